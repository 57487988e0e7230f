"""Repair strategies: which reused tokens each one recomputes, and how one is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
import torch

from kvboost_rag.engine.repair import (
    REPAIRS,
    BoundaryRepair,
    FullRepair,
    NoRepair,
    QueryRepair,
    Repair,
    RepairView,
    Reused,
    resolve_repair,
)
from kvboost_rag.errors import OptionError

SPANS: dict[str, list[tuple[int, int]]] = {
    "none": [],
    "empty": [(7, 7)],
    "one token": [(3, 4)],
    "one": [(10, 60)],
    "from the start": [(0, 40)],
    "touching": [(5, 30), (30, 31), (31, 80)],
    "apart": [(4, 100), (120, 121), (130, 133), (150, 190)],
}


def view(spans: Sequence[tuple[int, int]], attention: torch.Tensor | None = None) -> RepairView:
    if attention is None:
        attention = torch.rand(200, generator=torch.Generator().manual_seed(0))
    deviation = torch.rand(200, generator=torch.Generator().manual_seed(1))
    return RepairView([Reused(*span) for span in spans], attention, deviation)


def positions(spans: Sequence[tuple[int, int]]) -> list[int]:
    return [position for start, end in spans for position in range(start, end)]


def selected(repair: Repair, spans: Sequence[tuple[int, int]], attention: torch.Tensor | None = None) -> list[int]:
    return repair.select(view(spans, attention)).tolist()


@pytest.mark.parametrize("name", REPAIRS)
class TestRepairContract:
    """What every strategy in ``REPAIRS`` promises."""

    @pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
    def test_it_selects_ascending_unique_positions_inside_the_spans(self, name: str, spans: list[tuple[int, int]]):
        chosen = REPAIRS[name]().select(view(spans))
        assert chosen.dtype == torch.int64 and chosen.dim() == 1
        assert chosen.tolist() == sorted(set(chosen.tolist()) & set(positions(spans)))

    def test_it_looks_at_attention_if_and_only_if_it_says_so(self, name: str):
        strategy, spans = REPAIRS[name](), SPANS["apart"]
        attention = torch.arange(200).float()
        choices = {tuple(selected(strategy, spans, shown)) for shown in (attention, attention.flip(0))}
        assert (len(choices) > 1) is strategy.needs_attention
        if not strategy.needs_attention:
            unasked = replace(view(spans), attention=None)
            assert strategy.select(unasked).tolist() == selected(strategy, spans)

    def test_it_looks_at_deviation_if_and_only_if_it_asks_for_a_probe(self, name: str):
        strategy, shown = REPAIRS[name](), view(SPANS["apart"])
        turned = replace(shown, deviation=shown.deviation.flip(0))
        differs = strategy.select(shown).tolist() != strategy.select(turned).tolist()
        assert differs is (strategy.probe is not None)

    def test_it_changes_nothing_it_was_shown(self, name: str):
        shown = view(SPANS["apart"])
        attention, spans = shown.attention.clone(), list(shown.spans)
        REPAIRS[name]().select(shown)
        assert torch.equal(shown.attention, attention) and list(shown.spans) == spans

    def test_the_same_view_gives_the_same_choice(self, name: str):
        strategy = REPAIRS[name]()
        assert selected(strategy, SPANS["apart"]) == selected(strategy, SPANS["apart"])

    def test_it_is_listed_under_its_own_name(self, name: str):
        assert REPAIRS[name].name == name

    def test_it_is_a_value(self, name: str):
        strategy = REPAIRS[name]()
        assert strategy == REPAIRS[name]() and hash(strategy) == hash(REPAIRS[name]())
        for field in fields(strategy):
            with pytest.raises(FrozenInstanceError):
                setattr(strategy, field.name, None)


def test_none_selects_nothing_and_full_everything():
    assert selected(NoRepair(), SPANS["apart"]) == []
    assert selected(FullRepair(), SPANS["apart"]) == positions(SPANS["apart"])


@pytest.mark.parametrize(
    "side, num_tokens, expected",
    [
        ("start", 2, [4, 5, 20, 30, 31]),
        ("end", 2, [8, 9, 20, 32, 33]),
        ("start", 0, []),
        ("end", 0, []),
        ("start", 99, positions([(4, 10), (20, 21), (30, 34)])),
        ("end", 99, positions([(4, 10), (20, 21), (30, 34)])),
    ],
)
def test_boundary_selects_one_side_of_every_chunk(side: str, num_tokens: int, expected: list[int]):
    assert selected(BoundaryRepair(side, num_tokens), [(4, 10), (20, 21), (30, 34)]) == expected


def test_boundary_by_default_selects_the_papers_sixteen_tokens_at_the_start():
    assert selected(BoundaryRepair(), [(100, 150)]) == list(range(100, 116))


@pytest.mark.parametrize("ratio", [0.0, 0.01, 0.05, 0.1, 0.15, 0.33, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("num_first_tokens", [0, 4, 1000])
@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
def test_query_spends_exactly_its_budget(ratio: float, num_first_tokens: int, spans: list[tuple[int, int]]):
    chosen = selected(QueryRepair(ratio, num_first_tokens), spans)
    assert len(chosen) == round(ratio * len(positions(spans)))


@pytest.mark.parametrize("most, expected", [(None, 15), (100, 15), (15, 15), (9, 9), (0, 0)])
def test_query_recomputes_no_more_than_its_most(most: int | None, expected: int):
    strategy, spans = QueryRepair(0.1, max_tokens=most), [(0, 50), (60, 110), (120, 170)]
    chosen = selected(strategy, spans)
    assert len(chosen) == strategy.num_selected([Reused(*span) for span in spans]) == expected
    assert set(chosen) <= set(selected(QueryRepair(0.1, num_first_tokens=min(4, expected // 3)), spans))


@pytest.mark.parametrize(
    "strategy, num_reused, expected",
    [
        (QueryRepair(), 200, 10),
        (QueryRepair(), 2560, 128),
        (QueryRepair(), 2580, 128),
        (QueryRepair(), 100_000, 128),
        (QueryRepair(max_tokens=64), 100_000, 64),
        (QueryRepair(max_tokens=1000), 10_000, 500),
        (QueryRepair(0.05), 100_000, 5000),
        (QueryRepair(max_tokens=64).with_ratio(0.2), 100_000, 64),
        (QueryRepair().with_ratio(0.05), 100_000, 5000),
    ],
)
def test_only_the_usual_share_has_a_most_of_its_own(strategy: QueryRepair, num_reused: int, expected: int):
    """A ratio that somebody asked for is kept to."""
    assert strategy.num_selected([Reused(3, 3 + num_reused)]) == expected


@pytest.mark.parametrize("ratio, expected", [(0.0, []), (1.0, positions(SPANS["apart"]))])
def test_query_at_its_ends_is_none_and_full(ratio: float, expected: list[int]):
    assert selected(QueryRepair(ratio), SPANS["apart"]) == expected


def test_query_selects_what_the_question_attends_to_most():
    attention = torch.zeros(200)
    attention[[12, 40, 41, 77, 150]] = torch.tensor([5.0, 3.0, 4.0, 9.0, 99.0])  # 150 was not reused
    spans = [(10, 50), (70, 80)]
    assert selected(QueryRepair(3 / 50, num_first_tokens=0), spans, attention) == [12, 41, 77]
    assert selected(QueryRepair(4 / 50, num_first_tokens=0), spans, attention) == [12, 40, 41, 77]


def test_query_takes_the_first_tokens_of_every_chunk_before_all_others():
    attention = torch.arange(200).float()  # the last tokens are attended to most
    spans = [(0, 50), (60, 110)]
    chosen = selected(QueryRepair(0.12, num_first_tokens=4), spans, attention)
    assert chosen == [0, 1, 2, 3, 60, 61, 62, 63, 106, 107, 108, 109]


def test_query_gives_each_chunk_fewer_first_tokens_when_the_budget_is_small():
    spans = [(0, 50), (60, 110)]
    assert selected(QueryRepair(0.04, num_first_tokens=4), spans, torch.arange(200).float()) == [0, 1, 60, 61]
    assert selected(QueryRepair(0.01, num_first_tokens=4), spans, torch.arange(200).float()) == [109]


def test_query_counts_the_first_tokens_of_a_short_chunk_only_once():
    chosen = selected(QueryRepair(0.2, num_first_tokens=4), [(0, 2), (10, 58)], torch.arange(200).float())
    assert chosen == [0, 1, 10, 11, 12, 13, 54, 55, 56, 57]


def test_a_larger_ratio_selects_all_that_a_smaller_one_did():
    smaller: set[int] = set()
    for ratio in (0.1, 0.2, 0.4, 0.8):
        larger = set(selected(QueryRepair(ratio), SPANS["apart"]))
        assert smaller < larger
        smaller = larger


@pytest.mark.parametrize(
    "make, options, named",
    [
        (BoundaryRepair, {"side": "middle"}, "side='middle'.*'start' or 'end'"),
        (BoundaryRepair, {"num_tokens": -1}, "num_tokens=-1"),
        (BoundaryRepair, {"num_tokens": 1.5}, "num_tokens=1.5"),
        (QueryRepair, {"recompute_ratio": 1.01}, "recompute_ratio=1.01"),
        (QueryRepair, {"recompute_ratio": "half"}, "recompute_ratio='half'"),
        (QueryRepair, {"num_first_tokens": -1}, "num_first_tokens=-1"),
        (QueryRepair, {"num_first_tokens": None}, "num_first_tokens=None"),
        (QueryRepair, {"max_tokens": -1}, "max_tokens=-1"),
        (QueryRepair, {"max_tokens": 0.5}, "max_tokens=0.5.*or None"),
        (QueryRepair, {"max_tokens": True}, "max_tokens=True"),
    ],
)
def test_a_wrong_option_of_a_strategy_is_refused_by_name(make: type[Repair], options: dict[str, Any], named: str):
    with pytest.raises(OptionError, match=named):
        make(**options)


@pytest.mark.parametrize("name", REPAIRS)
def test_a_strategy_is_resolved_by_name_and_an_object_is_itself(name: str):
    assert resolve_repair(name) == REPAIRS[name]()
    strategy = REPAIRS[name]()
    assert resolve_repair(strategy) is strategy


@pytest.mark.parametrize("name", REPAIRS)
def test_a_ratio_of_zero_is_none_and_of_one_is_full_whatever_the_strategy(name: str):
    for zero, one in ((0, 1), (0.0, 1.0)):
        assert resolve_repair(name, zero) == NoRepair()
        assert resolve_repair(name, one) == FullRepair()


def test_a_ratio_between_goes_to_the_strategy_and_leaves_its_other_options():
    assert resolve_repair("query", 0.3) == QueryRepair(recompute_ratio=0.3)
    assert resolve_repair(QueryRepair(0.1, num_first_tokens=2), 0.3) == QueryRepair(0.3, num_first_tokens=2)


@pytest.mark.parametrize("name", sorted(set(REPAIRS) - {"query", "deviation"}))
def test_a_ratio_for_a_strategy_without_one_is_refused(name: str):
    with pytest.raises(OptionError, match=f"recompute_ratio=0.3.*{name!r}.*'query'"):
        resolve_repair(name, 0.3)


@pytest.mark.parametrize("repair", ["quary", "", None, 5, ["query"], QueryRepair], ids=repr)
def test_an_unknown_strategy_is_refused_with_all_the_choices(repair: Any):
    with pytest.raises(OptionError) as raised:
        resolve_repair(repair)
    assert all(said in str(raised.value) for said in (repr(repair), *map(repr, REPAIRS)))


@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan"), float("inf"), "0.5", True, [0.5]], ids=repr)
@pytest.mark.parametrize("name", ["query", "none"])
def test_a_wrong_ratio_is_refused_by_name_and_value(name: str, ratio: Any):
    with pytest.raises(OptionError, match=r"recompute_ratio=.*0 to 1"):
        resolve_repair(name, ratio)
