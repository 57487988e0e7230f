"""Every family the catalogue serves, in every variant: what is reused is what a prefill computes.

Windows are 16 tokens and ropes switch at 64, so that tiny prompts lie below, at and above them.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers
from catalogue import OWN_ATTENTION, REFUSED, SERVED, build
from packaging.version import Version
from prompts import TOLERANCE, assert_same, cold, ids
from transformers import DynamicCache

from kvboost_rag.engine import exchange
from kvboost_rag.engine.capabilities import Reuse
from kvboost_rag.engine.compat import ForwardNames
from kvboost_rag.engine.config import EngineConfig
from kvboost_rag.engine.engine import Engine, Prefilled
from kvboost_rag.engine.generate import GenerationOptions
from kvboost_rag.engine.model import Model
from kvboost_rag.engine.repair import FullRepair, NoRepair, QueryRepair, Repair
from kvboost_rag.engine.store import MemoryStore
from kvboost_rag.engine.types import Fidelity, Segment
from kvboost_rag.errors import UnsupportedModelError

RELEASE = Version(transformers.__version__)
CASES = [
    pytest.param(name, variant, id=f"{name}, {variant}" if variant else name)
    for name, family in SERVED.items()
    for variant in ("", *family.variants)
]


HEADER, SEP, QUESTION = Segment(ids(100, 3)), Segment(ids(101, 1)), Segment(ids(102, 5))
# shorter than, as long as and longer than the windows
A, B, C = (Segment(ids(seed, length), document=True) for seed, length in ((1, 9), (2, 16), (3, 20)))
NEW = Segment(ids(4, 6), document=True)
PROMPT = [HEADER, C, SEP, A, SEP, NEW, B, QUESTION]  # 61 tokens


@functools.cache
def stock(name: str, variant: str, dtype: torch.dtype = torch.float32) -> Any:
    """The model as ``transformers`` runs it. Skips what this release cannot run itself."""
    family = SERVED[name]
    try:
        model = build(family, family.variants.get(variant), dtype)
        cache = {str(ForwardNames.of(model).cache): DynamicCache()}
        for tokens in ([7], [8, 9, 10]):
            model(input_ids=torch.tensor([tokens]), use_cache=True, **cache)
    except (RuntimeError, AttributeError, ValueError) as error:
        if Version("5.17") <= RELEASE:
            raise
        pytest.skip(f"{name} in transformers {transformers.__version__} itself fails: {error}")
    return model


def warmed(name: str, variant: str, **options: Any) -> Engine:
    engine = Engine(Model(stock(name, variant), **options), MemoryStore(10**8), EngineConfig(chunk_size=8))
    with engine.lock:
        for document in (A, B, C):
            engine.warm([], document)
    return engine


def prefill(engine: Engine, segments: list[Segment], repair: Repair | None = None, mode: str = "reuse") -> Prefilled:
    """As in ``prompts``, with room for new tokens."""
    with engine.lock:
        prefilled = engine.prefill(segments, repair or NoRepair(), mode, 32)
        engine.keep(prefilled)
        return prefilled


@pytest.mark.parametrize("name,variant", CASES)
def test_reuse(name: str, variant: str) -> None:
    """Full repair and exact reuse equal a prefill; every warm document hits; partial repair is finite and differs."""
    engine = warmed(name, variant)
    assert engine.model.capabilities.reuse is Reuse.ANY_POSITION
    expected = cold(engine, PROMPT)
    assert_same(prefill(engine, PROMPT, FullRepair()).logits, expected)
    for repair in (NoRepair(), QueryRepair(0.3)):
        result = prefill(engine, PROMPT, repair)
        assert [d.hit for d in result.report.documents] == [True] * 4  # NEW: kept by the call before
        assert result.logits.isfinite().all()
        assert not torch.allclose(result.logits, expected, atol=TOLERANCE)
    engine.store.clear()
    prefill(engine, PROMPT)
    again = prefill(engine, PROMPT)
    assert again.report.num_approximate_tokens == 0
    assert again.report.num_exact_tokens > 40
    assert_same(again.logits, expected)
    engine.model.close()


@pytest.mark.parametrize("name,variant", CASES)
def test_a_moved_document_equals_a_prefill_at_its_place(name: str, variant: str) -> None:
    """First in a prompt without opening, no context is missing: warmed behind another text, it is the real thing."""
    engine = warmed(name, variant)
    with engine.lock:
        moved = engine.prefill([NEW, A, QUESTION], NoRepair())  # A moves from 0 to 6
        model, start, end = engine.model, len(NEW.ids), len(NEW.ids) + len(A.ids)
        alone = model.new_cache(end)
        alone.zero_slots(torch.arange(start))
        alone.set_length(end)
        positions = torch.arange(start, end)
        hidden = torch.arange(end) < start
        model.scattered(torch.tensor(A.ids), positions, alone, hidden=hidden)
    for ours, theirs in zip(moved.cache.layers, alone.layers, strict=True):
        assert_same(ours.keys[:, :, start:end], theirs.keys[:, :, start:])
        assert_same(ours.values[:, :, start:end], theirs.values[:, :, start:])
    engine.model.close()


@pytest.mark.parametrize("name,variant", CASES)
def test_the_planned_attention_equals_the_model_s_own(name: str, variant: str) -> None:
    """Windows, soft caps, sinks and groups: the same tokens reused and computed, under the model's own attention."""
    engine, slow = warmed(name, variant), warmed(name, variant, stock_attention=True)
    assert engine.model.capabilities.planned or Version("5.17") > RELEASE or name in OWN_ATTENTION
    assert_same(prefill(engine, PROMPT).logits, prefill(slow, PROMPT).logits)
    engine.model.close()
    slow.model.close()


@pytest.mark.parametrize("name,variant", CASES)
def test_decoding_goes_on_past_windows_and_switches(name: str, variant: str) -> None:
    """Twenty tokens behind a prompt that is longer than the window equal what ``transformers`` alone generates."""
    model = stock(name, variant)
    prompt = torch.tensor([[token for segment in PROMPT for token in segment.ids]])
    expected = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=20, do_sample=False, pad_token_id=0
    )[0, prompt.shape[1] :]
    engine = warmed(name, variant)
    prefilled = prefill(engine, PROMPT, FullRepair())
    generated: list[int] = []

    def take(new: list[int]) -> bool:
        generated.extend(new)
        return False

    with engine.lock:
        engine.generate(prefilled, GenerationOptions(max_new_tokens=20), take)
    assert generated == expected.tolist()
    engine.model.close()


@pytest.mark.parametrize("name,variant", CASES)
def test_left_padded_batches_are_what_they_were(name: str, variant: str) -> None:
    """While an engine serves it, the user's own calls of the model give the same bits, masks included."""
    model = stock.__wrapped__(name, variant)  # of its own: a dynamic rope keeps what others ran
    rows = torch.tensor([ids(7, 30), ids(8, 30)])
    padding = torch.ones_like(rows)
    padding[0, :11] = 0
    arguments = {"input_ids": rows, "attention_mask": padding}
    implementation, before = model.config._attn_implementation, model(**arguments).logits
    generated = model.generate(**arguments, max_new_tokens=6, do_sample=False, pad_token_id=0)
    engine = Engine(Model(model), MemoryStore(10**8), EngineConfig(chunk_size=8))
    prefill(engine, PROMPT)
    prefill(engine, PROMPT[1:], QueryRepair(0.3))
    assert torch.equal(model(**arguments).logits, before)
    assert torch.equal(model.generate(**arguments, max_new_tokens=6, do_sample=False, pad_token_id=0), generated)
    engine.model.close()
    assert model.config._attn_implementation == implementation


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", SERVED)
def test_half_precision_is_served(name: str, dtype: torch.dtype) -> None:
    """Exact reuse gives the logits of a cold prefill as well as the precision allows; reuse is finite."""
    engine = Engine(Model(stock(name, "", dtype)), MemoryStore(10**8), EngineConfig(chunk_size=8))
    assert engine.model.capabilities.reuse is Reuse.ANY_POSITION
    expected = cold(engine, PROMPT)
    prefill(engine, PROMPT)
    again = prefill(engine, PROMPT)
    assert again.report.num_exact_tokens > 40
    error = (again.logits - expected).norm() / expected.norm()
    assert error < {torch.bfloat16: 0.1, torch.float16: 0.02}[dtype]
    moved = prefill(engine, [B, A, C, QUESTION], QueryRepair(0.2))
    assert moved.report.num_document_hits == 3
    assert moved.logits.isfinite().all()
    engine.model.close()


@pytest.mark.parametrize("name", REFUSED)
def test_the_rest_is_refused_with_what_was_seen(name: str) -> None:
    family, seen = REFUSED[name]
    try:
        model = build(family)
    except AttributeError:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    implementation = model.config._attn_implementation
    with pytest.raises(UnsupportedModelError, match=seen) as refused:
        Model(model.train())
    message = str(refused.value)
    assert type(model).__name__ in message
    assert "Use a decoder with rotary positions" in message
    assert model.config._attn_implementation == implementation
    assert not exchange.is_installed(model)
    assert model.training


# Ropes that change with the length of the prompt

SWITCHING = [("Llama", "dynamic"), ("Phi-3", "longrope")]
LONG_DOCUMENT = Segment(ids(9, 80), document=True)


@pytest.mark.parametrize("name,variant", SWITCHING)
@pytest.mark.parametrize("extra", [-1, 0, 1, 2, 40])
def test_a_prompt_across_the_switch_equals_a_prefill(name: str, variant: str, extra: int) -> None:
    """Warmed below the switch, asked at it and around it, exact and approximate, and below it again."""
    engine = warmed(name, variant)
    limit = engine.model.capabilities.switch.limit
    padding = Segment(ids(11, limit + extra - 9 - 16 - 5))
    crossing, short = [padding, A, B, QUESTION], [HEADER, B, SEP, A, QUESTION]
    for segments in (short, crossing, short, crossing):
        expected = cold(engine, segments)
        assert_same(prefill(engine, segments, FullRepair()).logits, expected)
    report = prefill(engine, short).report
    assert report.num_document_hits == 2
    fresh = warmed(name, variant)
    report = prefill(fresh, crossing).report
    assert report.num_document_hits == (2 if extra <= 0 else 0)
    assert any(variant in note for note in report.notes) == (extra > 0)
    engine.model.close()
    fresh.model.close()


def test_past_a_longrope_switch_documents_are_reused_among_themselves() -> None:
    engine = warmed("Phi-3", "longrope")
    first = [LONG_DOCUMENT, A, SEP, B, QUESTION]
    prefill(engine, first)
    report = prefill(engine, [LONG_DOCUMENT, B, SEP, A, QUESTION]).report
    assert [d.fidelity for d in report.documents] == [Fidelity.EXACT, Fidelity.APPROXIMATE, Fidelity.APPROXIMATE]
    engine.model.close()


def test_past_a_dynamic_switch_nothing_is_kept() -> None:
    engine = warmed("Llama", "dynamic")
    before = engine.store.stats().num_entries
    prefill(engine, [LONG_DOCUMENT, A, QUESTION])
    with engine.lock:
        assert not engine.warm([], LONG_DOCUMENT).stored
    assert engine.store.stats().num_entries == before
    engine.model.close()


@pytest.mark.parametrize("name,variant", SWITCHING)
def test_what_was_run_before_does_not_matter(name: str, variant: str) -> None:
    """``transformers`` keeps the frequencies of the longest sequence it saw; an engine starts from the original."""
    engine = warmed(name, variant)
    long, longer = [HEADER, LONG_DOCUMENT, QUESTION], [HEADER, LONG_DOCUMENT, C, B, QUESTION]
    first = cold(engine, long)
    cold(engine, longer)
    assert torch.equal(cold(engine, long), first)
    engine.model.close()
