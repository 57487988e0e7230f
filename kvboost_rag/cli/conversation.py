"""The prompts of a conversation: earlier turns, then the passages found for the question, then the question.

Knows turns, documents and how many tokens a prompt may have; knows nothing of stores or terminals. Passages of earlier
questions are not repeated: what was answered from them stands in the turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvboost_rag.kvboost import KVBoost
from kvboost_rag.prompt import ChatFormat, Prompt, rag


class Turn(NamedTuple):
    question: str
    answer: str


def conversation(chat_format: ChatFormat, turns: Sequence[Turn], documents: Sequence[str], question: str) -> Prompt:
    """Without turns, the same prompt as ``KVBoost.prompt`` builds."""
    earlier = [
        {"role": role, "content": text}
        for turn in turns
        for role, text in (("user", turn.question), ("assistant", turn.answer))
    ]
    return rag(chat_format, documents, question, earlier=earlier)


def fitted(
    engine: KVBoost, turns: Sequence[Turn], documents: Sequence[str], question: str, max_new_tokens: int
) -> tuple[Prompt, list[Turn]]:
    """The prompt with as many of the last turns as the model's context has room for, and these turns.

    Documents and question stay whole: whether they fit is for the engine to say.
    """
    kept = list(turns)
    while True:
        prompt = conversation(engine.chat_format, kept, documents, question)
        if not kept or engine.count_tokens(prompt) + max_new_tokens <= engine.context_tokens:
            return prompt, kept
        del kept[0]
