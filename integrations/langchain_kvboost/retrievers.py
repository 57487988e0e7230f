"""KVBoostRetriever: any LangChain retriever whose results the model has read before they are used.

Knows LangChain's retriever interface; finding is the base retriever's job, reading is the engine's.
"""

from __future__ import annotations

import asyncio
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import Field, model_validator


class KVBoostRetriever(BaseRetriever):
    """Returns what ``base_retriever`` finds, in its order, and warms what is not warm yet.

    ``engine``: a ``kvboost_rag.KVBoost`` or an LLM object that has one.
    """

    base_retriever: BaseRetriever
    engine: Any = Field(exclude=True, repr=False)

    def __init__(self, base_retriever: BaseRetriever, engine: Any, **kwargs: Any):
        super().__init__(base_retriever=base_retriever, engine=engine, **kwargs)

    @model_validator(mode="after")
    def _resolve(self) -> KVBoostRetriever:
        from kvboost_rag.owner import engine_of

        self.engine = engine_of(self.engine)
        return self

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        documents = self.base_retriever.invoke(query, config={"callbacks": run_manager.get_child()}, **kwargs)
        self._warm(documents)
        return documents

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        documents = await self.base_retriever.ainvoke(query, config={"callbacks": run_manager.get_child()}, **kwargs)
        await asyncio.to_thread(self._warm, documents)
        return documents

    def _warm(self, documents: list[Document]) -> None:
        self.engine.warm([document.page_content for document in documents], progress=False)
