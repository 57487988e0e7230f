"""A LangChain agent that looks things up: the middleware finds documents and has the model read what it has not yet.

    python examples/03_langchain_agent.py [MODEL]

MODEL is a hub name or a folder; left out, the bundled small model is used, which needs no network. Needs `langchain`.
"""

from __future__ import annotations

import sys

import _bundled
from langchain.agents import create_agent
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_kvboost import ChatKVBoost, KVBoostRAGMiddleware

from kvboost_rag import KVBoost, hub, sample


def main(model: str | None = None) -> None:
    passages = list(sample.passages().values())[6:12]
    store = InMemoryVectorStore.from_texts(passages, _bundled.for_langchain())  # filled before, without the model
    retriever = store.as_retriever(search_kwargs={"k": 3})
    with KVBoost.from_pretrained(model or hub.bundled_model()) as engine:
        llm = ChatKVBoost(engine=engine, max_tokens=32)
        agent = create_agent(llm, tools=[], middleware=[KVBoostRAGMiddleware(retriever)])

        for question in (
            "Who is the head teacher of the Floating School?",
            "Which village was the first to grow blue barley?",
            "In what year was the Tide Clock finished?",
        ):
            before = sum(map(engine.is_warm, passages))
            state = agent.invoke({"messages": [{"role": "user", "content": question}]})
            message = state["messages"][-1]
            report = message.response_metadata["kvboost"]
            print(f"\n{question}\n{message.content.strip()}")
            print(
                f"{sum(map(engine.is_warm, passages)) - before} passages read for this question, "
                f"documents hit {report['num_document_hits']}/{len(report['documents'])}, "
                f"TTFT {report['ttft_seconds']:.2f} s"
            )


if __name__ == "__main__":
    main(*sys.argv[1:2])
