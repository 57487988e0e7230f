"""What the tests of the LangChain integration share: an embedding without a model."""

from __future__ import annotations

from conftest import embed
from langchain_core.embeddings import Embeddings


class Words(Embeddings):
    """Texts with words in common are near one another."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [embed(text) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        return embed(text)
