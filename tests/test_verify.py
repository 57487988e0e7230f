"""Reuse measured against full prefill on the user's own prompts; quality as one word."""

from __future__ import annotations

import pytest
from conftest import document

from kvboost_rag import KVBoost, OptionError
from kvboost_rag.options import QUALITIES


@pytest.fixture
def prompts(boost: KVBoost) -> list[object]:
    boost.warm([document(n) for n in range(3)], progress=False)
    return [boost.prompt([document(n), document((n + 1) % 3)], "why?") for n in range(3)]


def test_full_repair_strays_nowhere_and_none_does(boost: KVBoost, prompts: list[object]) -> None:
    exact, fast = boost.verify(prompts, 8, quality="exact"), boost.verify(prompts, 8, repair="none")
    assert exact.mean("kl") < 1e-6
    assert exact.mean("agreement") == 1
    assert fast.mean("kl") > 1e-4
    assert fast.worst is not None
    assert fast.worst.kl == max(each.kl for each in fast.comparisons)
    assert all(each.report.num_document_hits == 2 for each in fast.comparisons)
    assert "3 prompts, repair none" in str(fast)


def test_no_prompts_is_no_error(boost: KVBoost) -> None:
    report = boost.verify([])
    assert report.worst is None
    assert "0 prompts" in str(report)


@pytest.mark.parametrize("quality", [*QUALITIES, 0, 0.3, 1])
def test_quality_picks_the_repair(boost: KVBoost, prompts: list[object], quality: str | float) -> None:
    report = boost.prefill(prompts[0], quality=quality).report
    expected = QUALITIES[quality].name if isinstance(quality, str) else {0: "none", 0.3: "query", 1: "full"}[quality]
    assert report.repair == expected
    share = report.num_repaired_tokens / (report.num_repaired_tokens + report.num_approximate_tokens)
    wanted = {"exact": 1, "high": 0.15, "fast": 0.05}.get(str(quality), quality)
    assert share == pytest.approx(wanted, abs=0.01)


def test_a_call_s_repair_goes_over_the_engine_s_quality(boost: KVBoost) -> None:
    with KVBoost(boost.engine.model.module, boost.tokenizer, quality="exact") as other:
        other.warm([document(0)], progress=False)
        prompt = other.prompt([document(0)], "why?")
        assert other.prefill(prompt).report.repair == "full"
        assert other.prefill(prompt, repair="none").report.repair == "none"
        assert other.prefill(prompt, quality="fast").report.repair == "query"


@pytest.mark.parametrize("quality", ["best", "", -1, 2, True, float("nan")])
def test_wrong_qualities_name_the_choices(boost: KVBoost, quality: object) -> None:
    with pytest.raises(OptionError, match=r"quality=.*'exact', 'high', 'fast'"):
        boost.prefill("text", quality=quality)


def test_quality_and_repair_exclude_each_other(boost: KVBoost) -> None:
    with pytest.raises(OptionError, match="leave out repair"):
        boost.prefill("text", quality="high", repair="none")
    with pytest.raises(OptionError, match="num_tokens"):
        boost.verify([], num_tokens=0)
