"""Lays reused KV into a prompt's buffer: dequantise, rotate, copy, gaps left open (paper, section 4.3).

Knows placements, codecs and rope; knows nothing of why a chunk hit or what is recomputed afterwards.
"""

from __future__ import annotations

from kvboost_rag.engine.assemble import Assembled
from kvboost_rag.engine.cache import SlotCache
from kvboost_rag.engine.codecs import CODECS
from kvboost_rag.engine.rope import Rope, move, place


def stitch(assembled: Assembled, cache: SlotCache, rope: Rope, first: int = 0) -> int:
    """Fill the slots of every hit of ``assembled`` in ``cache``, from position ``first`` on. Returns the bytes read.

    Keys move by (position now - position when computed), a move by zero copies the bits; keys kept without rotation are
    turned once, straight to where they go. Other slots stay as they are.
    """
    moved_bytes = 0
    for placement in assembled.placements:
        if placement.entry is None or placement.chunk.start < first:
            continue
        kv = CODECS[placement.entry.packed.codec].decode(placement.entry.packed)
        start, end = placement.chunk.start, placement.chunk.end
        for slab in cache.slabs:
            target, own = slab.window(start, end), rope.of_layers(slab.first, slab.last)
            keys, values = kv.keys[slab.first : slab.last], kv.values[slab.first : slab.last]
            keys = keys.to(slab.device, non_blocking=True)
            if kv.position is None:
                place(keys, start, own, out=target.keys)
            else:
                move(keys, start - kv.position, own, out=target.keys)
            target.values.copy_(values, non_blocking=True)
        moved_bytes += placement.entry.packed.num_bytes
    return moved_bytes
