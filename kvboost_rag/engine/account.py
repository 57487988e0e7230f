"""The account of a request: where each of its tokens came from, and the counts that follow from that.

Knows placements and positions; knows nothing of models, buffers or how a strategy chooses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from kvboost_rag.engine.assemble import Assembled
from kvboost_rag.engine.store import Entry
from kvboost_rag.engine.types import DocumentReport, Fidelity, Report, Source, Trace

_SOURCES = {Fidelity.EXACT: Source.EXACT, Fidelity.APPROXIMATE: Source.MOVED, Fidelity.MISS: Source.LIVE}


@dataclass(frozen=True)
class Choice:
    """What is recomputed. ``positions``: ascending int64; ``num_done``: how many of the leading live positions were
    computed on the way; ``attention``: (num_tokens,) float32 that the choice was made by, if it was."""

    positions: torch.Tensor
    num_done: int = 0
    attention: torch.Tensor | None = None

    def computed(self, live: torch.Tensor) -> torch.Tensor:
        """The positions still to be computed, ascending: of ``live`` and of the choice."""
        return torch.cat([live[self.num_done :], self.positions]).sort().values


def fill(
    report: Report, assembled: Assembled, live: torch.Tensor, choice: Choice, tier_of: Callable[[Entry], str]
) -> None:
    """The trace of ``report`` and its counts, from what was placed, live and chosen."""
    sources = np.zeros(assembled.num_tokens, dtype=np.uint8)
    for placement in assembled.placements:
        sources[placement.chunk.start : placement.chunk.end] = _SOURCES[placement.fidelity]
    sources[live.numpy()] = Source.LIVE
    sources[choice.positions.cpu().numpy()] = Source.REPAIRED
    attention = None if choice.attention is None else choice.attention.cpu().numpy()
    report.trace = Trace(assembled.ids.numpy(), sources, attention)
    count(report)
    for placement in assembled.placements:
        chunk = placement.chunk
        if chunk.document:
            num_repaired = int((sources[chunk.start : chunk.end] == Source.REPAIRED).sum())
            tier = tier_of(placement.entry) if placement.entry is not None else ""
            document = DocumentReport(len(chunk), chunk.start, placement.fidelity, num_repaired, tier)
            if chunk.part and report.documents:
                report.documents[-1].add_part(document)
            else:
                report.documents.append(document)


def count(report: Report) -> None:
    """The four counts of ``report`` from its trace."""
    assert report.trace is not None, "only a report with a trace is counted"
    found = np.bincount(report.trace.sources, minlength=len(Source)).tolist()
    report.num_live_tokens, report.num_exact_tokens = found[Source.LIVE], found[Source.EXACT]
    report.num_approximate_tokens, report.num_repaired_tokens = found[Source.MOVED], found[Source.REPAIRED]


def computed_after_all(report: Report, num_tokens: int) -> None:
    """Count the first ``num_tokens`` exact ones as live and stored: they were computed for this prompt, just before."""
    assert report.trace is not None, "only a report with a trace is counted"
    first = np.flatnonzero(report.trace.sources == Source.EXACT)[:num_tokens]
    report.trace.sources[first] = Source.LIVE
    report.num_stored_tokens += len(first)
    count(report)


def all_live(ids: torch.Tensor) -> Trace:
    """The trace of a prompt (num_tokens,) of which everything is computed."""
    return Trace(ids.numpy(), np.full(len(ids), Source.LIVE, dtype=np.uint8))
