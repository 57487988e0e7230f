"""The one KV buffer of a prompt, in the shape ``transformers`` expects of a cache.

Knows slots and lengths; knows nothing of chunks, hashes or rotation. The buffer is allocated once, with room for the
new tokens: stitching lays reused KV straight into it, the fused forward scatters computed rows into their slots, and
decoding appends behind them without copying what is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

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
        # An integer in current releases, a tensor of positions in older ones.
        num_queries = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.length + num_queries, 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:  # the older name of get_max_length
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens. Only called by releases that count what to remove."""
        self.length -= abs(tokens_to_remove)


class SlotCache(Cache):  # type: ignore[misc]
    """A cache over one buffer per side, (layers, kv_heads, capacity, head_dim)."""

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        whole: tuple[torch.Tensor, torch.Tensor] | None = None,
    ):
        """``whole``: the memory that ``keys`` and ``values`` are views of, if it is larger."""
        self.buffer_keys, self.buffer_values = keys, values
        self.whole = whole or (keys, values)
        self._stop_layer = len(keys)
        super().__init__(layers=[SlotLayer(k[None], v[None]) for k, v in zip(keys, values, strict=True)])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        """As every cache's. Raises StopForwardError at the layer of ``stopping_at``."""
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

    @classmethod
    def allocate(cls, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> SlotCache:
        """An unfilled buffer of ``shape`` (layers, kv_heads, capacity, head_dim)."""
        keys, values = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
        return cls(keys, values)

    def cancel_when(self, cancelled: Callable[[], bool]) -> None:
        """Forwards over this cache stop at the next layer once ``cancelled`` returns True."""
        for layer in self.layers:
            layer.cancelled = cancelled

    def set_length(self, length: int) -> None:
        for layer in self.layers:
            layer.length = length

    def window(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of slots [start, end): keys and values, (layers, kv_heads, end - start, head_dim)."""
        return self.buffer_keys[:, :, start:end], self.buffer_values[:, :, start:end]

    def zero_slots(self, slots: torch.Tensor) -> None:
        """Give ``slots`` (num_slots,) harmless contents until they are computed."""
        if slots.numel():
            self.buffer_keys[:, :, slots] = 0
            self.buffer_values[:, :, slots] = 0

    def copy_out(self, start: int, end: int) -> KV:
        """A copy of slots [start, end) that shares nothing with the buffer."""
        keys, values = self.window(start, end)
        return KV(
            keys=keys.clone(memory_format=torch.contiguous_format),
            values=values.clone(memory_format=torch.contiguous_format),
            position=start,
        )

    @contextmanager
    def scattering(self, slots: torch.Tensor) -> Iterator[None]:
        """While on, computed rows go to ``slots`` (num_rows,) and the length stays."""
        for layer in self.layers:
            layer.slots = slots.to(layer.device)
        try:
            yield
        finally:
            for layer in self.layers:
                layer.slots = None
