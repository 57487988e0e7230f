"""Finds warmed documents inside plain prompt text.

Knows texts; knows nothing of tokens, hashes of KV or models. Frameworks hand over one string in which the documents
stand somewhere, so the hits have to be found again: exact text, whole documents, longest first. Each document is
filed under its first characters (its anchor); one walk over the prompt looks every position up, so the cost grows with
the prompt, not with the corpus. Documents that share an anchor (a common title, a letterhead) are told apart by longer
and longer beginnings; a near-duplicate never matches, since the last word is always a comparison of the whole text.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

ANCHOR_LENGTHS = (32, 8)  # characters; the short one for short documents of dense scripts
BUCKET_SIZE = 8


@dataclass
class _Node:
    """Texts that share their first ``length`` characters.

    A short list, told apart by their lengths; once crowded, the longer ones move to nodes of twice the length.
    """

    length: int
    texts: set[str] = field(default_factory=set)
    sizes: Counter[int] = field(default_factory=Counter)  # how many of ``texts`` have each length
    children: dict[str, _Node] = field(default_factory=dict)

    def add(self, text: str) -> None:
        deeper = 2 * self.length
        if self.children and len(text) >= deeper:
            self._child(text[:deeper]).add(text)
        elif text not in self.texts:
            self.texts.add(text)
            self.sizes[len(text)] += 1
            if not self.children and len(self.texts) > BUCKET_SIZE:
                for crowd in [t for t in self.texts if len(t) >= deeper]:
                    self._remove(crowd)
                    self._child(crowd[:deeper]).add(crowd)

    def _child(self, beginning: str) -> _Node:
        return self.children.setdefault(beginning, _Node(len(beginning)))

    def _remove(self, text: str) -> None:
        self.texts.remove(text)
        self.sizes[len(text)] -= 1
        if not self.sizes[len(text)]:
            del self.sizes[len(text)]

    def discard(self, text: str) -> None:
        if text in self.texts:
            self._remove(text)
            return
        child = self.children.get(text[: 2 * self.length])
        if child is not None:
            child.discard(text)
            if child.is_empty:
                del self.children[text[: 2 * self.length]]

    @property
    def is_empty(self) -> bool:
        return not self.texts and not self.children

    def lengths(self, prompt: str, at: int) -> list[int]:
        """Lengths of all filed texts that stand at ``at``."""
        found = [size for size in self.sizes if prompt[at : at + size] in self.texts]
        child = self.children.get(prompt[at : at + 2 * self.length])
        return found + child.lengths(prompt, at) if child is not None else found


class DocumentIndex:
    """The texts of warmed documents. Safe from many threads."""

    def __init__(self) -> None:
        self._anchors: dict[int, dict[str, _Node]] = {length: {} for length in ANCHOR_LENGTHS}
        self._lock = threading.Lock()

    def add(self, text: str) -> None:
        """File ``text``, without white space at its ends. Texts shorter than the shortest anchor are not filed."""
        text = text.strip()
        length = _anchor_length(text)
        if length is not None:
            with self._lock:
                anchors = self._anchors[length]
                anchors.setdefault(text[:length], _Node(length)).add(text)

    def discard(self, text: str) -> None:
        text = text.strip()
        length = _anchor_length(text)
        if length is not None:
            with self._lock:
                node = self._anchors[length].get(text[:length])
                if node is not None:
                    node.discard(text)
                    if node.is_empty:
                        del self._anchors[length][text[:length]]

    def clear(self) -> None:
        with self._lock:
            for anchors in self._anchors.values():
                anchors.clear()

    def find(self, prompt: str) -> list[tuple[int, int]]:
        """Where filed documents stand in ``prompt``: [start, end) in characters, ascending, without overlap.

        Where two overlap the longer one wins, then the earlier.
        """
        with self._lock:
            matches = [
                (at, at + size)
                for length, anchors in self._anchors.items()
                if anchors
                for at in range(len(prompt) - length + 1)
                if (node := anchors.get(prompt[at : at + length])) is not None
                for size in node.lengths(prompt, at)
            ]
        chosen: list[tuple[int, int]] = []
        for start, end in sorted(matches, key=lambda m: (m[0] - m[1], m[0])):
            if all(end <= other_start or start >= other_end for other_start, other_end in chosen):
                chosen.append((start, end))
        return sorted(chosen)


def _anchor_length(text: str) -> int | None:
    return next((length for length in ANCHOR_LENGTHS if len(text) >= length), None)
