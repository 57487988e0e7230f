"""The oracles of reuse: whatever is cached, moved, missing or repaired, the result is what it should be.

Exact reuse and full repair equal a cold prefill (1e-4 in float32, the design's bar); approximate reuse is finite and
differs. The cases are kinds of fault that public bug reports show in other systems.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from conftest import build_model
from prompts import (
    GAPS,
    HEADER,
    NEW,
    PRIMER,
    QUESTION,
    SEP,
    TOLERANCE,
    A,
    B,
    C,
    assert_same,
    cold,
    ids,
    make,
    prefill,
    warmed,
)

from kvboost_rag.engine.assemble import assemble
from kvboost_rag.engine.chunking import Cutting
from kvboost_rag.engine.config import EngineConfig
from kvboost_rag.engine.engine import Engine
from kvboost_rag.engine.forward import fused_forward
from kvboost_rag.engine.model import Model
from kvboost_rag.engine.repair import BoundaryRepair, FullRepair, NoRepair, QueryRepair, Repair
from kvboost_rag.engine.store import MemoryStore, NullStore
from kvboost_rag.engine.types import Fidelity, Segment


@pytest.mark.parametrize("case", GAPS)
def test_full_repair_equals_a_cold_prefill(family: str, case: str) -> None:
    engine, segments = warmed(family), GAPS[case]
    assert_same(prefill(engine, segments, FullRepair()).logits, cold(engine, segments))


@pytest.mark.parametrize("case", GAPS)
@pytest.mark.parametrize("repair", [NoRepair(), BoundaryRepair("end"), QueryRepair(0.2)], ids=lambda r: r.name)
def test_approximate_reuse_is_finite_counts_add_up_and_every_warm_document_hits(case: str, repair: Repair) -> None:
    engine, segments = warmed(), GAPS[case]
    result = prefill(engine, segments, repair)
    report = result.report
    assert result.logits.isfinite().all()
    assert not torch.allclose(result.logits, cold(engine, segments), atol=TOLERANCE)
    parts = (report.num_exact_tokens, report.num_approximate_tokens, report.num_repaired_tokens, report.num_live_tokens)
    assert sum(parts) == report.num_prompt_tokens == sum(len(s.ids) for s in segments)
    expected = [s.ids != NEW.ids for s in segments if s.document]
    assert [document.hit for document in report.documents] == expected
    assert report.num_repaired_tokens > 0 or repair.name == "none"


def test_a_miss_between_hits_costs_only_itself() -> None:
    engine = warmed()
    report = prefill(engine, [HEADER, A, SEP, NEW, SEP, C, QUESTION]).report
    live = sum(len(s.ids) for s in (HEADER, SEP, NEW, SEP, QUESTION))
    assert report.num_live_tokens == live


@pytest.mark.parametrize("order", list(itertools.permutations([A, B, C]))[:6])
def test_any_order_hits_every_document(order: tuple[Segment, ...]) -> None:
    engine = warmed()
    segments = [HEADER, *order, QUESTION]
    assert prefill(engine, segments).report.num_document_hits == 3
    assert_same(prefill(engine, segments, FullRepair()).logits, cold(engine, segments))


def test_exact_reuse_equals_a_cold_prefill_at_every_length(family: str) -> None:
    """The whole prompt cached chunk by chunk, twice and thrice, lengths around the chunk size."""
    for length in (1, 15, 16, 17, 32, 48):
        engine, segments = make(family), [Segment(ids(7, length))]
        expected = cold(engine, segments)
        for attempt in range(3):
            result = prefill(engine, segments)
            assert_same(result.logits, expected)
            kept = (length - 1) if attempt else 0  # the last token is always computed
            assert result.report.num_exact_tokens == kept


def test_a_document_straight_behind_its_header_is_exact_when_it_comes_first(family: str) -> None:
    engine = make(family)
    with engine.lock:
        engine.warm([HEADER], A)
        engine.warm([HEADER], B)
    segments = [HEADER, A, SEP, QUESTION]
    result = prefill(engine, segments)
    assert result.report.documents[0].fidelity is Fidelity.EXACT
    assert_same(result.logits, cold(engine, segments))
    second = prefill(engine, [HEADER, A, SEP, B, QUESTION]).report
    assert [d.fidelity for d in second.documents] == [Fidelity.EXACT, Fidelity.APPROXIMATE]


def test_what_a_prompt_computed_in_full_is_exact_next_time() -> None:
    engine = make()
    first = [HEADER, A, SEP, B, QUESTION]
    prefill(engine, first)
    again = [HEADER, A, SEP, B, Segment(ids(105, 5))]
    result = prefill(engine, again)
    assert [d.fidelity for d in result.report.documents] == [Fidelity.EXACT, Fidelity.EXACT]
    assert result.report.num_live_tokens == 5
    assert_same(result.logits, cold(engine, again))


def test_the_same_documents_in_the_same_order_are_one_prefix() -> None:
    engine = make()
    prefill(engine, [HEADER, A, SEP, B, SEP, C, QUESTION])
    result = prefill(engine, [HEADER, A, SEP, B, SEP, C, Segment(ids(105, 5))], mode="prefix")
    assert result.report.num_live_tokens == 5
    assert result.report.num_exact_tokens == result.report.num_prompt_tokens - 5
    other = prefill(engine, [HEADER, B, SEP, A, SEP, C, Segment(ids(105, 5))], mode="prefix")
    assert other.report.num_exact_tokens == len(HEADER.ids)


def test_text_behind_the_last_document_is_not_kept() -> None:
    engine = make()
    prefill(engine, [HEADER, A, SEP, QUESTION])
    assert engine.store.stats().num_entries == 2


def test_what_stands_behind_approximate_kv_is_never_served_as_exact() -> None:
    engine = warmed()
    prefill(engine, [HEADER, A, NEW, QUESTION])  # NEW is computed behind a reused A
    result = prefill(engine, [HEADER, A, NEW, Segment(ids(106, 4))])
    assert [d.fidelity for d in result.report.documents] == [Fidelity.APPROXIMATE, Fidelity.APPROXIMATE]


def test_the_header_is_computed_once() -> None:
    engine = warmed()
    assert prefill(engine, [HEADER, A, QUESTION]).report.num_exact_tokens == 0
    report = prefill(engine, [HEADER, B, QUESTION]).report
    assert report.num_exact_tokens == len(HEADER.ids)
    assert report.num_live_tokens == len(QUESTION.ids)


def test_prefix_mode_takes_the_leading_exact_run_only() -> None:
    engine = warmed()
    segments = [HEADER, A, SEP, B, QUESTION]
    prefill(engine, segments)
    result = prefill(engine, segments, mode="prefix")
    assert result.report.num_exact_tokens == len(HEADER.ids)
    assert result.report.num_approximate_tokens == 0
    assert_same(result.logits, cold(engine, segments))


@pytest.mark.parametrize("heads,kv_heads", [(6, 6), (6, 3), (9, 3), (6, 1)], ids=["MHA", "GQA", "9/3", "MQA"])
def test_any_grouping_of_heads(heads: int, kv_heads: int) -> None:
    changes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": heads * 8}
    engine = warmed(**changes)
    segments = GAPS["new between"]
    assert_same(prefill(engine, segments, FullRepair()).logits, cold(engine, segments))
    assert not torch.allclose(prefill(engine, segments).logits, cold(engine, segments), atol=TOLERANCE)


def test_moved_keys_are_the_keys_of_the_document_alone_at_its_new_place() -> None:
    """A document without context, encoded at 0 and moved, against the model run on it at that position."""
    engine = make()
    with engine.lock:
        engine.warm([], A)
        segments = [HEADER, A, QUESTION]
        moved = engine.prefill(segments, NoRepair())
        start = len(HEADER.ids)
        alone = engine.model.new_cache(start + len(A.ids))
        positions = torch.arange(start, start + len(A.ids))
        hidden = torch.arange(start + len(A.ids)) < start
        alone.zero_slots(torch.arange(start))
        fused_forward(engine.model, torch.tensor((0,) * start + A.ids), positions, alone, hidden=hidden)
    there = slice(start, start + len(A.ids))
    assert_same(moved.cache.slabs[0].keys[:, :, there], alone.slabs[0].keys[:, :, there])
    assert_same(moved.cache.slabs[0].values[:, :, there], alone.slabs[0].values[:, :, there])


def test_a_document_warmed_late_in_a_long_context_moves_to_the_front() -> None:
    engine = make()
    with engine.lock:
        engine.warm([Segment(ids(9, 300), document=True)], A)
    for segments in ([A, QUESTION], [HEADER, A, QUESTION], [Segment(ids(8, 400)), A, QUESTION]):
        result = prefill(engine, segments)
        assert result.report.num_document_hits == 1
        assert_same(prefill(engine, segments, FullRepair()).logits, cold(engine, segments))


def test_exact_reuse_in_bfloat16_gives_the_same_bits() -> None:
    engine = make(dtype=torch.bfloat16)
    segments = [HEADER, A, QUESTION]
    first, second = prefill(engine, segments), prefill(engine, segments)
    end = len(HEADER.ids) + len(A.ids)
    assert second.report.num_exact_tokens == end
    assert torch.equal(second.cache.slabs[0].keys[:, :, :end], first.cache.slabs[0].keys[:, :, :end])
    assert torch.equal(second.cache.slabs[0].values[:, :, :end], first.cache.slabs[0].values[:, :, :end])


def test_stored_kv_never_changes() -> None:
    engine = warmed()
    key = engine.content_key(A.ids)

    def checksum() -> torch.Tensor:
        kv = engine.store.peek(key).packed
        return torch.cat([kv.keys.flatten(), kv.values.flatten()]).clone()

    before = checksum()
    for repair in (NoRepair(), QueryRepair(0.5), FullRepair()):
        prefill(engine, [HEADER, A, B, A, QUESTION], repair)
    assert torch.equal(checksum(), before)


def test_without_a_store_everything_is_computed() -> None:
    engine = make(store=NullStore())
    segments = [HEADER, A, QUESTION]
    for _ in range(2):
        result = prefill(engine, segments)
        assert result.report.num_live_tokens == result.report.num_prompt_tokens
        assert_same(result.logits, cold(engine, segments))


def test_stock_attention_under_an_explicit_mask_is_the_slow_truth_of_the_fused_forward() -> None:
    fast, slow = warmed(), warmed()
    slow.model.stock_attention = True
    for segments in GAPS.values():
        for repair in (NoRepair(), BoundaryRepair(), QueryRepair(0.3)):
            assert_same(prefill(fast, segments, repair).logits, prefill(slow, segments, repair).logits)


def test_rope_scaling_of_llama_3_is_served_exactly() -> None:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    engine = warmed(rope_parameters=scaling)
    segments = GAPS["shuffled"]
    assert prefill(engine, segments).report.num_document_hits == 3
    assert_same(prefill(engine, segments, FullRepair()).logits, cold(engine, segments))


def test_entries_of_another_model_never_match() -> None:
    store = MemoryStore(10**8)
    one, other = make(store=store), make(store=store, seed=1)
    with one.lock:
        one.warm([], A)
    assert prefill(other, [A, QUESTION]).report.num_document_hits == 0
    assert prefill(one, [A, QUESTION]).report.num_document_hits == 1


def test_assembling_looks_every_chunk_up_on_its_own() -> None:
    engine = warmed()
    assembled = assemble(GAPS["new between"], engine.store, engine.model.fingerprint(), Cutting(16))
    found = [(p.chunk.document, p.fidelity) for p in assembled.placements]
    assert found == [
        (False, Fidelity.MISS),
        (True, Fidelity.APPROXIMATE),
        (False, Fidelity.MISS),
        (True, Fidelity.MISS),
        (False, Fidelity.MISS),
        (True, Fidelity.APPROXIMATE),
        (False, Fidelity.MISS),
    ]


def test_separators_are_computed_where_they_stand() -> None:
    """Their KV is kept with a header or a primer, but two tokens are not worth moving."""
    engine = warmed()
    prefill(engine, [HEADER, NEW, SEP, QUESTION])
    with engine.lock:
        engine.warm([HEADER, NEW, SEP], Segment(ids(55, 40), document=True))
    report = prefill(engine, [HEADER, A, SEP, B, QUESTION]).report
    assert report.num_live_tokens == len(SEP.ids) + len(QUESTION.ids)


def test_more_repair_means_less_error() -> None:
    """On a random model, over many prompts: the mean error at 50 % is below the one at 0, and 0 at 100 %."""
    engine = warmed()
    errors = dict.fromkeys((0.0, 0.5, 1.0), 0.0)
    for seed in range(20):
        segments = [HEADER, C, SEP, A, SEP, B, Segment(ids(200 + seed, 9))]
        expected = cold(engine, segments)
        for ratio in errors:
            errors[ratio] += float((prefill(engine, segments, QueryRepair(ratio)).logits - expected).abs().mean())
    assert errors[0.5] < errors[0.0]
    assert errors[1.0] / 20 < TOLERANCE


def test_sinks_are_always_computed_and_counted_as_live() -> None:
    engine = Engine(Model(build_model()), MemoryStore(10**8), EngineConfig(chunk_size=16, sink_tokens=4))
    with engine.lock:
        engine.warm([], A)
    for segments in ([A, QUESTION], [HEADER, B, QUESTION]):
        for _ in range(2):
            result = prefill(engine, segments, FullRepair())
            assert_same(result.logits, cold(engine, segments))
    report = prefill(engine, [A, QUESTION]).report
    assert report.num_live_tokens >= 4 + 1
    assert report.num_exact_tokens + report.num_approximate_tokens + report.num_live_tokens == report.num_prompt_tokens


def test_moved_cuts_are_found_again() -> None:
    """Hashes use the boundaries that were cut: the same text gives the same chunks, wherever the windows moved them."""
    config = EngineConfig(chunk_size=16, boundary_window=5)
    engine = Engine(Model(build_model()), MemoryStore(10**8), config, breaks=frozenset(range(5, 60)))
    text = [Segment(ids(400, 100)), QUESTION]
    prefill(engine, text)
    again = prefill(engine, text)
    assert again.report.num_exact_tokens > 80
    assert_same(again.logits, cold(engine, text))
    assert {len(p.chunk) for p in again.assembled.placements} - {16}  # some did move


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_prefill_in_slices_is_the_same_prefill(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No call of the model sees more tokens than were asked for, but for those whose logits are wanted."""
    config = EngineConfig(chunk_size=16, prefill_chunk_tokens=size)
    engine, whole = Engine(Model(build_model()), MemoryStore(10**8), config), warmed()
    widths: list[int] = []
    first = engine.model.module.model.layers[0].mlp
    own = first.forward
    monkeypatch.setattr(first, "forward", lambda hidden: (widths.append(hidden.shape[1]), own(hidden))[1])
    with engine.lock:
        for document in (A, B, C):
            engine.warm(PRIMER, document)
    assert max(widths) <= size + 16
    widths.clear()
    segments = [HEADER, B, SEP, NEW, SEP, A, QUESTION]
    result = prefill(engine, segments)
    assert max(widths) <= size + 1
    assert_same(result.logits, prefill(whole, segments).logits)
    assert_same(prefill(engine, segments, FullRepair()).logits, cold(engine, segments))
