"""From a prompt to token segments, warmed documents found on the way.

Knows prompts, a tokenizer and the texts of warmed documents; knows nothing of KV or models. Every way of asking goes
through here, so equal prompts have equal ids.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvboost_rag.detect import DocumentIndex
from kvboost_rag.documents import DocumentCutter, is_chunking, pieces_at
from kvboost_rag.engine.store import WarmText
from kvboost_rag.engine.types import Segment
from kvboost_rag.prompt import ChatFormat, Piece, Prompt, completion
from kvboost_rag.tokens import Tokens

MIN_DETECTED_TOKENS = 32
CERTAINLY_LONG = 1000  # characters

PromptLike = str | Prompt | Sequence[Mapping[str, Any]]


class Segmenter:
    """Turns whatever a caller may pass as a prompt into segments."""

    def __init__(
        self,
        tokens: Tokens,
        chat_format: ChatFormat,
        cutter: DocumentCutter,
        texts: Callable[[], Iterable[WarmText]] = tuple,
    ):
        """``texts``: documents that are warm from the start; asked for once, when documents are first looked for."""
        self._tokens, self._chat_format, self._cutter = tokens, chat_format, cutter
        self._texts = texts
        self._once = threading.Lock()
        self.index = DocumentIndex()

    def file(self, text: str, num_tokens: int) -> None:
        """From now on find ``text`` in prompts, if it is long enough to be told from chance; and the pieces it was
        made of."""
        found = [p for p in self._pieces(text) if len(self._tokens.encode(p)) >= MIN_DETECTED_TOKENS]
        if found or num_tokens >= MIN_DETECTED_TOKENS or len(text) > CERTAINLY_LONG:
            for each in (text, *found):
                self.index.add(each)

    def unfile(self, text: str) -> None:
        """No longer find ``text``, nor the pieces it was made of."""
        for each in (text, *self._pieces(text)):
            self.index.discard(each)

    def _pieces(self, text: str) -> list[str]:
        """What of ``text`` is found on its own; a piece with white space at an end would have other ids there."""
        pieces = pieces_at(text, self._cutter.chunking_of(text))
        return [piece for piece in pieces if len(pieces) > 1 and piece == piece.strip()]

    def recall(self) -> None:
        """File what was warm from the start, the first time this is called."""
        with self._once:
            texts, self._texts = self._texts, tuple
            for known in texts():
                if is_chunking(known.chunking):
                    self._cutter.note(known.text, known.chunking)
                self.file(known.text, known.num_tokens)

    def as_prompt(self, prompt: PromptLike) -> Prompt:
        """A string is a raw completion, a list of chat messages is templated. Raises TypeError on anything else."""
        if isinstance(prompt, Prompt):
            return prompt
        if isinstance(prompt, str):
            return completion(prompt)
        if isinstance(prompt, list | tuple):
            return self._chat_format.render(prompt)
        raise TypeError(f"a prompt is a string, a list of chat messages or a Prompt, not {type(prompt).__name__}")

    def segments(self, prompt: PromptLike, detect: bool = True) -> list[Segment]:
        """The prompt's ids, piece by piece; at most one BOS, in front."""
        prompt = self.as_prompt(prompt)
        if detect:
            self.recall()
        segments = []
        if prompt.opening and not (prompt.pieces and self._tokens.starts_with_opening(prompt.pieces[0].text)):
            segments.append(Segment(self._tokens.opening_ids))
        for piece in prompt.pieces:
            for part in self._parts(piece) if detect else (piece,):
                segments += self._encoded(part)
        return segments

    def _encoded(self, piece: Piece) -> tuple[Segment, ...]:
        if piece.kind == "document":
            return self._cutter.cut(piece.text)
        encode = self._tokens.encode_template if piece.kind == "template" else self._tokens.encode
        return (Segment(encode(piece.text)),)

    def _parts(self, piece: Piece) -> list[Piece]:
        """``piece`` cut around the warmed documents that stand in it."""
        if piece.kind == "document":
            return [piece]
        parts, at = [], 0
        for start, end in self.index.find(piece.text):
            parts += [Piece(piece.text[at:start], piece.kind), Piece(piece.text[start:end], "document")]
            at = end
        parts.append(Piece(piece.text[at:], piece.kind))
        return [part for part in parts if part.text]
