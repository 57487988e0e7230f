"""Which texts go together into one prompt, none of them cut.

Knows texts, their scores and how many tokens prompts have; knows nothing of LlamaIndex.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvboost_rag.errors import PromptTooLongError
from kvboost_rag.prompt import Piece, Prompt


@dataclass(frozen=True)
class Packing:
    """One question and its texts: which of them go together into one prompt. Texts are named by their positions.

    ``loose``: texts that are not warm themselves, but end with one that is; it is found where it stands.
    """

    engine: Any
    question: str
    texts: Sequence[str]
    max_new_tokens: int
    context_tokens: int
    system: str | None
    instruction: str
    refine: str
    loose: frozenset[str]

    def prompt(self, chosen: Sequence[int], answer: str | None = None) -> Prompt:
        """The engine's prompt with these texts in this order; with ``answer``, one that refines it."""
        question = self.question if answer is None else self.refine.format(question=self.question, answer=answer)
        built = self.engine.prompt([self.texts[i] for i in chosen], question, self.system, self.instruction)
        pieces = (Piece(p.text) if p.kind == "document" and p.text in self.loose else p for p in built.pieces)
        return Prompt(tuple(pieces), built.opening)

    def num_tokens(self, chosen: Sequence[int], answer: str | None = None) -> int:
        return int(self.engine.count_tokens(self.prompt(chosen, answer)))

    def fits(self, chosen: Sequence[int], answer: str | None = None) -> bool:
        return self.num_tokens(chosen, answer) + self.max_new_tokens <= self.context_tokens

    def check(self, chosen: Sequence[int], answer: str | None = None) -> None:
        """Raises PromptTooLongError if these texts do not fit together."""
        num_tokens = self.num_tokens(chosen, answer)
        if num_tokens + self.max_new_tokens > self.context_tokens:
            what = f"the prompt with {len(chosen)} of {len(self.texts)} nodes"
            raise PromptTooLongError(num_tokens, self.max_new_tokens, self.context_tokens, what)

    def check_each(self) -> None:
        """Raises PromptTooLongError if a text does not fit alone, where several prompts are needed."""
        everything = list(range(len(self.texts)))
        if not self.fits(everything):
            for i in everything:
                self.check([i], "" if i else None)
            self.check(everything[:1])

    def best(self, scores: Sequence[float | None]) -> list[int]:
        """All texts, or those left when the ones with the lowest scores are gone, as few as need be. Warns.

        Raises PromptTooLongError if none is left.
        """
        everything = list(range(len(self.texts)))
        if self.fits(everything):
            return everything
        worst_first = sorted(everything, key=lambda i: (_rank(scores[i]), -i))
        left = [i for i in everything if self.fits([i])]
        going = [i for i in worst_first if i in left]
        while left and not self.fits(left):
            left.remove(going.pop(0))
        if not left:
            self.check(worst_first[-1:])
        warnings.warn(
            f"{len(everything) - len(left)} of {len(everything)} nodes were left out, those with the lowest scores and "
            f"those too long by themselves: the prompt with all of them has {self.num_tokens(everything)} tokens and "
            f"{self.max_new_tokens} new ones were asked for, but the model's context holds "
            f"{self.context_tokens}.",
            UserWarning,
            stacklevel=2,
        )
        return left

    def next_group(self, left: Sequence[int], answer: str | None) -> tuple[Prompt, list[int]]:
        """A prompt with as many texts of ``left`` as fit, at least one if there is one; and what is left then."""
        size = len(left)
        while size > 1 and not self.fits(left[:size], answer):
            size -= 1
        while answer and not self.fits(left[:size], answer):
            answer = answer[: len(answer) // 2]
        return self.prompt(left[:size], answer), list(left[size:])


def _rank(score: float | None) -> float:
    return float("-inf") if score is None else score


def warm_inside(engine: Any, text: str) -> bool:
    """Whether ``text`` is cold, but ends with one that is warm: without its metadata lines, as LangChain has it."""
    return bool(text) and not engine.is_warm(text) and engine.segments(Prompt((Piece(text),)))[-1].document
