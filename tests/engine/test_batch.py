"""Batches: every row is what it is alone, and what rows share is there once."""

from __future__ import annotations

import pytest
from catalogue import SERVED, build
from prompts import HEADER, NEW, PRIMER, QUESTION, SEP, A, B, C, assert_same, ids, prefill

from kvboost_rag.engine.batches import can_share, generate_batch, in_groups, prefill_batch
from kvboost_rag.engine.config import EngineConfig
from kvboost_rag.engine.engine import Engine
from kvboost_rag.engine.generate import GenerationOptions
from kvboost_rag.engine.model import Model
from kvboost_rag.engine.repair import BoundaryRepair, DeviationRepair, FullRepair, NoRepair, QueryRepair, Repair
from kvboost_rag.engine.store import MemoryStore
from kvboost_rag.engine.types import Segment

FAMILIES = ["Llama", "Gemma 2", "Gemma 3", "gpt-oss", "Cohere 2", "GLM-4"]
OTHER, LONG = Segment(ids(200, 4)), Segment(ids(201, 33))
BATCHES = {
    "same documents, other questions": [[HEADER, A, SEP, B, end] for end in (QUESTION, OTHER, LONG)],
    "one question twice": [[HEADER, A, SEP, B, QUESTION]] * 2,
    "documents part behind the first": [[HEADER, A, SEP, B, QUESTION], [HEADER, A, SEP, C, LONG]],
    "nothing in common": [[A, QUESTION], [HEADER, B, OTHER], [C, SEP, B, LONG]],
    "a new document in one": [[HEADER, A, SEP, NEW, QUESTION], [HEADER, A, SEP, B, OTHER]],
    "a new document in all": [[HEADER, NEW, SEP, B, end] for end in (QUESTION, LONG)],
    "documents only": [[HEADER, A, B], [HEADER, A, C]],
    "lengths 1, 7, 40": [[Segment((7,))], [Segment(ids(5, 7))], [Segment(ids(6, 40))]],
}
REPAIRS = [NoRepair(), BoundaryRepair("start", 4), QueryRepair(0.2), DeviationRepair(0.2), FullRepair()]


def warmed(name: str = "Llama") -> Engine:
    engine = Engine(Model(build(SERVED[name])), MemoryStore(10**8), EngineConfig(chunk_size=16))
    with engine.lock:
        for document in (A, B, C):
            engine.warm(PRIMER, document)
    return engine


def together(engine: Engine, prompts: list[list[Segment]], repair: Repair, new_tokens: int = 8):
    generated: list[list[int]] = [[] for _ in prompts]

    def take(row: int, new: list[int]) -> bool:
        generated[row].extend(new)
        return False

    with engine.lock:
        batch = prefill_batch(engine, prompts, repair, new_tokens)
        logits = batch.logits.clone()
        generate_batch(engine, batch, GenerationOptions(max_new_tokens=new_tokens), take)
    return batch, logits, generated


def alone(engine: Engine, prompt: list[Segment], repair: Repair, new_tokens: int = 8):
    generated: list[int] = []
    with engine.lock:
        prefilled = engine.prefill(prompt, repair, "reuse", new_tokens)
        engine.generate(
            prefilled, GenerationOptions(max_new_tokens=new_tokens), lambda new: bool(generated.extend(new))
        )
    return prefilled, generated


@pytest.mark.parametrize("case", BATCHES)
@pytest.mark.parametrize("repair", REPAIRS, ids=lambda repair: repair.name)
def test_each_row_equals_its_single_run(case: str, repair: Repair) -> None:
    engine, prompts = warmed(), BATCHES[case]
    for prompt in prompts:
        prefill(engine, prompt)  # what is new is kept, so that single runs and the batch find the same
    _, logits, generated = together(engine, prompts, repair)
    for row, prompt in enumerate(prompts):
        single, tokens = alone(engine, prompt, repair)
        assert_same(logits[row], single.logits)
        assert generated[row] == tokens


@pytest.mark.parametrize("name", FAMILIES)
def test_windows_caps_sinks_and_pairs(name: str) -> None:
    """Past windows of 16, rows of different length, twenty tokens on."""
    engine, prompts = warmed(name), BATCHES["same documents, other questions"]
    _, logits, generated = together(engine, prompts, QueryRepair(0.2), 20)
    for row, prompt in enumerate(prompts):
        single, tokens = alone(engine, prompt, QueryRepair(0.2), 20)
        assert_same(logits[row], single.logits)
        assert generated[row] == tokens


def test_reports_are_those_of_single_runs() -> None:
    engine, prompts = warmed(), BATCHES["same documents, other questions"]
    prefill(engine, prompts[0])
    batch, _, _ = together(engine, prompts, QueryRepair(0.2))
    for report, prompt in zip(batch.reports, prompts, strict=True):
        single = alone(engine, prompt, QueryRepair(0.2))[0].report
        for name in ("num_exact_tokens", "num_approximate_tokens", "num_repaired_tokens", "num_live_tokens"):
            assert getattr(report, name) == getattr(single, name)
        assert report.documents == single.documents
        assert report.num_new_tokens == 8


def test_what_is_shared_lies_there_once() -> None:
    """Rows hold their own tokens only: bytes grow by what differs, not by the prefix."""
    engine = warmed()
    prompts = [[HEADER, C, SEP, B, Segment(ids(300 + n, 6))] for n in range(6)]
    batch, _, _ = together(engine, prompts, NoRepair(), 4)
    prefix = sum(len(s.ids) for s in (HEADER, C, SEP, B))
    assert batch.num_shared_tokens == prefix
    own = 1 + len(SEP.ids) + 6 + 4  # padding, separators behind documents, question, new tokens
    assert batch.cache.num_bytes <= 6 * own * engine.model.bytes_per_token
    assert batch.cache.num_bytes < prefix * engine.model.bytes_per_token


def test_a_header_nobody_has_seen_is_computed_once_and_kept() -> None:
    engine, prompts = warmed(), BATCHES["same documents, other questions"]
    batch, _, _ = together(engine, prompts, NoRepair())
    first, *others = batch.reports
    assert first.num_stored_tokens >= len(HEADER.ids)
    assert (first.num_exact_tokens, first.num_live_tokens >= len(HEADER.ids)) == (0, True)
    assert others
    assert all(report.num_exact_tokens >= len(HEADER.ids) for report in others)
    assert all(report.num_stored_tokens == 0 for report in others)
    for report in batch.reports:
        counted = report.num_exact_tokens + report.num_approximate_tokens
        assert counted + report.num_repaired_tokens + report.num_live_tokens == report.num_prompt_tokens


def test_a_row_that_ends_leaves_the_others_alone() -> None:
    engine, prompts = warmed(), BATCHES["same documents, other questions"]
    expected = [alone(engine, prompt, NoRepair(), 12)[1] for prompt in prompts]
    generated: list[list[int]] = [[] for _ in prompts]

    def take(row: int, new: list[int]) -> bool:
        generated[row].extend(new)
        return row == 0 and len(generated[0]) == 3

    with engine.lock:
        batch = prefill_batch(engine, prompts, NoRepair(), 12)
        reasons = generate_batch(engine, batch, GenerationOptions(max_new_tokens=12), take)
    assert generated == [expected[0][:3], expected[1], expected[2]]
    assert reasons == ["stop", "length", "length"]


@pytest.mark.parametrize("options", [{"temperature": 1.0, "seed": 3}, {"repetition_penalty": 1.5}], ids=str)
def test_sampling_and_penalties_are_those_of_single_runs(options: dict[str, float]) -> None:
    engine, prompts = warmed(), BATCHES["same documents, other questions"]
    decoding = GenerationOptions(max_new_tokens=10, **options)
    generated: list[list[int]] = [[] for _ in prompts]
    with engine.lock:
        batch = prefill_batch(engine, prompts, NoRepair(), 10)
        generate_batch(engine, batch, decoding, lambda row, new: bool(generated[row].extend(new)))
        for row, prompt in enumerate(prompts):
            tokens: list[int] = []
            prefilled = engine.prefill(prompt, NoRepair(), "reuse", 10)
            engine.generate(prefilled, decoding, lambda new, tokens=tokens: bool(tokens.extend(new)))
            assert generated[row] == tokens


def test_groups_keep_neighbours_together_and_lose_nobody() -> None:
    first, second = [HEADER, A, QUESTION], [HEADER, B, QUESTION]
    prompts = [first, second, [*first, OTHER], [*second, LONG], [C]]
    groups = in_groups(prompts, 2)
    assert sorted(n for group in groups for n in group) == [0, 1, 2, 3, 4]
    assert any(set(group) == {0, 2} for group in groups) or any(set(group) == {1, 3} for group in groups)
    assert max(map(len, groups)) == 2


def test_what_cannot_share_says_so() -> None:
    engine = warmed()
    assert can_share(engine, [[A], [B]], "reuse")
    assert not can_share(engine, [[A]], "reuse")
    assert not can_share(engine, [[A], [B]], "baseline")
    falcon = Engine(Model(build(SERVED["Falcon"])), MemoryStore(10**8), EngineConfig())
    assert not can_share(falcon, [[A], [B]], "reuse")
