"""Which model, embedder and device a command uses: what was asked for, what the store was made with, or what there is.

Knows names and what is installed; loads nothing.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvboost_rag import hub
from kvboost_rag.cli.corpus import Settings
from kvboost_rag.errors import OptionError

BUNDLED = "bundled"
DEFAULT_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
DEFAULT_EMBEDDER = "sentence-transformers/all-MiniLM-L6-v2"


@dataclass(frozen=True)
class Common:
    """The options most commands have; None where nothing was said."""

    store: Path
    model: str | None = None
    embedder: str | None = None
    dtype: str | None = None
    device: str | None = None
    kv_dtype: str | None = None
    max_cache_bytes: str | None = None
    max_packed_bytes: str | None = None

    @property
    def budgets(self) -> dict[str, Any]:
        """Options of the engine."""
        given = {"max_cache_bytes": self.max_cache_bytes, "max_packed_bytes": self.max_packed_bytes}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class Chosen:
    """``model``, ``embedder``: ``"bundled"``, a hub name, or the whole path of a folder."""

    model: str
    embedder: str
    dtype: str
    kv_dtype: str


def choose(common: Common, settings: Settings) -> Chosen:
    """What ``common`` says, else what the store was made with, else what is installed. A dtype belongs to its model."""
    model = whole(common.model) if common.model else settings.model or _default(hub.BUNDLED_PACKAGE, DEFAULT_MODEL)
    dtype = settings.dtype if model == settings.model else "auto"
    embedder = whole(common.embedder) if common.embedder else settings.embedder
    return Chosen(
        model,
        embedder or _default(hub.EMBEDDER_PACKAGE, DEFAULT_EMBEDDER),
        common.dtype or dtype,
        common.kv_dtype or settings.kv_dtype,
    )


def whole(name: str) -> str:
    """A name as it means the same everywhere: that of a folder that is there becomes its whole path."""
    path = Path(name).expanduser()
    return str(path.resolve()) if name != BUNDLED and path.is_dir() else name


def _default(package: str, name: str) -> str:
    return BUNDLED if importlib.util.find_spec(package) is not None else name


def location(model: str) -> str | os.PathLike[str]:
    """What ``transformers`` loads for a name. Raises MissingExtraError, ModelNotFoundError."""
    return hub.bundled_model() if model == BUNDLED else model


def check_device(name: str | None) -> Any:
    """A device to move the model to: the one named, or the first CUDA device, or None for the CPU. Raises OptionError.

    Loads torch.
    """
    import torch

    num_cuda = torch.cuda.device_count()
    if name is None:
        return "cuda" if num_cuda else None
    there = ["cpu", *(["cuda"] if num_cuda else []), *(f"cuda:{index}" for index in range(num_cuda))]
    there += ["mps"] if torch.backends.mps.is_available() else []
    if name not in there:
        raise OptionError.bad_value("device", name, f"what this machine has: {', '.join(there)}")
    return name
