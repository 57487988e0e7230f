"""KVBoostRetriever: any LangChain retriever whose results the model has read before they are used.

Knows LangChain's retriever interface; finding is the base retriever's job, reading is the engine's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import Field

from kvboost_rag.calls import ON_ERROR, ORDERS, check_choice
from langchain_kvboost.ingestion import warm_documents


def ready(
    documents: Sequence[Document],
    engine: Any,
    *,
    order: str = "retrieval",
    header: Any = None,
    first: bool = False,
    on_error: str = "warn",
) -> list[Document]:
    """``documents``, read: those on disk start to come to memory, in the background; the others are warmed now.

    Options as in ``KVBoostRetriever``. Blocks while it reads: an event loop calls it in another thread.
    """
    texts = [document.page_content for document in documents]
    warm = [engine.is_warm(text) for text in texts]
    with suppress(Exception):  # it only saves time
        engine.prefetch([text for text, there in zip(texts, warm, strict=True) if there])
    if first and documents:  # None: cut as they were when they were warmed
        warm_documents(documents, engine, on_error=on_error, header=header, first=True, chunking=None, progress=False)
    elif not all(warm):
        cold = [document for document, there in zip(documents, warm, strict=True) if not there]
        warm_documents(cold, engine, on_error=on_error, header=header, progress=False)
    if order == "cache":
        return [documents[i] for i in engine.order(texts, header=header)]
    return list(documents)


class KVBoostRetriever(BaseRetriever):
    """Returns what ``base_retriever`` finds, and warms what is not warm yet.

    ``engine``: a ``kvboost_rag.KVBoost`` or an LLM object that has one. ``k``: how many documents, here or in a call;
    passed on, and what is more than that is cut off. ``order``: ``"retrieval"`` leaves the order alone; ``"cache"``
    puts documents first whose exact KV is kept behind the prompt's beginning, which saves work and may change answers.
    ``header``: what the prompts begin with, as in ``KVBoost.warm``; used for both. ``first``: keep a second version of
    each document, straight behind ``header``: exact when it comes first. ``on_error``: as in ``warm_documents``.

    Raises OptionError.
    """

    base_retriever: BaseRetriever
    engine: Any = Field(exclude=True, repr=False)
    k: int | None = None
    order: str = "retrieval"
    header: Any = None
    first: bool = False
    on_error: str = "warn"

    def __init__(self, base_retriever: BaseRetriever, engine: Any, **kwargs: Any):
        from kvboost_rag.owner import engine_of

        # here and not in validators, which would turn an OptionError into one of pydantic's
        check_choice("order", kwargs.get("order", "retrieval"), ORDERS)
        check_choice("on_error", kwargs.get("on_error", "warn"), ON_ERROR)
        super().__init__(base_retriever=base_retriever, engine=engine_of(engine), **kwargs)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        kwargs = self._call(kwargs)
        found = self.base_retriever.invoke(query, config={"callbacks": run_manager.get_child()}, **kwargs)
        return self._ready(found[: kwargs.get("k")])

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        kwargs = self._call(kwargs)
        found = await self.base_retriever.ainvoke(query, config={"callbacks": run_manager.get_child()}, **kwargs)
        return await asyncio.to_thread(self._ready, found[: kwargs.get("k")])

    def _call(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return kwargs if self.k is None else {"k": self.k, **kwargs}

    def _ready(self, documents: list[Document]) -> list[Document]:
        return ready(
            documents,
            self.engine,
            order=self.order,
            header=self.header,
            first=self.first,
            on_error=self.on_error,
        )
