"""How documents are read before they are asked about: the same texts, warmed in several ways.

Knows engines, contexts and stores; knows nothing of questions' answers or of what is measured. ``ENCODINGS`` is the one
list:

- ``alone``: nothing in front; ``not rotated``: the same, its keys used as if they stood where they are needed.
- ``header``: behind the beginning of the prompts, up to their first document.
- ``shared primer``: behind the usual opening and 320 tokens (or as many as the name says) of other documents, the same
  for all; ``bundled primer``: the same with the text that comes with the package.
- ``primer``: as ``warm`` does by default: behind a document read before that shares text with this one, else behind
  the last ones read; ``last read``: behind the last ones read, whatever they say.
- ``first exact``: as ``primer``, with a second version of each document straight behind the prompts' header.
- ``chunks of N alone``, ``... primed``: cut every N tokens, each chunk read without those before it, behind nothing or
  behind the primer of its document.
- ``primer int8``, ``primer int4``: what ``primer`` has, quantised, without asking whether the model bears it.

The corpus comes in an order shuffled by a fixed seed, so that no document happens to be read behind the one that stands
before it in its prompt.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from types import TracebackType
from typing import Any

import common
import torch
from rows import CHUNK_SIZES, PRIMER_LENGTHS

from kvboost_rag import KVBoost, Prompt
from kvboost_rag.engine.codecs import CODECS
from kvboost_rag.engine.rope import Rope, displace
from kvboost_rag.engine.types import KV, Segment
from kvboost_rag.warming import PRIMER_TOKENS

BUDGET = "64GB"  # nothing is evicted: what does not fit the machine's memory is a matter of smaller blocks


class Encodings:
    """Engines over one model that have read ``texts``, each made when it is first asked for. Closing frees them."""

    def __init__(self, model: Any, tokenizer: Any, texts: Iterable[str], prompt: Prompt):
        """``prompt``: one of those that will be asked, for what they all begin with."""
        self.model, self.tokenizer, self.prompt = model, tokenizer, prompt
        self.texts = list(dict.fromkeys(texts))
        random.Random(common.SEED).shuffle(self.texts)
        self._made: dict[str, KVBoost] = {}

    def __getitem__(self, name: str) -> KVBoost:
        if name not in self._made:
            self._made[name] = boost = ENCODINGS[name](self)
            boost.prefill(self.prompt, repair="none")  # keeps the header: no row pays for it, the first neither
        return self._made[name]

    def boost(self, **options: Any) -> KVBoost:
        """A new engine. What it reuses does not depend on the time things take."""
        return KVBoost(self.model, self.tokenizer, max_cache_bytes=BUDGET, break_even=False, **options)

    def __enter__(self) -> Encodings:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for boost in self._made.values():
            boost.close()
        self._made.clear()


def header_of(boost: KVBoost, prompt: Prompt) -> list[Segment]:
    """What stands before the first document."""
    return list(takewhile(lambda segment: not segment.document, boost.segments(prompt, auto_detect=False)))


def read(boost: KVBoost, context: Sequence[Segment], text: str) -> None:
    with boost.engine.lock:
        boost.engine.warm(context, boost._cutter.cut(text))


def alone(encodings: Encodings) -> KVBoost:
    boost = encodings.boost()
    for text in encodings.texts:
        read(boost, [], text)
    return boost


def not_rotated(encodings: Encodings) -> KVBoost:
    boost = encodings.boost()
    boost.engine.store = boost.engine.keeper.store = encodings["alone"].engine.store
    unmoved = Rope(torch.zeros_like(boost.engine.model.rope().inv_freq))
    boost.engine.model.rope = lambda num_tokens=0: unmoved
    return boost


def header(encodings: Encodings) -> KVBoost:
    boost = encodings.boost()
    context = header_of(boost, encodings.prompt)
    for text in encodings.texts:
        read(boost, context, text)
    return boost


def shared_primer(encodings: Encodings, num_tokens: int) -> KVBoost:
    """The primer is cut from documents in the order of their hashes; those of them that are in it get the next ones."""
    boost = encodings.boost()
    ids = {text: boost.tokens.encode(text) for text in encodings.texts}
    ordered = sorted(encodings.texts, key=lambda text: boost.engine.content_key(ids[text]))
    opening = boost._opening(None)
    for text in encodings.texts:
        lead: list[int] = []
        for other in ordered:
            if other != text and len(lead) < num_tokens:
                lead += ids[other]
        primer = Segment(tuple(lead[:num_tokens]), document=True)
        read(boost, [*opening, primer, boost._warmer._separator], text)
    return boost


def bundled_primer(encodings: Encodings) -> KVBoost:
    boost = encodings.boost()
    boost.warm(encodings.texts, primer="bundled", progress=False)
    return boost


def primer(encodings: Encodings) -> KVBoost:
    boost = encodings.boost()
    common.log(f"  primer: {boost.warm(encodings.texts, primer='auto', progress=False)}")
    return boost


def last_read(encodings: Encodings) -> KVBoost:
    boost = encodings.boost()
    boost._warmer._related.related = lambda found: []
    boost.warm(encodings.texts, primer="auto", progress=False)
    return boost


def first_exact(encodings: Encodings) -> KVBoost:
    boost = encodings.boost()
    boost.warm(encodings.texts, header=encodings.prompt, first=True, progress=False)
    return boost


def chunks(encodings: Encodings, size: int, primed: bool) -> KVBoost:
    boost = encodings.boost(chunk_size=size, overlap_tokens=0)
    for text in encodings.texts:
        boost._cutter.note(text, "fixed")
    if primed:
        boost.warm(encodings.texts, primer="auto", progress=False)
        return boost
    for text in encodings.texts:
        for part in boost._cutter.cut(text):
            with boost.engine.lock:
                boost.engine.warm([], part)
    return boost


def quantised(encodings: Encodings, codec: str) -> KVBoost:
    source, target = encodings["primer"], encodings.boost()
    rope = source.engine.model.rope()
    for text in encodings.texts:
        parts = source._cutter.cut(text)
        num_tokens = sum(len(part.ids) for part in parts)
        for part in parts:
            entry = source.engine.store.peek(source.engine.content_key(part.ids, num_tokens))
            assert entry is not None
            kv = entry.packed
            assert isinstance(kv, KV)
            assert kv.position is not None
            free = replace(kv, keys=displace(kv.keys, kv.position, rope), position=None)
            target.engine.store.put(replace(entry, packed=CODECS[codec].encode(free), exact=False))
    return target


ENCODINGS: dict[str, Callable[[Encodings], KVBoost]] = {
    "alone": alone,
    "not rotated": not_rotated,
    "header": header,
    **{f"shared primer {n}": partial(shared_primer, num_tokens=n) for n in PRIMER_LENGTHS},
    "shared primer": partial(shared_primer, num_tokens=PRIMER_TOKENS),
    "bundled primer": bundled_primer,
    "last read": last_read,
    "primer": primer,
    "first exact": first_exact,
    **{f"chunks of {n} alone": partial(chunks, size=n, primed=False) for n in CHUNK_SIZES},
    **{f"chunks of {n} primed": partial(chunks, size=n, primed=True) for n in CHUNK_SIZES},
    "primer int8": partial(quantised, codec="int8"),
    "primer int4": partial(quantised, codec="int4"),
}
SOURCES = {
    "not rotated": "alone",
    "primer int8": "primer",
    "primer int4": "primer",
}  # made of what another one has read


def families(names: Iterable[str]) -> list[list[str]]:
    """``names`` in groups that have to be in memory together."""
    groups: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        groups.setdefault(SOURCES.get(name, name), []).append(name)
    return list(groups.values())
