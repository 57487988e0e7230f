"""A LlamaIndex query engine over nodes the model has read: warming is the last step of ingestion.

    python examples/04_llamaindex_query_engine.py [MODEL]

MODEL is a hub name or a folder; left out, the bundled small model is used, which needs no network.
"""

from __future__ import annotations

import sys
from typing import Any

import _bundled
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent
from llama_index.core.node_parser import SentenceSplitter
from llama_index.llms.kvboost import KVBoostLLM, KVBoostWarmTransform

from kvboost_rag import KVBoost, hub, sample


class Reports(BaseEventHandler):
    """A query engine returns text and sources; what was reused comes with LlamaIndex's own events."""

    def handle(self, event: Any, **kwargs: Any) -> None:
        if isinstance(event, LLMChatEndEvent):
            report = event.response.message.additional_kwargs["kvboost"]
            hits = f"{report['num_document_hits']}/{len(report['documents'])}"
            print(f"documents hit {hits}, TTFT {report['ttft_seconds']:.2f} s")


def main(model: str | None = None) -> None:
    documents = [Document(text=text) for text in list(sample.passages().values())[6:12]]
    get_dispatcher().add_event_handler(Reports())
    with KVBoost.from_pretrained(model or hub.bundled_model()) as engine:
        warm = KVBoostWarmTransform(engine)
        index = VectorStoreIndex.from_documents(
            documents, transformations=[SentenceSplitter(), warm], embed_model=_bundled.for_llama_index()
        )
        print(warm.report)

        llm = KVBoostLLM(engine=engine, max_new_tokens=32)
        query_engine = index.as_query_engine(llm=llm, similarity_top_k=3, streaming=False)
        for question in (
            "Who is the head teacher of the Floating School?",
            "Which village was the first to grow blue barley?",
        ):
            print(f"\n{question}")
            print(str(query_engine.query(question)).strip())


if __name__ == "__main__":
    main(*sys.argv[1:2])
