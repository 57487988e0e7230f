"""The trace of a request says of each token where it came from, and the counts follow from it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from prompts import HEADER, NEW, QUESTION, SEP, A, B, make, prefill, warmed

from kvboost_rag.engine.batches import prefill_batch
from kvboost_rag.engine.repair import BoundaryRepair, FullRepair, NoRepair, QueryRepair, Repair
from kvboost_rag.engine.types import Report, Source, total_tokens

PROMPT = [HEADER, A, SEP, NEW, SEP, B, QUESTION]


def counts(report: Report) -> list[int]:
    return [
        report.num_live_tokens,
        report.num_exact_tokens,
        report.num_approximate_tokens,
        report.num_repaired_tokens,
    ]


@pytest.mark.parametrize("repair", [NoRepair(), QueryRepair(0.3), BoundaryRepair(), FullRepair()])
def test_every_token_has_a_source_and_the_counts_are_theirs(repair: Repair) -> None:
    engine = warmed()
    report = prefill(engine, PROMPT, repair).report
    assert report.trace is not None
    assert report.trace.ids.tolist() == [token for segment in PROMPT for token in segment.ids]
    assert np.bincount(report.trace.sources, minlength=4).tolist() == counts(report)
    starts = np.cumsum([0, *(len(segment.ids) for segment in PROMPT)])
    by_segment = [set(report.trace.sources[a:b].tolist()) for a, b in pairwise(starts)]
    assert by_segment[3] == {Source.LIVE}  # nobody has read it
    found = {Source.REPAIRED} if isinstance(repair, FullRepair) else {Source.MOVED, Source.REPAIRED}
    assert by_segment[1] <= found
    assert by_segment[5] <= found
    assert (report.trace.attention is not None) == repair.needs_attention
    again = prefill(engine, PROMPT, repair).report
    assert again.trace is not None
    assert set(again.trace.sources[: len(HEADER.ids)].tolist()) <= {Source.EXACT, Source.LIVE}


def test_a_baseline_is_all_live_and_to_dict_leaves_the_trace_out() -> None:
    report = prefill(warmed(), PROMPT, mode="baseline").report
    assert report.trace is not None
    assert set(report.trace.sources.tolist()) == {Source.LIVE}
    assert "trace" not in report.to_dict()
    assert report.trace is not None


def test_what_a_batch_computed_for_all_counts_for_its_first_prompt() -> None:
    engine = make()  # cold
    prompts = [[HEADER, A, SEP, B, QUESTION], [HEADER, A, SEP, NEW, QUESTION]]
    with engine.lock:
        reports = prefill_batch(engine, prompts, NoRepair(), 0).reports
    for report, prompt in zip(reports, prompts, strict=True):
        assert report.trace is not None
        assert np.bincount(report.trace.sources, minlength=4).tolist() == counts(report)
        assert sum(counts(report)) == total_tokens(prompt)
    front = len(HEADER.ids) + len(A.ids) + len(SEP.ids)
    first, second = (r.trace.sources[:front].tolist() for r in reports if r.trace)
    assert set(first) == {Source.LIVE}
    assert Source.EXACT in second
    assert second.count(Source.EXACT) == reports[1].num_exact_tokens
