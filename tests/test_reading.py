"""Second versions of documents, reading them again, and bringing them back before they are needed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import build_model, build_tokenizer, document

from kvboost_rag import KVBoost
from kvboost_rag.engine.types import Fidelity
from kvboost_rag.errors import ClosedEngineError
from kvboost_rag.prompt import Piece

TEXTS = [document(n) for n in range(4)]
SYSTEM = "You answer from passages and from nothing else."


def opened(**options: Any) -> KVBoost:
    return KVBoost(build_model(), build_tokenizer(), **options)


@pytest.fixture(params=["memory", "disk", "int8"])
def versioned(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KVBoost]:
    options: dict[str, Any] = {
        "memory": {},
        "disk": {"cache_dir": tmp_path, "max_cache_bytes": 0},
        "int8": {"kv_dtype": "int8", "max_quantization_kl": 9.0},
    }[request.param]
    with opened(**options) as boost:
        yield boost


def fidelities(boost: KVBoost, order: list[int], **options: Any) -> list[Fidelity]:
    asked = boost.prompt([TEXTS[n] for n in order], "what?", system=SYSTEM)
    return [d.fidelity for d in boost.prefill(asked, repair="none", **options).report.documents]


# Second versions


def test_a_second_version_is_exact_in_front_and_the_first_serves_elsewhere(versioned: KVBoost) -> None:
    report = versioned.warm(TEXTS, header=SYSTEM, first=True, progress=False)
    assert (report.num_warmed, report.num_first, report.num_rejected) == (4, 4, 0)
    for order in ([0, 1, 2], [3, 0, 1], [2, 3, 0]):
        assert fidelities(versioned, order) == [Fidelity.EXACT, Fidelity.APPROXIMATE, Fidelity.APPROXIMATE]
    alone = versioned.prompt([TEXTS[1]], "what?", system=SYSTEM)
    cold = versioned.prefill(alone, mode="baseline")
    torch.testing.assert_close(versioned.prefill(alone, repair="none").logits, cold.logits, atol=1e-4, rtol=0)
    other = versioned.prompt([TEXTS[1]], "what?", system="Another header.")
    assert versioned.prefill(other).report.documents[0].fidelity is Fidelity.APPROXIMATE


def test_both_versions_are_already_warm_the_second_time_and_forgotten_together(versioned: KVBoost) -> None:
    versioned.warm(TEXTS, header=SYSTEM, first=True, progress=False)
    again = versioned.warm(TEXTS, header=SYSTEM, first=True, progress=False)
    assert (again.num_warmed, again.num_first, again.num_already_warm) == (0, 0, 4)
    other = versioned.warm(TEXTS, header="Another header.", first=True, progress=False)
    assert (other.num_warmed, other.num_first) == (0, 4)
    assert versioned.forget(TEXTS[0]) == 1
    assert fidelities(versioned, [0]) == [Fidelity.MISS]
    assert fidelities(versioned, [1]) == [Fidelity.EXACT]


def test_the_second_version_never_takes_the_place_of_the_first(versioned: KVBoost) -> None:
    versioned.warm(TEXTS[0], header=SYSTEM, primer=None, progress=False)  # exact there already
    report = versioned.warm(TEXTS[0], header=SYSTEM, first=True, progress=False)
    assert (report.num_warmed, report.num_first) == (0, 0) if versioned.engine.config.codec == "raw" else (0, 1)
    assert versioned.is_warm(TEXTS[0])
    assert fidelities(versioned, [1, 0]) == [Fidelity.MISS, Fidelity.APPROXIMATE]


def test_a_header_may_be_chat_messages(boost: KVBoost) -> None:
    messages = [{"role": "user", "content": [Piece("Read:\n"), Piece(TEXTS[0], "document"), Piece("\nWhat?")]}]
    boost.warm(TEXTS, header=messages, first=True, progress=False)
    assert boost.prefill(messages).report.documents[0].fidelity is Fidelity.EXACT


# Order


def test_order_begins_with_what_is_exact_and_keeps_the_rest(boost: KVBoost) -> None:
    boost.warm(TEXTS, progress=False)
    assert boost.order(TEXTS, header=SYSTEM) == [0, 1, 2, 3]
    boost.warm(TEXTS[2], header=SYSTEM, first=True, progress=False)
    assert boost.order(TEXTS, header=SYSTEM) == [2, 0, 1, 3]
    assert boost.order(TEXTS, header="Another header.") == [0, 1, 2, 3]
    assert boost.order([], header=SYSTEM) == []
    # a prompt whose second document was computed behind the exact first one extends the prefix
    new = document(9)
    boost.prefill(boost.prompt([TEXTS[2], new], "what?", system=SYSTEM))
    assert boost.order([TEXTS[0], new, TEXTS[2]], header=SYSTEM) == [2, 1, 0]


# Reading again


def test_rewarm_reads_all_again_and_each_old_version_stays_until_then(versioned: KVBoost) -> None:
    versioned.warm(TEXTS, progress=False)
    assert sorted(versioned.texts()) == sorted(TEXTS)
    key = versioned.engine.content_key(versioned.tokens.encode(TEXTS[3]))
    before = versioned.engine.store.peek(key).keys.prefix
    report = versioned.rewarm(header=SYSTEM, primer=None, first=True, progress=False)
    assert (report.num_documents, report.num_warmed, report.num_already_warm) == (4, 4, 0)
    assert sorted(versioned.texts()) == sorted(TEXTS)
    assert versioned.engine.store.peek(key).keys.prefix != before
    assert fidelities(versioned, [3, 1]) == [Fidelity.EXACT, Fidelity.APPROXIMATE]
    assert versioned.rewarm([TEXTS[0]], progress=False).num_warmed == 1


def test_another_model_reads_what_this_one_knows() -> None:
    with opened() as first, KVBoost(build_model(seed=1), build_tokenizer()) as second:
        first.warm(TEXTS, progress=False)
        assert second.texts() == []
        second.rewarm(first.texts(), progress=False)
        assert all(second.is_warm(text) for text in TEXTS)


# Bringing back


def test_prefetch_brings_documents_from_disk_to_memory(tmp_path: Path) -> None:
    with opened(cache_dir=tmp_path, max_document_tokens=100) as first:
        first.warm(TEXTS, progress=False)
    with opened(cache_dir=tmp_path, max_document_tokens=100) as second:
        assert second.prefetch([TEXTS[0], TEXTS[1], "", document(77)]).result(60) == 2
        assert second.prefetch(TEXTS[0]).result(60) == 0
        report = second.prefill(f"{TEXTS[0]}\n\n{TEXTS[2]}\n\n{TEXTS[1]}").report
        assert [d.tier for d in report.documents] == ["memory", "disk", "memory"]


def test_prefetching_what_is_gone_or_in_memory_only_harms_nothing(tmp_path: Path, boost: KVBoost) -> None:
    boost.warm(TEXTS[0], progress=False)
    assert boost.prefetch(TEXTS).result(60) == 0
    with opened(cache_dir=tmp_path) as first:
        first.warm(TEXTS, progress=False)
    with opened(cache_dir=tmp_path) as second:
        for folder in tmp_path.iterdir():
            shutil.rmtree(folder)
        assert second.prefetch(TEXTS).result(60) == 0
        assert second.prefill(TEXTS[0]).report.num_document_hits == 0
    with pytest.raises(ClosedEngineError):
        second.prefetch(TEXTS)


def test_how_a_text_was_cut_is_known_to_all_that_read_it_again(tmp_path: Path) -> None:
    for ask in (
        lambda boost: boost.prefetch(TEXTS[0]).result(60) == 1,
        lambda boost: boost.order(TEXTS[1::-1], header=SYSTEM) == [1, 0],
        lambda boost: boost.warm(TEXTS[0], progress=False).num_already_warm == 1,
        lambda boost: boost.estimate(TEXTS[0]).num_documents == 1 and boost.is_warm(TEXTS[0]),
    ):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        with opened(cache_dir=folder, chunk_size=40) as first:
            first.warm(TEXTS[0], chunking="semantic", header=SYSTEM, first=True, progress=False)
        with opened(cache_dir=folder, chunk_size=40) as second:
            assert ask(second)
