"""The bundled sentence embedder, as LangChain, LlamaIndex and plain Python want one. No example itself.

It stands where your own embeddings go. Knows texts and vectors; knows nothing of the model that answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvboost_rag import demo


def for_langchain() -> Any:
    """An ``Embeddings`` for LangChain's vector stores."""
    from langchain_core.embeddings import Embeddings

    embed = demo.embedder()

    class Bundled(Embeddings):
        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            return embed(texts)

        def embed_query(self, text: str) -> list[float]:
            return embed([text])[0]

    return Bundled()


def for_llama_index() -> Any:
    """An ``embed_model`` for LlamaIndex's indexes."""
    from llama_index.core.embeddings import BaseEmbedding

    embed = demo.embedder()

    class Bundled(BaseEmbedding):  # type: ignore[misc]
        def _get_text_embedding(self, text: str) -> list[float]:
            return embed([text])[0]

        _get_query_embedding = _get_text_embedding

        async def _aget_query_embedding(self, query: str) -> list[float]:
            return self._get_query_embedding(query)

    return Bundled()


def search_in(passages: Sequence[str], k: int = 3) -> Callable[[str], list[str]]:
    """A function from a question to the ``k`` passages that are nearest to it, the nearest first."""
    embed = demo.embedder()
    vectors = torch.tensor(embed(passages))  # of length 1, as the embedder makes them

    def search(question: str) -> list[str]:
        nearness = vectors @ torch.tensor(embed([question])[0])
        return [passages[i] for i in nearness.topk(k).indices]

    return search
