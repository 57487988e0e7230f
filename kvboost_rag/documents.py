"""How a text that is warmed is cut: into one chunk, or into several that follow one another (paper, section 4.1).

Knows texts and a tokenizer; knows nothing of KV, prompts or models. A text is cut the same way whenever it is met, so
what was warmed is found. The parts concatenate to the text and are run together when it is warmed; each is kept,
evicted and reused on its own.
"""

from __future__ import annotations

import re
import threading
from functools import lru_cache
from itertools import pairwise

from kvboost_rag.boundaries import EncodeWithOffsets, offsets_of, semantic
from kvboost_rag.engine.types import Segment
from kvboost_rag.errors import OptionError
from kvboost_rag.tokens import Tokens

NUM_REMEMBERED = 1024  # documents
CHUNKINGS = ("document", "semantic", "fixed")
_AT = re.compile(r"at:\d+(,\d+)*")


def check_chunking(chunking: str) -> str:
    """Raises OptionError for a name that is not one of CHUNKINGS, nor ``at:`` and numbers of characters."""
    if not is_chunking(chunking):
        choices = f"one of {', '.join(map(repr, CHUNKINGS))}, or 'at:' and numbers of characters"
        raise OptionError.bad_value("chunking", chunking, choices)
    return chunking


def is_chunking(chunking: object) -> bool:
    return isinstance(chunking, str) and (chunking in CHUNKINGS or bool(_AT.fullmatch(chunking)))


def pieces_at(text: str, chunking: str) -> list[str]:
    """``text`` cut behind the characters that ``at:...`` names; whole for another chunking."""
    if not chunking.startswith("at:"):
        return [text]
    cuts = sorted({int(at) for at in chunking[3:].split(",")} - {0})
    bounds = [0, *(at for at in cuts if at < len(text)), len(text)]
    return [text[start:end] for start, end in pairwise(bounds)]


class DocumentCutter:
    """Cuts texts into segments, and remembers which of them are not cut in the usual way. Safe from many threads.

    ``"document"``: one chunk; where a text has more than ``max_document_tokens``, as ``"semantic"`` with that size.
    ``"semantic"``: at paragraph ends, then sentence ends, parts of at most ``chunk_size`` tokens.
    ``"fixed"``: every ``chunk_size`` tokens; for texts whose beginnings come back while their ends change.
    ``"at:35"``: behind these characters, for texts made of parts that are found on their own too (the metadata lines of
    a node and its text); each part as in ``"document"``.
    """

    def __init__(self, tokens: Tokens, chunk_size: int = 128, max_document_tokens: int = 2048):
        self._tokens = tokens
        self._chunk_size, self._max_document_tokens = chunk_size, max_document_tokens
        self._offsets: EncodeWithOffsets | None = None
        self._unusual: dict[str, str] = {}  # text -> chunking
        self._lock = threading.Lock()
        self._remembered = lru_cache(maxsize=NUM_REMEMBERED)(self._cut)

    def note(self, text: str, chunking: str) -> None:
        """From now on cut ``text`` that way. Raises OptionError."""
        check_chunking(chunking)
        with self._lock:
            if chunking == "document":
                self._unusual.pop(text, None)
            else:
                self._unusual[text] = chunking

    def clear(self) -> None:
        with self._lock:
            self._unusual.clear()

    def chunking_of(self, text: str) -> str:
        return self._unusual.get(text, "document")

    def cut(self, text: str) -> tuple[Segment, ...]:
        """The document ``text`` as segments, one for each part. An empty text has none."""
        return self._remembered(text, self.chunking_of(text))

    def _cut(self, text: str, chunking: str) -> tuple[Segment, ...]:
        parts = [part for piece in pieces_at(text, chunking) for part in self._parts(piece, chunking)]
        return tuple(Segment(part, document=True, part=number) for number, part in enumerate(parts))

    def _parts(self, text: str, chunking: str) -> list[tuple[int, ...]]:
        ids = self._tokens.encode(text)
        size = self._chunk_size if chunking in ("semantic", "fixed") else self._max_document_tokens
        if len(ids) <= size:
            return [ids] if ids else []
        if chunking == "fixed":
            return [ids[at : at + size] for at in range(0, len(ids), size)]
        return [self._tokens.encode(text[start:end]) for start, end in semantic(text, self._encode(), size)]

    def _encode(self) -> EncodeWithOffsets:
        if self._offsets is None:  # a private tokenizer more, only where a long text comes
            self._offsets = offsets_of(self._tokens.tokenizer)
        return self._offsets
