"""LlamaIndex's ways of asking, on real weights: every retrieved node hits, and what changed is read again."""

from __future__ import annotations

from typing import Any

import pytest
from indexes import Words, watch
from llama_index.core import Document, Settings, VectorStoreIndex
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.llms.kvboost import KVBoostLLM, KVBoostSynthesizer, KVBoostWarmTransform, evicting

from kvboost_rag import KVBoost, sample
from kvboost_rag.engine.types import Report

TEXTS = [" ".join(text.split()[:90]) for text in list(sample.passages().values())[:5]]
QUESTIONS = [q.question for q in sample.questions()[:2]]

pytestmark = pytest.mark.real_model


@pytest.fixture
def boost(real_boost: KVBoost) -> KVBoost:
    real_boost.clear()
    Settings.tokenizer = lambda text: list(real_boost.tokens.encode(text))
    return real_boost


@pytest.fixture
def llm(boost: KVBoost) -> KVBoostLLM:
    return KVBoostLLM(engine=boost, max_new_tokens=6)


@pytest.fixture
def reports(boost: KVBoost, monkeypatch: pytest.MonkeyPatch) -> list[Report]:
    return watch(boost, monkeypatch)


@pytest.fixture
def index(boost: KVBoost) -> VectorStoreIndex:
    documents = [Document(text=text, doc_id=str(n), metadata={"page": n}) for n, text in enumerate(TEXTS)]
    return VectorStoreIndex.from_documents(
        documents, transformations=[KVBoostWarmTransform(boost)], embed_model=Words()
    )


def all_hit(reports: list[Report], num_nodes: int) -> bool:
    found = [(report.num_document_hits, len(report.documents)) for report in reports]
    reports.clear()
    return bool(found) and all(each == (num_nodes, num_nodes) for each in found)


@pytest.mark.parametrize("own", [False, True], ids=["compact", "own synthesizer"])
async def test_a_query_engine(index: VectorStoreIndex, llm: KVBoostLLM, reports: list[Report], own: bool) -> None:
    def engine(streaming: bool = False) -> Any:
        synthesizer = KVBoostSynthesizer(llm=llm, streaming=streaming) if own else None
        return index.as_query_engine(llm=llm, similarity_top_k=4, streaming=streaming, response_synthesizer=synthesizer)

    for question in QUESTIONS:
        answer = str(engine().query(question))
        assert all_hit(reports, 4)
    assert str(await engine().aquery(question)) == answer
    assert all_hit(reports, 4)
    pieces = list(engine(streaming=True).query(question).response_gen)
    assert "".join(pieces) == answer
    assert len(pieces) > 1
    assert all_hit(reports, 4)
    streamed = await engine(streaming=True).aquery(question)
    assert "".join([piece async for piece in streamed.async_response_gen()]) == answer
    assert all_hit(reports, 4)


@pytest.mark.parametrize("mode", ["context", "condense_plus_context"])
def test_a_chat_engine(index: VectorStoreIndex, llm: KVBoostLLM, reports: list[Report], mode: str) -> None:
    chat = index.as_chat_engine(chat_mode=mode, llm=llm, similarity_top_k=3)
    for question in QUESTIONS:
        chat.chat(question)
        assert (reports[-1].num_document_hits, len(reports[-1].documents)) == (3, 3)


def test_a_pipeline_run_twice_reads_what_changed_only(boost: KVBoost) -> None:
    warm = KVBoostWarmTransform(boost)
    pipeline = IngestionPipeline(
        transformations=[Words(), warm],
        docstore=SimpleDocumentStore(),
        vector_store=SimpleVectorStore(),
        docstore_strategy=DocstoreStrategy.UPSERTS,
    )
    documents = [Document(text=text, doc_id=str(n)) for n, text in enumerate(TEXTS[:3])]
    assert len(pipeline.run(documents=documents)) == 3
    documents[1] = Document(text=TEXTS[3], doc_id="1")
    assert len(pipeline.run(documents=documents)) == 1
    assert warm.report.num_warmed == 1
    assert boost.is_warm(TEXTS[3])


def test_a_refreshed_document_is_read_again_and_the_old_one_goes(index: VectorStoreIndex, boost: KVBoost) -> None:
    documents = [Document(text=text, doc_id=str(n), metadata={"page": n}) for n, text in enumerate(TEXTS)]
    documents[2] = Document(text="Entirely new: " + TEXTS[2][:300], doc_id="2", metadata={"page": 2})
    with evicting(index, boost):
        assert index.refresh_ref_docs(documents) == [False, False, True, False, False]
    assert [boost.is_warm(text) for text in TEXTS] == [True, True, False, True, True]
    assert boost.is_warm(documents[2].text)
