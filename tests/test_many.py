"""Many prompts at once: each answer is the single one, in the order asked."""

from __future__ import annotations

import pytest
from conftest import document

from kvboost_rag import KVBoost, OptionError, PromptTooLongError


@pytest.fixture
def asked(boost: KVBoost) -> list[object]:
    boost.warm([document(n) for n in range(4)], progress=False)
    shared = [document(0), document(1)]
    prompts = [boost.prompt(shared, question) for question in ("why?", "who was it, and when did it end?", "so?")]
    return [*prompts, boost.prompt([document(2), document(0)], "why?"), f"{document(3)} And then", prompts[0]]


@pytest.mark.parametrize(
    "options", [{}, {"repair": "none"}, {"mode": "baseline"}, {"stop": "e"}, {"seed": 3, "temperature": 0.7}], ids=str
)
def test_answers_are_those_of_single_calls(boost: KVBoost, asked: list[object], options: dict[str, object]) -> None:
    expected = [boost.generate(prompt, max_new_tokens=10, **options) for prompt in asked]
    for results in (
        boost.generate_batch(asked, max_new_tokens=10, **options),
        boost.generate_many(asked, max_new_tokens=10, max_batch_size=2, progress=False, **options),
    ):
        assert [r.text for r in results] == [e.text for e in expected]
        assert [r.finish_reason for r in results] == [e.finish_reason for e in expected]
        for result, single in zip(results, expected, strict=True):
            assert result.report.num_document_hits == single.report.num_document_hits
            assert result.report.num_new_tokens == single.report.num_new_tokens
            assert result.ttft_seconds > 0


def test_no_prompts_no_answers(boost: KVBoost) -> None:
    assert boost.generate_batch([]) == []
    assert boost.generate_many([]) == []


def test_wrong_calls_are_refused_before_any_work(boost: KVBoost) -> None:
    with pytest.raises(TypeError, match="list of prompts"):
        boost.generate_batch("one prompt")
    with pytest.raises(TypeError, match="list of prompts"):
        boost.generate_many([{"role": "user", "content": "hello"}])
    with pytest.raises(OptionError, match="max_batch_size"):
        boost.generate_many(["a", "b"], max_batch_size=0)
    with pytest.raises(OptionError, match="temprature"):
        boost.generate_batch(["a"], temprature=1)
    with pytest.raises(PromptTooLongError):
        boost.generate_batch(["a", "b " * 3000])
