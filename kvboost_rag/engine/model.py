"""One ``transformers`` decoder behind the few questions the engine asks.

Knows the model's geometry, its rope and the names its forward goes by (they differ between releases; nothing else in
the package depends on the release). Knows nothing of chunks, stores or text.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import threading
from collections.abc import Callable
from typing import Any

import torch

from kvboost_rag.engine import attention
from kvboost_rag.engine.cache import SlotCache
from kvboost_rag.engine.rope import Rope
from kvboost_rag.errors import ClosedEngineError, UnsupportedModelError

FORMAT_VERSION = 1

# Model types whose keys are plain half-split rotary keys in every layer, and rope types whose frequencies are fixed.
SERVED_MODEL_TYPES = ("llama", "qwen2")
SERVED_ROPE_TYPES = ("default", "linear", "llama3")


class Model:
    """A model that can be served. ``close()`` gives it its own attention back."""

    def __init__(self, model: Any, salt: bytes = b"", stock_attention: bool = False):
        """``salt`` goes into the fingerprint (tokenizer, tenant). ``stock_attention`` keeps the model's own attention
        in fused forwards too: the slow truth the tests compare with, and the path on devices where ours is unmeasured.

        Raises UnsupportedModelError.
        """
        config = model.config
        self.rope = _rope_of(model)
        self.module = model.eval()
        self.num_layers: int = config.num_hidden_layers
        self.kv_heads: int = config.num_key_value_heads or config.num_attention_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.context_tokens: int = config.max_position_embeddings
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.fingerprint = _fingerprint(model, salt)
        self.stock_attention = stock_attention or self.device.type != "cpu"
        parameters = inspect.signature(model.forward).parameters
        self.cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._keep_argument = "logits_to_keep" if "logits_to_keep" in parameters else "num_logits_to_keep"
        self._spare: tuple[torch.Tensor, torch.Tensor] | None = None
        self._spare_lock = threading.Lock()
        self._uninstall: Callable[[], None] | None = attention.install(model)

    @property
    def bytes_per_token(self) -> int:
        """Raw KV bytes of one token: keys and values of every layer."""
        return 2 * self.num_layers * self.kv_heads * self.head_dim * self.dtype.itemsize

    def new_cache(self, capacity: int) -> SlotCache:
        """A buffer for ``capacity`` tokens, contents undefined; a recycled one if it is large enough."""
        with self._spare_lock:
            spare, self._spare = self._spare, None
        if spare is not None and spare[0].shape[2] >= capacity:
            keys, values = (side[:, :, :capacity] for side in spare)
            return SlotCache(keys, values, whole=spare)
        shape = (self.num_layers, self.kv_heads, capacity, self.head_dim)
        return SlotCache.allocate(shape, self.dtype, self.device)

    def recycle(self, cache: Any) -> None:
        """Give back a buffer nobody looks at any more: touching fresh memory costs as much as laying KV into it.

        Other devices' allocators keep freed memory themselves.
        """
        if isinstance(cache, SlotCache) and self.device.type == "cpu":
            with self._spare_lock:
                self._spare = cache.whole

    def close(self) -> None:
        if self._uninstall is not None:
            self._uninstall()
            self._uninstall = None
            self._spare = None

    @torch.no_grad()
    def forward(
        self,
        ids: torch.Tensor,
        cache: Any,
        positions: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        plan: attention.Plan | None = None,
        num_logits: int = 1,
    ) -> torch.Tensor:
        """One call of the model on ``ids`` (num_tokens,). Returns the last ``num_logits`` rows, (num_logits, vocab)
        float32: projecting only those is the last-logit saving of the paper's section 5.

        With a ``plan``, ``positions`` (num_tokens,) ascending and ``mask`` as ``attention.full_mask`` makes it.
        """
        if self._uninstall is None:
            raise ClosedEngineError("this engine was closed; build a new one")
        if plan is not None and not attention.is_installed(self.module):
            raise RuntimeError(
                "the model's attention implementation was changed while an engine serves it; "
                "close the engine before calling set_attn_implementation"
            )
        arguments: dict[str, Any] = {
            "input_ids": ids.to(self.device)[None],
            "use_cache": True,
            self.cache_argument: cache,
            self._keep_argument: num_logits,
        }
        if positions is not None:
            arguments["position_ids"] = positions.to(self.device)[None]
        if mask is not None:
            arguments["attention_mask"] = mask
        with attention.planned(plan) if plan is not None else contextlib.nullcontext():
            logits: torch.Tensor = self.module(**arguments).logits
        return logits[0, -num_logits:].float()


def _rope_of(model: Any) -> Rope:
    config = model.config
    if config.model_type not in SERVED_MODEL_TYPES:
        raise UnsupportedModelError(
            f"{type(model).__name__} (model_type {config.model_type!r}) is not served; "
            f"model types that are: {', '.join(SERVED_MODEL_TYPES)}"
        )
    parameters = getattr(config, "rope_parameters", None) or {}
    rope_type = parameters.get("rope_type", "default")
    if rope_type not in SERVED_ROPE_TYPES:
        raise UnsupportedModelError(
            f"rope type {rope_type!r} of {type(model).__name__} is not served; those that are: "
            f"{', '.join(SERVED_ROPE_TYPES)}"
        )
    if getattr(config, "use_sliding_window", False):
        raise UnsupportedModelError(f"{type(model).__name__} uses sliding-window attention, which is not served")
    rotary = next(m for m in model.modules() if isinstance(getattr(m, "inv_freq", None), torch.Tensor))
    return Rope(rotary.inv_freq.detach().float().cpu())


def _fingerprint(model: Any, salt: bytes) -> bytes:
    """Identity of everything KV depends on besides the tokens: weights, dtype, configuration, format, ``salt``.

    Of every parameter, 32 evenly spaced numbers are read: enough to tell fine-tunes and adapters merged into the
    weights apart, in milliseconds.
    """
    digest = hashlib.sha256(f"format {FORMAT_VERSION} {model.dtype}".encode() + salt)
    config = {k: v for k, v in model.config.to_dict().items() if not k.startswith("_") and k != "transformers_version"}
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    for name, parameter in model.named_parameters():
        flat = parameter.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // 32)][:32].float().cpu()
        digest.update(f"{name} {tuple(parameter.shape)}".encode() + sample.numpy().tobytes())
    return digest.digest()
