"""KVBoostVectorStore: any LangChain vector store whose documents are read by the model as they are added.

Knows LangChain's vector-store interface; storing and searching is the inner store's job, reading is the engine's.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

from kvboost_rag.calls import ON_ERROR, check_choice
from kvboost_rag.errors import OptionError
from langchain_kvboost.ingestion import warm_documents

if TYPE_CHECKING:
    from kvboost_rag import WarmReport

NUM_NEAR = 10  # neighbours among which a text with the very same vector is looked for


class KVBoostVectorStore(VectorStore):
    """Delegates everything to ``inner``; adding documents also warms them, deleting the last copy evicts it.

    ``engine``: a ``kvboost_rag.KVBoost`` or an LLM object that has one. ``warm_kwargs`` go to ``KVBoost.warm``.
    Documents are added to ``inner`` first: whatever becomes of the reading, their embeddings are there. ``on_error``:
    what to do about those too long to be read, as in ``warm_documents``; the others are read in any case.

    Deleting, or writing an id again, evicts a text unless another id has it. Texts of ids that were added by an earlier
    process are looked up in ``inner`` before, and stay warm if a search finds them under other ids (which embeds them
    once more), or if ``inner`` cannot tell: being warm does no harm, and a retriever warms again what was evicted.
    Methods that only ``inner`` has work too; they neither warm nor evict.
    """

    def __init__(
        self, inner: VectorStore, engine: Any, warm_kwargs: dict[str, Any] | None = None, *, on_error: str = "warn"
    ):
        from kvboost_rag.owner import engine_of

        check_choice("on_error", on_error, ON_ERROR)
        self.inner = inner
        self.engine = engine_of(engine)
        self.on_error = on_error
        self.warm_kwargs = {"progress": False, **(warm_kwargs or {})}
        self._texts: dict[str, str] = {}  # of ids added here, without white space at the ends
        self._copies: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "inner" not in self.__dict__:  # not set up yet: being copied
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.inner, name)

    # Adding and deleting

    def add_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        documents = list(documents)
        before = self._held(self._unknown(_ids(documents, kwargs)))
        ids = self.inner.add_documents(documents, **kwargs)
        self._added(ids, documents, before)
        return ids

    async def aadd_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        documents = list(documents)
        before = await self._aheld(self._unknown(_ids(documents, kwargs)))
        ids = await self.inner.aadd_documents(documents, **kwargs)
        await asyncio.to_thread(self._added, ids, documents, before)
        return ids

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        before = self._held(self._unknown(ids or []))
        result = self.inner.delete(ids, **kwargs)
        if result is not False:
            self._deleted(ids, before)
        return result

    async def adelete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        before = await self._aheld(self._unknown(ids or []))
        result = await self.inner.adelete(ids, **kwargs)
        if result is not False:
            await asyncio.to_thread(self._deleted, ids, before)
        return result

    def warm(self, ids: Sequence[str]) -> WarmReport:
        """Read documents that are in ``inner`` already, by their ids: those a record manager lists, for example."""
        return self._read(self.inner.get_by_ids(ids))

    def _read(self, documents: Sequence[Document]) -> WarmReport:
        return warm_documents(documents, self.engine, on_error=self.on_error, **self.warm_kwargs)

    def _added(self, ids: Sequence[str | None] | None, documents: Sequence[Document], before: Sequence[str]) -> None:
        """``before``: what ``inner`` had under these ids from an earlier process."""
        if not ids or len(ids) != len(documents):  # inner keeps its ids to itself: it is asked when they are deleted
            ids = [None] * len(documents)
        gone = []
        for key, document in zip(ids, documents, strict=True):
            if key is not None:
                gone += self._forget([key])  # an id that is written again replaces its text
                with self._lock:
                    self._texts[key] = document.page_content.strip()
                    self._copies[self._texts[key]] += 1
        self._evict(gone, before, ids)
        self._read(documents)

    def _deleted(self, ids: Sequence[str] | None, before: Sequence[str]) -> None:
        if ids is None:  # all of them, or those a filter of inner's names
            with self._lock:
                ids = list(self._texts)
            left = self._look(lambda: {document.id for document in self.inner.get_by_ids(ids)})
            if left is None or None in left:
                return
            ids = [key for key in ids if key not in left]
        self._evict(self._forget(ids), before, ids)

    def _forget(self, ids: Iterable[str]) -> list[str]:
        """No longer count these ids. Returns their texts."""
        with self._lock:
            texts = [self._texts.pop(key) for key in ids if key in self._texts]
            self._copies.subtract(texts)
        return texts

    def _evict(self, counted: Sequence[str], uncounted: Sequence[str], ids: Sequence[str | None]) -> None:
        """Forget the texts that no id has any more; ``uncounted``: those that only ``inner`` knows of."""
        with self._lock:
            gone = [text for text in counted if self._copies[text] <= 0]
            doubtful = [text for text in uncounted if self._copies[text.strip()] <= 0]
            self._copies = +self._copies
        self.engine.forget(gone + self._unique(doubtful, ids))

    def _unique(self, texts: Sequence[str], ids: Sequence[str | None]) -> list[str]:
        """Those of ``texts`` that ``inner`` does not have under other ids than ``ids``."""
        embeddings = self.inner.embeddings
        vectors = self._look(lambda: embeddings.embed_documents(list(texts))) if texts and embeddings else None
        found = []
        for text, vector in zip(texts, vectors or (), strict=False):
            near = self._look(lambda vector=vector: self.inner.similarity_search_by_vector(vector, k=NUM_NEAR))
            same = text.strip()
            if near is not None and not any(d.page_content.strip() == same and d.id not in ids for d in near):
                found.append(text)
        return found

    # What the inner store can tell of documents from earlier processes

    def _unknown(self, ids: Iterable[str | None]) -> list[str]:
        with self._lock:
            return [key for key in ids if key is not None and key not in self._texts]

    def _held(self, ids: Sequence[str]) -> list[str]:
        """The texts ``inner`` has under ``ids``; none if it cannot say."""
        return [d.page_content for d in self._look(lambda: self.inner.get_by_ids(ids)) or ()] if ids else []

    async def _aheld(self, ids: Sequence[str]) -> list[str]:
        if not ids:
            return []
        try:
            return [document.page_content for document in await self.inner.aget_by_ids(ids)]
        except Exception:  # as in _look
            return []

    def _look(self, ask: Callable[[], Any]) -> Any:
        """What ``ask`` returns; None if it fails: not every store can answer, and the answers only save room."""
        try:
            return ask()
        except Exception:
            return None

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

    def similarity_search_with_relevance_scores(self, *args: Any, **kwargs: Any) -> list[tuple[Document, float]]:
        return self.inner.similarity_search_with_relevance_scores(*args, **kwargs)

    async def asimilarity_search_with_relevance_scores(self, *args: Any, **kwargs: Any) -> list[tuple[Document, float]]:
        return await self.inner.asimilarity_search_with_relevance_scores(*args, **kwargs)

    def search(self, query: str, search_type: str, **kwargs: Any) -> list[Document]:
        return self.inner.search(query, search_type, **kwargs)

    async def asearch(self, query: str, search_type: str, **kwargs: Any) -> list[Document]:
        return await self.inner.asearch(query, search_type, **kwargs)

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
        warm_kwargs: dict[str, Any] | None = None,
        on_error: str = "warn",
        **kwargs: Any,
    ) -> KVBoostVectorStore:
        """Embed **and** read ``texts``, in a new ``vectorstore_cls``, to which ``kwargs`` go. ``from_documents`` comes
        through here too.
        """
        engine, ids = _check(engine, on_error), _complete(ids, len(texts))
        inner = vectorstore_cls.from_texts(texts, embedding, metadatas, ids=ids, **kwargs)
        store = cls(inner, engine, warm_kwargs, on_error=on_error)
        store._added(ids, [Document(page_content=text) for text in texts], ())
        return store

    @classmethod
    async def afrom_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        engine: Any = None,
        vectorstore_cls: type[VectorStore] = InMemoryVectorStore,
        warm_kwargs: dict[str, Any] | None = None,
        on_error: str = "warn",
        **kwargs: Any,
    ) -> KVBoostVectorStore:
        """As ``from_texts``; the documents are read in another thread."""
        engine, ids = _check(engine, on_error), _complete(ids, len(texts))
        inner = await vectorstore_cls.afrom_texts(texts, embedding, metadatas, ids=ids, **kwargs)
        store = cls(inner, engine, warm_kwargs, on_error=on_error)
        await asyncio.to_thread(store._added, ids, [Document(page_content=text) for text in texts], ())
        return store


def _check(engine: Any, on_error: str) -> Any:
    """The engine, before anything is embedded. Raises OptionError."""
    from kvboost_rag.owner import engine_of

    if engine is None:
        raise OptionError("KVBoostVectorStore needs engine= (a KVBoost, or an LLM object that has one)")
    check_choice("on_error", on_error, ON_ERROR)
    return engine_of(engine)


def _complete(ids: Sequence[str | None] | None, count: int) -> list[str]:
    """``ids``, with new ones where there are none."""
    return [key or str(uuid.uuid4()) for key in ids or [None] * count]


def _ids(documents: Sequence[Document], kwargs: dict[str, Any]) -> Sequence[str | None]:
    """Under which ids documents are about to be written, as far as their caller says."""
    return kwargs.get("ids") or [document.id for document in documents]
