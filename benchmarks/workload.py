"""Documents and prompts of a wanted size, and what the store keeps of a document.

Knows an engine and the texts of ``common``; knows nothing of clocks or of what is measured.
"""

from __future__ import annotations

from collections.abc import Sequence

from common import texts_of

from kvboost_rag import KVBoost, Prompt
from kvboost_rag.engine.store import Entry
from kvboost_rag.engine.types import Segment, total_tokens

QUESTION = "What do these passages have in common?"
NUM_DOCUMENTS = 4
SLACK = 40  # tokens by which a text may be longer than asked for, and a separator


def documents_of(boost: KVBoost, context: int, room: int = 0, count: int = NUM_DOCUMENTS) -> list[str]:
    """``count`` texts which, with QUESTION and ``room`` new tokens, fill a context of ``context`` tokens nearly."""
    around = boost.count_tokens(boost.prompt([], QUESTION))
    each = (min(context, boost.context_tokens) - room - around) // count - SLACK
    if each < 1:
        raise SystemExit(f"a context of {context} tokens has no room for {count} documents")
    return texts_of(boost.tokenizer, each, count)


def asked(boost: KVBoost, documents: Sequence[str]) -> Prompt:
    """QUESTION over ``documents`` in another order than they were read in."""
    return boost.prompt(list(reversed(documents)), QUESTION)


def parts_of(boost: KVBoost, text: str) -> list[Segment]:
    """A document as prompts have it: one segment, or several if it is very long."""
    return [segment for segment in boost.segments(boost.prompt([text])) if segment.document]


def entries_of(boost: KVBoost, text: str) -> list[Entry]:
    """What the store keeps of a warm document, part by part."""
    parts = parts_of(boost, text)
    found = [boost.engine.store.peek(boost.engine.content_key(part.ids, total_tokens(parts))) for part in parts]
    entries = [entry for entry in found if entry is not None]
    if len(entries) < len(parts):
        raise RuntimeError(f"not warm: {text[:40]!r}")
    return entries
