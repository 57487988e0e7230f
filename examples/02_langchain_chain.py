"""An ordinary LangChain chain whose documents the model has read: adding them to the store is reading them.

    python examples/02_langchain_chain.py [MODEL]

MODEL is a hub name or a folder; left out, the bundled small model is used, which needs no network.
"""

from __future__ import annotations

import sys

import _bundled
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_kvboost import ChatKVBoost, KVBoostVectorStore

from kvboost_rag import KVBoost, hub, sample

TEMPLATE = "{context}\n\nQuestion: {question}\nAnswer in one short sentence."


def join(documents: list[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)


def main(model: str | None = None) -> None:
    passages = list(sample.passages().values())[6:12]
    with KVBoost.from_pretrained(model or hub.bundled_model()) as engine:
        inner = InMemoryVectorStore(_bundled.for_langchain())  # or Chroma, Qdrant, FAISS, ...
        store = KVBoostVectorStore(inner, engine)
        store.add_texts(passages)  # embeds them as always, and reads them
        print(f"{sum(map(engine.is_warm, passages))} of {len(passages)} passages read")

        retriever = store.as_retriever(search_kwargs={"k": 3})
        prompt = ChatPromptTemplate.from_template(TEMPLATE)
        llm = ChatKVBoost(engine=engine, max_tokens=32)
        chain = {"context": retriever | join, "question": RunnablePassthrough()} | prompt | llm

        for question in (
            "Who is the head teacher of the Floating School?",
            "Which village was the first to grow blue barley?",
        ):
            message = chain.invoke(question)
            report = message.response_metadata["kvboost"]
            print(f"\n{question}\n{message.content.strip()}")
            print(
                f"documents hit {report['num_document_hits']}/{len(report['documents'])}, "
                f"{report['reuse_ratio']:.0%} of {report['num_prompt_tokens']} prompt tokens reused, "
                f"TTFT {report['ttft_seconds']:.2f} s"
            )


if __name__ == "__main__":
    main(*sys.argv[1:2])
