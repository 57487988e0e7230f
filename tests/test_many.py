"""Many prompts at once: each answer is the single one, in the order asked."""

from __future__ import annotations

import threading

import pytest
import torch
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


def test_a_document_that_only_one_row_has_is_kept(boost: KVBoost) -> None:
    boost.warm(document(0), progress=False)
    prompts = [boost.prompt([document(0), document(n)], "why?") for n in (5, 6)]
    first = boost.generate_batch(prompts, max_new_tokens=3, repair="full")
    assert [r.report.num_document_misses for r in first] == [1, 1]
    assert all(r.report.num_stored_tokens > 0 for r in first)
    for prompt, result in zip(prompts, first, strict=True):
        again = boost.prefill(prompt, repair="none")
        cold = boost.prefill(prompt, mode="baseline")
        assert again.report.num_document_misses == 0
        assert again.report.num_reused_tokens > result.report.num_reused_tokens
        full = boost.prefill(prompt, repair="full")
        torch.testing.assert_close(full.logits, cold.logits, atol=1e-4, rtol=0)


def test_what_one_row_computed_is_what_it_computes_alone(boost: KVBoost) -> None:
    """Exact behind an opening that both rows have: so what is kept of a row must be a prefill's own KV."""
    prompts = [boost.prompt([document(n)], "why?") for n in (5, 6)]
    boost.generate_batch(prompts, max_new_tokens=3)
    for prompt in prompts:
        again, cold = boost.prefill(prompt), boost.prefill(prompt, mode="baseline")
        assert [d.fidelity for d in again.report.documents] == ["exact"]
        torch.testing.assert_close(again.logits, cold.logits, atol=1e-4, rtol=0)


def test_another_request_gets_its_turn_while_a_batch_decodes(boost: KVBoost, asked: list[object]) -> None:
    ended: list[str] = []
    started = threading.Event()

    def batch() -> None:
        inner = boost.engine.lock.pass_on

        def pass_on() -> None:
            started.set()
            inner()

        boost.engine.lock.pass_on = pass_on
        boost.generate_batch(asked[:3], max_new_tokens=200)
        ended.append("batch")

    thread = threading.Thread(target=batch)
    thread.start()
    assert started.wait(60)
    boost.generate(asked[3], max_new_tokens=2)
    ended.append("single")
    thread.join(60)
    assert ended == ["single", "batch"]
