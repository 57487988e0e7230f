"""KVBoostRAGMiddleware: retrieval for LangChain's ``create_agent``, documents whole and marked.

Knows agents' middleware; the only module that needs ``langchain`` itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.retrievers import BaseRetriever

from kvboost_rag.errors import MissingExtraError
from kvboost_rag.prompt import INSTRUCTION, SEPARATOR
from langchain_kvboost.chains import document_blocks
from langchain_kvboost.retrievers import ready

try:
    from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse
except ImportError as error:
    raise MissingExtraError.of("langchain", "langchain-agents") from error


class KVBoostRAGMiddleware(AgentMiddleware):
    """Finds documents for the last human message and puts them into the system message, behind the agent's own.

    For ``create_agent(ChatKVBoost(...), tools=[], middleware=[KVBoostRAGMiddleware(retriever)])``. Documents that are
    not warm yet are warmed in the model's engine. ``k``: how many documents, for a retriever that takes it in a call;
    ``instruction``: what stands before the documents. The agent's state is left as it is.
    """

    def __init__(self, retriever: BaseRetriever, *, instruction: str = INSTRUCTION, k: int | None = None):
        super().__init__()
        self.retriever, self.instruction, self.k = retriever, instruction, k

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> Any:
        question = _last_question(request)
        if question is None:
            return handler(request)
        return handler(self._with(request, self.retriever.invoke(question, **self._call())))

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> Any:
        question = _last_question(request)
        if question is None:
            return await handler(request)
        documents = await self.retriever.ainvoke(question, **self._call())
        return await handler(await asyncio.to_thread(self._with, request, documents))

    def _call(self) -> dict[str, Any]:
        return {} if self.k is None else {"k": self.k}

    def _with(self, request: ModelRequest[Any], documents: list[Document]) -> ModelRequest[Any]:
        from kvboost_rag.owner import engine_of

        documents = ready(documents[: self.k], engine_of(request.model))
        own = request.system_message.text if request.system_message else ""
        blocks = document_blocks(documents, f"{own}{SEPARATOR}{self.instruction}" if own else self.instruction)
        return request.override(system_message=SystemMessage(blocks))


def _last_question(request: ModelRequest[Any]) -> str | None:
    return next((m.text for m in reversed(request.messages) if isinstance(m, HumanMessage)), None)
