"""The passages of a store: texts cut to a size, and where they come from.

Knows texts and how a tokenizer counts them; knows nothing of files, models or KV.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

from kvboost_rag.boundaries import EncodeWithOffsets, split_document
from kvboost_rag.cli.loading import Text


class Passage(NamedTuple):
    """``id``: of the text, so that equal texts have one KV and one vector. ``file``: as ``Corpus.name_of`` names it;
    ``digest``: of the file's bytes and the size its texts were cut to; ``source``: the file, or a line's own."""

    id: str
    source: str
    text: str
    file: str
    digest: str


def text_id(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def digest_of(data: bytes, passage_tokens: int) -> str:
    """Changes when a file has to be cut again."""
    return hashlib.sha256(f"{passage_tokens}\n".encode() + data).hexdigest()[:16]


def cut(texts: Iterable[Text], file: str, digest: str, encode: EncodeWithOffsets, passage_tokens: int) -> list[Passage]:
    """The passages of one file, at most ``passage_tokens`` each, cut at ends of paragraphs and sentences.

    The same text twice from the same source is one passage.
    """
    found: dict[tuple[str, str], Passage] = {}
    for text in texts:
        source = text.source or (f"{file}:{text.line}" if text.line else file)
        for piece in split_document(text.text.strip(), encode, passage_tokens):
            stripped = piece.text.strip()
            if stripped:
                found[source, stripped] = Passage(text_id(stripped), source, stripped, file, digest)
    return list(found.values())
