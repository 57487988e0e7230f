"""LangChain ingests, LlamaIndex answers: what one has read, the other finds, because the engine is the same.

    python examples/09_two_frameworks_one_engine.py [MODEL]

MODEL is a hub name or a folder; left out, the bundled small model is used, which needs no network.
"""

from __future__ import annotations

import sys
from typing import Any

import _bundled
from langchain_kvboost import KVBoostVectorStore
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent
from llama_index.llms.kvboost import KVBoostLLM

from kvboost_rag import KVBoost, hub, sample


class Reports(BaseEventHandler):
    """Prints what LlamaIndex's answers reused of what was read."""

    def handle(self, event: Any, **kwargs: Any) -> None:
        if isinstance(event, LLMChatEndEvent):
            report = event.response.message.additional_kwargs["kvboost"]
            print(f"documents hit {report['num_document_hits']}/{len(report['documents'])}")


def main(model: str | None = None) -> None:
    passages = list(sample.passages().values())[6:12]
    get_dispatcher().add_event_handler(Reports())
    with KVBoost.from_pretrained(model or hub.bundled_model()) as engine:
        store = KVBoostVectorStore.from_texts(passages, _bundled.for_langchain(), engine=engine)
        print(f"{sum(map(engine.is_warm, passages))} of {len(passages)} passages read through LangChain")

        documents = [Document(text=text) for text in passages]  # an index without a warming step: it reads nothing
        index = VectorStoreIndex.from_documents(documents, embed_model=_bundled.for_llama_index())
        query_engine = index.as_query_engine(llm=KVBoostLLM(engine=engine, max_new_tokens=32), similarity_top_k=3)

        question = "Which village was the first to grow blue barley?"
        titles = [document.page_content.splitlines()[0] for document in store.similarity_search(question, k=3)]
        print(f"\n{question}\nLangChain finds: {', '.join(titles)}")
        print(f"LlamaIndex answers: {str(query_engine.query(question)).strip()}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
