"""From a prompt to token segments, warmed documents found on the way.

Knows prompts, a tokenizer and the texts of warmed documents; knows nothing of KV or models. Every way of asking goes
through here, so equal prompts have equal ids.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvboost_rag.detect import DocumentIndex
from kvboost_rag.engine.types import Segment
from kvboost_rag.prompt import ChatFormat, Piece, Prompt, completion
from kvboost_rag.tokens import Tokens

MIN_DETECTED_TOKENS = 32

PromptLike = str | Prompt | Sequence[Mapping[str, Any]]


class Segmenter:
    """Turns whatever a caller may pass as a prompt into segments."""

    def __init__(
        self,
        tokens: Tokens,
        chat_format: ChatFormat,
        texts: Callable[[], Iterable[tuple[str, int]]] = tuple,
    ):
        """``texts``: documents that are warm from the start, with their numbers of tokens; asked for once, when
        documents are first looked for."""
        self._tokens, self._chat_format = tokens, chat_format
        self._texts = texts
        self._once = threading.Lock()
        self.index = DocumentIndex()

    def file(self, text: str, num_tokens: int) -> None:
        """From now on find ``text`` in prompts, if it is long enough to be told from chance."""
        if num_tokens >= MIN_DETECTED_TOKENS:
            self.index.add(text)

    def _file_those_from_before(self) -> None:
        with self._once:
            texts, self._texts = self._texts, tuple
            for text, num_tokens in texts():
                self.file(text, num_tokens)

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
            self._file_those_from_before()
        segments = []
        if prompt.opening and not (prompt.pieces and self._tokens.starts_with_opening(prompt.pieces[0].text)):
            segments.append(Segment(self._tokens.opening_ids))
        for piece in prompt.pieces:
            for part in self._parts(piece) if detect else (piece,):
                segments.append(Segment(self._encode(part), document=part.kind == "document"))
        return segments

    def _encode(self, piece: Piece) -> tuple[int, ...]:
        if piece.kind == "template":
            return self._tokens.encode_template(piece.text)
        return self._tokens.encode_document(piece.text) if piece.kind == "document" else self._tokens.encode(piece.text)

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
