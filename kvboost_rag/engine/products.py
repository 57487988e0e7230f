"""The matrix products of planned forwards: float32 weights on the CPU, multiplied by oneDNN where that is faster.

Knows linear layers, rows and two libraries; knows nothing of attention, positions or caches. PyTorch gives such
products to MKL. For the few rows a reuse request computes, oneDNN with weights packed once in the order it reads them
was measured to need 0.6 to 0.75 of MKL's time on an AMD processor (benchmarks/NOTES.md). Which of them is faster
here is found out once, when a model is loaded. The layers are exchanged for the time of a forward and for the thread
that runs it; outside it, the model is what it was. (A ``TorchFunctionMode`` would not touch the layers at all, and was
measured to cost what the faster products save.)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.nn.functional as F
from torch.nn import Linear

MIN_ROWS = 4  # one or two rows are a matter of reading memory, whoever does it
MIN_WEIGHTS = 1 << 16  # smaller products cost their calls
TRIAL_ROWS = 32
TRIALS = 5


class Product:
    """What a layer does while it is exchanged. ``copy``: its weight in oneDNN's order, or None to take it as it is."""

    def __init__(self, layer: Linear, running: threading.local, pack: bool):
        self._layer, self._running = layer, running
        self._weight, self._version = layer.weight, layer.weight._version
        self._copy: torch.Tensor | None = None
        if pack:
            self._copy = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach())

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """``input`` (..., in): (..., out), as the layer's own forward gives it."""
        weight, bias = self._layer.weight, self._layer.bias
        few = input.numel() < MIN_ROWS * weight.shape[1]
        other = weight is not self._weight or input.dtype is not torch.float32 or input.device.type != "cpu"
        if few or other or not getattr(self._running, "depth", 0):
            return F.linear(input, weight, bias)
        unchanged = weight._version == self._version
        return _onednn(input, self._copy if self._copy is not None and unchanged else weight, bias)

    def __reduce__(self) -> Any:
        """A copy of the model that is made meanwhile gets its layer's own forward."""
        return getattr, (self._layer, "forward")


class Products:
    """A context in which the large layers of ``module`` are multiplied by oneDNN, for the thread that enters it.

    Their weights are packed up to ``max_packed_bytes`` of copies; the others are taken as they are. The vocabulary,
    which meets one row only, is left alone.
    """

    def __init__(self, module: torch.nn.Module, max_packed_bytes: int):
        self._running = threading.local()
        self._lock = threading.Lock()
        self._users = 0
        self._products: list[tuple[Linear, Product]] = []
        self.packed_bytes = 0
        for layer in _layers(module):
            size = layer.weight.numel() * layer.weight.element_size()
            pack = self.packed_bytes + size <= max_packed_bytes
            self._products.append((layer, Product(layer, self._running, pack)))
            self.packed_bytes += size if pack else 0

    def __enter__(self) -> None:
        self._running.depth = getattr(self._running, "depth", 0) + 1
        with self._lock:
            self._users += 1
            if self._users == 1:
                for layer, product in self._products:
                    layer.__dict__.setdefault("forward", product)

    def __exit__(self, *exception: object) -> None:
        self._running.depth -= 1
        with self._lock:
            self._users -= 1
            if self._users == 0:
                for layer, product in self._products:
                    if layer.__dict__.get("forward") is product:
                        del layer.__dict__["forward"]


def _onednn(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows.contiguous(), weight, bias, "none", [], "")
    return result


def _layers(module: torch.nn.Module) -> list[Linear]:
    """The plain linear layers that are large, compute in float32 on the CPU and have a forward of their own class."""
    vocabulary = {id(p) for part in _vocabulary(module) for p in part.parameters()}
    return [
        part
        for part in module.modules()
        if type(part) is Linear
        and type(part.weight) is torch.nn.Parameter  # not a quantised one, which multiplies in its own way
        and id(part.weight) not in vocabulary
        and part.weight.numel() >= MIN_WEIGHTS
        and part.weight.dtype is torch.float32
        and part.weight.device.type == "cpu"
        and not part.weight.is_inference()  # those have no version to be checked by
        and isinstance(part.__dict__.get("forward"), Product | None)  # not accelerate's, which swap weights
    ]


def _vocabulary(module: Any) -> list[torch.nn.Module]:
    return [part for part in (module.get_input_embeddings(), module.get_output_embeddings()) if part is not None]


Context = AbstractContextManager[None]
_made: WeakKeyDictionary[torch.nn.Module, WeakValueDictionary[Any, Any]] = WeakKeyDictionary()
_made_lock = threading.Lock()


def products(module: torch.nn.Module, max_packed_bytes: int) -> Context:
    """What the planned forwards of ``module`` run in: ``Products``, or nothing where they would not be faster.

    Engines over one model share it while its weights are what they were; with the last of them it is gone.
    """
    with _made_lock:
        made, layers = _made.setdefault(module, WeakValueDictionary()), _layers(module)
        key = max_packed_bytes, tuple((id(layer.weight), _state(layer.weight)) for layer in layers)
        found: Context | None = made.get(key)
        if found is None:
            largest = max((layer.weight for layer in layers), key=torch.Tensor.numel, default=None)
            found = made[key] = _make(module, max_packed_bytes, largest)
        return found


def _make(module: torch.nn.Module, max_packed_bytes: int, largest: torch.Tensor | None) -> Context:
    if largest is None or not _pays(largest):
        return nullcontext()
    try:
        return Products(module, max_packed_bytes)
    except (RuntimeError, MemoryError):  # no room for the copies
        return nullcontext()


def _state(weight: torch.Tensor) -> bytes:
    """Some of its numbers. Writing through ``.data``, as merging an adapter does, changes no version."""
    flat = weight.detach().reshape(-1)
    sample = flat[:: max(1, flat.numel() // 32)][:32]
    return sample.numpy().tobytes()


@torch.no_grad()
def _pays(weight: torch.Tensor) -> bool:
    """Whether oneDNN is there, gives the same numbers, and is faster for a few rows of this weight as it is."""
    rows = torch.randn(TRIAL_ROWS, weight.shape[1], generator=torch.Generator().manual_seed(0))
    try:
        other, own = _onednn(rows, weight, None), F.linear(rows, weight)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    if not torch.allclose(other, own, rtol=1e-4, atol=1e-4):
        return False
    sides: tuple[Callable[[], Any], ...] = (lambda: _onednn(rows, weight, None), lambda: F.linear(rows, weight))
    best = [float("inf")] * len(sides)
    for _ in range(TRIALS):
        for number, side in enumerate(sides):
            started = time.perf_counter()
            side()
            best[number] = min(best[number], time.perf_counter() - started)
    return best[0] < best[1]
