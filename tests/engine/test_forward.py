"""The scout pass: which rows it runs, and what it says of them. The fused forward itself: ``test_reuse.py``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from prompts import GAPS, HEADER, NEW, QUESTION, SEP, A, B, cold, prefill, warmed

from kvboost_rag.engine import engine as engine_module
from kvboost_rag.engine import forward
from kvboost_rag.engine.repair import QueryRepair

Rows = list[torch.Tensor]


@pytest.fixture
def scouted(monkeypatch: pytest.MonkeyPatch) -> tuple[Rows, Rows]:
    """The positions that scout passes run, and the attention they find."""
    rows: Rows = []
    found: Rows = []
    run, scout = forward.fused_forward, engine_module.scout

    def watched(model: Any, ids: Any, positions: Any, cache: Any, **options: Any) -> Any:
        rows.append(positions)
        return run(model, ids, positions, cache, **options)

    def kept(*arguments: Any) -> Any:
        found.append(scout(*arguments))
        return found[-1]

    monkeypatch.setattr(forward, "fused_forward", watched)
    monkeypatch.setattr(engine_module, "scout", kept)
    return rows, found


@pytest.mark.parametrize(
    "live, missing, expected",
    [
        ([3, 4, 9, 10], [], [3, 4, 9, 10]),
        ([3, 4, 5, 6, 9, 10], [4, 5], [3, 6, 9, 10]),
        (range(2000), range(1990), range(1990, 2000)),
        (range(2000), [], range(2000 - forward.SCOUT_TOKENS, 2000)),
        (range(2000), range(1000, 1900), [*range(844, 1000), *range(1900, 2000)]),
        (range(20), range(10, 20), range(20)),  # ends in a document that is missing
        (range(5), range(5), range(5)),
    ],
)
def test_documents_that_are_missing_are_no_part_of_the_question(live: Any, missing: Any, expected: Any) -> None:
    mask = torch.zeros(2000, dtype=torch.bool)
    mask[list(missing)] = True
    assert forward.scout_rows(torch.tensor(list(live)), mask).tolist() == list(expected)


def test_a_scout_pass_leaves_out_what_was_not_found(scouted: tuple[Rows, Rows]) -> None:
    rows, found = scouted
    engine = warmed()
    prompt = [HEADER, A, SEP, NEW, SEP, B, QUESTION]
    prefill(engine, [HEADER, A, QUESTION], QueryRepair(0.2))  # keeps the header
    rows.clear()
    report = prefill(engine, prompt, QueryRepair(0.2)).report
    assert (report.num_document_hits, report.num_document_misses) == (2, 1)
    (ran,) = rows
    assert len(ran) == 2 * len(SEP.ids) + len(QUESTION.ids)
    start = sum(len(segment.ids) for segment in prompt[:3])
    absent = found[-1][start : start + len(NEW.ids)]
    assert absent.max() == 0
    assert found[-1].isfinite().all()


@pytest.mark.parametrize("case", GAPS)
def test_what_the_scout_leaves_out_is_computed_all_the_same(case: str) -> None:
    engine = warmed()
    result = prefill(engine, GAPS[case], QueryRepair(1.0))
    torch.testing.assert_close(result.logits, cold(engine, GAPS[case]), atol=1e-4, rtol=0)


def test_a_prompt_that_ends_in_a_new_document_is_repaired() -> None:
    report = prefill(warmed(), [HEADER, A, SEP, B, SEP, NEW], QueryRepair(0.2)).report
    assert report.num_repaired_tokens == round(0.2 * (len(A.ids) + len(B.ids)))
