"""One engine under load: how many requests a second, how long until the first token, and whether answers change.

    python benchmarks/load.py --requests 32 --rounds 2

Documents are warm. Every request asks a question over four of them, drawn and shuffled by a fixed seed, and generates
a few tokens greedily. The same requests, each round once by 1, 4 and 16 threads, each of which asks its next one as
soon as it has its answer, and by ``agenerate`` on one event loop, 16 at a time. TTFT runs from the call to the first
token, waiting for the engine included; so does latency to the end. Each answer is compared with the one the same
request had when it was asked alone: text, reason and counts of tokens (reuse does not depend on timing here:
``break_even=False``). ``baseline`` is full prefill by one thread, on the first few requests only; it is told as a
ratio of seconds over the same requests.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import common
from workload import NUM_DOCUMENTS

from kvboost_rag import KVBoost, Prompt
from kvboost_rag.report import GenerationResult

BASELINE = "baseline"
ALONE = "1 thread"
COUNTED = (
    "num_prompt_tokens",
    "num_exact_tokens",
    "num_approximate_tokens",
    "num_repaired_tokens",
    "num_live_tokens",
    "num_new_tokens",
)


@dataclass(frozen=True)
class Answer:
    """``same``: everything that must not depend on what else the engine does. Seconds from the call."""

    same: tuple[Any, ...]
    ttft: float
    latency: float

    @classmethod
    def of(cls, result: GenerationResult, started: float) -> Answer:
        counts = tuple(getattr(result.report, name) for name in COUNTED)
        return cls((result.text, result.finish_reason, *counts), result.ttft_seconds, time.perf_counter() - started)


class Load:
    """The same ``prompts`` asked in several ways; keeps all answers by way, round after round."""

    def __init__(self, boost: KVBoost, prompts: Sequence[Prompt], max_new_tokens: int):
        self.boost, self.prompts, self.options = boost, list(prompts), {"max_new_tokens": max_new_tokens}
        self.answers: dict[str, list[list[Answer]]] = defaultdict(list)

    def ask(self, prompt: Prompt, **options: Any) -> Answer:
        started = time.perf_counter()
        return Answer.of(self.boost.generate(prompt, **self.options, **options), started)

    async def ask_async(self, prompt: Prompt, turns: asyncio.Semaphore) -> Answer:
        async with turns:
            started = time.perf_counter()
            return Answer.of(await self.boost.agenerate(prompt, **self.options), started)

    def by_threads(self, num_threads: int) -> list[Answer]:
        with ThreadPoolExecutor(num_threads) as pool:
            return list(pool.map(self.ask, self.prompts))

    def by_loop(self, num_tasks: int) -> list[Answer]:
        async def all_of_them() -> list[Answer]:
            turns = asyncio.Semaphore(num_tasks)
            return await asyncio.gather(*(self.ask_async(prompt, turns) for prompt in self.prompts))

        return asyncio.run(all_of_them())

    def baseline(self, num_requests: int) -> list[Answer]:
        return [self.ask(prompt, mode="baseline") for prompt in self.prompts[:num_requests]]

    def timed(self, name: str, way: Callable[[], list[Answer]]) -> Callable[[], float]:
        """A side of ``common.alternate``."""

        def side() -> float:
            started = time.perf_counter()
            self.answers[name].append(way())
            return time.perf_counter() - started

        return side


def prompts_of(boost: KVBoost, documents: Sequence[str], count: int) -> list[Prompt]:
    """``count`` questions, each over NUM_DOCUMENTS of ``documents`` in an order of its own."""
    rng = random.Random(common.SEED)
    return [
        boost.prompt(rng.sample(list(documents), NUM_DOCUMENTS), f"What is said in part {number % len(documents)}?")
        for number in range(count)
    ]


def rows_of(load: Load, taken: dict[str, list[float]], reference: Sequence[Answer]) -> list[dict[str, Any]]:
    """What is told of each way: requests a second over rounds, times over all requests of all rounds."""
    alone = [len(load.prompts) / seconds for seconds in taken[ALONE]] if ALONE in taken else []
    rows = []
    for name, seconds in taken.items():
        answers = [answer for each in load.answers[name] for answer in each]
        rates = [len(each) / wall for each, wall in zip(load.answers[name], seconds, strict=True)]
        row: dict[str, Any] = {
            "way": name,
            "num_requests": len(answers),
            "seconds": seconds,
            "requests_per_second": common.spread(rates),
            "ttft_seconds": common.spread([answer.ttft for answer in answers]),
            "latency_seconds": common.spread([answer.latency for answer in answers]),
        }
        if name != BASELINE:
            expected = [answer.same for _ in load.answers[name] for answer in reference]
            pairs = zip(answers, expected, strict=True)
            row["num_different"] = sum(answer.same != wanted for answer, wanted in pairs)
            row |= {"throughput_of_one_thread": common.ratio(rates, alone)} if alone else {}
        elif alone:
            same = [sum(a.latency for a in each[: len(load.answers[BASELINE][0])]) for each in load.answers[ALONE]]
            row["seconds_over_reuse"] = common.ratio(seconds, same)
        rows.append(row)
    return rows


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    model, tokenizer = common.load(arguments)
    with KVBoost(model, tokenizer, break_even=False, max_cache_bytes="16GB") as boost:
        documents = common.texts_of(tokenizer, arguments.tokens, max(arguments.documents, NUM_DOCUMENTS))
        common.log(str(boost.warm(documents, progress=False)))
        load = Load(boost, prompts_of(boost, documents, arguments.requests), arguments.new)
        load.ask(load.prompts[0])  # computes the prompts' opening, once for all
        reference = [load.ask(prompt) for prompt in load.prompts]
        sides = {
            (ALONE if count == 1 else f"{count} threads"): (lambda count=count: load.by_threads(count))
            for count in arguments.threads
        }
        if arguments.tasks:
            sides[f"event loop, {arguments.tasks} tasks"] = lambda: load.by_loop(arguments.tasks)
        if arguments.baseline:
            sides[BASELINE] = lambda: load.baseline(arguments.baseline)
        timed = {name: load.timed(name, way) for name, way in sides.items()}
        rows = rows_of(load, common.alternate(timed, arguments.rounds, warmups=0), reference)
        prompt_tokens = [boost.count_tokens(prompt) for prompt in load.prompts]
    return {
        "num_documents": len(documents),
        "num_documents_each": NUM_DOCUMENTS,
        "prompt_tokens": common.spread(prompt_tokens),
        "max_new_tokens": arguments.new,
        "rounds": arguments.rounds,
        "num_different": sum(row.get("num_different", 0) for row in rows),
        "rows": rows,
    }


def show(result: dict[str, Any]) -> None:
    print(f"{result['prompt_tokens']['median']:.0f} prompt tokens, {result['max_new_tokens']} new ones")
    print(f"{'':24}{'requests/s':>11}{'TTFT median':>13}{'p95':>9}{'latency':>10}{'p95':>9}  differ")
    for row in result["rows"]:
        ttft, latency = row["ttft_seconds"], row["latency_seconds"]
        print(
            f"{row['way']:24}{row['requests_per_second']['median']:11.2f}{ttft['median']:11.3f} s{ttft['p95']:7.3f} s"
            f"{latency['median']:8.3f} s{latency['p95']:7.3f} s  {row.get('num_different', '-')}"
        )
    slower = next((row["seconds_over_reuse"] for row in result["rows"] if "seconds_over_reuse" in row), None)
    if slower is not None:
        print(f"full prefill takes {slower['median']:.1f} times as long as reuse, first to last token, one thread")
    print(f"answers that differed from those asked alone: {result['num_different']} (must be 0)")


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--documents", type=int, default=8, help="warm documents to draw from (8)")
    parser.add_argument("--tokens", type=int, default=600, help="of each document, about (600)")
    parser.add_argument("--requests", type=int, default=32, help="in each way and round (32)")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--new", type=int, default=8, help="tokens generated (8)")
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--tasks", type=int, default=16, help="at a time on one event loop, 0 for none (16)")
    parser.add_argument("--baseline", type=int, default=3, help="requests answered by full prefill, 0 for none (3)")
    arguments = parser.parse_args(argv)
    result = run(arguments)
    show(result)
    common.save(arguments.json, {**common.about(arguments), **result})
    if result["num_different"]:
        raise SystemExit(f"{result['num_different']} answers differ from those asked alone")


if __name__ == "__main__":
    main()
