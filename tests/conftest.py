"""Tiny random models and a tokenizer of our own: no network, milliseconds each.

``tiny_model(family, **changes)`` builds a model from its configuration; ``tokenizer`` is byte-level with a BOS, chat
markers and a chat template; ``boost`` is a KVBoost over both.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from kvboost_rag import KVBoost
from kvboost_rag.engine import costs

SPECIAL = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build_tokenizer(bos: bool = True, chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """Byte-level BPE without merges but for a few pairs, so that tokens seams can be told from bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("a", "n"), ("i", "n"), ("e", "r"), ("Ġ", "the"), ("o", "n"), ("1", "2")]
    vocab = {token: i for i, token in enumerate([*SPECIAL, *alphabet, *("".join(pair) for pair in merges)])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token=None
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def build_model(family: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
    """A random model with weights large enough for attention to be far from uniform."""
    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    }[family]
    options: dict[str, Any] = {
        "vocab_size": 300,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": 0.25,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    torch.manual_seed(seed)
    return model_class(config_class(**{**options, **changes})).to(dtype).eval()


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reuse always pays: for models this small it rarely would, and tests must not depend on the time."""
    monkeypatch.setattr(costs, "MIN_SAVED_SECONDS", float("inf"))


@pytest.fixture(autouse=True)
def _llama_index_settings() -> Iterator[None]:
    """LlamaIndex keeps its settings, and a splitter made with them, for the whole process: each test begins anew."""

    def kept() -> dict[str, Any]:
        return dict(vars(core.Settings)) if (core := sys.modules.get("llama_index.core")) else {}

    before, tokenizer = kept(), getattr(sys.modules.get("llama_index.core"), "global_tokenizer", None)
    yield
    if core := sys.modules.get("llama_index.core"):
        vars(core.Settings).update(before or vars(type(core.Settings)()))
        core.global_tokenizer = tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture
def tiny_model() -> Callable[..., Any]:
    return build_model


@pytest.fixture(params=["llama", "qwen2"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def boost(tokenizer: PreTrainedTokenizerFast) -> Iterator[KVBoost]:
    with KVBoost(build_model(), tokenizer, max_cache_bytes="64MB") as engine:
        yield engine


@pytest.fixture(scope="session")
def real_boost() -> Iterator[KVBoost]:
    """The bundled SmolLM2-135M. Tests clear it before use."""
    from kvboost_rag import hub

    with KVBoost.from_pretrained(hub.bundled_model(), dtype=torch.float32) as engine:
        yield engine


def document(number: int, words: int = 30) -> str:
    """A text of its own for each number, well over the 32 tokens detection needs."""
    return " ".join(f"{chr(97 + (number * 7 + i * 3) % 26)}word{number}x{i}" for i in range(words))


def embed(text: str) -> list[float]:
    """A bag of hashed words: texts that share words are close."""
    vector = [0.0] * 64
    for word in text.lower().split():
        vector[int(hashlib.sha256(word.encode()).hexdigest(), 16) % 64] += 1.0
    norm = sum(v * v for v in vector) ** 0.5 or 1.0
    return [v / norm for v in vector]
