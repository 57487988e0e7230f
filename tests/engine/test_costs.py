"""Reuse is not done where it would cost more than it saves; what is known of costs comes from what was run."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from conftest import build_model, build_tokenizer, document
from prompts import HEADER, QUESTION, SEP, A, B, C, assert_same, cold, prefill, warmed

from kvboost_rag import KVBoost, OptionError
from kvboost_rag.engine import costs
from kvboost_rag.engine.costs import Costs, Work
from kvboost_rag.engine.repair import REPAIRS, FullRepair, NoRepair, QueryRepair, RepairView, Reused
from kvboost_rag.engine.types import Fidelity

PROMPT = [HEADER, C, SEP, A, SEP, B, QUESTION]


@pytest.fixture(autouse=True)
def impatient(_patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "MIN_SAVED_SECONDS", 0.0)


def machine(fixed: float, slope: float, balanced: float = 1000.0, noise: float = 0.0) -> Costs:
    """Costs that have seen a machine of which this is the truth."""
    found, dice = Costs(balanced), random.Random(0)
    for num_rows in (8, 20, 60, 130, 300, 700) * 6:
        work = Work(num_rows, num_rows)
        seconds = fixed + slope * num_rows * (1 + num_rows / balanced)
        slow = 10 if dice.random() < noise else 1
        found.forward_took(work, seconds * slow)
    return found


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_the_line_is_found_whatever_a_busy_machine_does(noise: float) -> None:
    verdict = machine(0.02, 0.001, noise=noise).judge([Work(100, 500)], {}, instead=Work(1000, 500))
    assert verdict is not None
    assert verdict.reuse_seconds == pytest.approx(0.02 + 0.001 * 150, rel=0.05)
    assert verdict.full_seconds == pytest.approx(0.02 + 0.001 * 1500, rel=0.05)
    assert verdict.pays


def test_what_a_full_prefill_takes_follows_from_the_line() -> None:
    assert Costs(1000).full_prefill(500) == 0
    assert machine(0.02, 0.001).full_prefill(999) == pytest.approx(0.02 + 0.001 * 999 * 1.5, rel=0.05)


def test_nothing_is_judged_before_small_and_large_were_seen() -> None:
    found = Costs(1000)
    assert found.judge([Work(10, 10)], {}, Work(500, 250)) is None
    for num_rows in (400, 500, 600):
        found.forward_took(Work(num_rows, num_rows / 2), num_rows * 1e-3)
    found.forward_took(Work(0, 0), 5.0)  # nothing was computed
    assert found.judge([Work(10, 10)], {}, Work(500, 250)) is None
    found.forward_took(Work(40, 500), 0.05)
    assert found.judge([Work(10, 10)], {}, Work(500, 250)) is not None


def test_a_second_pass_does_not_pay_where_little_is_reused() -> None:
    found = machine(fixed=0.03, slope=0.0001)
    two_passes = [Work(45, 100), Work(40, 100, share=2 / 3)]
    assert not found.judge(two_passes, {}, instead=Work(100, 50)).pays
    assert found.judge(two_passes, {}, instead=Work(2000, 1000)).pays
    assert found.judge(two_passes[:1], {}, instead=Work(100, 50)).pays


def test_a_slow_tier_does_not_pay() -> None:
    found = machine(fixed=0.001, slope=0.0001)
    for seconds in (0.9, 1.0, 30.0):
        found.loading_took({"disk": 1_000_000}, seconds)
        found.loading_took({"memory": 1_000_000}, seconds / 1000)
        found.loading_took({"memory": 500, "disk": 500}, 99.0)  # says nothing of either
    reuse = [Work(40, 600)]
    assert not found.judge(reuse, {"disk": 1_000_000}, instead=Work(600, 300)).pays
    assert found.judge(reuse, {"memory": 1_000_000}, instead=Work(600, 300)).pays
    assert found.judge(reuse, {"unknown": 1_000_000}, instead=Work(600, 300)).pays


@pytest.mark.parametrize("name", sorted(REPAIRS))
def test_strategies_tell_beforehand_how_much_they_will_recompute(name: str) -> None:
    repair = REPAIRS[name]()
    spans = [Reused(10, 50), Reused(60, 64), Reused(70, 270)]
    view = RepairView(spans, attention=torch.rand(300), deviation=torch.rand(300))
    assert repair.num_selected(spans) == len(repair.select(view))


class Dear:
    """A stand-in for ``Costs``: reuse never pays."""

    def __init__(self, inner: Costs):
        self.inner = inner
        self.asked: list[tuple[list[Work], dict[str, int], Work]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def judge(self, passes: list[Work], moved_bytes: dict[str, int], instead: Work) -> costs.Verdict:
        self.asked.append((passes, dict(moved_bytes), instead))
        return costs.Verdict(2.0, 1.0)


def test_what_does_not_pay_is_computed_and_the_report_says_so() -> None:
    engine = warmed()
    engine.costs = Dear(engine.costs)
    found = prefill(engine, PROMPT, QueryRepair())
    assert_same(found.logits, cold(engine, PROMPT))
    assert (found.report.num_approximate_tokens, found.report.num_repaired_tokens) == (0, 0)
    assert [d.fidelity for d in found.report.documents] == [Fidelity.MISS] * 3
    assert any("2000 ms" in note and "1000 ms" in note for note in found.report.notes)
    again = prefill(engine, PROMPT, QueryRepair())  # what was computed is exact now, and exact hits are never given up
    assert again.report.num_exact_tokens > 200
    assert_same(again.logits, found.logits)


def test_what_is_asked() -> None:
    engine = warmed()
    engine.costs = dear = Dear(engine.costs)
    num_reused, num_live = 234, 11 + 2 + 2 + 9
    prefill(engine, PROMPT, QueryRepair(0.5))
    ((one, scout), moved, instead) = dear.asked[0]
    assert (one.num_rows, scout.num_rows) == (num_live + num_reused // 2, num_live)
    assert 0 < scout.share < 1
    assert moved == {"memory": sum(engine.store.peek(engine.content_key(s.ids)).packed.num_bytes for s in (A, B, C))}
    assert (instead.num_rows, instead.num_keys) == (num_live + num_reused, (num_live + num_reused + 1) / 2)


@pytest.mark.parametrize("repair", [FullRepair(), NoRepair()])
def test_full_repair_is_wanted_whatever_it_costs(repair: Any) -> None:
    engine = warmed()
    engine.costs = dear = Dear(engine.costs)
    found = prefill(engine, PROMPT, repair)
    assert bool(dear.asked) is (repair == NoRepair())
    assert bool(found.report.num_repaired_tokens) is (repair == FullRepair())


def test_calibration_comes_with_use_and_can_be_left_out() -> None:
    text = f"{document(1)} And {document(2)} so?"
    for break_even in (True, False):
        with KVBoost(build_model(), build_tokenizer(), break_even=break_even) as boost:
            boost.warm([document(1), document(2)], progress=False)
            for _ in range(3):
                boost.prefill(text, repair="none")
            verdict = boost.engine.costs.judge([Work(10, 400)], {"memory": 1000}, Work(400, 200))
            assert verdict is not None
            assert verdict.reuse_seconds > 0
            boost.engine.costs = Dear(boost.engine.costs)
            assert boost.prefill(text).report.num_document_hits == (0 if break_even else 2)
    with pytest.raises(OptionError, match="break_even"):
        KVBoost(build_model(), build_tokenizer(), break_even="yes")
