"""Quantised documents: kept only where the next token bears it, never served as exact."""

from __future__ import annotations

import warnings

import pytest
import torch
from catalogue import SERVED, build
from conftest import build_model
from prompts import HEADER, PRIMER, QUESTION, SEP, A, B, C, assert_same, cold, prefill

from kvboost_rag.engine.config import EngineConfig
from kvboost_rag.engine.engine import Engine
from kvboost_rag.engine.model import Model
from kvboost_rag.engine.repair import FullRepair, NoRepair
from kvboost_rag.engine.store import MemoryStore
from kvboost_rag.engine.types import Fidelity
from kvboost_rag.errors import OptionError, QuantizationWarning

PROMPT = [HEADER, A, SEP, B, QUESTION]


def engine_with(model: object, **options: object) -> Engine:
    return Engine(Model(model), MemoryStore(10**8), EngineConfig(chunk_size=16, **options))


def kept_as(engine: Engine, document: object = B) -> str:
    entry = engine.store.peek(engine.content_key(document.ids))
    assert entry is not None
    return entry.packed.codec


def warm(engine: Engine, *documents: object) -> None:
    with engine.lock:
        for document in documents:
            engine.warm(PRIMER, document)


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_document_that_bears_it_is_kept_small(family: str, kv_dtype: str) -> None:
    raw, small = (
        engine_with(build_model(family)),
        engine_with(build_model(family), kv_dtype=kv_dtype, max_quantization_kl=9),
    )
    for engine in (raw, small):
        warm(engine, A, B, C)
    assert kept_as(small) == kv_dtype
    assert small.keeper.num_kept_wider == 0
    logits, exact = prefill(small, PROMPT).logits, prefill(raw, PROMPT).logits
    assert logits.isfinite().all()
    assert not torch.equal(logits, exact)
    strayed = (logits - exact).norm() / exact.norm()
    assert strayed < {"int8": 0.05, "int4": 0.6}[kv_dtype]
    assert_same(prefill(small, PROMPT, FullRepair()).logits, cold(small, PROMPT))


def test_quantised_kv_is_never_exact_and_by_products_stay_raw() -> None:
    engine = engine_with(build_model(), kv_dtype="int8", max_quantization_kl=9)
    with engine.lock:
        engine.warm([HEADER], A)  # as a prefill would have it, but for the codec
    report = prefill(engine, [HEADER, A, QUESTION]).report
    assert [d.fidelity for d in report.documents] == [Fidelity.APPROXIMATE]
    again = prefill(engine, [HEADER, A, QUESTION], FullRepair())
    assert again.report.num_exact_tokens == len(HEADER.ids)
    assert_same(again.logits, cold(engine, [HEADER, A, QUESTION]))


def test_the_gate_falls_back_step_by_step_and_says_so_once() -> None:
    engine = engine_with(build_model(), kv_dtype="int4", max_quantization_kl=0.0)
    with pytest.warns(QuantizationWarning, match=r"int4: .* int8: .*'raw'"):
        warm(engine, A)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warm(engine, B)
    assert kept_as(engine) == "raw"
    assert engine.keeper.num_kept_wider == 2
    plain = engine_with(build_model())
    warm(plain, A, B)
    assert_same(prefill(engine, PROMPT).logits, prefill(plain, PROMPT).logits)


def test_between_the_two_a_document_is_kept_as_int8() -> None:
    engine = engine_with(build_model(), kv_dtype="int4", max_quantization_kl=0.004)
    with pytest.warns(QuantizationWarning, match="'int8'"):
        warm(engine, B)
    assert kept_as(engine) == "int8"


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_outliers_in_the_key_bias_never_pass_unseen(kv_dtype: str) -> None:
    """Qwen2's fault: some channels of the keys carry a large constant. What is kept stays within the gate."""
    model = build_model("qwen2")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.normal_(0, 0.5)
            layer.self_attn.k_proj.bias[::5] *= 50
    engine = engine_with(model, kv_dtype=kv_dtype, max_quantization_kl=0.02)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", QuantizationWarning)
        warm(engine, A, B, C)
    raw = engine_with(model)
    warm(raw, A, B, C)
    # asked the way the gate asks: the same prompt, the document where it was read
    prompt = [*PRIMER, B, QUESTION]
    full, kept = (prefill(e, prompt).logits.log_softmax(-1) for e in (raw, engine))
    assert float((full.exp() * (full - kept)).sum()) < 0.2


@pytest.mark.parametrize("name", ["Gemma 2", "gpt-oss", "Cohere 2", "GLM-4", "Phi"])
def test_families_with_windows_sinks_pairs_and_partial_rotation(name: str) -> None:
    """Learned sinks, too: the first tokens of a document stay as they were, and the gate has the last word."""
    engine = engine_with(build(SERVED[name]), kv_dtype="int8", max_quantization_kl=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", QuantizationWarning)
        warm(engine, A, B)
    raw = engine_with(build(SERVED[name]))
    warm(raw, A, B)
    full, kept = (prefill(e, PROMPT, NoRepair()).logits.log_softmax(-1) for e in (raw, engine))
    assert float((full.exp() * (full - kept)).sum()) < 0.5


def test_bytes_are_estimated_well() -> None:
    engine = engine_with(build_model(hidden_size=384, num_attention_heads=6), kv_dtype="int4", max_quantization_kl=9)
    warm(engine, B)
    entry = engine.store.peek(engine.content_key(B.ids))
    assert entry is not None
    assert entry.packed.num_bytes == pytest.approx(engine.bytes_per_token * len(B.ids), rel=0.15)


@pytest.mark.parametrize(
    "options", [{"kv_dtype": "int2"}, {"max_quantization_kl": -1}, {"max_quantization_kl": float("nan")}]
)
def test_wrong_options_name_themselves(options: dict[str, object]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        EngineConfig(**options)
