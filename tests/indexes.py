"""What the tests of the LlamaIndex integration share: an embedding without a model, and eyes on an engine's prompts."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import embed
from llama_index.core.embeddings import BaseEmbedding

from kvboost_rag import KVBoost
from kvboost_rag.engine.types import Report


class Words(BaseEmbedding):
    """Texts with words in common are near one another."""

    def _get_text_embedding(self, text: str) -> list[float]:
        return embed(text)

    def _get_query_embedding(self, query: str) -> list[float]:
        return embed(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return embed(query)


def watch(engine: KVBoost, monkeypatch: pytest.MonkeyPatch) -> list[Report]:
    """The report of every prompt that ``engine`` runs."""
    seen: list[Report] = []
    prefill = engine.engine.prefill

    def watched(*args: Any, **kwargs: Any) -> Any:
        result = prefill(*args, **kwargs)
        seen.append(result.report)
        return result

    monkeypatch.setattr(engine.engine, "prefill", watched)
    return seen
