"""What is kept of what was computed: documents read on purpose, and by-products of prompts (paper, section 4.7).

Knows a model, a store and buffers that are filled; knows nothing of repair, decoding or text. The one rule: KV is kept
as exact only if nothing approximate stood before it, and nothing was lost in packing it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile

import numpy as np
import torch

from kvboost_rag.engine.assemble import Assembled, Placement, assemble
from kvboost_rag.engine.capabilities import Reuse
from kvboost_rag.engine.chunking import Cutting
from kvboost_rag.engine.codecs import Packed
from kvboost_rag.engine.config import EngineConfig
from kvboost_rag.engine.costs import Costs
from kvboost_rag.engine.forward import fused_forward, work_of
from kvboost_rag.engine.model import Model
from kvboost_rag.engine.quantize import Kept, keep, num_probe_tokens
from kvboost_rag.engine.stitch import stitch
from kvboost_rag.engine.store import Entry, Put, Store
from kvboost_rag.engine.types import KV, Fidelity, Segment, total_tokens
from kvboost_rag.errors import QuantizationWarning

CopyOut = Callable[[int, int], KV]  # a copy of a prompt's KV at positions [start, end)


def importance(keys: Sequence[torch.Tensor]) -> float:
    """Mean length of ``keys``, (layers, kv_heads, tokens, head_dim) each, per token, layer and head (paper, equation
    6). A rotation changes no length."""
    return float(torch.cat([part.float().norm(dim=-1).flatten().cpu() for part in keys]).mean())


class Keeper:
    """Puts KV into ``store``. The caller holds the engine's lock."""

    def __init__(self, model: Model, store: Store, cutting: Cutting, config: EngineConfig, costs: Costs):
        self.model, self.store, self.cutting, self.config, self.costs = model, store, cutting, config, costs
        self.num_kept_wider = 0  # documents that the codec asked for would have changed too much

    def by_products(self, assembled: Assembled, copy_out: CopyOut, first: int = 0, followed: bool = False) -> int:
        """Store what a prompt computed from position ``first`` on and a later one may reuse. Returns how many tokens
        were stored.

        That is the run of text before the first document (a chain's fixed opening), documents that missed, and text
        between documents as long as all is exact: the same documents in the same order are then one exact prefix.
        ``followed``: more of them come behind this one. By-products never displace warmed documents.
        """
        if not self.model.lasting(assembled.num_tokens):
            return 0
        exact, opening = True, True
        num_stored = 0
        run = list(takewhile(lambda each: each.fidelity is not Fidelity.APPROXIMATE, assembled.placements))
        last = max((n for n, each in enumerate(run) if each.chunk.document), default=-1)
        if followed and len(run) == len(assembled.placements):
            last = len(run)
        for number, placement in enumerate(assembled.placements):
            exact = exact and placement.fidelity is not Fidelity.APPROXIMATE
            opening = opening and not placement.chunk.document
            new = placement.entry is None and placement.chunk.start >= first
            if new and (placement.chunk.document or opening or (exact and number < last)):
                num_stored += len(placement.chunk) if self._as_computed(placement, copy_out, exact).stored else 0
        return num_stored

    def read(
        self,
        context: Sequence[Segment],
        parts: Sequence[Segment],
        pinned: bool = False,
        text: str = "",
        chunking: str = "document",
        anchored: bool = False,
    ) -> Put:
        """Run a document behind ``context`` and keep its KV (paper: ``warm``), each of its ``parts`` as an entry.

        The document is run as a whole, so its parts see all before them. What is new of the context is kept too, as a
        by-product: one that many documents share is computed once. A document of the context that is warm already is
        reused where it stands. ``text`` goes with the largest part (a smaller one may be another document's too), so
        that a store opened again can tell what to look for. ``anchored``: keep it, as computed, as a second version for
        this context only.
        """
        segments = [*context, *parts]
        num_tokens = total_tokens(segments)
        mode = "prefix" if self.model.capabilities.reuse is Reuse.PREFIX_ONLY else "reuse"
        assembled = assemble(segments, self.store, self.model.fingerprint(num_tokens), self.cutting, mode)
        before, targets = assembled.placements[: -len(parts)], assembled.placements[-len(parts) :]
        targets = tuple(replace(target, fidelity=Fidelity.MISS, entry=None) for target in targets)
        assembled = replace(assembled, placements=(*before, *targets))
        cache = self.model.new_cache(num_tokens)
        stitch(assembled, cache, self.model.rope(num_tokens))
        codec = "raw" if anchored else self.config.codec
        judged = codec != "raw"  # whose last tokens say what quantisation costs
        num_logits = max(1, num_probe_tokens(total_tokens(parts))) if judged else 1
        live, size = assembled.live_positions(), self.config.prefill_chunk_tokens
        with self.costs.forward(work_of(live)):
            logits = fused_forward(self.model, assembled.ids, live, cache, num_logits, slice_tokens=size)
        exact = True
        for placement in before:
            exact = exact and placement.fidelity is not Fidelity.APPROXIMATE
            if placement.entry is None and exact:
                self._as_computed(placement, cache.copy_out, exact=True)
        if not self.model.lasting(num_tokens):
            return Put(stored=False)
        spans = [(target.chunk.start, target.chunk.end) for target in targets]
        largest = max(targets, key=lambda target: target.chunk.end - target.chunk.start)
        kept = keep(self.model, cache, assembled.ids, spans, logits, codec, self.config.max_quantization_kl)
        self._say(kept)
        puts = [
            self._put(
                target,
                packed,
                # what was quantised is no longer what a prefill computes
                exact=exact and packed.codec == "raw",
                importance=importance([slab.window(*span).keys for slab in cache.slabs]),
                warmed=True,
                pinned=pinned,
                text=text if target is largest and not anchored else "",
                chunking=chunking,
                anchored=anchored,
            )
            for target, packed, span in zip(targets, kept.packed, spans, strict=True)
        ]
        return Put(all(put.stored for put in puts), tuple(entry for put in puts for entry in put.evicted))

    def _as_computed(self, placement: Placement, copy_out: CopyOut, exact: bool) -> Put:
        """Keep one chunk of a prompt as it is."""
        kv = copy_out(placement.chunk.start, placement.chunk.end)
        return self._put(placement, kv, exact, importance([kv.keys]))

    def _put(
        self,
        placement: Placement,
        packed: Packed,
        exact: bool,
        importance: float,
        warmed: bool = False,
        pinned: bool = False,
        text: str = "",
        chunking: str = "document",
        anchored: bool = False,
    ) -> Put:
        ids = np.asarray(placement.chunk.ids, dtype=np.int64)
        return self.store.put(
            Entry(placement.keys, ids, packed, exact, warmed, pinned, importance, text, chunking, anchored)
        )

    def _say(self, kept: Kept) -> None:
        if kept.refused and not self.num_kept_wider:
            tried = ", ".join(f"{name}: {kl:.3g} nats a token" for name, kl in kept.refused)
            warnings.warn(
                f"quantised KV changes this model's next token by more than max_quantization_kl="
                f"{self.config.max_quantization_kl} ({tried}); such documents are kept as {kept.packed[0].codec!r}",
                QuantizationWarning,
                stacklevel=6,
            )
        self.num_kept_wider += bool(kept.refused)
