"""Lays reused KV into a prompt's buffer: dequantise, rotate, copy, gaps left open (paper, section 4.3).

Knows placements, a codec and rope; knows nothing of why a chunk hit or what is recomputed afterwards.
"""

from __future__ import annotations

from kvboost_rag.engine.assemble import Assembled
from kvboost_rag.engine.cache import SlotCache
from kvboost_rag.engine.codecs import Codec
from kvboost_rag.engine.rope import Rope, move


def stitch(assembled: Assembled, cache: SlotCache, codec: Codec, rope: Rope) -> int:
    """Fill the slots of every hit of ``assembled`` in ``cache``. Returns the bytes read.

    Keys move by (position now - position when computed); a move by zero copies the bits. Other slots stay as they are.
    """
    moved_bytes = 0
    for placement in assembled.placements:
        if placement.entry is None:
            continue
        kv = codec.decode(placement.entry.packed)
        distance = placement.chunk.start - kv.position
        for slab in cache.slabs:
            target = slab.window(placement.chunk.start, placement.chunk.end)
            keys, values = kv.keys[slab.first : slab.last], kv.values[slab.first : slab.last]
            keys = keys.to(slab.device, non_blocking=True)
            move(keys, distance, rope.of_layers(slab.first, slab.last), out=target.keys)
            target.values.copy_(values, non_blocking=True)
        moved_bytes += kv.num_bytes
    return moved_bytes
