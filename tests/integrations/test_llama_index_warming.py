"""Nodes are read at ingestion, exactly as prompts will have them, and forgotten when they go.

Threads (numbers as in the issue): 17 (second runs, one changed node) and 18 (``num_workers``, failing transformations).
"""

from __future__ import annotations

import copy
import json
import logging
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
from conftest import build_model, document
from indexes import Words
from llama_index.core import Document, Settings, SummaryIndex, VectorStoreIndex
from llama_index.core.bridge.pydantic import Field
from llama_index.core.ingestion import DocstoreStrategy, IngestionCache, IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import BaseNode, ImageNode, MediaResource, MetadataMode, Node, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.llms.kvboost import KVBoostLLM, KVBoostWarmTransform, evicting, forget_nodes, warm_nodes
from llama_index.llms.kvboost.warming import chunking_of, content_of, own_text

from kvboost_rag import KVBoost, OptionError, PromptTooLongError
from kvboost_rag.errors import ClosedEngineError

TEXTS = [document(i) for i in range(6)]
TOO_LONG = document(9, words=400)


class TextStore(SimpleVectorStore):
    """A vector store that has the texts, as all but the simple one do: the index then has no docstore of its own."""

    stores_text: bool = True
    listed: bool = True
    kept: dict[str, Any] = Field(default_factory=dict)

    def add(self, nodes: Any, **kwargs: Any) -> list[str]:
        self.kept.update({node.node_id: node for node in nodes})
        return super().add(nodes, **kwargs)

    def delete(self, ref_doc_id: str, **kwargs: Any) -> None:
        for key in [k for k, node in self.kept.items() if node.ref_doc_id == ref_doc_id]:
            del self.kept[key]
        super().delete(ref_doc_id, **kwargs)

    def get_nodes(self, node_ids: Any = None, filters: Any = None) -> list[BaseNode]:
        if not self.listed:
            raise NotImplementedError
        return list(self.kept.values())


# nodes with a source: without one, nothing can be deleted by document
SPLITTER = SentenceSplitter(chunk_size=4000, chunk_overlap=0, tokenizer=str.split)


def sources(*numbers: int, **metadata: Any) -> list[Document]:
    return [Document(text=document(n), id_=f"doc{n}", metadata=metadata) for n in numbers]


def warm_ones(engine: KVBoost) -> set[int]:
    return {n for n in range(12) if engine.is_warm(document(n))}


@pytest.fixture
def read(boost: KVBoost, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that the engine was made to read, in order."""
    seen: list[str] = []
    warm = boost.engine.warm

    def watched(context: Any, parts: Any, pinned: bool = False, text: str = "", *rest: Any, **kwargs: Any) -> Any:
        seen.append(text)
        return warm(context, parts, pinned, text, *rest, **kwargs)

    monkeypatch.setattr(boost.engine, "warm", watched)
    return seen


# What is read


@pytest.mark.parametrize(
    ("node", "lines"),
    [
        (TextNode(text=TEXTS[0]), ""),
        (TextNode(text=TEXTS[0], metadata={"file": "a.md"}), "file: a.md\n\n"),
        (TextNode(text=f" \n{TEXTS[0]}  ", metadata={"file": "a.md", "page": 3}), "file: a.md\npage: 3\n\n \n"),
        (TextNode(text=TEXTS[0], metadata={"file": "a.md"}, excluded_llm_metadata_keys=["file"]), ""),
        (TextNode(text=TEXTS[0], metadata={"a": 1, "b": 2}, excluded_llm_metadata_keys=["a"]), "b: 2\n\n"),
        (TextNode(text=TEXTS[0], metadata={"a": 1}, excluded_embed_metadata_keys=["a"]), "a: 1\n\n"),
        (TextNode(text=TEXTS[0], metadata={"a": 1}, metadata_template="<{key}={value}>"), "<a=1>\n\n"),
        (TextNode(text=TEXTS[0], metadata={"a": 1}, text_template="[{metadata_str}] {content}"), "[a: 1] "),
        (TextNode(text=TEXTS[0], metadata={"a": 1}, text_template="{content}\n[{metadata_str}]"), ""),
        (TextNode(text=TEXTS[0], metadata={"a": 1}, text_template="<{metadata_str}>{content}</>"), ""),
        (TextNode(text=TEXTS[0], metadata={"a": 1}, text_template="{content}"), ""),
        (TextNode(text=TEXTS[0], metadata={"a": ""}), "a:\n\n"),
        (TextNode(text="", metadata={"a": 1}), ""),
        (TextNode(text=" \n"), ""),
        (ImageNode(text=TEXTS[0], metadata={"a": 1}), "a: 1\n\n"),
        (Node(text_resource=MediaResource(text=TEXTS[0]), metadata={"a": 1}), "a: 1\n\n"),
        (Node(), ""),
    ],
)
def test_metadata_lines_are_a_part_of_their_own(boost: KVBoost, node: BaseNode, lines: str) -> None:
    before = node.model_dump()
    content = node.get_content(MetadataMode.LLM).strip()
    assert chunking_of(node) == (f"at:{len(lines)}" if lines else "document")
    assert lines + own_text(node) == content_of(node) == content
    (same,) = KVBoostWarmTransform(boost)([node])
    assert same is node
    assert node.model_dump() == before
    assert boost.is_warm(content) == bool(content)
    if lines:
        assert boost.is_warm(TEXTS[0])
        parts = [s for s in boost.segments(f"x {content} x") if s.document]
        assert [boost.tokens.decode(part.ids) for part in parts] == [lines, TEXTS[0]]


def test_what_was_read_whole_is_read_again_in_parts_once(boost: KVBoost, read: list[str]) -> None:
    node = TextNode(text=TEXTS[0], metadata={"file": "a.md"})
    boost.warm(content_of(node), progress=False)
    for _ in range(2):
        KVBoostWarmTransform(boost)([node, node.model_copy()])
        assert read == [content_of(node)] * 2


def test_options_of_warming_are_passed_on(boost: KVBoost) -> None:
    header = "You are kind."
    nodes = [TextNode(text=TEXTS[0], metadata={"file": "a.md"}), TextNode(text=TEXTS[1])]
    transform = KVBoostWarmTransform(boost, header=header, first=True, progress=False)
    transform(nodes)
    assert (transform.report.num_warmed, transform.report.num_first) == (2, 2)
    assert boost.order([TEXTS[2], content_of(nodes[0])], header=header) == [1, 0]
    assert boost.order([TEXTS[2], content_of(nodes[0])], header="Another.") == [0, 1]
    KVBoostWarmTransform(boost, chunking="semantic")([TextNode(text=TEXTS[3], metadata={"a": 1})])
    assert boost.is_warm(f"a: 1\n\n{TEXTS[3]}")
    assert not boost.is_warm(TEXTS[3])


def test_wrong_options_are_never_taken_for_failures(boost: KVBoost) -> None:
    with pytest.raises(OptionError, match=r"on_error='ignore' is not valid; on_error takes one of 'warn', 'raise'"):
        KVBoostWarmTransform(boost, on_error="ignore")
    with pytest.raises(OptionError, match="engine="):
        KVBoostWarmTransform(object())
    with pytest.raises(OptionError, match="chunking='other'"):
        KVBoostWarmTransform(boost, chunking="other")([TextNode(text="x")])
    with pytest.raises(TypeError, match="haeder"):
        KVBoostWarmTransform(boost, haeder="x")([TextNode(text="x")])
    boost.close()
    with pytest.raises(ClosedEngineError):
        KVBoostWarmTransform(boost)([TextNode(text="x")])


def test_the_engine_of_the_settings(boost: KVBoost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Settings, "_llm", KVBoostLLM(engine=boost))
    monkeypatch.setattr(Settings, "_transformations", [SPLITTER, KVBoostWarmTransform()])
    index = VectorStoreIndex.from_documents(sources(0), embed_model=Words())
    warm_nodes([TextNode(text=TEXTS[1])])
    assert warm_ones(boost) == {0, 1}
    with evicting(index):
        index.delete_ref_doc("doc0")
    assert forget_nodes([TextNode(text=TEXTS[1])]) == 1
    assert warm_ones(boost) == set()


async def test_the_event_loop_never_reads(boost: KVBoost, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()
    warm = boost.warm
    monkeypatch.setattr(
        boost, "warm", lambda *args, **kwargs: (threads.add(threading.current_thread()), warm(*args, **kwargs))[1]
    )
    transform = KVBoostWarmTransform(boost)
    nodes = [TextNode(text=TEXTS[0])]
    assert await transform.acall(nodes) is nodes
    assert len(threads) == 1
    assert threading.main_thread() not in threads
    assert transform.report.num_warmed == 1


# The ingestion cache


def test_the_hash_follows_the_store(boost: KVBoost, tokenizer: Any, tmp_path: Path) -> None:
    transform = KVBoostWarmTransform(boost, header=boost.prompt(["x"]), first=True)
    before = transform.to_dict()
    assert before["store_id"] == boost.store_id
    assert before["options"]["first"] is True
    json.dumps(before)
    assert transform.to_dict() == before
    boost.clear()
    assert transform.to_dict() != before
    assert KVBoostWarmTransform(boost, first=True).to_dict() != KVBoostWarmTransform(boost).to_dict()

    def of(seed: int) -> dict[str, Any]:
        with KVBoost(build_model(seed=seed), tokenizer, cache_dir=tmp_path) as engine:
            transform = KVBoostWarmTransform(engine)
            transform([TextNode(text=TEXTS[0])])
            return transform.to_dict()

    assert of(0) == of(0) != of(1)


def test_a_second_run_over_a_cleared_store_reads_again(boost: KVBoost, read: list[str]) -> None:
    nodes = [TextNode(text=text) for text in TEXTS[:2]]
    pipeline = IngestionPipeline(transformations=[KVBoostWarmTransform(boost)])
    pipeline.run(nodes=nodes)
    pipeline.run(nodes=nodes)
    assert read == TEXTS[:2]
    boost.clear()
    assert len(pipeline.run(nodes=nodes)) == 2
    assert read == TEXTS[:2] * 2
    assert warm_ones(boost) == {0, 1}


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_thread_17_a_second_run_reads_what_changed(boost: KVBoost, read: list[str], asynchronous: bool) -> None:
    """llama_index#14065, #10948, #16394: the second run returns nothing, and one changed node runs all again."""
    pipeline = IngestionPipeline(
        transformations=[SPLITTER, KVBoostWarmTransform(boost), Words()],
        docstore=SimpleDocumentStore(),
        docstore_strategy=DocstoreStrategy.UPSERTS,
        vector_store=SimpleVectorStore(),
        cache=IngestionCache(),
    )

    async def run(documents: list[Document]) -> int:
        nodes = await pipeline.arun(documents=documents) if asynchronous else pipeline.run(documents=documents)
        return len(nodes)

    assert await run(sources(0, 1, 2)) == 3
    assert read == TEXTS[:3]
    assert await run(sources(0, 1, 2)) == 0
    assert read == TEXTS[:3]
    changed = Document(text=document(7), id_="doc1")
    assert await run([*sources(0, 2), changed]) == 1
    assert read == [*TEXTS[:3], document(7)]
    assert warm_ones(boost) >= {0, 2, 7}


def test_thread_17_a_second_run_with_another_store_returns_nothing_and_leaves_it_cold(
    boost: KVBoost, tokenizer: Any
) -> None:
    """The docstore skips documents before any transformation: ``warm_nodes`` or a postprocessor reads them."""
    options: dict[str, Any] = {"docstore": SimpleDocumentStore(), "vector_store": SimpleVectorStore()}
    IngestionPipeline(transformations=[KVBoostWarmTransform(boost), Words()], **options).run(documents=sources(0, 1))
    with KVBoost(build_model(seed=1), tokenizer) as other:
        pipeline = IngestionPipeline(transformations=[KVBoostWarmTransform(other), Words()], **options)
        assert len(pipeline.run(documents=sources(0, 1))) == 0
        assert warm_ones(other) == set()
        assert warm_nodes(pipeline.docstore.docs.values(), other).num_warmed == 2
        assert warm_ones(other) == {0, 1}


# Failures


async def test_thread_18_num_workers_is_refused_by_name(boost: KVBoost) -> None:
    """llama_index#14236, #21300: a local model is pickled into other processes, or lost there."""
    transform = KVBoostWarmTransform(boost)
    pipeline = IngestionPipeline(transformations=[transform], disable_cache=True)
    with pytest.raises(TypeError, match=r"KVBoostWarmTransform holds .* without num_workers"):
        pickle.dumps(transform)
    with pytest.raises(TypeError, match=r"KVBoostWarmTransform holds .* without num_workers"):
        pipeline.run(documents=sources(0, 1), num_workers=2)
    with pytest.raises(TypeError, match=r"KVBoostWarmTransform holds .* without num_workers"):
        await pipeline.arun(documents=sources(0, 1), num_workers=2)
    pipeline.run(documents=sources(0, 1), num_workers=1)
    assert copy.deepcopy(transform).to_dict() == transform.to_dict()
    assert warm_ones(boost) == {0, 1}


def test_thread_18_one_node_too_long_keeps_no_other_from_being_read(
    boost: KVBoost, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = [TextNode(text=TEXTS[0]), TextNode(text=TOO_LONG, id_="giant"), TextNode(text=TEXTS[1], metadata={"a": 1})]
    transform = KVBoostWarmTransform(boost)
    with caplog.at_level(logging.WARNING):
        assert transform(nodes) is nodes
    assert [r.getMessage() for r in caplog.records if "node giant was not read: the document" in r.getMessage()]
    report = transform.report
    assert (report.num_documents, report.num_warmed, report.num_rejected) == (3, 2, 1)
    assert boost.is_warm(content_of(nodes[2]))
    boost.clear()
    with pytest.raises(PromptTooLongError):
        KVBoostWarmTransform(boost, on_error="raise")(nodes)
    assert warm_ones(boost) == {0, 1}


def test_thread_18_a_failed_run_marks_nothing_as_done(boost: KVBoost, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama_index#19579: with ``on_error="raise"`` the next run tries again; with ``"warn"`` the run goes on."""
    warm, broken = boost.engine.warm, [TEXTS[1]]

    def failing(context: Any, parts: Any, pinned: bool, text: str, *rest: Any) -> Any:
        if text in broken:
            raise OSError("no space left on device")
        return warm(context, parts, pinned, text, *rest)

    monkeypatch.setattr(boost.engine, "warm", failing)
    vectors, docstore = SimpleVectorStore(), SimpleDocumentStore()
    options: dict[str, Any] = {"docstore": docstore, "vector_store": vectors, "disable_cache": True}
    raising = IngestionPipeline(transformations=[KVBoostWarmTransform(boost, on_error="raise"), Words()], **options)
    with pytest.raises(OSError, match="no space left"):
        raising.run(documents=sources(0, 1, 2))
    assert warm_ones(boost) == {0, 2}
    assert docstore.get_all_document_hashes() == {}
    logging_on = IngestionPipeline(transformations=[KVBoostWarmTransform(boost), Words()], **options)
    assert len(logging_on.run(documents=sources(0, 1, 2))) == 3
    assert len(vectors.data.embedding_dict) == 3
    assert warm_ones(boost) == {0, 2}


# Going


def test_forgetting_leaves_what_other_nodes_have(boost: KVBoost) -> None:
    a, b = ({"file": name} for name in "ab")
    nodes = [TextNode(text=TEXTS[i], metadata=meta) for i, meta in ((0, a), (1, a), (0, b), (2, b), (3, {}))]
    transform = KVBoostWarmTransform(boost)

    def warm() -> list[bool]:
        return [boost.is_warm(content_of(node)) for node in nodes]

    transform(nodes)
    assert transform.forget(nodes[:1], keep=nodes[1:]) == 0  # the third has its text, the second its lines
    assert warm() == [True] * 5
    assert transform.forget(nodes[1:2], keep=[nodes[0]]) == 1
    assert warm() == [True, False, True, True, True]
    assert forget_nodes([nodes[3], nodes[4]], boost) == 2
    assert warm() == [True, False, True, False, False]  # the lines of b are still there
    assert transform.forget(nodes, keep=[]) == 1
    assert boost.stats().num_warmed == 0


@pytest.mark.parametrize("metadata", [{}, {"author": "Ann", "kind": "story"}])
async def test_refreshing_reads_what_changed_and_evicts_what_it_was(
    boost: KVBoost, read: list[str], metadata: dict[str, Any]
) -> None:
    def texts(*numbers: int) -> set[str]:
        return {content_of(source) for source in sources(*numbers, **metadata)}

    index = VectorStoreIndex.from_documents(
        sources(0, 1, 2, **metadata), transformations=[SPLITTER, KVBoostWarmTransform(boost)], embed_model=Words()
    )
    del read[:]
    changed = Document(text=document(7), id_="doc1", metadata=metadata)
    with evicting(index, boost):
        refreshed = index.refresh_ref_docs([*sources(0, **metadata), changed, *sources(2, **metadata)])
    assert refreshed == [False, True, False]
    assert set(read) == texts(7)
    assert all(boost.is_warm(text) for text in texts(0, 2, 7))
    assert warm_ones(boost) == {0, 2, 7}
    with evicting(index, KVBoostLLM(engine=boost)):
        await index.arefresh_ref_docs([Document(text=document(8), id_="doc1", metadata=metadata)])
    assert warm_ones(boost) == {0, 2, 8}
    with pytest.raises(RuntimeError), evicting(index, boost):  # what is gone is gone
        index.delete_ref_doc("doc0")
        raise RuntimeError
    assert warm_ones(boost) == {2, 8}
    with evicting(index, boost):
        await index.adelete_ref_doc("doc2", delete_from_docstore=True)
        index.delete_ref_doc("doc1", delete_from_docstore=True)
    assert warm_ones(boost) == set()


def test_a_text_stays_while_any_document_has_it(boost: KVBoost) -> None:
    twin = Document(text=f"{TEXTS[0]}\n", id_="twin", metadata={"file": "b"})
    transformations = [SPLITTER, KVBoostWarmTransform(boost)]
    index = SummaryIndex.from_documents([*sources(0, 1), twin], transformations=transformations)
    with evicting(index, boost):
        index.delete_ref_doc("doc0", delete_from_docstore=True)
    assert warm_ones(boost) == {0, 1}
    with evicting(index, boost):
        index.delete_ref_doc("twin", delete_from_docstore=True)
    assert warm_ones(boost) == {1}


def test_a_pipeline_into_a_store_of_texts_evicts_too(boost: KVBoost) -> None:
    vectors = TextStore()
    index = VectorStoreIndex.from_vector_store(vectors, embed_model=Words())
    pipeline = IngestionPipeline(
        transformations=[SPLITTER, KVBoostWarmTransform(boost), Words()],
        docstore=SimpleDocumentStore(),
        docstore_strategy=DocstoreStrategy.UPSERTS_AND_DELETE,
        vector_store=vectors,
    )
    pipeline.run(documents=sources(0, 1, 2))
    with evicting(index, boost):
        pipeline.run(documents=[*sources(0), Document(text=document(7), id_="doc1")])
    assert warm_ones(boost) == {0, 7}
    vectors.listed = False
    with pytest.raises(OptionError, match="forget_nodes"), evicting(index, boost):
        raise AssertionError
