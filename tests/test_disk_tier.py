"""Documents that outlive the process: found again, reported with their tier, never another model's."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch
from conftest import build_model, build_tokenizer, document

from kvboost_rag import KVBoost, OptionError
from kvboost_rag.errors import CacheWarning


def opened(folder: Path, seed: int = 0, **options: object) -> KVBoost:
    return KVBoost(build_model(seed=seed), build_tokenizer(), cache_dir=folder, **options)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_a_document_is_found_by_the_next_process(tmp_path: Path, kv_dtype: str) -> None:
    options = {"kv_dtype": kv_dtype, "max_quantization_kl": 9.0}
    with opened(tmp_path, **options) as first:
        first.warm([document(n) for n in range(3)], progress=False)
        text = f"Read this: {document(1)}\nWhat does it say?"
        expected = first.prefill(text, repair="none")
    with opened(tmp_path, **options) as second:
        assert second.is_warm(document(2))
        assert not second.is_warm(document(5))
        found = second.prefill(text, repair="none")
        assert [d.tier for d in found.report.documents] == ["disk"]
        torch.testing.assert_close(found.logits, expected.logits, atol=1e-4, rtol=0)
        again = second.prefill(text, repair="none")
        assert [d.tier for d in again.report.documents] == ["memory"]
        report = second.warm([document(n) for n in range(3)], progress=False)
        assert report.num_already_warm == 3


def test_another_model_or_tokenizer_finds_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as first:
        first.warm(document(1), progress=False)
    for other in (
        opened(tmp_path, seed=1),
        KVBoost(build_model(), build_tokenizer(bos=False), cache_dir=tmp_path),
        KVBoost(build_model(dtype=torch.bfloat16), build_tokenizer(), cache_dir=tmp_path),
        opened(tmp_path, tenant="other"),
    ):
        with other:
            assert not other.is_warm(document(1))
            assert other.prefill(f"{document(1)} so").report.num_document_hits == 0


def test_a_broken_file_is_a_miss_with_a_warning(tmp_path: Path) -> None:
    with opened(tmp_path) as first:
        first.warm(document(1), progress=False)
    (file,) = tmp_path.glob("*/*-w*.safetensors")
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with opened(tmp_path) as second:
        prompt = second.prompt([document(1)], "why?")
        with pytest.warns(CacheWarning, match=file.name):
            report = second.prefill(prompt).report
        assert report.num_document_hits == 0
        assert second.prefill(prompt).report.num_document_hits == 1  # computed, and kept


def test_forget_and_clear_reach_the_disk(tmp_path: Path) -> None:
    with opened(tmp_path) as boost:
        boost.warm([document(n) for n in range(3)], progress=False)
    with opened(tmp_path) as boost:
        assert boost.forget(document(0)) == 1
        assert not boost.is_warm(document(0))
        boost.clear()
        assert not boost.is_warm(document(1))
    assert not list(tmp_path.glob("*/*.safetensors"))


def test_a_folder_that_vanishes_costs_hits_not_answers(tmp_path: Path) -> None:
    with opened(tmp_path / "cache", max_cache_bytes=1) as boost:
        boost.warm([document(0)], progress=False)
        prompt = boost.prompt([document(0)], "why?")
        full = boost.prefill(prompt, mode="baseline")
        assert boost.prefill(prompt).report.num_document_hits == 1
        shutil.rmtree(tmp_path / "cache")
        gone = boost.prefill(prompt)
        assert gone.report.num_document_hits == 0
        torch.testing.assert_close(gone.logits, full.logits, atol=1e-4, rtol=0)


def test_steady_state_with_disk_every_document_hits(tmp_path: Path) -> None:
    """50 documents, memory for 30, 14 of them drawn by Zipf and shuffled again and again."""
    documents = [document(n, 14) for n in range(50)]
    with KVBoost(build_model(), build_tokenizer()) as sized:
        budget = sized.estimate(documents).num_bytes * 30 // 50
    rng = random.Random(0)
    rates = {}
    for name, options in {"disk": {"cache_dir": tmp_path}, "memory": {}, "lru": {"eviction": "lru"}}.items():
        if name != "disk":
            options["warmed_share"] = 1.0
        rng.seed(0)
        hits = asked = 0
        with KVBoost(build_model(), build_tokenizer(), max_cache_bytes=budget, repair="none", **options) as boost:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("warnings.warn", lambda *args, **kwargs: None)
                boost.warm(documents, progress=False)
            for _ in range(15):
                drawn = rng.choices(range(50), [1 / (n + 1) for n in range(50)], k=40)
                chosen = list(dict.fromkeys(drawn))[:8]
                rng.shuffle(chosen)
                report = boost.prefill(boost.prompt([documents[n] for n in chosen], "why?")).report
                hits += report.num_document_hits
                asked += len(chosen)
                assert boost.stats().used_bytes <= budget
                if name == "disk":
                    assert {d.tier for d in report.documents} <= {"disk", "memory"}
        rates[name] = hits / asked
    assert rates["disk"] == 1.0
    assert rates["memory"] >= rates["lru"] - 0.05


@pytest.mark.parametrize(
    ("options", "message"),
    [({"max_disk_bytes": "1GB"}, "cache_dir"), ({"cache_dir": "x", "max_disk_bytes": "much"}, "max_disk_bytes")],
)
def test_wrong_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        KVBoost(build_model(), build_tokenizer(), **options)


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model = build_model()
    own = model.config._attn_implementation
    with pytest.raises(OptionError, match="folder"):
        KVBoost(model, build_tokenizer(), cache_dir=tmp_path / "file")
    assert model.config._attn_implementation == own


def test_one_exact_prefix_is_one_in_the_next_process_too(tmp_path: Path) -> None:
    """The text between documents is the same everywhere; only the one behind the right prefix is of use."""
    texts = [document(n) for n in range(3)]
    with opened(tmp_path) as first:
        first.generate(first.prompt(texts, "why?"), max_new_tokens=1)
        repeated = first.prefill(first.prompt(texts, "who?"), mode="prefix").report
    assert repeated.num_document_hits == 3
    for mode in ("prefix", "reuse"):
        with opened(tmp_path) as second:
            report = second.prefill(second.prompt(texts, "who?"), mode=mode).report
            assert report.num_exact_tokens == repeated.num_exact_tokens
            assert report.num_approximate_tokens == report.num_repaired_tokens == 0


def test_what_another_process_reads_meanwhile_is_found_in_text_once_it_was_asked_about(tmp_path: Path) -> None:
    text = f"Read this: {document(1)}\nWhat does it say?"
    with opened(tmp_path) as first, opened(tmp_path) as second:
        assert not second.is_warm(document(1))
        assert second.prefill(text).report.documents == []
        first.warm(document(1), progress=False)
        assert second.is_warm(document(1))
        assert second.prefill(text).report.num_document_hits == 1
