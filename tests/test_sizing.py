"""The page on memory is up to date, and its numbers are the engine's."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers
from conftest import build_model, build_tokenizer, document
from sizing import (
    BEGIN,
    END,
    MODELS,
    NUM_TOKENS,
    PAGE,
    Shape,
    document_bytes,
    num_fitting,
    packed_bytes,
    packed_layers,
    page,
    table,
)

from kvboost_rag import KVBoost
from kvboost_rag.engine.codecs import CODECS
from kvboost_rag.engine.config import EngineConfig
from kvboost_rag.engine.store import Entry
from kvboost_rag.errors import BudgetWarning

TEXT = PAGE.read_text(encoding="utf-8")
DOCUMENT = document(1)  # over 128 tokens
QUANTISED = {"int8": 0.56, "int4": 0.32}  # of 16-bit KV, at most, from 128 tokens on
TINY = Shape(layers=3, kv_heads=2, head_dim=32)
# Families whose default configuration is one of the table's models.
DEFAULTS = {"Gemma 2 2B": "Gemma2", "SmolLM3-3B": "SmolLM3", "Mistral-7B-v0.3": "Mistral", "Phi-3-mini": "Phi3"}


def warmed(boost: KVBoost, text: str = DOCUMENT) -> Entry:
    boost.warm(text, progress=False)
    entry = boost.engine.store.peek(boost.engine.content_key(boost.tokens.encode(text)))
    assert entry is not None
    assert entry.warmed
    assert entry.num_tokens >= 128
    return entry


def tiny_boost(dtype: torch.dtype, codec: str = "raw", **options: Any) -> KVBoost:
    kv_dtype = "auto" if codec == "raw" else codec
    model = build_model(dtype=dtype, head_dim=TINY.head_dim)
    return KVBoost(model, build_tokenizer(), kv_dtype=kv_dtype, max_quantization_kl=99.0, **options)


def test_the_table_in_the_docs_is_up_to_date() -> None:
    assert page(TEXT) == TEXT, "run `make docs`"


@pytest.mark.parametrize("name", DEFAULTS)
def test_shapes_are_those_of_the_default_configurations(name: str) -> None:
    config = getattr(transformers, f"{DEFAULTS[name]}Config")()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    assert MODELS[name] == Shape(config.num_hidden_layers, config.num_key_value_heads, head_dim)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("shape", [(3, 64), (2, 96), (1, 256)], ids=str)
def test_layers_are_packed_alike(codec: str, shape: tuple[int, int]) -> None:
    one, three = (packed_layers(layers, *shape, codec, NUM_TOKENS, torch.bfloat16) for layers in (1, 3))
    assert three == 3 * one


def test_raw_sizes_are_the_formula() -> None:
    for shape in MODELS.values():
        assert packed_bytes(shape, "raw") == NUM_TOKENS * shape.bytes_per_token()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_raw_document_takes_bytes_per_token(dtype: torch.dtype) -> None:
    with tiny_boost(dtype) as boost:
        entry = warmed(boost)
        assert entry.packed.num_bytes == entry.num_tokens * boost.engine.bytes_per_token
        assert boost.engine.bytes_per_token == TINY.bytes_per_token(dtype)
        assert boost.estimate(DOCUMENT).num_bytes == entry.num_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("codec", QUANTISED)
def test_a_quantised_document_takes_a_share_of_sixteen_bits(codec: str, dtype: torch.dtype) -> None:
    with tiny_boost(dtype, codec) as boost:
        entry = warmed(boost)
        assert entry.packed.codec == codec
        assert entry.packed.num_bytes <= QUANTISED[codec] * entry.num_tokens * TINY.bytes_per_token()


@pytest.mark.parametrize("codec", QUANTISED)
def test_the_share_holds_from_128_tokens_on(codec: str) -> None:
    for num_tokens in range(128, 264, 5):
        packed = packed_bytes(TINY, codec, num_tokens)
        assert packed <= QUANTISED[codec] * packed_bytes(TINY, "raw", num_tokens)


@pytest.mark.parametrize("codec", CODECS)
def test_the_table_counts_what_the_store_counts(codec: str) -> None:
    with tiny_boost(torch.bfloat16, codec) as boost:
        entry = warmed(boost)
        assert entry.num_bytes == document_bytes(TINY, codec, entry.num_tokens)


@pytest.mark.parametrize("codec", QUANTISED)
def test_quantised_documents_are_as_small_from_float32(codec: str) -> None:
    assert packed_bytes(TINY, codec, dtype=torch.float32) == packed_bytes(TINY, codec)


@pytest.mark.parametrize("codec", QUANTISED)
def test_estimates_are_a_little_low(codec: str) -> None:
    """As the page says: by up to 2 % for 600 tokens, by more for fewer."""
    with tiny_boost(torch.bfloat16, codec) as boost:
        low, more = (
            1 - boost.engine.bytes_per_token * num_tokens / packed_bytes(TINY, codec, num_tokens)
            for num_tokens in (NUM_TOKENS, 100)
        )
    assert 0 < low < 0.02 < more


def test_what_is_met_in_passing_is_kept_as_computed() -> None:
    with tiny_boost(torch.bfloat16, "int8") as boost:
        boost.prefill(boost.prompt([DOCUMENT], "why?"))
        entry = boost.engine.store.peek(boost.engine.content_key(boost.tokens.encode(DOCUMENT)))
        assert entry is not None
        assert not entry.warmed
        assert entry.packed.codec == "raw"


def test_as_many_documents_stay_warm_as_fit() -> None:
    texts = [DOCUMENT.replace("word1", f"word{n}") for n in range(2, 7)]
    with tiny_boost(torch.bfloat16) as boost:
        size = warmed(boost).num_bytes
    budget = int(3.5 * size / EngineConfig().warmed_share)
    assert num_fitting(budget, size) == 3
    with tiny_boost(torch.bfloat16, max_cache_bytes=budget) as boost:
        estimate = boost.estimate(texts)
        assert (estimate.num_bytes, estimate.num_fitting) == (5 * size, 3)
        with pytest.warns(BudgetWarning, match="3 of 5 fit"):
            boost.warm(texts, progress=False)
        assert boost.stats().num_warmed == 3


def test_the_worked_examples_are_right() -> None:
    shape = MODELS["Qwen2.5-3B"]
    assert f"= {shape.bytes_per_token():,} bytes a token" in TEXT
    assert f"600 tokens take {NUM_TOKENS * shape.bytes_per_token() / 1e6:.1f} MB" in TEXT
    assert f"256 new ones on Qwen2.5-3B take {(2_200 + 256) * shape.bytes_per_token() / 1e6:.1f} MB" in TEXT


def test_options_are_named_with_their_defaults() -> None:
    defaults = EngineConfig()
    named = dict(re.findall(r"^- `(\w+)` \((.+?)\):", TEXT, flags=re.MULTILINE))
    assert named == {
        "max_cache_bytes": f"{defaults.max_cache_bytes // 10**9} GB",
        "warmed_share": str(defaults.warmed_share),
        "kv_dtype": f'`"{defaults.kv_dtype}"`',
        "max_quantization_kl": str(defaults.max_quantization_kl),
        "cache_dir": "none",
        "max_disk_bytes": "no limit",
        "max_document_tokens": f"{defaults.max_document_tokens:,}",
        "prefill_chunk_tokens": f"{defaults.prefill_chunk_tokens:,}",
    }
    assert (defaults.cache_dir, defaults.max_disk_bytes) == (None, None)


def test_the_code_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    opened = []

    def from_pretrained(name: str, **options: Any) -> KVBoost:
        opened.append(KVBoost(build_model(), build_tokenizer(), **options))
        return opened[-1]

    monkeypatch.setattr(KVBoost, "from_pretrained", from_pretrained)
    blocks = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), {})
    assert "2 of 2 fit" in capsys.readouterr().out
    for boost in opened:
        boost.close()


def test_every_model_has_a_row() -> None:
    assert TEXT.count(BEGIN) == TEXT.count(END) == 1
    rows = re.findall(r"^\| ([^|]+) \| \d+ × \d+ × \d+ \|", table(), flags=re.MULTILINE)
    assert rows == list(MODELS)
