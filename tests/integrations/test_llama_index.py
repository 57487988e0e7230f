"""LlamaIndex's doors: a query engine whose nodes hit, and responses that come back complete."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import document
from indexes import Words, watch
from llama_index.core import Document, Settings, VectorStoreIndex
from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.schema import TextNode
from llama_index.llms.kvboost import KVBoostLLM, KVBoostWarmTransform

from kvboost_rag import KVBoost, OptionError
from kvboost_rag.engine.types import Report

TEXTS = [document(i) for i in range(6)]


@pytest.fixture
def llm(boost: KVBoost) -> KVBoostLLM:
    return KVBoostLLM(engine=boost, max_new_tokens=8)


@pytest.fixture
def reports(boost: KVBoost, monkeypatch: pytest.MonkeyPatch) -> list[Report]:
    return watch(boost, monkeypatch)


@pytest.fixture
def index(boost: KVBoost) -> VectorStoreIndex:
    documents = [Document(text=text) for text in TEXTS]
    # the default packs prompts by another model's tokenizer
    Settings.tokenizer = lambda text: list(boost.tokens.encode(text))
    return VectorStoreIndex.from_documents(
        documents, transformations=[KVBoostWarmTransform(boost)], embed_model=Words()
    )


async def test_a_query_engine_hits_every_node(index: VectorStoreIndex, llm: KVBoostLLM, reports: list[Report]) -> None:
    assert all(llm.engine.is_warm(text) for text in TEXTS)
    for question in ("word1x1 word3x2?", "word5x9?"):
        answer = str(index.as_query_engine(llm=llm, similarity_top_k=3).query(question))
        assert (reports[-1].num_document_hits, len(reports[-1].documents)) == (3, 3)
        streamed = index.as_query_engine(llm=llm, similarity_top_k=3, streaming=True).query(question)
        assert "".join(streamed.response_gen) == answer
        assert reports[-1].num_document_hits == 3
        assert str(await index.as_query_engine(llm=llm, similarity_top_k=3).aquery(question)) == answer


def test_a_chat_engine_hits_through_the_system_message(
    index: VectorStoreIndex, llm: KVBoostLLM, reports: list[Report]
) -> None:
    index.as_chat_engine(chat_mode="context", llm=llm, similarity_top_k=2).chat("word2x2?")
    assert (reports[-1].num_document_hits, len(reports[-1].documents)) == (2, 2)


def test_inserted_documents_are_warmed_too(index: VectorStoreIndex, llm: KVBoostLLM) -> None:
    index.insert(Document(text=document(40)))
    assert llm.engine.is_warm(document(40))


def test_metadata_the_model_sees_is_warmed_with_the_text(boost: KVBoost) -> None:
    node = TextNode(text=TEXTS[0], metadata={"file": "a.md"})
    before = node.model_dump()
    (same,) = KVBoostWarmTransform(boost)([node])
    assert same is node
    assert node.model_dump() == before
    assert boost.is_warm(f"file: a.md\n\n{TEXTS[0]}")


async def test_a_second_run_of_a_pipeline_warms_a_new_store(boost: KVBoost, tokenizer: Any) -> None:
    """The ingestion cache skips a transformation whose inputs and settings it has seen."""
    from conftest import build_model

    nodes = [TextNode(text=TEXTS[0])]
    pipeline = IngestionPipeline(transformations=[KVBoostWarmTransform(boost)])
    await pipeline.arun(nodes=nodes)
    assert boost.is_warm(TEXTS[0])
    with KVBoost(build_model(), tokenizer) as other:
        again = IngestionPipeline(transformations=[KVBoostWarmTransform(other)], cache=pipeline.cache)
        again.run(nodes=nodes)
        assert other.is_warm(TEXTS[0])


def test_the_class_is_an_llm(llm: KVBoostLLM) -> None:
    assert BaseLLM.__name__ in [base.__name__ for base in KVBoostLLM.__mro__]
    assert llm.class_name() == "KVBoostLLM"
    metadata = llm.metadata
    assert (metadata.context_window, metadata.num_output, metadata.is_chat_model) == (2048, 8, True)
    assert "engine" not in llm.to_dict()


def test_complete_chat_and_their_streams_agree(llm: KVBoostLLM) -> None:
    completed = llm.complete("hello there")
    *_, streamed = llm.stream_complete("hello there")
    assert completed.text == streamed.text
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert completed.raw["usage"][count] == streamed.raw["usage"][count]
    messages = [ChatMessage(role=MessageRole.USER, content="hello there")]
    chatted = llm.chat(messages)
    pieces = list(llm.stream_chat(messages))
    assert "".join(p.delta for p in pieces) == pieces[-1].message.content == chatted.message.content
    assert chatted.message.additional_kwargs["kvboost"]["num_prompt_tokens"] == chatted.raw["usage"]["prompt_tokens"]


def test_options_as_fields_and_per_call(boost: KVBoost, llm: KVBoostLLM) -> None:
    assert llm.complete("hello", max_tokens=3).raw["usage"]["completion_tokens"] == 3
    free = llm.complete("hello").text
    stopping = KVBoostLLM(engine=boost, max_new_tokens=8, stop=free[3:5])
    assert stopping.complete("hello").text == free[: free.index(free[3:5])]
    with pytest.raises(OptionError, match="unknown option 'tempreature'"):
        llm.complete("hello", tempreature=1)


def test_an_llm_without_an_engine_loads_one_by_name(boost: KVBoost, tmp_path: Any) -> None:
    boost.engine.model.module.save_pretrained(tmp_path)
    boost.tokenizer.save_pretrained(tmp_path)
    loaded = KVBoostLLM(model_name=str(tmp_path), max_new_tokens=5)
    assert loaded.complete("hello").raw["usage"]["completion_tokens"] == 5
    loaded.engine.close()
    with pytest.raises(OptionError, match="needs engine="):
        KVBoostLLM()


def test_both_frameworks_share_one_engine(boost: KVBoost, llm: KVBoostLLM) -> None:
    from langchain_kvboost import ChatKVBoost

    KVBoostWarmTransform(llm)([TextNode(text=TEXTS[3])])
    message = ChatKVBoost(engine=llm, max_tokens=4).invoke(f"{TEXTS[3]}\nwhich?")
    assert message.response_metadata["kvboost"]["num_document_hits"] == 1
