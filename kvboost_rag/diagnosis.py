"""An account of what can be done with a model: what the probe found, and what serving it will take.

Knows findings and sizes; changes nothing. The answer to "will this model work, and if not, why?".
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from kvboost_rag import hub
from kvboost_rag._version import __version__
from kvboost_rag.engine.capabilities import Capabilities, Reuse
from kvboost_rag.engine.model import Model
from kvboost_rag.errors import UnsupportedModelError
from kvboost_rag.kvboost import KVBoost
from kvboost_rag.report import format_bytes

TOKENS_SHOWN = 600  # a passage


@dataclass(frozen=True)
class Diagnosis:
    """What ``doctor`` found. ``str()`` gives a readable account; ``served`` the short answer.

    ``bytes_per_token``: KV of one token as it is computed; 0 if the model is not served.
    """

    capabilities: Capabilities
    dtype: str = ""
    devices: tuple[str, ...] = ()
    context_tokens: int = 0
    bytes_per_token: int = 0

    @property
    def served(self) -> bool:
        return self.capabilities.reuse is not Reuse.NOTHING

    def to_dict(self) -> dict[str, Any]:
        """As plain numbers, strings and lists."""
        found = self.capabilities
        return {
            "model_class": found.model_class,
            "model_type": found.model_type,
            "served": self.served,
            "reuse": found.reuse.value,
            "reason": found.reason,
            "rotation": found.rotation,
            "rope_type": found.rope_type,
            "attention": found.attention,
            "planned": found.planned,
            "notes": list(found.notes),
            "dtype": self.dtype,
            "devices": list(self.devices),
            "context_tokens": self.context_tokens,
            "bytes_per_token": self.bytes_per_token,
        }

    def __str__(self) -> str:
        lines = [str(self.capabilities)]
        if self.served:
            passage = format_bytes(self.bytes_per_token * TOKENS_SHOWN)
            lines += [
                f"  size       {format_bytes(self.bytes_per_token)} of KV a token in {self.dtype}: {passage} for a "
                f"passage of {TOKENS_SHOWN} tokens",
                f"  context    {self.context_tokens} tokens, prompt and answer together",
                f"  devices    {', '.join(self.devices)}",
            ]
        versions = f"kvboost-rag {__version__}, transformers {transformers.__version__}, torch {torch.__version__}"
        return "\n".join([*lines, f"  versions   {versions}"])


def doctor(model: Any, **load_options: Any) -> Diagnosis:
    """Examine ``model``: a loaded ``transformers`` model, a ``KVBoost``, or a hub name or folder to load.

    ``load_options``: as for ``KVBoost.from_pretrained`` (``dtype``, ``device_map``, ``trust_remote_code``, ...), for
    a name or folder only. A model that cannot be served is no error here: the account says why. Raises
    ModelNotFoundError if there is nothing to load.
    """
    if isinstance(model, KVBoost):
        return _of(model.engine.model)
    if isinstance(model, str | os.PathLike):
        try:
            model = hub.load(model, need_tokenizer=False, **load_options).model
        except UnsupportedModelError as error:
            return Diagnosis(Capabilities(str(model), "not loaded", Reuse.NOTHING, str(error)))
    elif load_options:
        raise TypeError(f"{', '.join(load_options)}: only a model that is loaded by name or folder takes load options")
    try:
        examined = Model(model)
    except UnsupportedModelError as error:
        name, kind = type(model).__name__, str(getattr(model.config, "model_type", "unknown"))
        return Diagnosis(Capabilities(name, kind, Reuse.NOTHING, str(error)))
    try:
        return _of(examined)
    finally:
        examined.close()


def _of(model: Model) -> Diagnosis:
    return Diagnosis(
        model.capabilities,
        str(model.dtype).removeprefix("torch."),
        tuple(dict.fromkeys(map(str, model.devices))),
        model.context_tokens,
        model.bytes_per_token,
    )
