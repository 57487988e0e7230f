"""The bundled model: what the design claims holds on real weights and real text."""

from __future__ import annotations

import itertools

import pytest
import torch

from kvboost_rag import KVBoost, Prompt, sample
from kvboost_rag.engine.repair import FullRepair
from kvboost_rag.engine.types import Segment
from kvboost_rag.rag import RAG

PASSAGES = sample.passages()
QUESTIONS = sample.questions()

pytestmark = pytest.mark.real_model


@pytest.fixture
def boost(real_boost: KVBoost) -> KVBoost:
    real_boost.clear()
    return real_boost


def cut(text: str, num_words: int = 110) -> str:
    return " ".join(text.split()[:num_words])


def prompts(boost: KVBoost, num_questions: int) -> list[Prompt]:
    """Each question's passage between two others, cut short to keep the test quick."""
    names = list(PASSAGES)
    built = []
    for number, item in enumerate(QUESTIONS[:num_questions]):
        at = names.index(item.passage)
        chosen = [names[at - 3], item.passage, names[at - 7]]
        turn = number % 3
        documents = [cut(PASSAGES[name]) for name in chosen[turn:] + chosen[:turn]]
        built.append(boost.prompt(documents=documents, question=item.question))
    return built


def test_the_error_falls_with_the_budget_and_is_nothing_at_the_whole(boost: KVBoost) -> None:
    built = prompts(boost, 20)
    boost.warm([d for p in built for d in p.documents], progress=False)
    ratios = (0.0, 0.02, 0.05, 0.10, 0.20, 0.50, 1.0)
    divergence = dict.fromkeys(ratios, 0.0)
    worst = 0.0
    for prompt in built:
        full = boost.prefill(prompt, mode="baseline").logits.log_softmax(-1)
        for ratio in ratios:
            logits = boost.prefill(prompt, repair="query", recompute_ratio=ratio).logits.log_softmax(-1)
            divergence[ratio] += float((full.exp() * (full - logits)).sum()) / len(built)
            if ratio == 1.0:
                worst = max(worst, float((full - logits).abs().max()))
    steps = [divergence[r] for r in ratios]
    assert all(after <= 1.05 * before for before, after in itertools.pairwise(steps)), divergence
    assert divergence[1.0] <= 1e-4
    assert worst <= 1e-3  # log-probabilities of 49,152 tokens, float32


def test_rotation_matters(boost: KVBoost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, keys moved by hundreds of positions are far worse than with it: the paper's gap."""
    from kvboost_rag.engine.rope import Rope

    built = prompts(boost, 4)
    boost.warm([d for p in built for d in p.documents], progress=False)
    model = boost.engine.model
    own = model.rope()

    def error() -> float:
        total = 0.0
        for prompt in built:
            full = boost.prefill(prompt, mode="baseline").logits.log_softmax(-1)
            logits = boost.prefill(prompt, repair="none").logits.log_softmax(-1)
            total += float((full.exp() * (full - logits)).sum())
        return total

    rotated = error()
    monkeypatch.setattr(model, "rope", lambda num_tokens: Rope(torch.zeros_like(own.inv_freq)))
    assert error() > rotated


def test_a_prompt_without_its_first_token_is_reused_as_it_is(boost: KVBoost) -> None:
    """Attention rests on the first token, whatever it is; toy models hide it when its KV is another's."""
    segments = boost.segments(boost.prompt([cut(PASSAGES[name]) for name in list(PASSAGES)[:2]], "Who?"))
    trimmed = [Segment(segments[0].ids[1:]), *segments[1:]]
    engine = boost.engine
    with engine.lock:
        for prompt in (segments, trimmed, segments, trimmed):
            expected = engine.prefill(prompt, FullRepair(), "baseline").logits
            result = engine.prefill(prompt, FullRepair())
            engine.keep(result)
            torch.testing.assert_close(result.logits, expected, atol=1e-3, rtol=0)
    assert result.report.num_exact_tokens > 0


def test_a_document_in_three_places_and_orders_hits_and_full_repair_is_exact(boost: KVBoost) -> None:
    documents = [cut(PASSAGES[name]) for name in list(PASSAGES)[:3]]
    boost.warm(documents, progress=False)
    for order in (documents, documents[1:] + documents[:1], [*documents[::-1], documents[0]]):
        prompt = boost.prompt(documents=order, question="Who built the lighthouse?", system="Be brief.")
        full = boost.prefill(prompt, repair="full")
        assert full.report.num_document_hits == len(order)
        expected = boost.prefill(prompt, mode="baseline").logits
        torch.testing.assert_close(full.logits, expected, atol=5e-4, rtol=0)


@pytest.mark.parametrize("name", ["21-cork-theatre", "22-mount-arl-observatory"])
def test_what_full_prefill_answers_surely_reuse_answers_too(boost: KVBoost, name: str) -> None:
    """Questions that full prefill answers in either order of the passages; separators do not leak into answers."""
    item = next(q for q in QUESTIONS if q.passage == name)
    documents = [PASSAGES[name], PASSAGES["12-bell-heron"]]
    for order in (documents, documents[::-1]):
        rag = RAG(boost, lambda question, order=order: order)
        full = rag.ask(item.question, max_new_tokens=24, mode="baseline")
        answer = rag.ask(item.question, max_new_tokens=24)
        assert item.answer in full.text
        assert item.answer in answer.text
        assert "# #" not in answer.text
        assert answer.result.report.num_document_hits == 2


def test_a_first_token_that_is_no_bos_is_served_exactly(boost: KVBoost) -> None:
    """Attention rests on the first token whatever it is: a prompt may begin in the middle of things."""
    text = cut(PASSAGES[QUESTIONS[1].passage], 60)
    for start in (0, 7):
        prompt = text[start:]
        once, twice = boost.prefill(prompt), boost.prefill(prompt)
        expected = boost.prefill(prompt, mode="baseline").logits
        torch.testing.assert_close(once.logits, expected, atol=5e-4, rtol=0)
        torch.testing.assert_close(twice.logits, expected, atol=5e-4, rtol=0)
        assert twice.report.num_live_tokens < once.report.num_live_tokens
