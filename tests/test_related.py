"""Documents that share text find each other; others do not."""

from __future__ import annotations

import random

import numpy as np

from kvboost_rag.related import MAX_PER_RUN, RelatedIndex, runs


def ids(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 50_000, length).tolist()


def index_of(documents: dict[str, list[int]]) -> RelatedIndex[str]:
    index: RelatedIndex[str] = RelatedIndex()
    for name, tokens in documents.items():
        index.add(name, runs(tokens))
    return index


def test_equal_runs_are_kept_everywhere_and_about_a_quarter_of_all() -> None:
    text = ids(1, 4000)
    kept = runs(text)
    assert 0.2 < len(kept) / 3996 < 0.3
    assert runs([*ids(2, 37), *text, *ids(3, 11)]) >= kept
    assert not kept & runs(ids(4, 4000))


def test_overlapping_chunks_are_related_most_overlap_first() -> None:
    text = ids(5, 1600)
    chunks = {"0": text[:600], "1": text[450:1050], "2": text[950:1550], "other": ids(6, 600)}
    index = index_of(chunks)
    assert index.related(runs(text[500:1100])) == ["1", "2", "0"]
    assert index.related(runs(ids(7, 600))) == []


def test_a_little_in_common_is_not_enough() -> None:
    text = ids(8, 1000)
    index = index_of({"quoted": text})
    assert index.related(runs([*text[:20], *ids(9, 1000)])) == []
    assert index.related(runs([*text[:200], *ids(9, 800)])) == ["quoted"]


def test_order_of_tokens_matters() -> None:
    text = ids(10, 500)
    shuffled = random.Random(0).sample(text, len(text))
    assert index_of({"text": text}).related(runs(shuffled)) == []


def test_short_documents_have_no_relatives() -> None:
    assert runs([]) == runs([1, 2, 3, 4]) == frozenset()
    assert index_of({"short": [1, 2]}).related(frozenset()) == []


def test_boilerplate_in_every_document_stays_bounded() -> None:
    letterhead = ids(11, 300)
    index = index_of({str(i): [*letterhead, *ids(100 + i, 100)] for i in range(200)})
    assert max(len(names) for names in index._names.values()) == MAX_PER_RUN
    assert len(index.related(runs([*letterhead, *ids(99, 100)]))) == MAX_PER_RUN


def test_clear_forgets_everything() -> None:
    index = index_of({"a": ids(12, 100)})
    index.clear()
    assert index.related(runs(ids(12, 100))) == []
