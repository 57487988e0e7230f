"""The explicit path: our own chain, and the middleware for agents."""

from __future__ import annotations

import importlib
import itertools
import subprocess
import sys
import threading
from typing import Any

import pytest
from conftest import document
from langchain.agents import create_agent
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda
from langchain_kvboost import ChatKVBoost, KVBoostRAGMiddleware, KVBoostRetriever, create_kvboost_rag_chain
from langchain_kvboost.chains import document_blocks, rag_messages
from langchain_kvboost.chat_models import to_engine
from pydantic import Field

from kvboost_rag import KVBoost, OptionError
from kvboost_rag.errors import MissingExtraError

TEXTS = [document(i) for i in range(6)]
ORDERS = [list(order) for order in list(itertools.permutations(range(4)))[::11]]


class Fixed(BaseRetriever):
    """Finds the same documents whatever is asked; remembers what was."""

    texts: list[str]
    asked: list[str] = Field(default_factory=list)

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        self.asked.append(query)
        return [Document(page_content=text, metadata={"page_content": "other"}) for text in self.texts]


class Spy(BaseCallbackHandler):
    """Keeps what a model was sent and what it wrote."""

    def __init__(self) -> None:
        self.sent: list[list[Any]] = []
        self.messages: list[AIMessage] = []

    def on_chat_model_start(self, serialized: Any, messages: Any, **kwargs: Any) -> None:
        self.sent.append(messages[0])

    def on_llm_end(self, response: Any, **kwargs: Any) -> None:
        self.messages.append(response.generations[0][0].message)

    @property
    def fidelities(self) -> list[list[str]]:
        return [[str(d["fidelity"]) for d in m.response_metadata["kvboost"]["documents"]] for m in self.messages]


@pytest.fixture
def llm(boost: KVBoost) -> ChatKVBoost:
    return ChatKVBoost(engine=boost, max_tokens=4)


def found(*numbers: int) -> Fixed:
    return Fixed(texts=[TEXTS[n] for n in numbers])


# The chain


@pytest.mark.parametrize("order", ORDERS)
async def test_every_way_to_call_the_chain_hits_and_agrees(llm: ChatKVBoost, order: list[int]) -> None:
    retriever, spy = found(*order), Spy()
    chain = create_kvboost_rag_chain(llm.bind(auto_detect=False), retriever)
    config: Any = {"callbacks": [spy]}
    llm.engine.warm([TEXTS[i] for i in order[::-1]], progress=False)
    result = chain.invoke("which?", config)
    assert set(result) == {"input", "context", "answer"}
    assert (result["input"], [d.page_content for d in result["context"]]) == ("which?", [TEXTS[i] for i in order])
    assert result["answer"] == spy.messages[0].text
    assert chain.invoke({"input": "which?", "more": 1}, config) == {**result, "more": 1}
    assert await chain.ainvoke("which?", config) == result
    pieces = list(chain.stream("which?", config))
    assert "".join(piece.get("answer", "") for piece in pieces) == result["answer"]
    assert sum("answer" in piece for piece in pieces) > 1
    assert [piece["context"] for piece in pieces if "context" in piece] == [result["context"]]
    pieces = [piece async for piece in chain.astream("which?", config)]
    assert "".join(piece.get("answer", "") for piece in pieces) == result["answer"]
    assert chain.batch(["which?", "which?"], config) == [result, result]
    assert spy.fidelities == [["approximate"] * 4] * 7
    assert retriever.asked == ["which?"] * 7


def test_the_documents_are_blocks_of_their_own(llm: ChatKVBoost) -> None:
    spy = Spy()
    texts = [f"\n {TEXTS[0]}  ", "  ", TEXTS[1]]
    chain = create_kvboost_rag_chain(llm, Fixed(texts=texts), system="Be kind.", instruction="Use this: ")
    chain.invoke("which?", {"callbacks": [spy]})
    ((system, documents, question),) = spy.sent
    assert (system.text, question.text) == ("Be kind.", "Question: which?")
    assert [block["text"] for block in documents.content] == ["Use this: ", TEXTS[0], "\n\n", TEXTS[1]]
    assert ["kvboost" in block.get("extras", {}) for block in documents.content] == [False, True, False, True]


def test_a_history_comes_between_documents_and_question(llm: ChatKVBoost) -> None:
    spy = Spy()
    chain = create_kvboost_rag_chain(llm, found(0, 1), first_versions=True)
    for history in ([], [("human", "hello"), AIMessage("Hi.")], [AIMessage("Ask me.")]):
        chain.invoke({"input": "which?", "chat_history": history}, {"callbacks": [spy]})
    assert [len(messages) for messages in spy.sent] == [2, 4, 3]
    assert spy.sent[1][1:] == [HumanMessage("hello"), AIMessage("Hi."), HumanMessage("Question: which?")]
    assert spy.fidelities == [["exact", "approximate"]] * 3  # what stands before the documents is always the same


@pytest.mark.parametrize("system", [None, "Be kind."])
@pytest.mark.parametrize("order", ORDERS)
def test_first_versions_are_exact_behind_the_chains_own_beginning(
    llm: ChatKVBoost, order: list[int], system: str | None
) -> None:
    plain, first = (
        create_kvboost_rag_chain(llm, found(*order), system=system, first_versions=wanted) for wanted in (False, True)
    )
    spy = Spy()
    plain.invoke("which?", {"callbacks": [spy]})
    first.invoke("which?", {"callbacks": [spy]})
    assert spy.fidelities == [["approximate"] * 4, ["exact"] + ["approximate"] * 3]
    header = to_engine(rag_messages([Document(page_content="x")], "?", system=system))
    assert llm.engine.order([TEXTS[5], TEXTS[order[2]]], header=header) == [1, 0]


@pytest.mark.parametrize("order", ORDERS)
async def test_the_order_of_the_cache_puts_an_exact_document_first(llm: ChatKVBoost, order: list[int]) -> None:
    create_kvboost_rag_chain(llm, found(order[3]), first_versions=True).invoke("which?")
    spy = Spy()
    chain = create_kvboost_rag_chain(llm, found(*order), order="cache")
    result = await chain.ainvoke("which?", {"callbacks": [spy]})
    assert [d.page_content for d in result["context"]] == [TEXTS[i] for i in (order[3], *order[:3])]
    assert spy.fidelities == [["exact"] + ["approximate"] * 3]


def test_documents_warmed_without_a_header_stand_behind_the_same_beginning(llm: ChatKVBoost) -> None:
    """The chain's default messages begin as the prompts that ``KVBoost.warm`` reads for."""
    llm.engine.warm(TEXTS[0], first=True, progress=False)
    spy = Spy()
    create_kvboost_rag_chain(llm, found(0, 1)).invoke("which?", {"callbacks": [spy]})
    assert spy.fidelities == [["exact", "approximate"]]


async def test_any_runnable_may_find_documents(llm: ChatKVBoost) -> None:
    def search(values: dict[str, Any]) -> list[Document]:
        return [Document(page_content=TEXTS[len(values["chat_history"])])]

    spy = Spy()
    chain = create_kvboost_rag_chain(llm, RunnableLambda(search))
    result = chain.invoke({"input": "which?", "chat_history": [("human", "a")]}, {"callbacks": [spy]})
    assert result["context"][0].page_content == TEXTS[1]
    wrapped = create_kvboost_rag_chain(llm, KVBoostRetriever(found(1), llm))
    assert (await wrapped.ainvoke("which?"))["context"][0].page_content == TEXTS[1]
    nothing = create_kvboost_rag_chain(llm, found(), first_versions=True, order="cache").invoke("which?")
    assert (nothing["context"], bool(nothing["answer"])) == ([], True)
    assert spy.fidelities == [["approximate"]]


def test_wrong_options_and_inputs_are_refused(llm: ChatKVBoost) -> None:
    with pytest.raises(OptionError, match=r"order='x' is not valid; order takes one of 'retrieval', 'cache'"):
        create_kvboost_rag_chain(llm, found(), order="x")
    with pytest.raises(OptionError, match="on_error='x'"):
        create_kvboost_rag_chain(llm, found(), on_error="x")
    with pytest.raises(OptionError, match="engine="):
        create_kvboost_rag_chain(RunnableLambda(str), found())
    for wrong in (3, {"question": "which?"}, {"input": ["which?"]}):
        with pytest.raises(OptionError, match="the question under 'input'"):
            create_kvboost_rag_chain(llm, found()).invoke(wrong)


async def test_the_event_loop_does_not_read(llm: ChatKVBoost, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, warm = [], llm.engine.warm

    def spied(*args: Any, **kwargs: Any) -> Any:
        threads.append(threading.current_thread())
        return warm(*args, **kwargs)

    monkeypatch.setattr(llm.engine, "warm", spied)
    await create_kvboost_rag_chain(llm, found(0)).ainvoke("which?")
    agent = create_agent(llm, tools=[], middleware=[KVBoostRAGMiddleware(found(1))])
    await agent.ainvoke({"messages": [("human", "which?")]})
    assert len(threads) == 2
    assert threading.main_thread() not in threads


# Agents


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("system_prompt", [None, "Be kind."])
async def test_an_agent_reads_what_is_found(llm: ChatKVBoost, order: list[int], system_prompt: str | None) -> None:
    retriever, spy = found(*order), Spy()
    middleware = KVBoostRAGMiddleware(retriever, instruction="Use this: ", k=3)
    agent = create_agent(llm, tools=[], middleware=[middleware], system_prompt=system_prompt)
    config: Any = {"callbacks": [spy]}
    messages = [("human", "old?"), ("ai", "Yes."), ("human", "new?")]
    state = agent.invoke({"messages": messages}, config)
    assert [m.type for m in state["messages"]] == ["human", "ai", "human", "ai"]  # no document in the state
    assert (await agent.ainvoke({"messages": messages}, config))["messages"][-1].text == state["messages"][-1].text
    assert retriever.asked == ["new?", "new?"]
    assert spy.fidelities == [["approximate"] * 3] * 2
    system = spy.sent[0][0]
    own = f"{system_prompt}\n\n" if system_prompt else ""
    assert system.text == f"{own}Use this: " + "\n\n".join(TEXTS[i] for i in order[:3])
    assert len(system.content) == 6


async def test_an_agent_without_a_question_asks_nothing(llm: ChatKVBoost) -> None:
    retriever = found(0)
    agent = create_agent(llm, tools=[], middleware=[KVBoostRAGMiddleware(retriever)])
    assert agent.invoke({"messages": [("ai", "Hello.")]})["messages"][-1].type == "ai"
    assert (await agent.ainvoke({"messages": [("ai", "Hello.")]}))["messages"][-1].type == "ai"
    assert retriever.asked == []


def test_without_langchain_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "langchain.agents.middleware", None)
    monkeypatch.delitem(sys.modules, "langchain_kvboost.middleware", raising=False)
    with pytest.raises(MissingExtraError, match=r'pip install "kvboost-rag\[langchain-agents\]"'):
        importlib.import_module("langchain_kvboost.middleware")


def test_building_blocks_load_no_torch_and_no_agents() -> None:
    code = (
        "import sys, langchain_kvboost as kv\n"
        "kv.create_kvboost_rag_chain, kv.KVBoostRetriever, kv.KVBoostVectorStore, kv.warm_documents\n"
        "loaded = {'torch', 'langchain', 'langchain_classic'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert document_blocks([], "") == []
