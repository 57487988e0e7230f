"""Every node an index finds has been read: through query engines, chat engines, other modes, and after a restart.

Threads (numbers as in the issue): 15 (another tokenizer's counts), 16 (nodes cut in two), 17 (nodes that no
transformation saw).
"""

from __future__ import annotations

import copy
import logging
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_index.core
import pytest
from conftest import build_model, document
from indexes import Words, watch
from llama_index.core import Document, Settings, StorageContext, VectorStoreIndex, load_index_from_storage
from llama_index.core.schema import BaseNode, NodeWithScore, TextNode
from llama_index.llms.kvboost import (
    KVBoostLLM,
    KVBoostNodePostprocessor,
    KVBoostSynthesizer,
    KVBoostWarmTransform,
)
from llama_index.llms.kvboost.warming import content_of

from kvboost_rag import KVBoost, OptionError, PromptTooLongError
from kvboost_rag.engine.types import Report

TEXTS = [document(i) for i in range(6)]
QUESTION = "word1x1 word3x2?"


def hits(report: Report) -> tuple[int, int]:
    return report.num_document_hits, len(report.documents)


def nodes_of(*numbers: int, metadata: dict[str, Any] | None = None) -> list[BaseNode]:
    return [TextNode(text=document(n), id_=f"node{n}", metadata=metadata or {}) for n in numbers]


def found(*numbers: int, metadata: dict[str, Any] | None = None) -> list[NodeWithScore]:
    return [NodeWithScore(node=node, score=1.0) for node in nodes_of(*numbers, metadata=metadata)]


@pytest.fixture
def llm(boost: KVBoost, monkeypatch: pytest.MonkeyPatch) -> KVBoostLLM:
    llm = KVBoostLLM(engine=boost, max_new_tokens=6)
    monkeypatch.setattr(llama_index.core, "global_tokenizer", llm.tokenizer_fn)
    return llm


@pytest.fixture
def reports(boost: KVBoost, monkeypatch: pytest.MonkeyPatch) -> list[Report]:
    return watch(boost, monkeypatch)


@pytest.fixture(params=["plain", "metadata"])
def metadata(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {} if request.param == "plain" else {"author": "Ann", "file": "a.md"}


@pytest.fixture
def index(boost: KVBoost, metadata: dict[str, Any]) -> VectorStoreIndex:
    documents = [Document(text=text, metadata=metadata) for text in TEXTS]
    return VectorStoreIndex.from_documents(
        documents, transformations=[KVBoostWarmTransform(boost)], embed_model=Words()
    )


@pytest.fixture(params=["warmed at ingestion", "warmed on miss"])
def either(
    request: pytest.FixtureRequest, boost: KVBoost, metadata: dict[str, Any]
) -> Iterator[tuple[VectorStoreIndex, list[Any]]]:
    """An index and postprocessors: the nodes were read when they came, or are when they are found."""
    if request.param == "warmed at ingestion":
        yield request.getfixturevalue("index"), []
    else:
        index = VectorStoreIndex(nodes=nodes_of(*range(6), metadata=metadata), embed_model=Words())
        assert boost.stats().num_warmed == 0
        yield index, [KVBoostNodePostprocessor(boost)]


Either = tuple[VectorStoreIndex, list[Any]]


# Every way to ask


@pytest.mark.parametrize("custom", [False, True])
async def test_a_query_engine_hits_every_node(
    either: Either, llm: KVBoostLLM, reports: list[Report], custom: bool
) -> None:
    index, postprocessors = either
    options: dict[str, Any] = {"llm": llm, "similarity_top_k": 3, "node_postprocessors": postprocessors}

    def engine(streaming: bool) -> Any:
        synthesizer = {"response_synthesizer": KVBoostSynthesizer(llm, streaming=streaming)} if custom else {}
        return index.as_query_engine(streaming=streaming, **options, **synthesizer)

    response = engine(False).query(QUESTION)
    assert len(response.source_nodes) == 3
    assert hits(reports[-1]) == (3, 3)
    assert "".join(engine(True).query(QUESTION).response_gen) == str(response)
    assert str(await engine(False).aquery(QUESTION)) == str(response)
    streamed = await engine(True).aquery(QUESTION)
    assert "".join([token async for token in streamed.async_response_gen()]) == str(response)
    assert [hits(report) for report in reports] == [(3, 3)] * 4


@pytest.mark.parametrize("chat_mode", ["context", "condense_plus_context"])
async def test_a_chat_engine_hits_every_node(
    either: Either, llm: KVBoostLLM, reports: list[Report], chat_mode: Any
) -> None:
    index, postprocessors = either
    options: dict[str, Any] = {"llm": llm, "similarity_top_k": 2, "node_postprocessors": postprocessors}

    def engine() -> Any:
        return index.as_chat_engine(chat_mode=chat_mode, **options)

    chat = engine()
    answer = str(chat.chat(QUESTION))
    assert hits(reports[-1]) == (2, 2)
    assert "".join(engine().stream_chat(QUESTION).response_gen) == answer
    assert str(await engine().achat(QUESTION)) == answer
    streamed = await engine().astream_chat(QUESTION)
    assert "".join([token async for token in streamed.async_response_gen()]) == answer
    assert [hits(report) for report in reports] == [(2, 2)] * 4
    chat.chat("word5x9?")  # with a history in front, or condensed
    assert hits(reports[-1]) == (2, 2)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("refine", [(1, 1)] * 3),
        ("accumulate", [(1, 1)] * 3),
        ("tree_summarize", [(3, 3)]),
        ("compact", [(3, 3)]),
        ("compact_accumulate", [(3, 3)]),
    ],
)
def test_other_modes_hit_where_texts_survive(
    index: VectorStoreIndex, llm: KVBoostLLM, reports: list[Report], mode: Any, expected: list[tuple[int, int]]
) -> None:
    index.as_query_engine(llm=llm, similarity_top_k=3, response_mode=mode).query(QUESTION)
    assert [hits(report) for report in reports] == expected


def test_two_nodes_with_the_same_text_both_hit(boost: KVBoost, llm: KVBoostLLM, reports: list[Report]) -> None:
    nodes = [
        TextNode(text=TEXTS[0], id_="a", metadata={"file": "a.md"}),
        TextNode(text=TEXTS[0], id_="b"),
        TextNode(text=f"\n{TEXTS[0]}", id_="c"),
    ]
    KVBoostWarmTransform(boost)(nodes)
    index = VectorStoreIndex(nodes=nodes, embed_model=Words())
    for synthesizer in (None, KVBoostSynthesizer(llm)):
        engine = index.as_query_engine(llm=llm, similarity_top_k=3, response_synthesizer=synthesizer)
        assert len(engine.query("word0x1?").source_nodes) == 3
        assert hits(reports[-1]) == (3, 3)


async def test_everything_takes_the_llm_of_the_settings(
    boost: KVBoost, llm: KVBoostLLM, reports: list[Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Settings, "_llm", llm)
    monkeypatch.setattr(Settings, "_embed_model", Words())
    index = VectorStoreIndex(nodes=nodes_of(0, 1, 2))
    postprocessors = [KVBoostNodePostprocessor()]
    for options in ({}, {"response_synthesizer": KVBoostSynthesizer()}):
        index.as_query_engine(node_postprocessors=postprocessors, **options).query("word1x1?")
        assert hits(reports[-1]) == (2, 2)
    index.as_chat_engine(chat_mode="context", node_postprocessors=postprocessors).chat("word1x1?")
    assert hits(reports[-1]) == (2, 2)


# Threads


def test_thread_15_another_tokenizers_counts_do_not_matter(
    boost: KVBoost, llm: KVBoostLLM, reports: list[Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    """langchain#20967, llama_index#14722, #17251: counted with GPT's tokenizer, the context is negative, or is not."""
    index = VectorStoreIndex(nodes=nodes_of(*range(4)), embed_model=Words())
    monkeypatch.setattr(llama_index.core, "global_tokenizer", lambda text: [0] * 10 * len(text))
    options: dict[str, Any] = {
        "llm": llm,
        "similarity_top_k": 4,
        "node_postprocessors": [KVBoostNodePostprocessor(boost)],
    }
    with pytest.raises(ValueError, match=r"not positive|not non-negative"):
        index.as_query_engine(**options).query(QUESTION)
    index.as_query_engine(response_synthesizer=KVBoostSynthesizer(llm), **options).query(QUESTION)
    assert hits(reports[-1]) == (4, 4)


def test_thread_16_nodes_are_not_cut_in_two(
    boost: KVBoost, llm: KVBoostLLM, reports: list[Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama_index#15054, #12613, PR#22392: compact cuts a node and its second half has no metadata; simple_summarize
    sends the repr of a list."""
    metadata = {"file": "a.md"}
    index = VectorStoreIndex(nodes=nodes_of(*range(8), metadata=metadata), embed_model=Words())
    KVBoostWarmTransform(boost)(nodes_of(*range(8), metadata=metadata))
    whole = {content_of(node) for node in nodes_of(*range(8), metadata=metadata)}
    prompts: list[Any] = []
    segments = boost._segmenter.segments
    monkeypatch.setattr(
        boost._segmenter, "segments", lambda prompt, *rest: (prompts.append(prompt), segments(prompt, *rest))[1]
    )

    def cut() -> bool:
        """Whether some word of a node stands in a prompt, but not the node."""
        texts = [str(getattr(prompt, "text", prompt)) for prompt in prompts]
        return any(text.split()[-1] in prompt and text not in prompt for prompt in texts for text in whole)

    for mode in ("compact", "simple_summarize"):
        try:
            index.as_query_engine(llm=llm, similarity_top_k=8, response_mode=mode).query("word1x1?")
        except PromptTooLongError:
            assert mode == "simple_summarize"
        assert cut(), mode
    for overflow in ("drop_lowest", "refine_groups"):
        del prompts[:], reports[:]
        synthesizer = KVBoostSynthesizer(llm, overflow=overflow)
        if overflow == "drop_lowest":
            with pytest.warns(UserWarning, match="of 8 nodes were left out"):
                index.as_query_engine(llm=llm, similarity_top_k=8, response_synthesizer=synthesizer).query("word1x1?")
        else:
            index.as_query_engine(llm=llm, similarity_top_k=8, response_synthesizer=synthesizer).query("word1x1?")
        assert prompts
        assert not cut()
        assert all(report.num_document_misses == 0 and report.documents for report in reports)
    assert sum(len(report.documents) for report in reports) == 8


async def test_thread_17_nodes_that_no_transformation_saw_are_read_when_found(
    boost: KVBoost, llm: KVBoostLLM, reports: list[Report]
) -> None:
    """llama_index#14921: ``VectorStoreIndex(nodes)`` and ``insert_nodes`` run no transformations."""
    index = VectorStoreIndex(nodes=nodes_of(0), embed_model=Words(), transformations=[KVBoostWarmTransform(boost)])
    index.insert_nodes(nodes_of(1))
    await index.ainsert_nodes(nodes_of(2))
    assert boost.stats().num_warmed == 0
    engine = index.as_query_engine(llm=llm, similarity_top_k=3, node_postprocessors=[KVBoostNodePostprocessor(boost)])
    engine.query("word1x1?")
    assert hits(reports[-1]) == (3, 3)
    assert boost.stats().num_warmed == 3


# The postprocessor


async def test_the_same_objects_come_back(boost: KVBoost, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()
    is_warm = boost.is_warm
    monkeypatch.setattr(boost, "is_warm", lambda text: (threads.add(threading.current_thread()), is_warm(text))[1])
    nodes = [*found(0, 1, metadata={"a": 1}), *found(2), NodeWithScore(node=TextNode(text=" "))]
    before = [each.model_dump() for each in nodes]
    postprocessor = KVBoostNodePostprocessor(KVBoostLLM(engine=boost))
    same = await postprocessor.apostprocess_nodes(nodes, query_str="x")
    assert threading.main_thread() not in threads
    assert len(threads) == 1
    assert all(a is b for a, b in zip(same, nodes, strict=True))
    assert [each.model_dump() for each in same] == before
    assert boost.stats().num_warmed == 4  # three texts, and the lines of metadata
    assert postprocessor.postprocess_nodes([]) == []


def test_what_is_warm_is_not_read_again(boost: KVBoost, monkeypatch: pytest.MonkeyPatch) -> None:
    KVBoostWarmTransform(boost)(nodes_of(0, metadata={"a": 1}))
    boost.warm(TEXTS[1], chunking="semantic", progress=False)
    read = []
    warm = boost.engine.warm
    monkeypatch.setattr(boost.engine, "warm", lambda *args, **kw: (read.append(args), warm(*args, **kw))[1])
    postprocessor = KVBoostNodePostprocessor(boost)
    postprocessor.postprocess_nodes([*found(0, metadata={"a": 1}), *found(1)])
    assert read == []
    postprocessor.postprocess_nodes([*found(0, metadata={"a": 1}), *found(2)])
    assert len(read) == 1
    first = KVBoostNodePostprocessor(boost, first=True)
    for _ in range(2):
        first.postprocess_nodes([*found(0, metadata={"a": 1}), *found(1)])
        assert len(read) == 3
    assert boost.is_warm(f"a: 1\n\n{TEXTS[0]}")


def test_nodes_kept_exactly_may_come_first(boost: KVBoost, llm: KVBoostLLM) -> None:
    synthesizer = KVBoostSynthesizer(llm, system="You are kind.", instruction="Read:\n")
    metadata = {"file": "a.md"}
    KVBoostWarmTransform(boost, header=synthesizer.header, first=True)(nodes_of(2, metadata=metadata))
    nodes = found(0, 1, 2, metadata=metadata)

    def order(**options: Any) -> list[str]:
        return [n.node_id for n in KVBoostNodePostprocessor(boost, **options).postprocess_nodes(nodes)]

    assert order(order="cache", header=synthesizer.header) == ["node2", "node0", "node1"]
    assert order(order="cache", header="Another.") == ["node0", "node1", "node2"]
    assert order(header=synthesizer.header) == ["node0", "node1", "node2"]
    assert boost.generate(boost.prompt([content_of(nodes[2].node)], "x", "You are kind.", "Read:\n"), max_new_tokens=1)


def test_a_node_too_long_is_logged_or_raised(boost: KVBoost, caplog: pytest.LogCaptureFixture) -> None:
    nodes = [*found(0), NodeWithScore(node=TextNode(text=document(9, words=400), id_="giant")), *found(1)]
    with caplog.at_level(logging.WARNING):
        assert KVBoostNodePostprocessor(boost).postprocess_nodes(nodes) is nodes
    assert "node giant was not read" in caplog.text
    assert boost.is_warm(TEXTS[1])
    with pytest.raises(PromptTooLongError):
        KVBoostNodePostprocessor(boost, on_error="raise").postprocess_nodes(nodes)
    for options in ({"order": "score"}, {"on_error": "ignore"}):
        with pytest.raises(OptionError, match=r"takes one of 'r|takes one of 'w"):
            KVBoostNodePostprocessor(boost, **options)
    with pytest.raises(OptionError, match="engine="):
        KVBoostNodePostprocessor("model")


def test_a_postprocessor_is_of_this_process(boost: KVBoost) -> None:
    postprocessor = KVBoostNodePostprocessor(boost, header=boost.prompt(["x"]))
    assert copy.deepcopy(postprocessor)._engine is boost
    assert "engine" not in postprocessor.to_dict()
    with pytest.raises(TypeError, match="KVBoostNodePostprocessor holds"):
        pickle.dumps(postprocessor)


# A restart


def test_an_index_and_a_store_reopened_hit_at_the_first_question(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = [{}, {}, {"file": "c.md"}, {"file": "d.md"}]
    with KVBoost(build_model(), tokenizer, cache_dir=tmp_path / "kv") as engine:
        documents = [Document(text=text, metadata=each) for text, each in zip(TEXTS, metadata, strict=False)]
        transformations = [KVBoostWarmTransform(engine)]
        index = VectorStoreIndex.from_documents(documents, transformations=transformations, embed_model=Words())
        index.storage_context.persist(tmp_path / "index")
    for custom in (False, True):
        with KVBoost(build_model(), tokenizer, cache_dir=tmp_path / "kv") as engine:
            reports = watch(engine, monkeypatch)
            llm = KVBoostLLM(engine=engine, max_new_tokens=2)
            monkeypatch.setattr(llama_index.core, "global_tokenizer", llm.tokenizer_fn)
            storage = StorageContext.from_defaults(persist_dir=tmp_path / "index")
            index = load_index_from_storage(storage, embed_model=Words())
            synthesizer = KVBoostSynthesizer(llm) if custom else None
            index.as_query_engine(llm=llm, similarity_top_k=4, response_synthesizer=synthesizer).query("word1x1?")
            assert [d.tier for d in reports[-1].documents] == ["disk"] * 4


def test_prefetching_brings_nodes_to_memory(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = {"file": "a.md"}  # lines that all of them share
    nodes = nodes_of(0, 1, 2, metadata=metadata)
    with KVBoost(build_model(), tokenizer, cache_dir=tmp_path) as engine:
        KVBoostWarmTransform(engine)(nodes)
    with KVBoost(build_model(), tokenizer, cache_dir=tmp_path) as engine:
        read = []
        monkeypatch.setattr(engine.engine, "warm", lambda *args, **kwargs: read.append(args))
        reports, llm = watch(engine, monkeypatch), KVBoostLLM(engine=engine, max_new_tokens=2)
        postprocessor = KVBoostNodePostprocessor(engine)
        result = postprocessor.postprocess_nodes(found(0, 1, 2, metadata=metadata))
        engine.prefetch([]).result()  # behind all that was started
        KVBoostSynthesizer(llm).synthesize("which?", result)
        assert read == []
        assert [d.tier for d in reports[-1].documents] == ["memory"] * 3


# Both frameworks


def test_langchain_and_llama_index_find_what_either_has_read(
    boost: KVBoost, llm: KVBoostLLM, reports: list[Report], metadata: dict[str, Any]
) -> None:
    from langchain_core.documents import Document as LangChainDocument
    from langchain_kvboost import ChatKVBoost, warm_documents

    def langchain(*numbers: int) -> tuple[int, int]:
        text = "\n\n".join(document(n) for n in numbers)
        ChatKVBoost(engine=boost, max_tokens=2).invoke(f"Read:\n{text}\n\nwhich?")
        return hits(reports[-1])

    def llama_index_(custom: bool, *numbers: int) -> tuple[int, int]:
        index = VectorStoreIndex(nodes=nodes_of(*numbers, metadata=metadata), embed_model=Words())
        synthesizer = KVBoostSynthesizer(llm) if custom else None
        index.as_query_engine(llm=llm, response_synthesizer=synthesizer).query("which?")
        return hits(reports[-1])

    def langchain_reads(*numbers: int) -> int:
        documents = [LangChainDocument(page_content=document(n), metadata={"b": 2}) for n in numbers]
        return warm_documents(documents, boost, progress=False).num_warmed

    assert langchain_reads(0, 1) == 2
    KVBoostWarmTransform(llm)(nodes_of(2, 3, metadata=metadata))
    assert langchain(2, 3) == langchain(1, 2) == (2, 2)
    for custom in (False, True):
        assert llama_index_(custom, 0, 1) == (2, 2)
        assert llama_index_(custom, 1, 2) == (2, 2)
    # what either has read is not read again: the texts are there, and the lines in front are those of other nodes
    assert langchain_reads(2, 3) == 0
    transform = KVBoostWarmTransform(boost)
    transform(nodes_of(0, 1, metadata=metadata))
    assert transform.report.num_warmed == 0
    transform(nodes_of(0, metadata={"never": "seen"}))
    assert transform.report.num_warmed == 1
    assert langchain(0, 1) == (2, 2)
    assert llama_index_(True, 0, 1) == llama_index_(False, 0, 1) == (2, 2)
