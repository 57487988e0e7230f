"""Chunking: prompts are cut without loss, a document is one chunk, text is cut every chunk_size tokens of its run.

With a window, cuts move to punctuation nearby and nowhere else.
"""

from __future__ import annotations

import random

import pytest

from kvboost_rag.engine.chunking import adaptive, chunk_prompt, fixed, overlapped, sink_positions
from kvboost_rag.engine.keys import chunk_keys
from kvboost_rag.engine.types import Chunk, Segment
from kvboost_rag.errors import OptionError


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


def random_segments(rng: random.Random, size: int) -> list[Segment]:
    return [
        Segment(tuple(rng.randrange(300) for _ in range(rng.randrange(3 * min(size, 20)))), document=rng.random() < 0.4)
        for _ in range(rng.randrange(12))
    ]


@pytest.mark.parametrize("seed", range(20))
def test_chunks_are_the_prompt_in_order_and_without_gaps(seed: int):
    rng = random.Random(seed)
    size = rng.choice([1, 2, 7, 128])
    segments = random_segments(rng, size)
    chunks = chunk_prompt(segments, size)
    assert [token for chunk in chunks for token in chunk.ids] == [t for segment in segments for t in segment.ids]
    assert [chunk.start for chunk in chunks] == [0, *(chunk.end for chunk in chunks)][: len(chunks)]
    assert all(0 < len(chunk) <= size for chunk in chunks if not chunk.document)
    assert [chunk.ids for chunk in chunks if chunk.document] == [s.ids for s in segments if s.document and s.ids]


def cut_at_nominal_splits(segments: list[Segment], chunk_size: int) -> list[Chunk]:
    """The reference: one token after the other, a chunk closed where a document or C tokens of text end."""
    chunks: list[Chunk] = []
    open_text = False
    for segment in (s for s in segments if s.ids):
        start = chunks[-1].end if chunks else 0
        if segment.document:
            chunks.append(Chunk(segment.ids, start, document=True))
        for token in () if segment.document else segment.ids:
            if open_text and len(chunks[-1]) < chunk_size:
                chunks[-1] = Chunk((*chunks[-1].ids, token), chunks[-1].start)
            else:
                chunks.append(Chunk((token,), chunks[-1].end if chunks else 0))
            open_text = True
        open_text = not segment.document
    return chunks


@pytest.mark.parametrize("seed", range(40))
def test_without_a_window_or_without_breaks_every_split_is_nominal(seed: int):
    rng = random.Random(seed)
    size = rng.choice([1, 2, 3, 7, 128])
    segments = random_segments(rng, size)
    expected = cut_at_nominal_splits(segments, size)
    assert chunk_prompt(segments, size) == expected
    assert chunk_prompt(segments, size, window=0, breaks=frozenset(range(300))) == expected
    assert chunk_prompt(segments, size, window=(size - 1) // 2) == expected


def nearest(ids: tuple[int, ...], at: int, window: int, breaks: frozenset[int]) -> int:
    """The reference: of all splits in the window, the nearest and then the leftmost."""
    allowed = [s for s in range(at - window, at + window + 1) if 0 < s < len(ids) and ids[s - 1] in breaks]
    return min(allowed, key=lambda split: (abs(split - at), split), default=at)


@pytest.mark.parametrize("seed", range(60))
def test_splits_move_to_the_nearest_break_in_their_window(seed: int):
    rng = random.Random(seed)
    size = rng.choice([3, 4, 7, 16])
    window = rng.randrange((size + 1) // 2)
    breaks = frozenset(range(rng.choice([0, 1, 10, 100])))
    ids = tuple(rng.randrange(100) for _ in range(rng.randrange(6 * size)))
    chunks = adaptive(ids, size, window, breaks, start=1000)
    splits = [chunk.start - 1000 for chunk in chunks][1:]
    assert splits == [nearest(ids, at, window, breaks) for at in range(size, len(ids), size)]
    assert sorted(set(splits)) == splits
    assert tuple(token for chunk in chunks for token in chunk.ids) == ids
    assert all(0 < len(chunk) <= size + 2 * window for chunk in chunks)
    assert [c.end for c in chunks[:-1]] == [c.start for c in chunks[1:]]
    assert adaptive(list(ids), size, window, set(breaks), start=1000) == chunks


@pytest.mark.parametrize(
    "breaks_behind, expected",
    [
        ((), 8),  # none: stays
        ((8,), 8),
        ((7, 9), 7),  # a tie goes left
        ((6, 9), 9),  # the nearer one
        ((5,), 5),
        ((4, 12), 8),  # outside the window
        ((11,), 11),
    ],
)
def test_a_split_lies_right_behind_the_break_token(breaks_behind: tuple[int, ...], expected: int):
    ids = tuple(99 if at + 1 in breaks_behind else 0 for at in range(16))
    assert [len(chunk) for chunk in chunk_prompt([text(*ids)], 8, 3, frozenset({99}))] == [expected, 16 - expected]


def test_the_grid_stays_where_it_is_when_a_split_moves():
    ids = tuple(99 if at == 9 else 0 for at in range(24))
    assert [chunk.start for chunk in chunk_prompt([text(*ids)], 8, 3, frozenset({99}))] == [0, 10, 16]


@pytest.mark.parametrize("num_tokens", [9, 10, 11])
def test_the_end_of_the_run_is_no_split_even_where_it_is_a_break(num_tokens: int):
    ids = (*([0] * (num_tokens - 1)), 99)
    assert [len(chunk) for chunk in chunk_prompt([text(*ids)], 8, 3, frozenset({99}))] == [8, num_tokens - 8]


def test_a_window_moves_no_cut_of_a_document():
    segments = [text(*range(10)), doc(*range(20)), text(*range(10))]
    chunks = chunk_prompt(segments, 4, 1, frozenset({4, 6}))
    assert [(chunk.start, len(chunk)) for chunk in chunks] == [
        (0, 5),
        (5, 2),
        (7, 3),
        (10, 20),
        (30, 5),
        (35, 2),
        (37, 3),
    ]
    assert [chunk.document for chunk in chunks] == [False] * 3 + [True] + [False] * 3


def test_hashes_are_those_of_the_ids_between_the_cuts_made():
    before, behind = [0, 1, 2, 3, 99], [4, 5, 6, 7, 8]
    cut = chunk_prompt([text(*before, *behind)], 6, 2, frozenset({99}))
    apart = [Chunk(tuple(before), 0), Chunk(tuple(behind), 5)]
    assert chunk_keys(cut, b"") == chunk_keys(apart, b"")
    assert chunk_keys(cut, b"")[0] != chunk_keys(chunk_prompt([text(*before, *behind)], 6), b"")[0]


@pytest.mark.parametrize("size, window", [(128, 64), (128, -1), (4, 2), (3, 2), (1, 1), (2, 1)])
@pytest.mark.parametrize("segments", [[], [text(1)], [doc(1)]])
def test_a_window_of_half_a_chunk_or_more_is_refused(size: int, window: int, segments: list[Segment]):
    with pytest.raises(OptionError, match=rf"window={window} .* chunk_size={size}"):
        chunk_prompt(segments, size, window)


@pytest.mark.parametrize("size, window", [(128, 63), (3, 1), (1, 0), (2, 0)])
def test_a_window_below_half_a_chunk_is_taken(size: int, window: int):
    assert chunk_prompt([text(1)], size, window) == [Chunk((1,), 0)]


@pytest.mark.parametrize(
    "overlap, spans",
    [
        (0, [(0, 4), (4, 5), (5, 9), (9, 11)]),
        (1, [(0, 4), (3, 5), (4, 9), (8, 11)]),
        (3, [(0, 4), (1, 5), (2, 9), (6, 11)]),
        (99, [(0, 4), (0, 5), (0, 9), (0, 11)]),
    ],
)
def test_overlap_puts_the_tokens_before_a_chunk_in_front_of_it(overlap: int, spans: list[tuple[int, int]]):
    chunks = chunk_prompt([text(*range(4)), doc(4), text(*range(5, 11))], 4)
    assert overlapped(chunks, overlap) == spans
    assert [end - len(chunk) for (_, end), chunk in zip(spans, chunks, strict=True)] == [c.start for c in chunks]


def test_overlap_never_reaches_before_the_first_chunk_given():
    assert overlapped([Chunk((1, 2), 10), Chunk((3,), 12)], 5) == [(10, 12), (10, 13)]
    assert overlapped([], 5) == []


@pytest.mark.parametrize(
    "num_tokens, sinks, expected", [(10, 0, []), (10, 4, [0, 1, 2, 3]), (2, 4, [0, 1]), (0, 4, [])]
)
def test_sinks_are_the_first_positions_of_the_prompt(num_tokens: int, sinks: int, expected: list[int]):
    assert list(sink_positions(num_tokens, sinks)) == expected


def test_negative_overlap_and_sinks_are_refused():
    with pytest.raises(OptionError, match="overlap=-1"):
        overlapped([], -1)
    with pytest.raises(OptionError, match="sinks=-2"):
        sink_positions(10, -2)
