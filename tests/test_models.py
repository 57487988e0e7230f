"""Models as users load them: from folders, with remote code, onto devices; and the account of what was found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from catalogue import REFUSED, SERVED, build, table
from conftest import build_model, build_tokenizer, document

from kvboost_rag import KVBoost, UnsupportedModelError, doctor

DOCS = Path(__file__).parent.parent / "docs" / "models.md"
REMOTE_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class InternLMConfig(LlamaConfig):
    model_type = "internlm"


class InternLMForCausalLM(LlamaForCausalLM):
    config_class = InternLMConfig
"""


@pytest.fixture
def internlm(tmp_path: Path) -> Path:
    """A folder as the hub keeps InternLM: a model type of its own, the code beside the weights."""
    folder = tmp_path / "internlm-tiny"
    model = build_model()
    model.config.auto_map = {
        "AutoConfig": "modeling_internlm.InternLMConfig",
        "AutoModelForCausalLM": "modeling_internlm.InternLMForCausalLM",
    }
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    (folder / "modeling_internlm.py").write_text(REMOTE_CODE)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"model_type": "llama"', '"model_type": "internlm"'))
    return folder


def test_remote_code_is_served(internlm: Path) -> None:
    with KVBoost.from_pretrained(internlm, model_kwargs={"trust_remote_code": True}) as boost:
        assert boost.engine.model.capabilities.model_type == "internlm"
        boost.warm([document(1), document(2)], progress=False)
        prompt = boost.prompt([document(2), document(1)], "why?")
        assert boost.prefill(prompt).report.num_document_hits == 2
        full, repaired = boost.prefill(prompt, mode="baseline"), boost.prefill(prompt, repair="full")
        torch.testing.assert_close(repaired.logits, full.logits, atol=1e-4, rtol=0)


def test_encoder_decoders_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    build(REFUSED["T5"][0]).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        KVBoost.from_pretrained(tmp_path)
    assert "encoder-decoder" in str(doctor(tmp_path))


def test_refused_models_raise_at_from_pretrained(tmp_path: Path) -> None:
    build(REFUSED["GPT-2"][0]).save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match=r"GPT2LMHeadModel.*learned"):  # the paper's section 4.8: a RuntimeError
        KVBoost.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["Gemma 3", "GLM-4", "gpt-oss", "Falcon"])
def test_text_in_text_out(name: str) -> None:
    """The facade over families whose layers differ: warm, find, answer as full prefill does under full repair."""
    with KVBoost(build(SERVED[name]), build_tokenizer()) as boost:
        boost.warm([document(n) for n in range(3)], progress=False)
        prompt = boost.prompt([document(2), document(0)], "why?")
        exact = boost.generate(prompt, mode="baseline", max_new_tokens=12)
        repaired = boost.generate(prompt, repair="full", max_new_tokens=12)
        assert repaired.text == exact.text
        result = boost.generate(prompt, max_new_tokens=4)
        assert result.report.num_document_hits == 2
        assert result.report.repair == ("boundary" if name == "Falcon" else "query")


def test_doctor_accounts_for_a_served_model() -> None:
    model = build(SERVED["Gemma 3"])
    own = model.config._attn_implementation
    found = doctor(model)
    assert found.served
    assert model.config._attn_implementation == own
    text = str(found)
    for part in ("any position", "half-split, 16 of 16", "window 16 in 5 of 6 layers", "2048 tokens", "float32", "cpu"):
        assert part in text
    with KVBoost(model, build_tokenizer()) as boost:
        assert doctor(boost) == found


def test_doctor_accounts_for_a_refused_model() -> None:
    found = doctor(build(REFUSED["LFM2"][0]))
    assert not found.served
    assert "conv" in str(found)
    assert "nothing" in str(found)


def test_doctor_takes_load_options_with_names_only() -> None:
    with pytest.raises(TypeError, match="dtype"):
        doctor(build_model(), dtype="bfloat16")


def test_doctor_loads_a_folder(tmp_path: Path) -> None:
    build_model().save_pretrained(tmp_path)
    found = doctor(str(tmp_path), dtype=torch.bfloat16)
    assert found.dtype == "bfloat16"
    assert found.served


def test_the_table_in_the_docs_is_what_the_probe_finds() -> None:
    assert DOCS.read_text(encoding="utf-8") == table(), "run `make docs`"
