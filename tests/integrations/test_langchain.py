"""LangChain's doors: every ordinary way of building a prompt hits, and messages come back complete."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import warnings
from typing import Any

import pytest
from conftest import build_model, document
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_kvboost import ChatKVBoost, KVBoostRetriever, KVBoostVectorStore
from langchain_kvboost.chat_models import to_engine
from stores import Words

from kvboost_rag import KVBoost, OptionError

TEXTS = [document(i) for i in range(6)]


@pytest.fixture
def store(boost: KVBoost) -> KVBoostVectorStore:
    documents = [Document(page_content=text, id=str(i)) for i, text in enumerate(TEXTS)]
    return KVBoostVectorStore.from_documents(documents, Words(), engine=boost)


@pytest.fixture
def llm(boost: KVBoost) -> ChatKVBoost:
    return ChatKVBoost(engine=boost, max_tokens=8)


def hits(message: AIMessage) -> tuple[int, int]:
    report = message.response_metadata["kvboost"]
    return report["num_document_hits"], len(report["documents"])


# The main job


def test_a_chain_over_the_store_hits_every_document_in_any_order(store: KVBoostVectorStore, llm: ChatKVBoost) -> None:
    assert all(llm.engine.is_warm(text) for text in TEXTS)
    prompt = ChatPromptTemplate.from_messages([("system", "Context:\n{context}"), ("human", "{question}")])
    for order in list(itertools.permutations(range(4)))[:3]:
        context = "\n\n".join(TEXTS[i] for i in order)
        assert hits((prompt | llm).invoke({"context": context, "question": "which?"})) == (4, 4)


async def test_lcel_sync_async_stream_and_batch_agree(store: KVBoostVectorStore, llm: ChatKVBoost) -> None:
    retriever = KVBoostRetriever(store.as_retriever(search_kwargs={"k": 4}), llm)
    prompt = ChatPromptTemplate.from_template("{context}\n\nQuestion: {question}")

    def join(documents: list[Document]) -> str:
        return "\n\n".join(d.page_content for d in documents)

    chain = {"context": retriever | join, "question": RunnablePassthrough()} | prompt | llm
    text = chain | StrOutputParser()
    question = "which word2x3?"
    message = chain.invoke(question)
    assert hits(message) == (4, 4)
    assert await text.ainvoke(question) == message.text
    assert "".join(text.stream(question)) == message.text
    assert "".join([piece async for piece in text.astream(question)]) == message.text
    assert text.batch([question, question]) == [message.text] * 2


def test_an_f_string_hits_too(store: KVBoostVectorStore, llm: ChatKVBoost) -> None:
    assert hits(llm.invoke(f"Read this.\n{TEXTS[2]}\nand this:  {TEXTS[0]}.")) == (2, 2)


def test_marked_content_blocks_are_documents_even_without_detection(llm: ChatKVBoost) -> None:
    blocks: list[Any] = [
        {"type": "text", "text": "Read:\n"},
        {"type": "text", "text": f" {TEXTS[0]}\n", "extras": {"kvboost": {}}},
        {"type": "text", "text": "which?"},
    ]
    message = llm.invoke([HumanMessage(blocks)], auto_detect=False)
    assert len(message.response_metadata["kvboost"]["documents"]) == 1
    plain = llm.invoke([HumanMessage(f"Read:\n {TEXTS[0]}\nwhich?")])
    assert plain.usage_metadata["input_tokens"] == message.usage_metadata["input_tokens"]


# Messages and usage


def test_usage_counts_what_was_read_from_the_cache(store: KVBoostVectorStore, llm: ChatKVBoost) -> None:
    question = [HumanMessage(f"{TEXTS[0]}\nwhich?")]
    llm.invoke(question)
    for message in (llm.invoke(question), _last_of(llm, question)):
        usage, report = message.usage_metadata, message.response_metadata["kvboost"]
        assert usage["input_tokens"] == report["num_prompt_tokens"]
        assert usage["output_tokens"] == report["num_new_tokens"]
        reused = report["num_exact_tokens"] + report["num_approximate_tokens"]
        assert usage["input_token_details"] == {"cache_read": reused, "cache_creation": 0}
        assert 0 < reused < usage["input_tokens"]
        assert message.response_metadata["model_name"] == llm.model
        assert message.response_metadata["finish_reason"] in ("stop", "length")


def _last_of(llm: ChatKVBoost, question: list[Any]) -> AIMessage:
    whole = None
    for chunk in llm.stream(question):
        whole = chunk if whole is None else whole + chunk
    return whole


def test_messages_become_the_engines() -> None:
    messages = [
        SystemMessage("s"),
        HumanMessage("h"),
        AIMessage("a"),
        HumanMessage(["x", {"type": "text", "text": "y"}]),
    ]
    assert [m["role"] for m in to_engine(messages)] == ["system", "user", "assistant", "user"]
    with pytest.raises(OptionError, match="message type='tool'"):
        to_engine([ToolMessage("r", tool_call_id="1")])


def test_stop_strings_of_constructor_and_call_are_merged(boost: KVBoost) -> None:
    free = ChatKVBoost(engine=boost, max_tokens=20).invoke("hello").text
    own, call = free[10:12], free[5:7]
    stopped = ChatKVBoost(engine=boost, max_tokens=20, stop=[own]).invoke("hello", stop=[call]).text
    assert stopped == free[: min(free.index(own), free.index(call))]


def test_options_of_a_call_reach_the_engine_and_unknown_ones_warn_once(llm: ChatKVBoost) -> None:
    message = llm.invoke("hello", max_tokens=3, temperature=1.0, seed=5, repair="none")
    assert message.usage_metadata["output_tokens"] == 3
    assert message.response_metadata["kvboost"]["repair"] == "none"
    with pytest.warns(UserWarning, match="unknown option 'presence_penalty'"):
        llm.invoke("hello", presence_penalty=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm.invoke("hello", presence_penalty=1)


def test_breaking_out_of_a_stream_frees_the_engine(llm: ChatKVBoost) -> None:
    for _ in llm.bind(max_tokens=500).stream("hello"):
        break
    assert not [t for t in threading.enumerate() if t.name == "kvboost-stream"]
    assert llm.invoke("hello").text


def test_tools_are_refused_by_name(llm: ChatKVBoost) -> None:
    with pytest.raises(NotImplementedError, match="does not call tools"):
        llm.bind_tools([])


def test_a_model_without_an_engine_loads_one_by_name(boost: KVBoost, tmp_path: Any) -> None:
    boost.engine.model.module.save_pretrained(tmp_path)
    boost.tokenizer.save_pretrained(tmp_path)
    loaded = ChatKVBoost(model=str(tmp_path), max_tokens=5, engine_kwargs={"repair": "none"})
    assert loaded.invoke("hello").usage_metadata["output_tokens"] == 5
    loaded.engine.close()
    with pytest.raises(Exception, match=r"engine= \(a KVBoost\) or model="):
        ChatKVBoost()


# Ingestion and retrieval


def test_deleting_the_last_copy_evicts_and_a_rewritten_id_replaces(store: KVBoostVectorStore) -> None:
    engine = store.engine
    (twin,) = store.add_documents([Document(page_content=TEXTS[0])])
    store.delete(["0"])
    assert engine.is_warm(TEXTS[0])
    store.delete([twin])
    assert not engine.is_warm(TEXTS[0])
    store.add_documents([Document(page_content=document(50))], ids=["1"])
    assert (engine.is_warm(TEXTS[1]), engine.is_warm(document(50))) == (False, True)


async def test_texts_and_documents_are_warmed_on_every_way_in(boost: KVBoost) -> None:
    store = KVBoostVectorStore(InMemoryVectorStore(Words()), ChatKVBoost(engine=boost))
    store.add_texts([TEXTS[0]])
    await store.aadd_documents([Document(page_content=TEXTS[1])])
    store.as_retriever().add_documents([Document(page_content=TEXTS[2])])
    await store.aadd_texts([TEXTS[3]])
    KVBoostVectorStore.from_texts([TEXTS[4]], Words(), engine=boost)
    assert all(boost.is_warm(text) for text in TEXTS[:5])
    assert {d.page_content for d in store.similarity_search("word1x2", k=4)} == set(TEXTS[:4])
    assert len(await store.asimilarity_search("word1x2", k=2)) == 2
    with pytest.raises(OptionError, match="needs engine="):
        KVBoostVectorStore.from_texts(["x"], Words())


async def test_the_retriever_warms_what_it_finds_and_changes_nothing(boost: KVBoost) -> None:
    inner = InMemoryVectorStore.from_texts(TEXTS, Words())
    retriever = KVBoostRetriever(inner.as_retriever(search_kwargs={"k": 3}), boost)
    expected = inner.similarity_search("word4x1 word4x2", k=3)
    assert retriever.invoke("word4x1 word4x2") == expected
    assert all(boost.is_warm(d.page_content) for d in expected)
    boost.clear()
    assert await retriever.ainvoke("word4x1 word4x2") == expected
    assert all(boost.is_warm(d.page_content) for d in expected)


def test_importing_loads_no_torch() -> None:
    code = "import sys, langchain_kvboost, kvboost_rag; assert 'torch' not in sys.modules, 'torch was loaded'"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_two_models_share_one_engine(boost: KVBoost) -> None:
    one, two = ChatKVBoost(engine=boost, max_tokens=4), ChatKVBoost(engine=boost, max_tokens=4, temperature=0.0)
    assert one.engine is two.engine
    assert one.invoke("hello").text == two.invoke("hello").text


def test_construction_takes_what_langchain_passes(boost: KVBoost) -> None:
    llm = ChatKVBoost(engine=boost, max_tokens=10, stop=["test"], api_key="x", timeout=3, max_retries=1, streaming=True)
    assert llm.invoke("hello").usage_metadata["output_tokens"] <= 10
    assert build_model is not None
