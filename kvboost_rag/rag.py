"""Passages and a question to an answer, without a framework.

Knows an engine and anything that finds passages; knows nothing of embeddings or where passages are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvboost_rag.kvboost import KVBoost
from kvboost_rag.report import GenerationResult

Search = Callable[[str], Sequence[str]]


@dataclass(frozen=True)
class Answer:
    """``documents`` are the passages the answer was given from, in the prompt's order."""

    text: str
    documents: tuple[str, ...]
    result: GenerationResult


class RAG:
    """``search`` finds passages for a question; those not warm yet are warmed before they are used."""

    def __init__(self, engine: KVBoost, search: Search, system: str | None = None):
        self.engine, self.search, self.system = engine, search, system

    def ask(self, question: str, **options: Any) -> Answer:
        """Answer from the passages ``search`` finds. Options: those of ``KVBoost.generate``."""
        documents = list(self.search(question))
        self.engine.warm(documents, progress=False)
        prompt = self.engine.prompt(documents=documents, question=question, system=self.system)
        result = self.engine.generate(prompt, **options)
        return Answer(result.text.strip(), tuple(prompt.documents), result)
