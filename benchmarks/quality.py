"""How far reuse strays from a full prefill, and what repair buys back.

    python benchmarks/quality.py --data PATH --questions 20

Protocol: a document is its title line (if any) and its text, stripped; blank lines between documents stay outside
their chunks. Each question gets its first ``--docs`` passages in an order shuffled by a fixed seed. Full prefill
generates ``--tokens`` tokens greedily, not stopped at the end token; every row is fed the same prompt ids and those
tokens (teacher forcing). KL is KL(full || row) in nats, mean per token. Each row is compared with "alone, rotated,
none" of the same run: encoded with nothing in front, keys rotated to their place, nothing repaired. Intervals are 95 %
bootstrap intervals of the ratio of means, resampling questions. ``work`` is the share of the prompt's tokens computed
at question time. ``joined`` tokenises the whole prompt as one text: the natural floor.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import platform
import random
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvboost_rag import KVBoost, Prompt, __version__, hub
from kvboost_rag.engine.codecs import CODECS, Codec
from kvboost_rag.engine.repair import BoundaryRepair, DeviationRepair, FullRepair, NoRepair, QueryRepair, Repair
from kvboost_rag.engine.rope import Rope, displace
from kvboost_rag.engine.types import KV, Segment
from kvboost_rag.prompt import Piece, document_pieces
from kvboost_rag.verify import greedy

INSTRUCTION = (
    "You will be given several passages and then a question about them. Answer directly from the passages, in at most "
    "five words, and do not repeat the question.\nPassages:\n\n"
)
QUESTION = "\n\nAnswer directly from the passages above, in at most five words.\nQuestion: {question}\nAnswer:"
REFERENCE = "alone, rotated, none"
SEED = 17


@dataclass(frozen=True)
class Question:
    documents: list[str]
    question: str


@dataclass(frozen=True)
class Row:
    """One line of the table: how documents were encoded, and what is repaired."""

    name: str
    encoding: str
    repair: Repair


ROWS = [
    Row("alone, not rotated, none", "not rotated", NoRepair()),
    Row(REFERENCE, "alone", NoRepair()),
    Row("alone, last 16 of each (paper)", "alone", BoundaryRepair("end", 16)),
    Row("alone, first 4 of each", "alone", BoundaryRepair("start", 4)),
    Row("alone, query 5 %", "alone", QueryRepair(0.05)),
    Row("header, none", "header", NoRepair()),
    Row("header, boundary R = 16 (paper)", "header", BoundaryRepair("end", 16)),
    Row("header, deviation 15 % (paper)", "header", DeviationRepair(0.15)),
    Row("header, deviation 15 %, squared", "header", DeviationRepair(0.15, measure="squared")),
    Row("header, query 15 %", "header", QueryRepair(0.15)),
    Row("shared primer, none", "shared primer", NoRepair()),
    Row("shared primer, query 5 %", "shared primer", QueryRepair(0.05)),
    Row("primer, none", "primer", NoRepair()),
    Row("primer, first 4 of each", "primer", BoundaryRepair("start", 4)),
    Row("primer, query 5 % (default)", "primer", QueryRepair()),
    Row("primer, query 15 %", "primer", QueryRepair(0.15)),
    Row("primer, boundary R = 16 (paper)", "primer", BoundaryRepair("end", 16)),
    Row("primer, deviation 15 % (paper)", "primer", DeviationRepair(0.15)),
    Row("primer int8, none", "int8", NoRepair()),
    Row("primer int4, none", "int4", NoRepair()),
    Row("primer, full", "primer", FullRepair()),
]


def load(path: Path, num_questions: int, num_docs: int) -> list[Question]:
    """Questions in the form of MuSiQue's public files: ``[{"ctxs": [{"title", "text"}], "question"}]``."""
    shuffle = random.Random(SEED)
    questions = []
    for item in json.loads(path.read_text(encoding="utf-8"))[:num_questions]:
        documents = [f"{c.get('title', '').strip()}\n{c['text'].strip()}".strip() for c in item["ctxs"][:num_docs]]
        shuffle.shuffle(documents)
        questions.append(Question(documents, item["question"]))
    return questions


def own_corpus(num_questions: int, num_docs: int) -> list[Question]:
    """The project's own passages: each question's passage among others drawn by a fixed seed."""
    folder = Path(__file__).parent.parent / "examples" / "data"
    passages = {p.stem: p.read_text(encoding="utf-8").strip() for p in sorted((folder / "passages").glob("*.md"))}
    draw = random.Random(SEED)
    questions = []
    for item in json.loads((folder / "questions.json").read_text(encoding="utf-8"))[:num_questions]:
        others = [text for name, text in passages.items() if name != item["passage"]]
        documents = [passages[item["passage"]], *draw.sample(others, num_docs - 1)]
        draw.shuffle(documents)
        questions.append(Question(documents, item["question"]))
    return questions


def build_prompt(boost: KVBoost, question: Question) -> Prompt:
    content = [
        Piece(INSTRUCTION),
        *document_pieces(question.documents),
        Piece(QUESTION.format(question=question.question)),
    ]
    return boost.chat_format.render([{"role": "user", "content": content}])


class Encodings:
    """The same documents warmed in several ways, one engine each over one model.

    ``alone``: nothing in front. ``shared primer``: behind the opening and 320 tokens of one document for all.
    ``primer``: as ``warm`` does by default, related documents included. The corpus comes in an order shuffled by a
    fixed seed, so that no document happens to be read behind the one that stands before it in its prompt.
    """

    def __init__(self, model: Any, tokenizer: Any, corpus: list[str], needed: set[str], header: list[Segment]):
        texts = list(dict.fromkeys(corpus))
        random.Random(SEED).shuffle(texts)
        names = ("alone", "not rotated", "header", "shared primer", "primer", "int8", "int4")
        self.engines = {name: KVBoost(model, tokenizer, max_cache_bytes="64GB") for name in names}
        alone, still = self.engines["alone"], self.engines["not rotated"]
        for name, context in (("alone", []), ("header", header)):
            if name in needed or (name == "alone" and "not rotated" in needed):
                _warm_behind(self.engines[name], context, texts)
        still.engine.store = alone.engine.store
        unmoved = Rope(torch.zeros_like(still.engine.model.rope().inv_freq))
        still.engine.model.rope = lambda num_tokens=0: unmoved
        if "shared primer" in needed:
            first, second = sorted(texts, key=lambda text: alone.engine.content_key(alone.tokens.encode(text)))[:2]
            self.engines["shared primer"].warm([t for t in texts if t != first], primer=first)
            self.engines["shared primer"].warm(first, primer=second)
        primed = self.engines["primer"]
        if needed & {"primer", "int8", "int4"}:
            print(primed.warm(texts, primer="auto"), file=sys.stderr)
        for name in needed & {"int8", "int4"}:
            _requantise(primed, self.engines[name], texts, CODECS[name])


def _warm_behind(boost: KVBoost, context: list[Segment], texts: list[str]) -> None:
    for text in texts:
        with boost.engine.lock:
            boost.engine.warm(context, Segment(boost.tokens.encode(text), document=True))


def _requantise(source: KVBoost, target: KVBoost, texts: list[str], codec: Codec) -> None:
    """The same KV as ``source`` has, kept by ``codec``, without asking whether the model bears it."""
    for text in texts:
        entry = source.engine.store.peek(source.engine.content_key(source.tokens.encode(text)))
        assert entry is not None
        kv = entry.packed
        assert isinstance(kv, KV)
        assert kv.position is not None
        free = replace(kv, keys=displace(kv.keys, kv.position, source.engine.model.rope()), position=None)
        target.engine.store.put(replace(entry, packed=codec.encode(free), exact=False))


def divergence(full: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """KL(full || other) per token, nats."""
    p, q = full.log_softmax(-1), other.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def measure(boost: KVBoost, prompt: Prompt, repair: Repair, ids: list[int], full: torch.Tensor) -> dict[str, float]:
    prefilled = boost._prefill(prompt, {"repair": repair}, "quality", len(ids))
    with boost.engine.lock:
        logits = boost.engine.extend(prefilled, ids)
    return summary(full, logits, prefilled.report.num_computed_tokens / prefilled.report.num_prompt_tokens)


def summary(full: torch.Tensor, logits: torch.Tensor, work: float) -> dict[str, float]:
    kl = divergence(full, logits)
    same = (full.argmax(-1) == logits.argmax(-1)).float().mean()
    return {"kl": float(kl.mean()), "kl_first": float(kl[0]), "same_top": float(same), "work": work}


def joined(boost: KVBoost, prompt: Prompt, ids: list[int], full: torch.Tensor) -> dict[str, float]:
    """Full prefill of the prompt tokenised as one text."""
    with boost.engine.lock:
        whole = [Segment(boost.tokens.encode_template(prompt.text))]
        prefilled = boost.engine.prefill(whole, NoRepair(), "baseline")
        return summary(full, boost.engine.extend(prefilled, ids), 1.0)


def interval(values: np.ndarray, reference: np.ndarray, draws: int = 2000) -> tuple[float, float]:
    """95 % bootstrap interval of mean(values) / mean(reference), questions resampled together."""
    picks = np.random.default_rng(SEED).integers(0, len(values), (draws, len(values)))
    low, high = np.percentile(values[picks].mean(1) / reference[picks].mean(1), [2.5, 97.5])
    return float(low), float(high)


def table(results: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    reference = np.array([m["kl"] for m in results[REFERENCE]])
    rows = []
    for name, measured in results.items():
        kl = np.array([m["kl"] for m in measured])
        rows.append(
            {
                "row": name,
                "kl": float(kl.mean()),
                "kl_p95": float(np.percentile(kl, 95)),
                "kl_first": float(np.mean([m["kl_first"] for m in measured])),
                "same_top": float(np.mean([m["same_top"] for m in measured])),
                "work": float(np.mean([m["work"] for m in measured])),
                "ratio": float(kl.mean() / reference.mean()),
                "ratio_interval": interval(kl, reference),
            }
        )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    print(f"\n{'':38}{'KL':>8}{'first':>8}{'same top':>10}{'work':>8}   KL relative to '{REFERENCE}'")
    for r in rows:
        low, high = r["ratio_interval"]
        print(
            f"{r['row']:38}{r['kl']:8.4f}{r['kl_first']:8.4f}{r['same_top']:10.1%}{r['work']:8.1%}"
            f"   {r['ratio']:.2f}  [{low:.2f}, {high:.2f}]"
        )


def run(arguments: argparse.Namespace, log: Callable[[str], None]) -> dict[str, Any]:
    source = hub.bundled_model() if arguments.model == "bundled" else arguments.model
    loaded = hub.load(source, dtype=torch.float32)
    questions = (
        load(arguments.data, arguments.questions, arguments.docs)
        if arguments.data
        else own_corpus(arguments.questions, arguments.docs)
    )
    plain = KVBoost(loaded.model, loaded.tokenizer)
    prompts = [build_prompt(plain, question) for question in questions]
    rows = [row for row in ROWS if not arguments.rows or any(row.name.startswith(part) for part in arguments.rows)]
    if not any(row.name == REFERENCE for row in rows):
        rows.insert(0, next(row for row in ROWS if row.name == REFERENCE))
    encodings_needed = {row.encoding for row in rows}
    log(f"{len(questions)} questions; warming their documents in {len(encodings_needed)} ways")
    corpus = [document for question in questions for document in question.documents]
    header = list(itertools.takewhile(lambda segment: not segment.document, plain.segments(prompts[0])))
    encodings = Encodings(loaded.model, loaded.tokenizer, corpus, encodings_needed, header)
    results: dict[str, list[dict[str, float]]] = {"joined tokenisation, full prefill": []}
    results |= {row.name: [] for row in rows}
    for number, prompt in enumerate(prompts, 1):
        started = time.perf_counter()
        prefilled = plain._prefill(prompt, {"mode": "baseline"}, "quality")
        with plain.engine.lock:
            ids, full = greedy(plain.engine, prefilled, arguments.tokens)
        results["joined tokenisation, full prefill"].append(joined(plain, prompt, ids, full))
        for row in rows:
            results[row.name].append(measure(encodings.engines[row.encoding], prompt, row.repair, ids, full))
        log(f"question {number}/{len(prompts)}: {time.perf_counter() - started:.1f} s")
    return {
        "command": shlex.join(Path(a).name if a == str(arguments.data) else a for a in sys.argv),
        "model": arguments.model,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "versions": {"kvboost_rag": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "data": arguments.data.name if arguments.data else "examples/data",
        "num_questions": len(questions),
        "num_documents": arguments.docs,
        "num_tokens": arguments.tokens,
        "strategies": {row.name: {"encoding": row.encoding, **dataclasses.asdict(row.repair)} for row in rows},
        "rows": table(results),
        "per_question": results,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="questions with passages; the project's own corpus if left out")
    parser.add_argument("--model", default="bundled", help="hub name or folder; 'bundled' needs no network")
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--docs", type=int, default=4, help="passages per question")
    parser.add_argument("--tokens", type=int, default=24, help="tokens generated and compared")
    parser.add_argument("--rows", nargs="*", help="only rows whose name starts with one of these")
    parser.add_argument("--json", type=Path, help="write everything here")
    arguments = parser.parse_args()
    result = run(arguments, lambda line: print(line, file=sys.stderr, flush=True))
    show(result["rows"])
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
