"""The attention of the fused forward: few queries at scattered positions over one long KV buffer.

Knows positions and tensors; knows nothing of chunks, of why a token is computed or of how this gets into a model
(`exchange.py`). ``transformers`` would take an explicit mask here, copy every grouped key head for each of its query
heads, and let every query meet every key. This function does neither: key heads are expanded as views, and queries,
sorted by position, go in blocks of 32 (128 where they follow one another) that are each cut at their own last position
(and, in a layer with a sliding window, at the first one they can see).
Measured at 2,478 keys, 9 query over 3 KV heads: 1.8 / 5.3 / 11.2 ms a layer for 34 / 148 / 396 queries, against
5.5 / 7.4 / 17.3 ms; equal to 1e-6 (`tests/engine/test_attention.py`). Soft caps and learned sinks are honoured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

BLOCK_QUERIES = {"cpu": 32}  # where blocks were measured to pay
FEW_QUERIES = {"cpu": 64}  # go in one block, wherever they are
RUN_QUERIES = {"cpu": 128}  # of a block whose positions follow one another: next to nothing is cut there
OTHER_BLOCK_QUERIES = 1024  # elsewhere only memory cuts


@dataclass(frozen=True)
class Traits:
    """What a layer hands its attention besides queries, keys and values."""

    window: int | None = None  # queries see that many positions, their own included
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # (heads,) learned logits that take part in the softmax

    @classmethod
    def of(cls, arguments: dict[str, Any], stock: str) -> Traits:
        """What the implementation ``stock`` makes of them: sdpa leaves soft caps and sinks out (newer releases of
        ``transformers`` refuse instead)."""
        window = arguments.get("sliding_window")
        return cls(window) if stock == "sdpa" else cls(window, arguments.get("softcap"), arguments.get("s_aux"))


class Capture:
    """Collects how much the queries from row ``first_query`` on look at each key.

    What counts of a layer is the largest probability that any head of any such query gives a key. Sums over heads and
    queries were measured to be worse: they favour tokens that everything rests on a little over those that one head
    reads (KL 0.56 against 0.52 of no repair's, 12 questions).
    """

    def __init__(self, num_keys: int, first_query: int = 0):
        self.first_query = first_query
        self._num_keys = num_keys
        self._by_layer: dict[int, torch.Tensor] = {}

    def add(self, layer: int, probabilities: torch.Tensor, start: int = 0) -> None:
        """``probabilities``: (kv_heads, group, counted queries, keys) float32, of the keys from ``start`` on."""
        largest = probabilities.amax(2).amax(1).amax(0)  # one by one: 20 times faster on views than all at once
        if layer not in self._by_layer:
            self._by_layer[layer] = torch.zeros(self._num_keys, device=largest.device)
        seen = self._by_layer[layer][start : start + largest.shape[0]]
        torch.maximum(seen, largest, out=seen)

    @property
    def scores(self) -> torch.Tensor:
        """(num_keys,) float32: the largest probability of each layer, summed over layers."""
        return torch.stack([layer.cpu() for layer in self._by_layer.values()]).sum(dim=0)


@dataclass(frozen=True)
class Block:
    """Queries [first, last) of a plan, which see keys [start, end) through an additive mask (queries, keys)."""

    first: int
    last: int
    start: int
    end: int
    mask: torch.Tensor


@dataclass(frozen=True)
class Plan:
    """How one fused forward attends: ascending query ``positions`` (num_queries,) over slots that equal positions.

    ``hidden``: (num_slots,) bool, slots no query may see because they hold no KV yet, or None. ``stock``: let the
    model's own implementation do it under an explicit mask, the slow truth. ``on_host``: ``positions`` where Python can
    read them without waiting for a device. Blocks and masks are made once for all
    layers that can share them.
    """

    positions: torch.Tensor
    dtype: torch.dtype
    hidden: torch.Tensor | None = None
    capture: Capture | None = None
    stock: bool = False
    on_host: torch.Tensor | None = None
    _made: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def blocks(self, window: int | None, device: torch.device) -> tuple[Block, ...]:
        key = ("blocks", window, device)
        if key not in self._made:
            self._made[key] = tuple(self._blocks(window, device))
        blocks: tuple[Block, ...] = self._made[key]
        return blocks

    def _blocks(self, window: int | None, device: torch.device) -> Iterator[Block]:
        positions = self.positions if self.on_host is None else self.on_host
        few, at_once, run = (
            size.get(device.type, OTHER_BLOCK_QUERIES) for size in (FEW_QUERIES, BLOCK_QUERIES, RUN_QUERIES)
        )
        run = at_once if self.capture is not None else run  # probabilities are held for all rows of a block
        first, num_queries = 0, positions.shape[0]
        while first < num_queries:
            last = min(first + run, num_queries)
            if num_queries > few and int(positions[last - 1]) - int(positions[first]) >= last - first:  # not one run
                last = min(first + at_once, num_queries)
            start = 0 if window is None else max(0, int(positions[first]) - window + 1)
            end = int(positions[last - 1]) + 1
            mask = additive_mask(self.positions[first:last], start, end, self.dtype, window, self.hidden).to(device)
            yield Block(first, last, start, end, mask)
            first = last

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, layer: int, traits: Traits
    ) -> torch.Tensor:
        return block_attention(query, key, value, self, scaling, layer, traits)

    def full_mask(self, window: int | None, num_keys: int, device: torch.device) -> torch.Tensor:
        """The whole mask (1, 1, queries, num_keys), for attention that knows no blocks."""
        key = ("mask", window, num_keys, device)
        mask: torch.Tensor | None = self._made.get(key)
        if mask is None:
            mask = additive_mask(self.positions, 0, num_keys, self.dtype, window, self.hidden)[None, None].to(device)
            self._made[key] = mask
        return mask


def additive_mask(
    rows: torch.Tensor,
    start: int,
    end: int,
    dtype: torch.dtype,
    window: int | None = None,
    hidden: torch.Tensor | None = None,
) -> torch.Tensor:
    """(rows, end - start): 0 where the query at that position sees the key at [start, end), else minus infinity.

    Additive, never boolean: ``transformers``' eager attention adds a boolean mask as numbers, silently.
    """
    keys = torch.arange(start, end, device=rows.device)
    masked = keys > rows[:, None]
    if window is not None:
        masked |= keys <= rows[:, None] - window
    if hidden is not None:
        masked |= hidden[start:end].to(rows.device)
    return torch.zeros(masked.shape, dtype=dtype, device=rows.device).masked_fill_(masked, float("-inf"))


def block_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: Plan,
    scaling: float,
    layer: int,
    traits: Traits = Traits(),
) -> torch.Tensor:
    """``query``: (1, heads, queries, head_dim); ``key``, ``value``: (1, kv_heads, slots, head_dim), slot = position.

    Returns (1, queries, heads, head_dim).
    """
    _, num_heads, num_queries, head_dim = query.shape
    kv_heads = key.shape[1]
    group = num_heads // kv_heads
    grouped = query[0].reshape(kv_heads, group, num_queries, head_dim)
    out = query.new_empty(num_queries, kv_heads, group, value.shape[-1])
    capture = plan.capture
    plain = traits.softcap is None and traits.sinks is None
    for block in plan.blocks(traits.window, query.device):
        rows = grouped[:, :, block.first : block.last]
        keys, values = key[0, :, block.start : block.end], value[0, :, block.start : block.end]
        counted = capture is not None and block.last > capture.first_query
        if plain and not counted:
            result = F.scaled_dot_product_attention(
                rows,
                keys[:, None].expand(-1, group, -1, -1),  # views: grouped heads share their keys
                values[:, None].expand(-1, group, -1, -1),
                attn_mask=block.mask,
                scale=scaling,
            )
        else:
            result, probabilities = _by_hand(rows, keys, values, block.mask, scaling, traits)
            if capture is not None and counted:
                capture.add(layer, probabilities[:, :, max(0, capture.first_query - block.first) :], block.start)
        out[block.first : block.last] = result.permute(2, 0, 1, 3)
    return out.view(1, num_queries, num_heads, -1)


def _by_hand(
    rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scaling: float, traits: Traits
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same attention with its probabilities. ``rows``: (kv_heads, group, queries, head_dim)."""
    kv_heads, group, num_rows, _ = rows.shape
    scores = torch.bmm(rows.flatten(1, 2) * scaling, keys.transpose(1, 2)).view(kv_heads, group, num_rows, -1)
    if traits.softcap is not None:
        scores = torch.tanh(scores / traits.softcap) * traits.softcap
    scores = scores.add_(mask)
    if traits.sinks is not None:
        sinks = traits.sinks.to(scores).view(kv_heads, group, 1, 1).expand(-1, -1, num_rows, -1)
        scores = torch.cat([scores, sinks], dim=-1)
    probabilities = torch.softmax(scores, dim=-1, dtype=torch.float32)[..., : keys.shape[1]]
    mixed = torch.bmm(probabilities.flatten(1, 2).to(values.dtype), values)
    return mixed.view(kv_heads, group, num_rows, -1), probabilities
