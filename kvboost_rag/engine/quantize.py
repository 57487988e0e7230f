"""Decides how a document is kept: by the codec asked for, if the model can live with it.

Knows a model, a filled buffer and codecs; knows nothing of stores. Quantisation fails on some models (Qwen2's keys
carry a bias with outliers) and it fails fluently, so what counts is the distribution of the next token, never the
distance of the numbers (the paper's section 4.5 has no such gate).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from kvboost_rag.engine.cache import SlotCache
from kvboost_rag.engine.codecs import CODECS, Packed
from kvboost_rag.engine.forward import fused_forward
from kvboost_rag.engine.model import Model
from kvboost_rag.engine.rope import Rope, displace, place
from kvboost_rag.engine.types import KV

Span = tuple[int, int]  # half-open, in tokens of the prompt
NUM_PROBE_TOKENS = 16
FALLBACKS = {"int4": ("int4", "int8", "raw"), "int8": ("int8", "raw"), "raw": ("raw",)}


@dataclass(frozen=True)
class Kept:
    """``packed``: what to store, part by part; ``kl``: what its quantisation costs, nats a token, 0 if there is none;
    ``refused``: codecs that cost too much, with their KL."""

    packed: tuple[Packed, ...]
    kl: float = 0.0
    refused: tuple[tuple[str, float], ...] = ()


def num_probe_tokens(num_tokens: int) -> int:
    """Of a document of ``num_tokens``, how many of the last serve to judge the others."""
    return min(NUM_PROBE_TOKENS, num_tokens // 2)


def keep(
    model: Model,
    cache: SlotCache,
    ids: torch.Tensor,
    parts: Sequence[Span],
    logits: torch.Tensor,
    codec: str,
    max_kl: float,
) -> Kept:
    """Pack the document at the end of the prompt ``ids`` (num_tokens,), whose KV fills ``cache``; its ``parts`` follow
    one another.

    ``logits``: (num_probe_tokens, vocab), those of its last tokens. They are computed again over the quantised KV of
    the tokens before, and KL(as computed || quantised), mean per token, must not exceed ``max_kl``; else the next wider
    codec is tried. Leaves ``cache`` changed.
    """
    kv = [cache.copy_out(start, end) for start, end in parts]
    refused: list[tuple[str, float]] = []
    for name, packed in _packings(kv, model, len(ids), codec):
        kl = 0.0 if name == "raw" or not len(logits) else _kl(model, cache, ids, parts, logits, packed)
        if kl <= max_kl:
            return Kept(packed, kl, tuple(refused))
        refused.append((name, kl))
    raise AssertionError("the raw codec costs nothing")


def _packings(
    parts: Sequence[KV], model: Model, num_tokens: int, codec: str
) -> Iterator[tuple[str, tuple[Packed, ...]]]:
    rope = model.rope(num_tokens)
    for name in FALLBACKS[codec]:
        encode, position_free = CODECS[name].encode, CODECS[name].position_free
        try:
            yield name, tuple(encode(_at_rest(kv, rope) if position_free else kv) for kv in parts)
        except ValueError:  # numbers that no scale can hold
            continue


def _at_rest(kv: KV, rope: Rope) -> KV:
    assert kv.position is not None
    return replace(kv, keys=displace(kv.keys, kv.position, rope), position=None)


def _kl(
    model: Model,
    cache: SlotCache,
    ids: torch.Tensor,
    parts: Sequence[Span],
    logits: torch.Tensor,
    packed: Sequence[Packed],
) -> float:
    end = len(ids) - len(logits)
    for (start, stop), part in zip(parts, packed, strict=True):
        if start < end:
            _lay(cache, start, min(stop, end), CODECS[part.codec].decode(part), model.rope(len(ids)))
    again = fused_forward(model, ids, torch.arange(end, len(ids)), cache, num_logits=len(logits))
    full, quantised = logits.log_softmax(-1), again.log_softmax(-1)
    kl = float((full.exp() * (full - quantised)).sum(-1).mean())
    return kl if kl == kl else float("inf")  # NaN is no answer


def _lay(cache: SlotCache, start: int, end: int, kv: KV, rope: Rope) -> None:
    """Put the first tokens of ``kv``, which is position-free, into slots [start, end)."""
    for slab in cache.slabs:
        window = slab.window(start, end)
        keys, values = (x[slab.first : slab.last, :, : end - start] for x in (kv.keys, kv.values))
        place(keys.to(slab.device), start, rope.of_layers(slab.first, slab.last), out=window.keys)
        window.values.copy_(values)
