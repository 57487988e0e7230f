"""Chunking: prompts are cut without loss, a document is one chunk, text is cut every chunk_size tokens of its run."""

from __future__ import annotations

import random

import pytest

from kvboost_rag.engine.chunking import chunk_prompt, fixed
from kvboost_rag.engine.types import Chunk, Segment


def text(*ids: int) -> Segment:
    return Segment(ids)


def doc(*ids: int) -> Segment:
    return Segment(ids, document=True)


@pytest.mark.parametrize(
    "num_tokens, sizes",
    [(0, []), (1, [1]), (3, [3]), (4, [4]), (5, [4, 1]), (8, [4, 4]), (11, [4, 4, 3])],
)
def test_fixed_cuts_every_chunk_size_tokens_and_keeps_the_tail(num_tokens: int, sizes: list[int]):
    chunks = fixed(range(num_tokens), 4, start=100)
    assert [len(chunk) for chunk in chunks] == sizes
    assert [token for chunk in chunks for token in chunk.ids] == list(range(num_tokens))
    assert [chunk.start for chunk in chunks] == [100 + 4 * i for i in range(len(sizes))]


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 50])
def test_a_document_is_one_chunk_of_any_length(num_tokens: int):
    assert chunk_prompt([doc(*range(num_tokens))], 4) == [Chunk(tuple(range(num_tokens)), 0, document=True)]


def test_neighbouring_texts_are_one_run_and_documents_are_not():
    chunks = chunk_prompt([text(1, 2, 3), text(4, 5), doc(6, 7), doc(8), text(9), text(10, 11, 12, 13)], 4)
    assert chunks == [
        Chunk((1, 2, 3, 4), 0),
        Chunk((5,), 4),
        Chunk((6, 7), 5, document=True),
        Chunk((8,), 7, document=True),
        Chunk((9, 10, 11, 12), 8),
        Chunk((13,), 12),
    ]


def test_empty_segments_vanish():
    assert chunk_prompt([], 4) == chunk_prompt([text(), doc(), text()], 4) == []
    assert chunk_prompt([text(1), doc(), text(2)], 4) == chunk_prompt([text(1, 2)], 4)
    assert chunk_prompt([doc(1), text(), doc(2)], 4) == chunk_prompt([doc(1), doc(2)], 4)


@pytest.mark.parametrize("before", [(), (1,), tuple(range(9))])
def test_what_stands_before_a_document_or_text_run_never_moves_its_cuts(before: tuple[int, ...]):
    tail = [doc(*range(20, 30)), text(*range(50, 60))]
    behind = chunk_prompt([text(*before), *tail], 4)[-4:]
    assert [chunk.ids for chunk in behind] == [chunk.ids for chunk in chunk_prompt(tail, 4)]


@pytest.mark.parametrize("seed", range(20))
def test_chunks_are_the_prompt_in_order_and_without_gaps(seed: int):
    rng = random.Random(seed)
    size = rng.choice([1, 2, 7, 128])
    segments = [
        Segment(tuple(rng.randrange(300) for _ in range(rng.randrange(3 * min(size, 20)))), document=rng.random() < 0.4)
        for _ in range(rng.randrange(12))
    ]
    chunks = chunk_prompt(segments, size)
    assert [token for chunk in chunks for token in chunk.ids] == [t for segment in segments for t in segment.ids]
    assert [chunk.start for chunk in chunks] == [0, *(chunk.end for chunk in chunks)][: len(chunks)]
    assert all(0 < len(chunk) <= size for chunk in chunks if not chunk.document)
    assert [chunk.ids for chunk in chunks if chunk.document] == [s.ids for s in segments if s.document and s.ids]
