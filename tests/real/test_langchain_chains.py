"""Every ordinary way of RAG with LangChain, on real weights: all documents hit, in any order, however asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from langchain_kvboost import (
    ChatKVBoost,
    KVBoostLLM,
    KVBoostRAGMiddleware,
    KVBoostRetriever,
    create_kvboost_rag_chain,
    warm_documents,
)

from kvboost_rag import KVBoost, sample

PASSAGES = list(sample.passages().values())[:4]
QUESTION = sample.questions()[0].question
DOCUMENTS = [Document(page_content=" ".join(text.split()[:90])) for text in PASSAGES]
ORDERS = [(0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0)]

pytestmark = pytest.mark.real_model


class Fixed(BaseRetriever):
    """Finds the four documents in the order it is given."""

    order: tuple[int, ...] = ORDERS[0]

    def _get_relevant_documents(self, query: str, **kwargs: Any) -> list[Document]:
        return [DOCUMENTS[n] for n in self.order]


@pytest.fixture
def boost(real_boost: KVBoost) -> KVBoost:
    real_boost.clear()
    warm_documents(DOCUMENTS, real_boost, progress=False)
    return real_boost


def lcel(model: Any, retriever: BaseRetriever) -> Runnable[str, Any]:
    prompt = ChatPromptTemplate.from_messages([("system", "Answer from:\n\n{context}"), ("human", "{question}")])

    def fill(question: str) -> dict[str, str]:
        return {"context": "\n\n".join(d.page_content for d in retriever.invoke(question)), "question": question}

    return RunnableLambda(fill) | prompt | model


def stuff(model: Any, retriever: BaseRetriever) -> Runnable[str, Any]:
    prompt = ChatPromptTemplate.from_messages([("human", "Read this:\n{context}\n\nThen answer: {question}")])
    chain = create_stuff_documents_chain(model, prompt, output_parser=RunnablePassthrough())
    return RunnableLambda(lambda q: {"context": retriever.invoke(q), "question": q}) | chain


def f_string(model: Any, retriever: BaseRetriever) -> Runnable[str, Any]:
    def write(question: str) -> list[HumanMessage]:
        text = "\n\n".join(document.page_content for document in retriever.invoke(question))
        return [HumanMessage(f"Passages:\n{text}\n\n{question}")]

    return RunnableLambda(write) | model


WAYS: dict[str, Callable[[Any, BaseRetriever], Runnable[str, Any]]] = {
    "LCEL": lcel,
    "stuff chain": stuff,
    "f-string": f_string,
}


def hits(message: Any) -> int:
    report = message.response_metadata["kvboost"]
    assert len(report["documents"]) == report["num_document_hits"]
    return int(report["num_document_hits"])


@pytest.mark.parametrize("way", WAYS)
async def test_every_way_of_asking_hits_all_documents(boost: KVBoost, way: str) -> None:
    model = ChatKVBoost(engine=boost, max_tokens=6)
    for order in ORDERS:
        chain = WAYS[way](model, KVBoostRetriever(Fixed(order=order), boost))
        message = chain.invoke(QUESTION)
        assert hits(message) == 4
    chunks = list(chain.stream(QUESTION))
    assert "".join(chunk.text for chunk in chunks) == message.text
    assert len(chunks) > 2
    assert [hits(m) for m in chain.batch([QUESTION, QUESTION])] == [4, 4]
    later = await chain.ainvoke(QUESTION)
    assert (hits(later), later.text) == (4, message.text)
    assert "".join([chunk.text async for chunk in chain.astream(QUESTION)]) == message.text


async def test_the_packages_own_chain(boost: KVBoost) -> None:
    model = ChatKVBoost(engine=boost, max_tokens=6)
    for order in ORDERS:
        chain = create_kvboost_rag_chain(model, KVBoostRetriever(Fixed(order=order), boost))
        found = chain.invoke({"input": QUESTION})
        assert [d.page_content for d in found["context"]] == [DOCUMENTS[n].page_content for n in order]
    streamed = "".join(part.get("answer", "") for part in chain.stream({"input": QUESTION}))
    assert streamed == found["answer"]
    assert (await chain.ainvoke({"input": QUESTION}))["answer"] == found["answer"]


async def test_an_agent_with_the_middleware(boost: KVBoost) -> None:
    model = ChatKVBoost(engine=boost, max_tokens=6)
    ask = {"messages": [HumanMessage(QUESTION)]}
    for order in ORDERS:
        agent = create_agent(model, tools=[], middleware=[KVBoostRAGMiddleware(retriever=Fixed(order=order))])
        answer = agent.invoke(ask)["messages"][-1]
        assert isinstance(answer, AIMessage)
        assert hits(answer) == 4
    assert (await agent.ainvoke(ask))["messages"][-1].text == answer.text


async def test_the_completion_model(boost: KVBoost) -> None:
    model = KVBoostLLM(engine=boost, max_tokens=6)
    prompts = []
    for order in ORDERS:
        context = "\n\n".join(DOCUMENTS[n].page_content for n in order)
        prompts.append(f"{context}\n\nQuestion: {QUESTION}\nAnswer:")
    result = model.generate(prompts)
    assert [g[0].generation_info["kvboost"]["num_document_hits"] for g in result.generations] == [4, 4, 4]
    texts = [g[0].text for g in result.generations]
    assert "".join(model.stream(prompts[0])) == texts[0]
    assert await model.ainvoke(prompts[1]) == texts[1]
