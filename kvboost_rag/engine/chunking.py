"""Cuts a prompt into chunks (paper, section 4.1).

Knows segments and counts; knows nothing of text, hashes or models. A document is one chunk (DOCUMENT); neighbouring
text segments are joined into a run and cut every ``chunk_size`` tokens from the run's start (FIXED), so that a
separator or a question never moves the cut of a document behind it. A tail shorter than a chunk is a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from kvboost_rag.engine.types import Chunk, Segment


def fixed(ids: Sequence[int], chunk_size: int, start: int = 0) -> list[Chunk]:
    """Splits at {0, C, 2C, ...}, counted from the first id."""
    return [Chunk(ids=tuple(ids[at : at + chunk_size]), start=start + at) for at in range(0, len(ids), chunk_size)]


def chunk_prompt(segments: Sequence[Segment], chunk_size: int) -> list[Chunk]:
    """Chunks of a whole prompt, in order and without gaps. Empty segments vanish."""
    chunks: list[Chunk] = []
    position = 0
    for document, group in groupby((s for s in segments if s.ids), key=lambda s: s.document):
        members = list(group)
        if document:
            for segment in members:
                chunks.append(Chunk(ids=tuple(segment.ids), start=position, document=True))
                position += len(segment.ids)
        else:
            run = [token for segment in members for token in segment.ids]
            chunks.extend(fixed(run, chunk_size, start=position))
            position += len(run)
    return chunks
