"""Cuts a prompt into chunks (paper, section 4.1).

Knows segments, counts and which ids a cut reads well behind; knows nothing of text, hashes or models. A document is one
chunk (DOCUMENT); neighbouring text segments are joined into a run and cut every ``chunk_size`` tokens from the run's
start (FIXED), so that a separator or a question never moves the cut of a document behind it. A tail shorter than a
chunk is a chunk.

With a window, a cut moves to punctuation nearby. Chunks then hold the ids between the cuts actually made and are hashed
by them like any others. The paper hashes between the nominal cuts instead, where equal hashes need not mean equal KV.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import groupby, pairwise

from kvboost_rag.engine.types import Chunk, Segment
from kvboost_rag.errors import OptionError


@dataclass(frozen=True)
class Cutting:
    """How prompts are cut: ``chunk_size`` (the paper's C), ``window`` (w) around each split of text in which an id of
    ``breaks`` attracts it, and ``sinks`` (s), first tokens of a prompt that are always computed fresh.

    ``read_together``: whether each part of a document is read behind all of its parts before it, so that there is no
    seam between them to repair.
    """

    chunk_size: int = 128
    window: int = 0
    breaks: frozenset[int] = frozenset()
    sinks: int = 0
    read_together: bool = True

    def __post_init__(self) -> None:
        _check_window(self.window, self.chunk_size)
        sink_positions(0, self.sinks)

    def chunks(self, segments: Sequence[Segment]) -> list[Chunk]:
        return chunk_prompt(segments, self.chunk_size, self.window, self.breaks)


def fixed(ids: Sequence[int], chunk_size: int, start: int = 0) -> list[Chunk]:
    """Splits at {0, C, 2C, ...}, counted from the first id."""
    return [Chunk(ids=tuple(ids[at : at + chunk_size]), start=start + at) for at in range(0, len(ids), chunk_size)]


def adaptive(
    ids: Sequence[int], chunk_size: int, window: int, breaks: Set[int] = frozenset(), start: int = 0
) -> list[Chunk]:
    """FIXED, but each split p in {C, 2C, ...} moves to the nearest one in [p-w, p+w] right behind an id of ``breaks``.

    Of two equally near, the left one; where there is none, p stays. The next split is looked for around its own p, not
    around where this one went. With w < C/2 windows never meet, so chunks have 1 to C + 2w tokens. A split may look
    ``window`` ids ahead: what is appended to a run can move the last split before its end.
    """
    _check_window(window, chunk_size)
    splits = [_nearest_break(ids, at, window, breaks) for at in range(chunk_size, len(ids), chunk_size)]
    bounds = [0, *splits, len(ids)] if ids else []
    return [Chunk(ids=tuple(ids[left:right]), start=start + left) for left, right in pairwise(bounds)]


def chunk_prompt(
    segments: Sequence[Segment], chunk_size: int, window: int = 0, breaks: Set[int] = frozenset()
) -> list[Chunk]:
    """Chunks of a whole prompt, in order and without gaps. Empty segments vanish.

    ``window`` (the paper's w, ``chunk_boundary_window``) and ``breaks`` move the splits of text as ``adaptive`` says;
    documents are never split. Raises OptionError (a ValueError) unless 0 <= window < chunk_size / 2.
    """
    _check_window(window, chunk_size)
    chunks: list[Chunk] = []
    position = 0
    for document, group in groupby((s for s in segments if s.ids), key=lambda s: s.document):
        members = list(group)
        if document:
            for segment in members:
                chunks.append(Chunk(tuple(segment.ids), position, document=True, part=segment.part))
                position += len(segment.ids)
        else:
            run = [token for segment in members for token in segment.ids]
            cut = adaptive(run, chunk_size, window, breaks, position) if window else fixed(run, chunk_size, position)
            chunks.extend(cut)
            position += len(run)
    return chunks


def overlapped(chunks: Sequence[Chunk], overlap: int) -> list[tuple[int, int]]:
    """Token spans to compute when each chunk is encoded apart: [start - k, end), in the prompt's positions.

    ``chunks``: of one prompt, in order and without gaps. What lies before a chunk's start is context only and not kept:
    k tokens, or as many as there are since the first chunk's start. They may reach past a chunk shorter than k.
    """
    if overlap < 0:
        raise OptionError.bad_value("overlap", overlap, "a whole number of tokens, 0 or more")
    return [(max(chunks[0].start, chunk.start - overlap), chunk.end) for chunk in chunks]


def sink_positions(num_tokens: int, sinks: int) -> range:
    """The first positions of a prompt of ``num_tokens``: many heads rest on them, so they are always computed fresh."""
    if sinks < 0:
        raise OptionError.bad_value("sinks", sinks, "a whole number of tokens, 0 or more")
    return range(min(sinks, num_tokens))


def _check_window(window: int, chunk_size: int) -> None:
    if not 0 <= 2 * window < max(chunk_size, 1):
        choices = f"a whole number of tokens, 0 or more and less than half of chunk_size={chunk_size}"
        raise OptionError.bad_value("window", window, choices)


def _nearest_break(ids: Sequence[int], at: int, window: int, breaks: Set[int]) -> int:
    """Where the split at ``at`` goes: inside (0, len(ids)), right behind an id of ``breaks``, or nowhere else."""
    for distance in range(window + 1):
        for split in (at - distance, at + distance):
            if 0 < split < len(ids) and ids[split - 1] in breaks:
                return split
    return at
