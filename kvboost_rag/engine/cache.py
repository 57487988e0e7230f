"""The KV buffer of a prompt, in the shape ``transformers`` expects of a cache.

Knows slots and lengths; knows nothing of chunks, hashes or rotation. The buffer is allocated once, with room for the
new tokens: stitching lays reused KV straight into it, the fused forward scatters computed rows into their slots, and
decoding appends behind them without copying what is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from kvboost_rag.engine import compat
from kvboost_rag.engine.types import KV
from kvboost_rag.errors import StreamClosedError


def never() -> bool:
    return False


class StopForwardError(Exception):
    """Enough layers were computed. Never leaves ``SlotCache.stopping_at``."""


class SlotLayer(DynamicLayer):  # type: ignore[misc]
    """One layer's view of the buffer; ``keys`` and ``values``: (1, kv_heads, capacity, head_dim)."""

    is_compileable = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor):
        super().__init__()
        self.buffer_keys, self.buffer_values = keys, values
        self.length = 0
        self.slots: torch.Tensor | None = None
        self.cancelled: Callable[[], bool] = never
        self.is_initialized = True
        self.dtype, self.device = keys.dtype, keys.device

    # `keys` and `values` are what other code reads of a layer: the filled part.
    @property
    def keys(self) -> torch.Tensor:
        return self.buffer_keys[:, :, : self.length]

    @keys.setter
    def keys(self, value: torch.Tensor | None) -> None:
        if value is not None:
            self.buffer_keys, self.length = value, value.shape[2]

    @property
    def values(self) -> torch.Tensor:
        return self.buffer_values[:, :, : self.length]

    @values.setter
    def values(self, value: torch.Tensor | None) -> None:
        if value is not None:
            self.buffer_values = value

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the buffer is there from the start."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new rows: into ``slots`` while a fused forward is on, else behind the last filled one.

        Raises StreamClosedError, in the middle of a forward, as soon as ``cancelled`` says so.
        """
        if self.cancelled():
            raise StreamClosedError("nobody waits for this prompt any more")
        if self.slots is not None:
            self.buffer_keys.index_copy_(2, self.slots, key_states)
            self.buffer_values.index_copy_(2, self.slots, value_states)
            return self.keys, self.values
        start, self.length = self.length, self.length + key_states.shape[2]
        if self.length > self.buffer_keys.shape[2]:
            self._grow(self.length)
        self.buffer_keys[:, :, start : self.length] = key_states
        self.buffer_values[:, :, start : self.length] = value_states
        return self.keys, self.values

    def _grow(self, length: int) -> None:
        extra = max(length - self.buffer_keys.shape[2], 256)
        for name in ("buffer_keys", "buffer_values"):
            old = getattr(self, name)
            more = old.new_empty(*old.shape[:2], extra, old.shape[3])
            setattr(self, name, torch.cat([old, more], dim=2))

    def get_seq_length(self, *args: Any) -> int:
        return self.length

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        return self.length + compat.num_queries(query_length), 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:  # the older name of get_max_length
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens. Only called by releases that count what to remove."""
        self.length -= abs(tokens_to_remove)


@dataclass(frozen=True)
class Slab:
    """The buffers of consecutive layers that live on one device, from layer ``first`` on.

    ``keys`` and ``values``: (layers, kv_heads, capacity, head_dim).
    """

    first: int
    keys: torch.Tensor
    values: torch.Tensor

    @property
    def last(self) -> int:
        return self.first + self.keys.shape[0]

    @property
    def device(self) -> torch.device:
        return self.keys.device

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    def window(self, start: int, end: int) -> Slab:
        """Views of slots [start, end)."""
        return Slab(self.first, self.keys[:, :, start:end], self.values[:, :, start:end])

    def of_layers(self, layers: slice) -> Slab:
        """Views of some of its layers, counted as the model's are."""
        part = slice(layers.start - self.first, layers.stop - self.first)
        return Slab(layers.start, self.keys[part], self.values[part])


class SlotCache(Cache):  # type: ignore[misc]
    """A cache over one slab per device."""

    def __init__(self, slabs: Sequence[Slab], whole: Sequence[Slab] | None = None):
        """``slabs``: one after the other, all layers. ``whole``: the memory they are views of, if it is larger."""
        self.slabs = tuple(slabs)
        self.whole = tuple(whole or slabs)
        self._stop_layer = self.slabs[-1].last
        self._watch_layer: int | None = None
        self.watched: torch.Tensor | None = None
        views = [(k[None], v[None]) for slab in self.slabs for k, v in zip(slab.keys, slab.values, strict=True)]
        super().__init__(layers=[SlotLayer(keys, values) for keys, values in views])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        """As every cache's. Raises StopForwardError at the layer of ``stopping_at`` or ``watching``."""
        if layer_idx == self._watch_layer:
            self.watched = key_states
            raise StopForwardError
        if layer_idx >= self._stop_layer:
            raise StopForwardError
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @contextmanager
    def stopping_at(self, layer: int) -> Iterator[None]:
        """A forward inside the context ends, without result, once the layers before ``layer`` are done."""
        self._stop_layer = layer
        try:
            with suppress(StopForwardError):
                yield
        finally:
            self._stop_layer = len(self.layers)

    @contextmanager
    def watching(self, layer: int) -> Iterator[None]:
        """A forward inside the context ends at ``layer``; the keys it computed there, (1, kv_heads, rows, head_dim),
        are ``watched`` afterwards, not written."""
        self._watch_layer = layer
        try:
            with suppress(StopForwardError):
                yield
        finally:
            self._watch_layer = None

    @classmethod
    def allocate(cls, devices: Sequence[torch.device], shape: tuple[int, int, int], dtype: torch.dtype) -> SlotCache:
        """An unfilled buffer for layers on ``devices``, one each. ``shape``: (kv_heads, capacity, head_dim)."""
        slabs, first = [], 0
        for device, group in groupby(devices):
            num_layers = len(list(group))
            keys, values = (torch.empty((num_layers, *shape), dtype=dtype, device=device) for _ in range(2))
            slabs.append(Slab(first, keys, values))
            first += num_layers
        return cls(slabs)

    def cancel_when(self, cancelled: Callable[[], bool]) -> None:
        """Forwards over this cache stop at the next layer once ``cancelled`` returns True."""
        for layer in self.layers:
            layer.cancelled = cancelled

    def set_length(self, length: int) -> None:
        for layer in self.layers:
            layer.length = length

    def zero_slots(self, slots: torch.Tensor) -> None:
        """Give ``slots`` (num_slots,) harmless contents until they are computed."""
        if slots.numel():
            for slab in self.slabs:
                slab.keys[:, :, slots] = 0
                slab.values[:, :, slots] = 0

    def copy_out(self, start: int, end: int) -> KV:
        """A copy of slots [start, end) that shares nothing with the buffer; in host memory if devices differ."""
        windows = [slab.window(start, end) for slab in self.slabs]
        if len(windows) == 1:
            (window,) = windows
            keys, values = (x.clone(memory_format=torch.contiguous_format) for x in (window.keys, window.values))
        else:
            keys = torch.cat([window.keys.cpu() for window in windows])
            values = torch.cat([window.values.cpu() for window in windows])
        return KV(keys, values, position=start)

    @contextmanager
    def scattering(self, slots: torch.Tensor) -> Iterator[None]:
        """While on, computed rows go to ``slots`` (num_rows,) and the length stays."""
        on_device = {slab.device: slots.to(slab.device) for slab in self.slabs}
        for layer in self.layers:
            layer.slots = on_device[layer.device]
        try:
            yield
        finally:
            for layer in self.layers:
                layer.slots = None
