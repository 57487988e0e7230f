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
        keys, values = cache.window(placement.chunk.start, placement.chunk.end)
        move(kv.keys.to(keys.device, non_blocking=True), placement.chunk.start - kv.position, rope, out=keys)
        values.copy_(kv.values, non_blocking=True)
        moved_bytes += kv.num_bytes
    return moved_bytes
