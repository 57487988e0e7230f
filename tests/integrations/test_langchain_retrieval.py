"""Ways out: retrieved documents are warm when they are used, and every ordinary way of building a prompt hits.

"Thread n" is the n-th real complaint that the integrations are held to (design notes, section 3).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from conftest import build_model, build_tokenizer, document
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_kvboost import ChatKVBoost, KVBoostLLM, KVBoostRetriever
from langchain_kvboost.chains import document_blocks
from stores import Words

from kvboost_rag import KVBoost, OptionError

TEXTS = [document(i) for i in range(6)]
ORDERS = [list(order) for order in list(itertools.permutations(range(4)))[::11]]
HEADER = "You are kind."


class Fixed(BaseRetriever):
    """Finds the same documents whatever is asked, and takes no ``k``."""

    texts: list[str]

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return [Document(page_content=text) for text in self.texts]


class Spy(BaseCallbackHandler):
    """Keeps the messages a model wrote."""

    def __init__(self) -> None:
        self.messages: list[AIMessage] = []

    def on_llm_end(self, response: Any, **kwargs: Any) -> None:
        self.messages.append(response.generations[0][0].message)


def new_engine(**options: Any) -> KVBoost:
    return KVBoost(build_model(), build_tokenizer(), **{"max_cache_bytes": "64MB", **options})


def report_of(message: AIMessage) -> dict[str, Any]:
    return message.response_metadata["kvboost"]


def hits(message: AIMessage) -> list[bool]:
    return [d["fidelity"] != "miss" for d in report_of(message)["documents"]]


def marked(texts: list[str], question: str = "\n\nwhich?") -> list[HumanMessage]:
    """A message whose documents are content blocks of their own."""
    blocks = document_blocks([Document(page_content=text) for text in texts])
    return [HumanMessage([*blocks, {"type": "text", "text": question}])]


@pytest.fixture
def llm(boost: KVBoost) -> ChatKVBoost:
    return ChatKVBoost(engine=boost, max_tokens=4)


# The retriever


async def test_the_order_of_the_cache_comes_first_only_if_asked_for(boost: KVBoost) -> None:
    base = Fixed(texts=TEXTS[:4])
    boost.warm(TEXTS[2], header=HEADER, first=True, progress=False)
    plain = KVBoostRetriever(base, boost, header=HEADER)
    cache = KVBoostRetriever(base, boost, header=HEADER, order="cache")
    elsewhere = KVBoostRetriever(base, boost, header="Another.", order="cache")
    for retriever, order in ((plain, [0, 1, 2, 3]), (cache, [2, 0, 1, 3]), (elsewhere, [0, 1, 2, 3])):
        expected = [TEXTS[i] for i in order]
        assert [d.page_content for d in retriever.invoke("which?")] == expected
        assert [d.page_content for d in await retriever.ainvoke("which?")] == expected


def test_documents_warmed_on_miss_can_keep_a_first_version(boost: KVBoost) -> None:
    KVBoostRetriever(Fixed(texts=TEXTS[:2]), boost, header=HEADER, first=True).invoke("which?")
    assert boost.order([TEXTS[3], TEXTS[1]], header=HEADER) == [1, 0]
    prompt = boost.prompt([TEXTS[1], TEXTS[0]], "which?", system=HEADER)
    assert [d.fidelity for d in boost.prefill(prompt).report.documents] == ["exact", "approximate"]


@pytest.mark.parametrize("first", [False, True])
def test_a_document_cut_in_parts_is_not_read_again_as_a_whole(boost: KVBoost, first: bool) -> None:
    boost.warm(TEXTS[0], chunking="semantic", progress=False)
    before = boost.stats()
    KVBoostRetriever(Fixed(texts=TEXTS[:1]), boost, first=first).invoke("which?")
    assert boost.warm([TEXTS[0]], chunking="semantic", progress=False).num_already_warm == 1
    if not first:
        assert boost.stats() == before
    assert boost.order([TEXTS[1], TEXTS[0]]) == ([1, 0] if first else [0, 1])


def test_wrong_options_name_the_choices(boost: KVBoost) -> None:
    base = Fixed(texts=[])
    with pytest.raises(OptionError, match=r"order='best' is not valid; order takes one of 'retrieval', 'cache'"):
        KVBoostRetriever(base, boost, order="best")
    with pytest.raises(OptionError, match=r"on_error=None is not valid; on_error takes one of 'warn', 'raise'"):
        KVBoostRetriever(base, boost, on_error=None)
    with pytest.raises(OptionError, match="engine="):
        KVBoostRetriever(base, engine="gpt2")


async def test_k_is_passed_on_or_cut_off(boost: KVBoost) -> None:
    inner = InMemoryVectorStore.from_texts(TEXTS, Words())
    for base in (inner.as_retriever(), Fixed(texts=TEXTS)):
        retriever = KVBoostRetriever(base, boost, k=3)
        assert len(retriever.invoke("word1x2")) == 3
        assert len(await retriever.ainvoke("word1x2", k=2)) == 2
    assert len(KVBoostRetriever(inner.as_retriever(), boost).invoke("word1x2", k=5)) == 5
    assert len(KVBoostRetriever(Fixed(texts=TEXTS), boost).invoke("word1x2")) == 6
    assert KVBoostRetriever(Fixed(texts=[]), boost, first=True, order="cache").invoke("?") == []


async def test_the_event_loop_neither_reads_nor_sorts(boost: KVBoost, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: dict[str, threading.Thread] = {}

    def spied(name: str) -> Callable[..., Any]:
        method = getattr(boost, name)
        return lambda *args, **kwargs: (threads.update({name: threading.current_thread()}), method(*args, **kwargs))[1]

    for name in ("warm", "order", "prefetch", "is_warm"):
        monkeypatch.setattr(boost, name, spied(name))
    await KVBoostRetriever(Fixed(texts=TEXTS), boost, order="cache").ainvoke("which?")
    assert set(threads) == {"warm", "order", "prefetch", "is_warm"}
    assert threading.main_thread() not in threads.values()


def test_what_is_on_disk_comes_to_memory_in_the_background(tmp_path: Path) -> None:
    with new_engine(cache_dir=tmp_path) as first:
        first.warm(TEXTS, progress=False)
    for order in ORDERS:
        with new_engine(cache_dir=tmp_path) as engine:
            texts = [TEXTS[i] for i in order]
            KVBoostRetriever(Fixed(texts=texts[:3]), engine).invoke("which?")
            engine.prefetch([]).result()  # promotions are done in order
            documents = engine.prefill("Read:\n" + "\n\n".join(texts) + "\nwhich?").report.documents
            assert [d.tier for d in documents] == ["memory"] * 3 + ["disk"]


def test_nobody_waits_for_a_promotion_or_hears_of_its_errors(boost: KVBoost, monkeypatch: pytest.MonkeyPatch) -> None:
    retriever = KVBoostRetriever(Fixed(texts=TEXTS[:2]), boost)
    asked = []

    def never(texts: list[str]) -> Future[int]:
        asked.append(texts)
        return Future()

    def broken(texts: list[str]) -> Future[int]:
        asked.append(texts)
        raise RuntimeError("cannot schedule new futures after shutdown")

    for prefetch in (never, broken):
        monkeypatch.setattr(boost, "prefetch", prefetch)
        assert len(retriever.invoke("which?")) == 2
    assert asked == [[], TEXTS[:2]]  # what is warmed only now is not on disk


def test_a_document_too_long_is_returned_unread(boost: KVBoost) -> None:
    base = Fixed(texts=[TEXTS[0], document(9, words=400), TEXTS[1]])
    with pytest.warns(UserWarning, match="were not read"):
        assert len(KVBoostRetriever(base, boost).invoke("which?")) == 3
    assert [boost.is_warm(text) for text in TEXTS[:2]] == [True, True]
    with pytest.raises(ValueError, match="too many"):
        KVBoostRetriever(base, boost, on_error="raise").invoke("which?")


# Prompts nobody changed for us


@pytest.mark.parametrize("order", ORDERS)
async def test_every_ordinary_prompt_hits(llm: ChatKVBoost, order: list[int]) -> None:
    retriever = KVBoostRetriever(Fixed(texts=[TEXTS[i] for i in order]), llm)
    found = retriever.invoke("which?")
    context, spy = "\n\n".join(d.page_content for d in found), Spy()
    config: Any = {"callbacks": [spy]}
    prompt = ChatPromptTemplate.from_messages([("system", "Use this:\n\n{context}"), ("human", "{input}")])
    titled = PromptTemplate.from_template("Source {source}:\n{page_content}")
    sourced = [Document(page_content=d.page_content, metadata={"source": f"{i}.txt"}) for i, d in enumerate(found)]

    stuff = create_stuff_documents_chain(llm, prompt)
    text = stuff.invoke({"context": found, "input": "which?"}, config)
    assert await stuff.ainvoke({"context": found, "input": "which?"}, config) == text
    create_stuff_documents_chain(llm, prompt, document_prompt=titled, document_separator="\n---\n").invoke(
        {"context": sourced, "input": "which?"}, config
    )
    lcel = prompt | llm | StrOutputParser()
    assert lcel.invoke({"context": context, "input": "which?"}, config) == text
    assert "".join(lcel.stream({"context": context, "input": "which?"}, config)) == text
    llm.invoke(f"Read this.\n{context}\nThen say: which?", config)
    llm.invoke(marked([d.page_content for d in found]), config, auto_detect=False)  # the explicit path
    assert [hits(message) for message in spy.messages] == [[True] * 4] * 7

    completion = KVBoostLLM(engine=llm.engine, max_tokens=2).generate([f"Read:\n{context}\nSo"])
    assert completion.generations[0][0].generation_info["kvboost"]["num_document_hits"] == 4


@pytest.mark.parametrize("order", ORDERS)
def test_metadata_that_replaces_a_text_costs_one_hit_and_nothing_else(llm: ChatKVBoost, order: list[int]) -> None:
    """``format_document`` lets a metadata key ``page_content`` win over the text; content blocks do not."""
    llm.engine.warm(TEXTS[:4], progress=False)
    found = [Document(page_content=TEXTS[i], metadata={"page_content": "other"} if i == 1 else {}) for i in order]
    spy = Spy()
    prompt = ChatPromptTemplate.from_template("{context}\n\n{input}")
    create_stuff_documents_chain(llm, prompt).invoke({"context": found, "input": "?"}, {"callbacks": [spy]})
    assert hits(spy.messages[0]) == [True] * 3
    assert hits(llm.invoke([HumanMessage(document_blocks(found))])) == [True] * 4


# Real complaints about reuse of the KV and prefix caches


@pytest.mark.parametrize("order", ORDERS)
def test_thread_19_a_question_about_read_documents_computes_little(llm: ChatKVBoost, order: list[int]) -> None:
    llm.engine.warm(TEXTS[:4], progress=False)
    report = report_of(llm.invoke(marked([TEXTS[i] for i in order])))
    assert report["num_live_tokens"] + report["num_repaired_tokens"] < 0.2 * report["num_prompt_tokens"]
    cold = report_of(llm.invoke(marked([TEXTS[i] for i in order]), mode="baseline"))
    assert cold["num_live_tokens"] == report["num_prompt_tokens"]


@pytest.mark.parametrize("order", ORDERS)
def test_thread_20_documents_from_disk_fit_anywhere(tmp_path: Path, order: list[int]) -> None:
    with new_engine(cache_dir=tmp_path) as first:
        first.warm(TEXTS, progress=False)
    files = {file: file.read_bytes() for file in tmp_path.glob("*/*-w*.safetensors")}
    assert len(files) == 6
    with new_engine(cache_dir=tmp_path) as engine:
        report = report_of(ChatKVBoost(engine=engine, max_tokens=2).invoke(marked([TEXTS[i] for i in order])))
    assert [d["tier"] for d in report["documents"]] == ["disk"] * 4
    assert files == {file: file.read_bytes() for file in files}  # reading changes nothing


@pytest.mark.parametrize("order", ORDERS)
def test_thread_21_seams_inside_tokens_do_not_matter(llm: ChatKVBoost, order: list[int]) -> None:
    engine = llm.engine
    engine.warm(TEXTS[:4], progress=False)
    alone = [engine.tokens.encode(TEXTS[i]) for i in order]
    prompt = "t" + "t".join(TEXTS[i] for i in order) + "t"  # document 1 begins with an h, and "th" is one token
    assert len(engine.tokens.encode(prompt)) < sum(map(len, alone)) + 5
    report = report_of(llm.invoke(prompt))
    assert [d["num_tokens"] for d in report["documents"]] == [len(ids) for ids in alone]
    assert report["num_document_hits"] == 4


@pytest.mark.parametrize("order", ORDERS)
def test_thread_22_no_token_of_a_document_is_lost_at_its_ends(llm: ChatKVBoost, order: list[int]) -> None:
    llm.engine.warm(TEXTS[:4], progress=False)
    num_tokens = sum(len(llm.engine.tokens.encode(TEXTS[i])) for i in order)
    report = report_of(llm.invoke(marked([TEXTS[i] for i in order]), repair="none"))
    assert report["num_approximate_tokens"] == num_tokens
    assert len(llm.engine.tokens.encode(TEXTS[0])) % 128  # and it would not end on a grid


def test_thread_23_new_prompts_displace_no_warmed_document() -> None:
    with new_engine(max_cache_bytes="900KB") as engine:
        engine.warm(TEXTS, progress=False)
        llm = ChatKVBoost(engine=engine, max_tokens=2)
        stored = sum(report_of(llm.invoke(marked([document(n)])))["num_stored_tokens"] for n in range(20, 30))
        assert stored > 0  # there is something that could displace
        for order in ORDERS:
            assert hits(llm.invoke(marked([TEXTS[i] for i in order]))) == [True] * 4
        assert all(engine.is_warm(text) for text in TEXTS)


@pytest.mark.parametrize("order", ORDERS)
def test_thread_24_a_miss_in_the_middle_stops_nothing(llm: ChatKVBoost, order: list[int]) -> None:
    engine, texts = llm.engine, [TEXTS[i] for i in order[:3]]
    engine.warm([texts[0], texts[2]], progress=False)
    message = llm.invoke(marked(texts))
    assert hits(message) == [True, False, True]
    assert message.usage_metadata["input_token_details"]["cache_creation"] >= len(engine.tokens.encode(texts[1]))
    assert hits(llm.invoke(marked(texts))) == [True] * 3  # the miss was kept
    assert hits(llm.invoke(marked(texts[::-1]))) == [True] * 3
    bare = [HumanMessage(document_blocks([Document(page_content=t) for t in texts], instruction=""))]
    first, again = llm.invoke(bare, repair="none"), llm.invoke(bare, repair="none")  # nothing but documents
    assert hits(again) == [True] * 3
    assert again.text == first.text
