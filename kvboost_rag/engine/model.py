"""One ``transformers`` decoder behind the few questions the engine asks.

Knows what the probe found, the model's buffers and its identity; knows nothing of chunks, stores or text.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kvboost_rag.engine import compat, exchange
from kvboost_rag.engine.attention import Capture, Plan
from kvboost_rag.engine.cache import Slab, SlotCache
from kvboost_rag.engine.capabilities import Capabilities
from kvboost_rag.engine.probe import probe
from kvboost_rag.engine.products import products
from kvboost_rag.engine.rope import Rope
from kvboost_rag.engine.runner import Runner
from kvboost_rag.errors import ClosedEngineError

FORMAT_VERSION = 2


class Model:
    """A model that can be served. ``close()`` gives it its own attention back."""

    def __init__(self, model: Any, salt: bytes = b"", stock_attention: bool = False, max_packed_bytes: int = 0):
        """``salt`` goes into the fingerprint (tokenizer, tenant). ``stock_attention`` keeps the model's own attention
        in fused forwards too, and its own products: the slow truth the tests compare with. ``max_packed_bytes``: see
        ``EngineConfig``.

        Raises UnsupportedModelError; the model is then what it was.
        """
        self.module = model
        self._uninstall: Callable[[], None] | None = _install(model)
        training = model.training
        model.eval()
        try:
            self._runner = Runner(model)
            self._hooks = [part.register_forward_pre_hook(_forget) for part in model.modules() if _is_dynamic(part)]
            self._probed = probe(self._runner)
            if not stock_attention:
                self._runner.products = products(model, max_packed_bytes)
        except BaseException:
            self.close()
            model.train(training)
            raise
        self.capabilities: Capabilities = self._probed.capabilities
        self.dtype, self.device = self._runner.dtype, self._runner.device
        self.devices = self._probed.devices  # of each layer's KV
        self.num_layers = len(self.devices)
        self.kv_heads, self.head_dim = self.capabilities.kv_heads, self.capabilities.head_dim
        self.context_tokens = _context_tokens(compat.text_config(model))
        self.cache_argument = self._runner.names.cache
        self.stock_attention = stock_attention
        self._ropes: dict[int, Rope] = {}
        self._identity = _fingerprint(model, salt)
        self._spare: tuple[Slab, ...] | None = None
        self._spare_lock = threading.Lock()

    @property
    def bytes_per_token(self) -> int:
        """Raw KV bytes of one token: keys and values of every layer."""
        return 2 * self.num_layers * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def balanced_keys(self) -> float:
        """How many keys a row has to see until attention takes as many operations as everything else in a layer."""
        embeddings = {
            id(p)
            for part in (self.module.get_input_embeddings(), self.module.get_output_embeddings())
            if part is not None
            for p in part.parameters()
        }
        weights = sum(p.numel() for p in self.module.parameters() if id(p) not in embeddings)
        return max(1.0, float(weights) / (2 * self.num_layers * self.capabilities.num_heads * self.head_dim))

    def settle(self) -> None:
        """Wait until the device has done what it was given."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    # What depends on the length of the prompt, for ropes that change with it

    def regime(self, num_tokens: int) -> int:
        """Which frequencies a prompt of ``num_tokens`` is computed with; 0 everywhere for most models."""
        switch = self.capabilities.switch
        return 0 if switch is None else switch.regime(num_tokens)

    def lasting(self, num_tokens: int) -> bool:
        """Whether KV of a prompt of ``num_tokens`` can be of use to another one."""
        switch = self.capabilities.switch
        return switch is None or switch.lasting(num_tokens)

    def fingerprint(self, num_tokens: int = 0) -> bytes:
        """Identity of everything KV depends on besides the tokens, in a prompt of ``num_tokens``."""
        regime = self.regime(num_tokens)
        return hashlib.sha256(self._identity + f"regime {regime}".encode()).digest() if regime else self._identity

    def rope(self, num_tokens: int = 0) -> Rope:
        """The rotation in a prompt of ``num_tokens``. Past a switch it is asked of the model: the caller holds the
        engine's lock."""
        regime = self.regime(num_tokens)
        if regime not in self._ropes:
            if self.capabilities.switch is not None:
                position = torch.tensor([num_tokens - 1 if regime else 0])
                cache = self.new_cache(1)
                self.forward(torch.tensor([0]), cache, position)
            if not self.lasting(num_tokens):
                return self._probed.rope()
            self._ropes[regime] = self._probed.rope()
        return self._ropes[regime]

    # Buffers

    def new_cache(self, capacity: int) -> SlotCache:
        """A buffer for ``capacity`` tokens, contents undefined; a recycled one if it is large enough."""
        with self._spare_lock:
            spare, self._spare = self._spare, None
        if spare is not None and spare[0].capacity >= capacity:
            return SlotCache([slab.window(0, capacity) for slab in spare], whole=spare)
        return SlotCache.allocate(self.devices, (self.kv_heads, capacity, self.head_dim), self.dtype)

    def recycle(self, cache: Any) -> None:
        """Give back a buffer nobody looks at any more: touching fresh memory costs as much as laying KV into it.

        Other devices' allocators keep freed memory themselves.
        """
        if isinstance(cache, SlotCache) and self.device.type == "cpu":
            with self._spare_lock:
                self._spare = cache.whole

    # Forwards

    def forward(
        self, ids: torch.Tensor, cache: Any, positions: torch.Tensor | None = None, num_logits: int = 1
    ) -> torch.Tensor:
        """``ids`` (num_tokens,) behind what ``cache`` holds. Returns the last ``num_logits`` rows of logits,
        (num_logits, vocab) float32."""
        self._check_open()
        return self._runner(ids, cache, positions, num_logits=num_logits)

    def scattered(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        cache: SlotCache,
        num_logits: int = 1,
        hidden: torch.Tensor | None = None,
        capture: Capture | None = None,
    ) -> torch.Tensor:
        """``ids`` (num_tokens,) at ascending ``positions`` (num_tokens,), each into its slot of ``cache``."""
        self._check_open()
        on_device, stock = positions.to(self.device), self.stock_attention and not capture
        plan = Plan(on_device, self.dtype, hidden, capture, stock, on_host=positions)
        return self._runner.scattered(ids, cache, plan, num_logits)

    def rows(self, ids: torch.Tensor, positions: torch.Tensor, cache: Any, plan: exchange.Attending) -> torch.Tensor:
        """Several prompts at once, (rows, num_tokens) each. Returns (rows, vocab) float32."""
        self._check_open()
        return self._runner.rows(ids, positions, cache, plan)

    def _check_open(self) -> None:
        if self._uninstall is None:
            raise ClosedEngineError("this engine was closed; build a new one")
        if self.capabilities.planned and not exchange.is_installed(self.module):
            raise RuntimeError(
                "the model's attention implementation was changed while an engine serves it; "
                "close the engine before calling set_attn_implementation"
            )

    def close(self) -> None:
        if self._uninstall is not None:
            self._uninstall()
            self._uninstall = None
            self._spare = None
            if hasattr(self, "_runner"):
                self._runner.products = contextlib.nullcontext()  # with its copies of the weights
            for hook in getattr(self, "_hooks", ()):
                hook.remove()


def _install(model: Any) -> Callable[[], None]:
    """Try to give ``model`` an attention that can follow plans; the probe sees whether it does."""
    try:
        return exchange.install(model)
    except (ValueError, AttributeError, KeyError, NotImplementedError):
        return lambda: None


def _is_dynamic(part: torch.nn.Module) -> bool:
    kinds = getattr(part, "rope_type", "")
    return any("dynamic" in kind for kind in (kinds.values() if isinstance(kinds, dict) else [str(kinds)]))


def _forget(part: Any, arguments: Any) -> None:
    """Before a forward of a dynamic rope: it keeps the frequencies of the longest sequence it has seen, so what a
    prompt gives would depend on the prompts before it. Start from the original ones, as a fresh model does."""
    for name in [n for n in part.__dict__ | part._buffers if n.endswith("original_inv_freq")]:
        own = getattr(part, name.replace("original_", ""))
        setattr(part, name.replace("original_", ""), getattr(part, name).to(own.device))
        longest = name.replace("original_inv_freq", "max_seq_len_cached")
        if hasattr(part, longest):
            setattr(part, longest, part.original_max_seq_len)


def _context_tokens(config: Any) -> int:
    """Tokens a prompt and its answer may have; scaled ropes reach further than the length they were trained for."""
    longest = int(config.max_position_embeddings)
    for parameters in compat.rope_parameters(config):
        factor = float(parameters.get("factor") or 1)
        if "dynamic" in parameters["rope_type"]:
            longest = max(longest, int(config.max_position_embeddings * factor))
        elif parameters["rope_type"] == "yarn":
            original = parameters.get("original_max_position_embeddings") or 0
            longest = max(longest, int(original * factor))
    return longest


def _fingerprint(model: Any, salt: bytes) -> bytes:
    """Identity of everything KV depends on besides the tokens: weights, dtype, configuration, format, ``salt``.

    Of every parameter, 32 evenly spaced numbers are read: enough to tell fine-tunes and adapters merged into the
    weights apart, in milliseconds.
    """
    digest = hashlib.sha256(f"format {FORMAT_VERSION} {model.dtype}".encode() + salt)
    config = {k: v for k, v in model.config.to_dict().items() if not k.startswith("_") and k != "transformers_version"}
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    for name, parameter in _weights(model):
        flat = parameter.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // 32)][:32].float().cpu()
        digest.update(f"{name} {tuple(parameter.shape)}".encode() + sample.numpy().tobytes())
    return digest.digest()


def _weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and values of all parameters, those that ``accelerate`` keeps elsewhere included."""
    for path, part in model.named_modules():
        elsewhere = getattr(getattr(part, "_hf_hook", None), "weights_map", None)
        for name, parameter in part.named_parameters(recurse=False):
            value = elsewhere[name] if parameter.is_meta and elsewhere is not None else parameter
            yield f"{path}.{name}", value
