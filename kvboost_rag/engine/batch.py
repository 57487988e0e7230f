"""Several prompts at once over one copy of what they share (paper, section 4.7: ``generate_batch``).

Knows buffers, rows and positions; knows nothing of stores, hashes or text. The KV that all rows reuse lies once in a
shared buffer; a row of its own holds only what differs: tokens computed for it (live and repaired ones, wherever they
stand) and KV reused behind the common prefix. Attention runs over both parts without joining them, and each row hides
the shared slots that it has computed anew. So nothing is expanded or copied, and a row sees exactly the keys it would
see alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from kvboost_rag.engine import compat
from kvboost_rag.engine.attention import Traits
from kvboost_rag.engine.cache import SlotCache
from kvboost_rag.engine.model import Model
from kvboost_rag.engine.types import KV

HIDDEN = 2**40  # the position of a slot that nobody sees
BLOCK_QUERIES = 64


Part = tuple[torch.Tensor, torch.Tensor]  # keys and values


class RowsLayer(DynamicLayer):  # type: ignore[misc]
    """One layer's own part of every row; ``keys`` and ``values``: (rows, kv_heads, slots, head_dim).

    Slot 0 is where padding is written to. Decoding appends; ``width`` tokens are counted before.
    """

    is_compileable = False

    def __init__(self, like: torch.Tensor, num_rows: int, num_slots: int, room: int, num_shared: int):
        super().__init__()
        _, kv_heads, _, head_dim = like.shape
        # zeros: what is hidden still meets a probability of zero, and zero times a NaN is a NaN
        self.own_keys, self.own_values = (
            like.new_zeros(num_rows, kv_heads, num_slots + room, head_dim) for _ in range(2)
        )
        self.num_filled, self.num_shared = num_slots, num_shared
        self.slots: torch.Tensor | None = None
        self.is_initialized = True
        self.dtype, self.device = like.dtype, like.device

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the buffer is there from the start."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new rows: into ``slots`` (rows, queries) if they are set, else behind the last filled one."""
        if self.slots is not None:
            at = self.slots[:, None, :, None].expand_as(key_states)
            self.own_keys.scatter_(2, at, key_states)
            self.own_values.scatter_(2, at, value_states)
        else:
            start, self.num_filled = self.num_filled, self.num_filled + key_states.shape[2]
            self.own_keys[:, :, start : self.num_filled] = key_states
            self.own_values[:, :, start : self.num_filled] = value_states
        return self.own_keys[:, :, : self.num_filled], self.own_values[:, :, : self.num_filled]

    def get_seq_length(self, *args: Any) -> int:
        return self.num_shared + self.num_filled

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        return self.get_seq_length() + compat.num_queries(query_length), 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:  # the older name of get_max_length
        return -1


class RowsCache(Cache):  # type: ignore[misc]
    """The own parts of all rows, in the shape ``transformers`` expects of a cache."""

    def __init__(self, shared: SlotCache, num_rows: int, num_slots: int, room: int, num_shared: int):
        views = [layer.buffer_keys for layer in shared.layers]
        super().__init__(layers=[RowsLayer(view, num_rows, num_slots, room, num_shared) for view in views])

    def set_slots(self, slots: torch.Tensor | None) -> None:
        for layer in self.layers:
            layer.slots = None if slots is None else slots.to(layer.device)

    def put(self, row: int, slots: torch.Tensor, parts: Sequence[Part]) -> None:
        """Lay KV into ``slots`` (num_tokens,) of one row, per layer keys and values (1, kv_heads, tokens, head_dim)."""
        for layer, (keys, values) in zip(self.layers, parts, strict=True):
            layer.own_keys[row][:, slots] = keys[0]
            layer.own_values[row][:, slots] = values[0]

    def copy_out(self, row: int, slots: torch.Tensor, position: int) -> KV:
        """A copy of ``slots`` (num_tokens,) of one row, which hold consecutive tokens from ``position`` on; in host
        memory if devices differ."""
        home = self.layers[0].device if len({layer.device for layer in self.layers}) == 1 else torch.device("cpu")
        keys, values = (
            torch.stack([side[row][:, slots.to(side.device)].to(home) for side in sides])
            for sides in ([x.own_keys for x in self.layers], [x.own_values for x in self.layers])
        )
        return KV(keys, values, position)

    @property
    def num_bytes(self) -> int:
        return sum(layer.own_keys.nbytes + layer.own_values.nbytes for layer in self.layers)


@dataclass(frozen=True)
class RowsPlan:
    """How rows attend: to shared slots [0, num_shared), whose positions are their numbers, and to their own.

    ``hidden``: (rows, num_shared) bool, shared slots a row does not see. ``own_positions``: (rows, slots) int64, the
    position of every own slot, future ones included, HIDDEN for padding. ``queries``: (rows, queries) positions while
    prompts are run, None while decoding, where a query is the last filled slot.
    """

    shared: SlotCache
    num_shared: int
    hidden: torch.Tensor
    own_positions: torch.Tensor
    queries: torch.Tensor | None = None
    stock: bool = False

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, layer: int, traits: Traits
    ) -> torch.Tensor:
        """``query``: (rows, heads, queries, head_dim); ``key``, ``value``: own parts (rows, kv_heads, slots, head_dim).

        Returns (rows, queries, heads, head_dim).
        """
        num_rows, num_heads, num_queries, _ = query.shape
        kv_heads, num_own = key.shape[1], key.shape[2]
        own = self.own_positions[:, :num_own].to(query.device)
        at = own[:, -1:] if self.queries is None else self.queries.to(query.device)
        held = self.shared.layers[layer]
        keys, values = (side[0, :, : self.num_shared] for side in (held.buffer_keys, held.buffer_values))
        grouped = query.view(num_rows, kv_heads, num_heads // kv_heads, num_queries, -1)
        outputs = []
        for first in range(0, num_queries, BLOCK_QUERIES):
            rows = grouped[:, :, :, first : first + BLOCK_QUERIES]
            mask = self._mask(at[:, first : first + BLOCK_QUERIES], own, traits.window, query.dtype)
            outputs.append(_two_parts(rows * scaling, (keys, values), (key, value), mask, traits))
        mixed = torch.cat(outputs, dim=3)
        return mixed.permute(0, 3, 1, 2, 4).reshape(num_rows, num_queries, num_heads, -1)

    def _mask(self, at: torch.Tensor, own: torch.Tensor, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Additive (rows, queries, num_shared + slots). A padding query (HIDDEN) sees everything, so that no row of
        the softmax is empty."""
        shared = torch.arange(self.num_shared, device=at.device).expand(at.shape[0], -1)
        shared = shared.masked_fill(self.hidden.to(at.device), HIDDEN)
        positions = torch.cat([shared, own], dim=1)[:, None]
        masked = positions > at[..., None]
        if window is not None:
            masked |= positions <= at[..., None] - window
            masked &= (at != HIDDEN)[..., None]
        return torch.zeros(masked.shape, dtype=dtype, device=at.device).masked_fill_(masked, float("-inf"))


def _two_parts(rows: torch.Tensor, shared: Part, own: Part, mask: torch.Tensor, traits: Traits) -> torch.Tensor:
    """Softmax attention over two sets of keys that stay where they are.

    ``rows``: (rows, kv_heads, group, queries, head_dim), scaled; ``shared``: (kv_heads, keys, head_dim) each; ``own``:
    (rows, kv_heads, keys, head_dim) each; ``mask``: (rows, queries, all keys). Returns the shape of ``rows``.
    """
    num_rows, kv_heads, group, num_queries, head_dim = rows.shape
    num_shared = shared[0].shape[1]
    together = rows.transpose(0, 1).reshape(kv_heads, -1, head_dim)  # all rows ask the shared keys at once
    scores_shared = torch.bmm(together, shared[0].transpose(1, 2))
    scores_shared = scores_shared.view(kv_heads, num_rows, group, num_queries, num_shared)
    scores_own = rows.flatten(2, 3) @ own[0].transpose(2, 3)
    scores = torch.cat(
        [scores_shared.transpose(0, 1), scores_own.view(num_rows, kv_heads, group, num_queries, -1)], dim=-1
    )
    if traits.softcap is not None:
        scores = torch.tanh(scores / traits.softcap) * traits.softcap
    scores = scores + mask[:, None, None]
    num_keys = scores.shape[-1]
    if traits.sinks is not None:
        sinks = traits.sinks.to(scores).view(1, kv_heads, group, 1, 1).expand(num_rows, -1, -1, num_queries, -1)
        scores = torch.cat([scores, sinks], dim=-1)
    probabilities = torch.softmax(scores, dim=-1, dtype=torch.float32)[..., :num_keys].to(own[1].dtype)
    on_shared, on_own = probabilities[..., :num_shared], probabilities[..., num_shared:]
    by_head = on_shared.transpose(0, 1).reshape(kv_heads, num_rows * group * num_queries, num_shared)
    mixed = torch.bmm(by_head, shared[1])
    mixed = mixed.view(kv_heads, num_rows, group, num_queries, -1).transpose(0, 1)
    by_own: torch.Tensor = (on_own.flatten(2, 3) @ own[1]).view(num_rows, kv_heads, group, num_queries, -1)
    return mixed + by_own


@dataclass(frozen=True)
class Row:
    """One prompt of a batch: ``ids``, the ascending positions that are ``computed`` for it, and the KV it reuses behind
    the shared prefix: ``tail`` at ``tail_positions``, per layer keys and values (1, kv_heads, tokens, head_dim)."""

    ids: torch.Tensor
    computed: torch.Tensor
    tail_positions: torch.Tensor
    tail: Sequence[Part]


@dataclass(frozen=True)
class Layout:
    """Where the own parts of rows lie. ``hidden`` and ``own_positions`` as in ``RowsPlan``.

    Own slots: 0 for padding, then a row's positions, aligned at the right, then room for new tokens.
    """

    hidden: torch.Tensor
    own_positions: torch.Tensor
    num_slots: int

    def slots_of(self, row: int, positions: torch.Tensor) -> torch.Tensor:
        """The own slots of a row's ``positions``, all of which it holds."""
        held = self.own_positions[row, : self.num_slots]
        return torch.searchsorted(held.masked_fill(held == HIDDEN, -1), positions)


def layout(rows: Sequence[Row], num_shared: int, room: int) -> Layout:
    """Own slots for ``rows`` and ``room`` new tokens each."""
    positions = [torch.cat([row.computed, row.tail_positions]).sort().values for row in rows]
    num_slots = 1 + max(len(p) for p in positions)
    hidden = torch.zeros(len(rows), num_shared, dtype=torch.bool)
    own = torch.full((len(rows), num_slots + room), HIDDEN)
    for number, (row, held) in enumerate(zip(rows, positions, strict=True)):
        hidden[number, held[held < num_shared]] = True
        own[number, num_slots - len(held) : num_slots] = held
        own[number, num_slots:] = torch.arange(len(row.ids), len(row.ids) + room)
    return Layout(hidden, own, num_slots)


def run(model: Model, shared: SlotCache, num_shared: int, rows: Sequence[Row], room: int) -> tuple[Any, ...]:
    """Compute all ``rows`` in one call of the model. Returns their last logits (rows, vocab), the cache of their own
    parts, the plan to decode under, and the layout of those parts."""
    places = layout(rows, num_shared, room)
    cache = RowsCache(shared, len(rows), places.num_slots, room, num_shared)
    width = max(len(row.computed) for row in rows)
    ids, positions, slots, at = (torch.zeros(len(rows), width, dtype=torch.int64) for _ in range(4))
    at.fill_(HIDDEN)
    for number, row in enumerate(rows):
        here = slice(width - len(row.computed), width)
        ids[number, here], positions[number, here] = row.ids[row.computed], row.computed
        slots[number, here], at[number, here] = places.slots_of(number, row.computed), row.computed
        if len(row.tail_positions):
            cache.put(number, places.slots_of(number, row.tail_positions), row.tail)
    plan = RowsPlan(shared, num_shared, places.hidden, places.own_positions, queries=at)
    cache.set_slots(slots)
    logits = model.rows(ids, positions, cache, plan)
    cache.set_slots(None)
    return logits, cache, replace(plan, queries=None), places
