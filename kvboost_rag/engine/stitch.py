"""Lays reused KV into a prompt's buffer: dequantise, rotate, copy, gaps left open (paper, section 4.3).

Knows placements, codecs and rope; knows nothing of why a chunk hit or what is recomputed afterwards.
"""

from __future__ import annotations

from kvboost_rag.engine.assemble import Assembled
from kvboost_rag.engine.cache import Slab, SlotCache
from kvboost_rag.engine.codecs import CODECS, Packed
from kvboost_rag.engine.rope import Rope, move, place

# Numbers decoded and turned at once: few, so that a prompt never takes much more than its buffer. An accelerator that
# gets them in small pieces waits for its calls.
BLOCK = {"cpu": 2**19}
OTHER_BLOCK = 2**25


def stitch(assembled: Assembled, cache: SlotCache, rope: Rope, first: int = 0) -> int:
    """Fill the slots of every hit of ``assembled`` in ``cache``, from position ``first`` on. Returns the bytes read.

    Keys move by (position now - position when computed), a move by zero copies the bits; keys kept without rotation are
    turned once, straight to where they go. Other slots stay as they are.
    """
    moved_bytes = 0
    for placement in assembled.placements:
        if placement.entry is None or placement.chunk.start < first:
            continue
        packed, start = placement.entry.packed, placement.chunk.start
        for slab in cache.slabs:
            target = slab.window(start, placement.chunk.end)
            block = BLOCK.get(slab.device.type, OTHER_BLOCK)
            at_once = max(1, block // max(1, 2 * target.keys[0].numel()))
            for layer in range(slab.first, slab.last, at_once):
                layers = slice(layer, min(layer + at_once, slab.last))
                _lay(packed, layers, start, target.of_layers(layers), rope.of_layers(layers.start, layers.stop))
        moved_bytes += packed.num_bytes
    rope.let_go()
    return moved_bytes


def _lay(packed: Packed, layers: slice, start: int, target: Slab, rope: Rope) -> None:
    """Fill ``target`` with ``layers`` of what is kept. What decoding and turning need is let go of before the next."""
    kv = CODECS[packed.codec].decode(packed, layers.start, layers.stop)
    keys = kv.keys.to(target.device, non_blocking=True)
    if kv.position is None:
        place(keys, start, rope, out=target.keys)
    else:
        move(keys, start - kv.position, rope, out=target.keys)
    target.values.copy_(kv.values, non_blocking=True)
