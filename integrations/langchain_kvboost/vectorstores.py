"""KVBoostVectorStore: any LangChain vector store whose documents are read by the model as they are added.

Knows LangChain's vector-store interface; storing and searching is the inner store's job, reading is the engine's.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore


class KVBoostVectorStore(VectorStore):
    """Delegates everything to ``inner``; adding documents also warms them, deleting the last copy evicts it.

    ``engine``: a ``kvboost_rag.KVBoost`` or an LLM object that has one. ``warm_kwargs`` go to ``KVBoost.warm``.
    """

    def __init__(self, inner: VectorStore, engine: Any, warm_kwargs: dict[str, Any] | None = None):
        from kvboost_rag.owner import engine_of

        self.inner = inner
        self.engine = engine_of(engine)
        self.warm_kwargs = {"progress": False, **(warm_kwargs or {})}
        self._texts: dict[str, str] = {}
        self._copies: Counter[str] = Counter()

    # Adding and deleting

    def add_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        ids = self.inner.add_documents(documents, **kwargs)
        self._warm(ids, documents)
        return ids

    async def aadd_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        ids = await self.inner.aadd_documents(documents, **kwargs)
        await asyncio.to_thread(self._warm, ids, documents)
        return ids

    def _warm(self, ids: Sequence[str], documents: Sequence[Document]) -> None:
        gone = self._forget(ids)  # an id that is written again replaces its text
        for key, document in zip(ids, documents, strict=True):
            self._texts[key] = document.page_content
            self._copies[document.page_content] += 1
        self._evict(gone)
        self.engine.warm([document.page_content for document in documents], **self.warm_kwargs)

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        result = self.inner.delete(ids, **kwargs)
        self._evict(self._forget(list(self._texts) if ids is None else ids))
        return result

    async def adelete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        result = await self.inner.adelete(ids, **kwargs)
        self._evict(self._forget(list(self._texts) if ids is None else ids))
        return result

    def _forget(self, ids: Iterable[str]) -> list[str]:
        texts = [self._texts.pop(key) for key in ids if key in self._texts]
        self._copies.subtract(texts)
        return texts

    def _evict(self, texts: Iterable[str]) -> None:
        self.engine.forget([text for text in texts if self._copies[text] <= 0])

    # Searching: the inner store's business

    @property
    def embeddings(self) -> Embeddings | None:
        return self.inner.embeddings

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        return self.inner.get_by_ids(ids)

    async def aget_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        return await self.inner.aget_by_ids(ids)

    def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        return self.inner.similarity_search(query, k, **kwargs)

    async def asimilarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        return await self.inner.asimilarity_search(query, k, **kwargs)

    def similarity_search_with_score(self, *args: Any, **kwargs: Any) -> list[tuple[Document, float]]:
        return self.inner.similarity_search_with_score(*args, **kwargs)

    async def asimilarity_search_with_score(self, *args: Any, **kwargs: Any) -> list[tuple[Document, float]]:
        return await self.inner.asimilarity_search_with_score(*args, **kwargs)

    def similarity_search_by_vector(self, embedding: list[float], k: int = 4, **kwargs: Any) -> list[Document]:
        return self.inner.similarity_search_by_vector(embedding, k, **kwargs)

    async def asimilarity_search_by_vector(self, embedding: list[float], k: int = 4, **kwargs: Any) -> list[Document]:
        return await self.inner.asimilarity_search_by_vector(embedding, k, **kwargs)

    def max_marginal_relevance_search(self, query: str, *args: Any, **kwargs: Any) -> list[Document]:
        return self.inner.max_marginal_relevance_search(query, *args, **kwargs)

    async def amax_marginal_relevance_search(self, query: str, *args: Any, **kwargs: Any) -> list[Document]:
        return await self.inner.amax_marginal_relevance_search(query, *args, **kwargs)

    def max_marginal_relevance_search_by_vector(
        self, embedding: list[float], *args: Any, **kwargs: Any
    ) -> list[Document]:
        return self.inner.max_marginal_relevance_search_by_vector(embedding, *args, **kwargs)

    async def amax_marginal_relevance_search_by_vector(
        self, embedding: list[float], *args: Any, **kwargs: Any
    ) -> list[Document]:
        return await self.inner.amax_marginal_relevance_search_by_vector(embedding, *args, **kwargs)

    def _select_relevance_score_fn(self) -> Any:
        return self.inner._select_relevance_score_fn()

    # Building

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        engine: Any = None,
        vectorstore_cls: type[VectorStore] = InMemoryVectorStore,
        **kwargs: Any,
    ) -> KVBoostVectorStore:
        """Embed **and** read ``texts``. ``from_documents`` comes through here too."""
        from kvboost_rag.errors import OptionError

        if engine is None:
            raise OptionError("KVBoostVectorStore needs engine= (a KVBoost, or an LLM object that has one)")
        options = {"ids": ids} if ids is not None else {}
        inner = vectorstore_cls.from_texts([], embedding, **kwargs)
        store = cls(inner, engine)
        documents = [
            Document(page_content=text, metadata=metadata)
            for text, metadata in zip(texts, metadatas or [{} for _ in texts], strict=True)
        ]
        if documents:
            store.add_documents(documents, **options)
        return store
