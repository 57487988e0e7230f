"""Time to the first token (TTFT): reuse against full prefill and against a perfect prefix cache.

    python benchmarks/ttft.py --sweeps headline contexts documents hits repair --json benchmarks/results/ttft.json

A prompt is an instruction, N documents of equal size and a question; the documents were warmed before, in another order
than they come in, and they come in another order each round. Sides alternate in one process and are told as ratios,
round by round, with the least and the greatest.

Sides: full prefill (``mode="baseline"``: stock attention, logits of the last token only); stock ``transformers`` over a
perfect prefix cache (same documents, same order, only live tokens left to compute; copying its KV is outside its
clock); ours with several repairs. ``headline`` also times ``generate()`` of a model that no engine has touched, which
full prefill has to equal.

Sweeps: ``contexts``: tokens of 4 documents in all; ``documents``: the same tokens in 1 to 16 documents; ``hits``: how
many of 4 documents are warm, the others never seen before; ``repair``: what each strategy takes, of which the fused
forward; ``peers``: other engines, each in an environment of its own (``peers/README.md``).

``computed`` is the share of the prompt's tokens that was computed; ``forward`` the fused forward's own seconds as a
share of full prefill. ``--max-seconds`` stops new points from being started; what was left out is in the result.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import common
import torch
from sides import FULL, QUESTION, REPEATS, Bench, Draw, Point, Stock, Ways, drawing, measure, orders, show

from kvboost_rag import Prompt
from kvboost_rag.engine.repair.query import USUAL_MOST

NUM_DOCUMENTS = 4
DOCUMENT_COUNTS = (1, 2, 4, 8, 16)
HEADLINE_ROUNDS = 7
GROWTH = (2048, 8192)
DEFAULT = f"ours, query 5 %, at most {USUAL_MOST} (default)"
NONE: Ways = {"ours, none": {"repair": "none"}}
USUAL: Ways = NONE | {DEFAULT: {}}
SHARE: Ways = USUAL | {"ours, query 5 %": {"repair": "query", "recompute_ratio": 0.05}}  # however many that is
REPAIRS: Ways = USUAL | {
    "ours, query 10 %": {"repair": "query", "recompute_ratio": 0.10},
    "ours, query 15 %": {"repair": "query", "recompute_ratio": 0.15},
    "ours, deviation 15 %": {"repair": "deviation", "recompute_ratio": 0.15},
    "ours, boundary 16": {"repair": "boundary"},
    "ours, full": {"repair": "full"},
}
Points = Iterator[tuple[str, Callable[[], Point]]]  # what is measured, and the measuring


def headline(bench: Bench, arguments: argparse.Namespace) -> Points:
    def run() -> Point:
        texts = bench.texts(NUM_DOCUMENTS, arguments.headline_tokens)
        bench.warm(texts)
        untouched, _ = common.load(arguments)
        draw = drawing(bench, texts)
        others = {"generate() of transformers": Stock(bench, untouched, draw)}
        return measure(
            bench,
            lambda: drawing(bench, texts),
            USUAL,
            num_hits=NUM_DOCUMENTS,
            rounds=HEADLINE_ROUNDS,
            others=others,
        )

    yield "headline", run


def _documents(bench: Bench, num_documents: int, num_tokens: int, ways: Ways) -> Callable[[], Point]:
    def run() -> Point:
        texts = bench.texts(num_documents, num_tokens)
        bench.warm(texts)
        return measure(bench, lambda: drawing(bench, texts), ways, num_hits=num_documents)

    return run


def contexts(bench: Bench, arguments: argparse.Namespace) -> Points:
    for num_tokens in arguments.contexts:
        yield f"{num_tokens} tokens", _documents(bench, NUM_DOCUMENTS, num_tokens, SHARE)


def documents(bench: Bench, arguments: argparse.Namespace) -> Points:
    for count in DOCUMENT_COUNTS:
        yield f"{count} documents", _documents(bench, count, arguments.tokens, USUAL)


def repair(bench: Bench, arguments: argparse.Namespace) -> Points:
    yield f"{arguments.tokens} tokens", _documents(bench, NUM_DOCUMENTS, arguments.tokens, REPAIRS)


def hits(bench: Bench, arguments: argparse.Namespace) -> Points:
    for num_hits in range(NUM_DOCUMENTS + 1):
        yield f"{num_hits / NUM_DOCUMENTS:.0%} hits", _hits(bench, num_hits, arguments.tokens)


def _hits(bench: Bench, num_hits: int, num_tokens: int) -> Callable[[], Point]:
    """Documents that are no hits are texts no prompt had before, and are forgotten when the clock has stopped: else
    they would be kept as by-products and hit the next time."""

    def run() -> Point:
        calls = (len(USUAL) * REPEATS + 1) * (bench.max_rounds + 2) + 1  # each side's rounds, first run and warm-up
        fresh = (NUM_DOCUMENTS - num_hits) * calls
        texts = bench.texts(NUM_DOCUMENTS, num_tokens, NUM_DOCUMENTS + fresh)
        warm, unseen = texts[:NUM_DOCUMENTS], iter(texts[NUM_DOCUMENTS:])
        bench.warm(warm)
        return measure(
            bench,
            lambda: _mixed(bench, warm[:num_hits], unseen),
            USUAL,
            num_hits=num_hits,
            prefix_cache=False,
            after=lambda prompt: bench.engine.forget([text for text in prompt.documents if text not in warm]),
        )

    return run


def _mixed(bench: Bench, warm: Sequence[str], unseen: Iterator[str]) -> Draw:
    """Prompts of the ``warm`` documents among new ones."""
    order = orders(NUM_DOCUMENTS)

    def draw() -> Prompt:
        chosen = [*warm, *(next(unseen) for _ in range(NUM_DOCUMENTS - len(warm)))]
        return bench.engine.prompt([chosen[n] for n in next(order)], QUESTION)

    return draw


SWEEPS: dict[str, Callable[[Bench, argparse.Namespace], Points]] = {
    "headline": headline,
    "contexts": contexts,
    "documents": documents,
    "hits": hits,
    "repair": repair,
}


def growth(points: dict[str, Point]) -> dict[str, float]:
    """By how much each side grows from 2K to 8K tokens (else from the first point to the last), and as a share of what
    full prefill grows by."""
    names = [f"{size} tokens" for size in GROWTH]
    if not all(name in points for name in names):
        names = [next(iter(points)), [*points][-1]]
    few, many = (points[name]["sides"] for name in names)
    grown = {side: many[side]["seconds"]["median"] / few[side]["seconds"]["median"] for side in few}
    shares = {f"{side}, of full prefill's": value / grown[FULL] for side, value in grown.items() if side != FULL}
    print(f"\nfrom {names[0]} to {names[1]}, times: " + "; ".join(f"{k} {v:.2f}" for k, v in (grown | shares).items()))
    return grown | shares


def sweep(bench: Bench, name: str, arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    """Measure the points of one sweep into ``result``, saved as they come."""
    points: dict[str, Point] = {}
    result["sweeps"][name] = {"points": points}
    for label, run in SWEEPS[name](bench, arguments):
        if bench.out_of_time():
            result["left_out"].append({"sweep": name, "point": label, "why": "--max-seconds"})
            continue
        common.log(f"{name}: {label}")
        try:
            points[label] = run()
        except torch.OutOfMemoryError:
            result["left_out"].append({"sweep": name, "point": label, "why": "memory"})
            continue
        show(f"{name}, {label}", points[label])
        common.save(arguments.json, result)
    if name == "contexts" and len(points) > 1:
        result["sweeps"][name]["growth"] = growth(points)


def parse() -> argparse.Namespace:
    parser = common.parser(__doc__)
    parser.add_argument("--sweeps", nargs="+", choices=[*SWEEPS, "peers"], default=[*SWEEPS])
    parser.add_argument("--contexts", nargs="+", type=int, default=[512, 1024, 2048, 4096, 8192], metavar="TOKENS")
    parser.add_argument("--tokens", type=int, default=2048, help="of all documents, in other sweeps (2048)")
    parser.add_argument("--headline-tokens", type=int, default=2450, help="the same for headline and peers (2450)")
    parser.add_argument("--rounds", type=int, default=3, help="a point; fewer where full prefill is slow (3)")
    parser.add_argument("--max-seconds", type=float, help="start no new point after that")
    for peer in ("kvboost", "vllm", "llama-cpp"):
        parser.add_argument(f"--peer-{peer}", type=Path, metavar="PYTHON", help="interpreter of its environment")
    parser.add_argument("--kvboost-dtypes", nargs="+", metavar="DTYPE", help="its own 'default' and ours, if not given")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    result: dict[str, Any] = {**common.about(arguments), "sweeps": {}, "left_out": []}
    bench = Bench(arguments)
    for name in arguments.sweeps:
        if name == "peers":
            from against import peers  # only here: nothing else of it is needed

            result["sweeps"][name] = peers(bench, arguments)
        else:
            sweep(bench, name, arguments, result)
        common.save(arguments.json, result)
    for left in result["left_out"]:
        print(f"left out: {left['sweep']}, {left['point']} ({left['why']})", file=sys.stderr)


if __name__ == "__main__":
    main()
