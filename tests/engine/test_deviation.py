"""CacheBlendRecompute: finds the tokens whose keys changed, for the price of one layer."""

from __future__ import annotations

import pytest
import torch
from prompts import GAPS, HEADER, QUESTION, SEP, A, B, C, assert_same, cold, make, prefill, warmed

from kvboost_rag.engine.engine import Engine
from kvboost_rag.engine.repair import DeviationRepair, NoRepair
from kvboost_rag.errors import OptionError

PROMPT = [HEADER, C, SEP, A, SEP, B, QUESTION]
REUSED = range(len(HEADER.ids), sum(len(s.ids) for s in PROMPT) - len(QUESTION.ids))


def rows_by_layer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the rows that go through the MLP of each layer from now on."""
    counts = [0] * engine.model.num_layers
    for number, layer in enumerate(engine.model.module.model.layers):

        def counted(hidden: torch.Tensor, number: int = number, own: object = layer.mlp.forward) -> torch.Tensor:
            counts[number] += hidden.shape[1]
            return own(hidden)

        monkeypatch.setattr(layer.mlp, "forward", counted)
    return counts


@pytest.mark.parametrize("case", GAPS)
def test_the_whole_budget_equals_a_cold_prefill(family: str, case: str) -> None:
    engine = warmed(family)
    assert_same(prefill(engine, GAPS[case], DeviationRepair(1.0)).logits, cold(engine, GAPS[case]))


@pytest.mark.parametrize("check_layer", [1, 2])
def test_the_probe_stops_at_its_layer(check_layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = warmed(num_hidden_layers=5)
    prefill(engine, [HEADER, QUESTION])  # the header is there
    counts = rows_by_layer(engine, monkeypatch)
    report = prefill(engine, PROMPT, DeviationRepair(0.15, check_layer=check_layer)).report
    computed, probed = report.num_computed_tokens, REUSED.stop
    assert counts == [probed + computed] * check_layer + [computed] * (5 - check_layer)
    assert report.num_repaired_tokens == round(0.15 * (len(A.ids) + len(B.ids) + len(C.ids)))


@pytest.mark.parametrize("measure", ["cosine", "squared"])
def test_it_selects_what_deviates_most_from_a_prefill(measure: str) -> None:
    """Against the slow truth: the keys that a whole prefill has at the check layer."""
    engine = warmed(num_hidden_layers=4)
    seen: list[torch.Tensor] = []

    class Spy(DeviationRepair):
        def select(self, view):  # type: ignore[no-untyped-def]
            chosen = super().select(view)
            seen.extend([view.deviation, chosen])
            return chosen

    stale = prefill(engine, PROMPT, NoRepair()).cache.layers[1].keys.clone()
    fresh = prefill(engine, PROMPT, mode="baseline").cache.layers[1].keys
    prefill(engine, PROMPT, Spy(0.2, measure=measure))
    old, new = (keys[0].transpose(0, 1)[: REUSED.stop] for keys in (stale, fresh))  # (tokens, kv_heads, head_dim)
    pairs = list(zip(old, new, strict=True))
    if measure == "cosine":
        expected = torch.stack([1 - (o * n).sum(-1) / (o.norm(dim=-1) * n.norm(dim=-1)) for o, n in pairs])
        expected = expected.mean(dim=-1)
    else:
        expected = torch.stack([((o - n) ** 2).sum() for o, n in pairs])
    deviation, chosen = seen
    spots = torch.tensor([p for p in REUSED if p not in separators()])
    torch.testing.assert_close(deviation[spots], expected[spots], atol=1e-4, rtol=1e-4)
    left = spots[~torch.isin(spots, chosen)]
    assert expected[chosen].min() >= expected[left].max() - 1e-4


def separators() -> set[int]:
    first = len(HEADER.ids) + len(C.ids)
    second = first + len(SEP.ids) + len(A.ids)
    return {p for start in (first, second) for p in range(start, start + len(SEP.ids))}


def test_more_budget_means_less_error() -> None:
    engine = warmed(num_hidden_layers=6)
    full = cold(engine, PROMPT)
    errors = [(prefill(engine, PROMPT, DeviationRepair(r)).logits - full).norm() for r in (0.0, 0.5, 0.9, 1.0)]
    assert errors[0] > errors[2] > errors[3]


def test_where_little_is_reused_the_probe_is_skipped_and_all_of_it_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    with engine.lock:
        engine.warm([], A)
    prompt = [HEADER, B, C, A, QUESTION]
    counts = rows_by_layer(engine, monkeypatch)
    result = prefill(engine, prompt, DeviationRepair(0.15, min_hit_ratio=0.5))
    total = sum(len(s.ids) for s in prompt)
    assert counts == [total] * engine.model.num_layers
    assert_same(result.logits, cold(engine, prompt))


@pytest.mark.parametrize(
    "options",
    [{"measure": "l3"}, {"check_layer": 0}, {"check_layer": True}, {"min_hit_ratio": 2}, {"recompute_ratio": -1}],
)
def test_wrong_options_name_themselves(options: dict[str, object]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        DeviationRepair(**options)
