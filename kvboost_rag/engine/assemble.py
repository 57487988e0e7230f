"""Finds what a prompt can reuse: the lookup cascade over its chunks (paper, sections 4.2.1 and 4.3).

Knows chunks, hashes and a store; knows nothing of models, rotation or attention. A miss between hits never stops
reuse: the published code breaks off at the first gap, here every chunk is looked up on its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from kvboost_rag.engine.chunking import Cutting, sink_positions
from kvboost_rag.engine.keys import chunk_keys
from kvboost_rag.engine.repair import Reused
from kvboost_rag.engine.store import Entry, Store
from kvboost_rag.engine.types import Chunk, ChunkKeys, Fidelity, Segment

MODES = ("baseline", "prefix", "reuse")
MIN_MOVED_TEXT_TOKENS = 32  # shorter pieces of text (separators) are cheaper computed than moved and repaired


@dataclass(frozen=True)
class Placement:
    """One chunk of the prompt and the entry that will fill it, if any."""

    chunk: Chunk
    keys: ChunkKeys
    fidelity: Fidelity
    entry: Entry | None = None


@dataclass(frozen=True)
class Assembled:
    """A prompt with its hits (the paper's AssembledPrompt).

    ``ids``: (num_tokens,) int64. The last token is always live: its logits are what the prompt is run for. So are the
    first ``num_sinks``. ``read_together``: see ``Cutting``.
    """

    ids: torch.Tensor
    placements: tuple[Placement, ...]
    num_sinks: int = 0
    read_together: bool = True

    @property
    def num_tokens(self) -> int:
        return int(self.ids.shape[0])

    def without_approximate(self) -> Assembled:
        """The same prompt with only its exact hits."""
        return replace(
            self,
            placements=tuple(
                replace(p, fidelity=Fidelity.MISS, entry=None) if p.fidelity is Fidelity.APPROXIMATE else p
                for p in self.placements
            ),
        )

    def live_positions(self) -> torch.Tensor:
        """Positions that are computed whatever is chosen for repair, ascending."""
        live = torch.ones(self.num_tokens, dtype=torch.bool)
        for placement in self.placements:
            if placement.entry is not None:
                live[placement.chunk.start : placement.chunk.end] = False
        live[: self.num_sinks] = True
        live[-1] = True
        return live.nonzero()[:, 0]

    def missing(self) -> torch.Tensor:
        """Which tokens belong to documents that were not found, (num_tokens,) bool."""
        found = torch.zeros(self.num_tokens, dtype=torch.bool)
        for placement in self.placements:
            if placement.chunk.document and placement.entry is None:
                found[placement.chunk.start : placement.chunk.end] = True
        return found

    def approximate_spans(self) -> list[Reused]:
        """What a repair strategy may choose from: approximate hits, less the tokens that are live anyway.

        Parts of a document that follow one another are one span where they were read together.
        """
        first, last = self.num_sinks, self.num_tokens - 1
        spans: list[Reused] = []
        for placement in self.placements:
            if placement.fidelity is Fidelity.APPROXIMATE:
                start, end = max(placement.chunk.start, first), min(placement.chunk.end, last)
                if self.read_together and placement.chunk.part and spans and spans[-1].end == start:
                    start = spans.pop().start
                spans.append(Reused(start, end))
        return [span for span in spans if span.start < span.end]


def assemble(
    segments: Sequence[Segment], store: Store, fingerprint: bytes, cutting: Cutting, mode: str = "reuse"
) -> Assembled:
    """Look every chunk up. ``prefix`` mode (PREFIX_ONLY) keeps the leading run of exact hits and drops the rest."""
    chunks = cutting.chunks(segments)
    placements = []
    leading = True
    for chunk, keys in zip(chunks, chunk_keys(chunks, fingerprint), strict=True):
        movable = chunk.document or len(chunk) >= MIN_MOVED_TEXT_TOKENS
        ids, anywhere = np.asarray(chunk.ids, dtype=np.int64), movable and mode == "reuse"
        hit = store.find(keys, ids, anywhere) if leading or mode == "reuse" else None
        leading = leading and hit is not None and hit[1] is Fidelity.EXACT
        if hit is None or (mode == "prefix" and not leading):
            placements.append(Placement(chunk, keys, Fidelity.MISS))
        else:
            placements.append(Placement(chunk, keys, hit[1], hit[0]))
    whole = torch.tensor([token for chunk in chunks for token in chunk.ids], dtype=torch.int64)
    num_sinks = len(sink_positions(len(whole), cutting.sinks))
    return Assembled(whole, tuple(placements), num_sinks, cutting.read_together)
