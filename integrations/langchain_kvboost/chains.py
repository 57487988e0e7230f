"""create_kvboost_rag_chain: from a question to an answer, with documents the model has read.

Knows LangChain's runnables and messages; finding is the retriever's job, reading and reuse are the engine's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from langchain_core.documents import Document
from langchain_core.language_models import LanguageModelLike
from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage, convert_to_messages
from langchain_core.output_parsers import StrOutputParser
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough

from kvboost_rag.calls import ON_ERROR, ORDERS, check_choice
from kvboost_rag.errors import OptionError
from kvboost_rag.prompt import INSTRUCTION, SEPARATOR
from langchain_kvboost.chat_models import to_engine
from langchain_kvboost.retrievers import ready

QUESTION = "Question: {input}"


def document_blocks(documents: Sequence[Document], instruction: str = INSTRUCTION) -> list[dict[str, Any]]:
    """Content blocks for a message: ``instruction``, then each document as a block of its own, marked as one.

    Blank documents are left out. Separators are blocks too: a document has the same tokens wherever it stands.
    """
    blocks: list[dict[str, Any]] = [{"type": "text", "text": instruction}] if instruction else []
    texts = [document.page_content.strip() for document in documents]
    for number, text in enumerate(filter(None, texts)):
        blocks += [{"type": "text", "text": SEPARATOR}] if number else []
        blocks.append({"type": "text", "text": text, "extras": {"kvboost": {"document": number}}})
    return blocks


def rag_messages(
    documents: Sequence[Document],
    question: str,
    history: Sequence[Any] = (),
    system: str | None = None,
    instruction: str = INSTRUCTION,
) -> list[BaseMessage]:
    """The chain's messages: the documents come before the history, so what stands before them never changes.

    With the default options that is what ``KVBoost.warm`` reads documents behind, too.
    """
    return [
        *([SystemMessage(system)] if system is not None else []),
        HumanMessage(document_blocks(documents, instruction)),
        *convert_to_messages(history),
        HumanMessage(QUESTION.format(input=question)),
    ]


def create_kvboost_rag_chain(
    llm: LanguageModelLike,
    retriever: BaseRetriever | Runnable[dict[str, Any], list[Document]],
    *,
    system: str | None = None,
    instruction: str = INSTRUCTION,
    order: str = "retrieval",
    first_versions: bool = False,
    on_error: str = "warn",
) -> Runnable[Any, dict[str, Any]]:
    """A chain from ``{"input": question}``, or the question itself, to ``{"input", "context", "answer"}``.

    ``llm``: a ``ChatKVBoost``. ``retriever``: given the question; or any runnable from the chain's input to documents,
    such as a history-aware one. What it finds is warmed if it is not warm yet, as by ``KVBoostRetriever``.
    ``"chat_history"`` in the input: messages before the question. ``system``, ``instruction``: the system message, and
    what stands before the documents. ``order``, ``on_error``: as in ``KVBoostRetriever``. ``first_versions``: keep a
    second version of each document, straight behind the chain's fixed beginning: exact when it comes first, at twice
    the memory. ``stream`` yields the answer piece by piece, in parts of the dict.

    Raises OptionError.
    """
    from kvboost_rag.owner import engine_of

    check_choice("order", order, ORDERS)
    check_choice("on_error", on_error, ON_ERROR)
    engine = engine_of(llm)
    header = to_engine(rag_messages([Document(page_content="x")], "x", system=system, instruction=instruction))
    options = {"order": order, "header": header, "first": first_versions, "on_error": on_error}

    def read(documents: Sequence[Document]) -> list[Document]:
        return ready(documents, engine, **options)

    async def aread(documents: Sequence[Document]) -> list[Document]:
        return await asyncio.to_thread(read, documents)

    def messages(values: Mapping[str, Any]) -> list[BaseMessage]:
        history = values.get("chat_history") or ()
        return rag_messages(values["context"], values["input"], history, system, instruction)

    found = RunnableLambda(itemgetter("input")) | retriever if isinstance(retriever, BaseRetriever) else retriever
    context = (found | RunnableLambda(read, aread)).with_config(run_name="retrieve_documents")
    answer = (RunnableLambda(messages) | llm | StrOutputParser()).with_config(run_name="answer")
    chain = RunnableLambda(_as_input) | RunnablePassthrough.assign(context=context).assign(answer=answer)
    return chain.with_config(run_name="kvboost_rag_chain")


def _as_input(given: Any) -> dict[str, Any]:
    values = {"input": given} if isinstance(given, str) else given
    if not isinstance(values, Mapping) or not isinstance(values.get("input"), str):
        raise OptionError.bad_value("input", given, "a question, or a dict with the question under 'input'")
    return dict(values)
