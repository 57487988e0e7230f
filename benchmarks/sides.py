"""Ways of answering the same prompts, timed side by side up to the first token. What ``ttft.py`` is made of.

Knows one engine, prompts and clocks; knows nothing of what is swept. Every clock starts at the call: tokenising,
lookup, stitching and repair are inside it.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import common
import torch
from transformers import DynamicCache

from kvboost_rag import KVBoost, Prompt
from kvboost_rag.engine.types import Report

QUESTION = "Who built the lighthouse?"
FULL, PREFIX_CACHE = "full prefill", "perfect prefix cache"
SLOW_SECONDS = 5.0  # a full prefill that takes longer is not warmed up a second time
POINT_SECONDS = 90.0  # of full prefills for one point; fewer rounds where they would take longer
MIN_ROUNDS = 2
TEXT_MARGIN = 40  # tokens by which a text of common.texts_of may be longer than asked for
CACHE_BYTES = "16GB"
FEW = 6  # documents, all orders of which are listed
# A fast side runs that often each round, and the median counts: the first one behind seconds of full prefill finds the
# processor as that left it, which is not how somebody finds it who asks questions.
REPEATS = 3

Ways = Mapping[str, Mapping[str, Any]]  # name of a side -> its options of KVBoost.generate
Draw = Callable[[], Prompt]  # the prompt of the next round
Point = dict[str, Any]


class Bench:
    """One model, one engine over it, and how long it has been running.

    ``break_even`` is off: what a side is called is what it does, also where the engine would rather compute.
    """

    def __init__(self, arguments: argparse.Namespace):
        self.device: str = arguments.device
        self.max_rounds: int = arguments.rounds
        self._max_seconds: float | None = arguments.max_seconds
        self._started = time.perf_counter()
        model, self.tokenizer = common.load(arguments)
        self.engine = KVBoost(model, self.tokenizer, break_even=False, max_cache_bytes=CACHE_BYTES)

    def out_of_time(self) -> bool:
        return self._max_seconds is not None and time.perf_counter() - self._started > self._max_seconds

    def texts(self, num_documents: int, num_tokens: int, count: int | None = None) -> list[str]:
        """``count`` texts (``num_documents`` if not given), of which ``num_documents`` have about ``num_tokens`` in
        all; less where the model's context leaves less beside the question."""
        frame = self.engine.count_tokens(self.engine.prompt(["x"], QUESTION))
        room = self.engine.context_tokens - frame - num_documents * TEXT_MARGIN
        return common.texts_of(self.tokenizer, min(num_tokens, room) // num_documents, count or num_documents)

    def warm(self, texts: Sequence[str]) -> None:
        """Forget everything, then read ``texts``."""
        self.engine.clear()
        self.engine.warm(texts, progress=False)

    def ids(self, prompt: Prompt) -> torch.Tensor:
        """(num_tokens,) int64."""
        return torch.tensor([token for segment in self.engine.segments(prompt) for token in segment.ids])


def orders(count: int) -> Iterator[Sequence[int]]:
    """Endless orders of ``count`` documents, the same ones each time: never the order they were warmed in, none twice
    before all had their turn, as far as there are others."""
    shuffle = random.Random(common.SEED)
    if count <= FEW:
        others = list(itertools.permutations(range(count)))[1:] or [(0,)]
        shuffle.shuffle(others)
        yield from itertools.cycle(others)
    while True:
        yield shuffle.sample(range(count), count)


@dataclass
class Side:
    """Our engine with some options: seconds to the first token of prompt after prompt.

    ``after`` gets each prompt when its clock has stopped.
    """

    bench: Bench
    draw: Draw
    options: Mapping[str, Any]
    after: Callable[[Prompt], Any] = lambda prompt: None
    reports: list[Report] = field(default_factory=list)

    def __call__(self) -> float:
        prompt = self.draw()
        common.synchronize(self.bench.device)
        result = self.bench.engine.generate(prompt, max_new_tokens=1, **self.options)
        self.reports.append(result.report)
        self.after(prompt)
        return result.ttft_seconds


class PrefixCache:
    """Stock ``transformers`` over the KV of all but the last ``num_live`` tokens: the best any prefix cache can do, and
    only when documents come in the very same order behind the very same words. Copying that KV is outside its clock."""

    def __init__(self, bench: Bench, prompt: Prompt, num_live: int):
        self._bench, self._model = bench, bench.engine.engine.model
        ids = bench.ids(prompt)
        self._cache, self._live = DynamicCache(), ids[-num_live:]
        with bench.engine.engine.lock:
            self._model.forward(ids[:-num_live], self._cache)

    def __call__(self) -> float:
        own = copy.deepcopy(self._cache)
        with self._bench.engine.engine.lock:
            return common.seconds(lambda: self._model.forward(self._live, own).argmax(), self._bench.device)


class Stock:
    """``generate()`` of a model no engine has touched: what the baseline is held against."""

    def __init__(self, bench: Bench, model: Any, draw: Draw):
        self._bench, self._model, self._draw = bench, model, draw

    def __call__(self) -> float:
        ids = self._bench.ids(self._draw())[None].to(self._bench.device)
        mask = torch.ones_like(ids)
        return common.seconds(
            lambda: self._model.generate(ids, attention_mask=mask, max_new_tokens=1, do_sample=False),
            self._bench.device,
        )


def drawing(bench: Bench, texts: Sequence[str], question: str = QUESTION) -> Draw:
    """Prompts of ``texts``, their order another one in each round."""
    order = orders(len(texts))
    return lambda: bench.engine.prompt([texts[n] for n in next(order)], question)


def measure(
    bench: Bench,
    draw: Callable[[], Draw],
    ways: Ways,
    *,
    num_hits: int,
    rounds: int | None = None,
    prefix_cache: bool = True,
    others: Mapping[str, Callable[[], float]] | None = None,
    after: Callable[[Prompt], Any] = lambda prompt: None,
) -> Point:
    """Full prefill, ``ways``, ``others`` and a perfect prefix cache, alternating.

    ``draw`` makes a side's prompts; documents must be warm already. Each side runs once before anything counts. Raises
    RuntimeError unless each of ``ways`` finds ``num_hits`` documents.
    """
    sides = {name: Side(bench, draw(), options, after) for name, options in ways.items()}
    for side in (*sides.values(), *(others or {}).values()):
        side()
    first = draw()()
    timed: dict[str, Callable[[], float]] = {FULL: Side(bench, draw(), {"mode": "baseline"}, after)}
    one_full = timed[FULL]()
    timed |= dict(others or {})
    if prefix_cache:
        timed[PREFIX_CACHE] = repeated(PrefixCache(bench, first, next(iter(sides.values())).reports[0].num_live_tokens))
    fast = {name: repeated(side) for name, side in sides.items()}
    num_rounds = rounds or max(MIN_ROUNDS, min(bench.max_rounds, int(POINT_SECONDS / one_full)))
    taken = common.alternate(timed | fast, num_rounds, warmups=int(one_full < SLOW_SECONDS))
    for name, side in sides.items():
        found = {report.num_document_hits for report in side.reports}
        if found != {num_hits}:
            raise RuntimeError(f"{name}: {num_hits} documents were to be found, but {sorted(found)} were")
    return point(taken, {name: side.reports[-num_rounds * REPEATS :] for name, side in sides.items()})


def repeated(side: Callable[[], float]) -> Callable[[], float]:
    """``side`` several times, of which the median counts."""
    return lambda: statistics.median(side() for _ in range(REPEATS))


def point(taken: Mapping[str, Sequence[float]], reports: Mapping[str, Sequence[Report]]) -> Point:
    """Seconds, ratios and counts by side, as plain values. ``steps``: median seconds of the engine's own steps."""
    full = taken[FULL]
    rows: dict[str, dict[str, Any]] = {}
    for name, seconds in taken.items():
        row: dict[str, Any] = {
            "seconds": common.spread(seconds),
            "each": list(seconds),
            "full_over_this": common.ratio(full, seconds),
            "share_of_full": common.ratio(seconds, full),
        }
        if PREFIX_CACHE in taken:
            row["over_prefix_cache"] = common.ratio(seconds, taken[PREFIX_CACHE])
        if name in reports:
            row |= _counts(reports[name])
            steps = iter([report.seconds["forward"] for report in reports[name]])
            forward = [repeated(steps.__next__)() for _ in full]  # those of a round
            row["forward_share_of_full"] = common.ratio(forward, full)
        rows[name] = row
    size = statistics.median(r.num_prompt_tokens for each in reports.values() for r in each)
    return {"num_prompt_tokens": size, "rounds": len(full), "sides": rows}


def _counts(reports: Sequence[Report]) -> dict[str, Any]:
    def median(value: Callable[[Report], float]) -> float:
        return statistics.median(value(report) for report in reports)

    return {
        "computed_share": median(lambda r: r.num_computed_tokens / r.num_prompt_tokens),
        "num_live_tokens": median(lambda r: r.num_live_tokens),
        "num_repaired_tokens": median(lambda r: r.num_repaired_tokens),
        "num_document_hits": median(lambda r: r.num_document_hits),
        "steps": {step: median(lambda r, step=step: r.seconds[step]) for step in reports[0].seconds},
        "notes": sorted({note for report in reports for note in report.notes}),
    }


def show(title: str, measured: Point) -> None:
    """One point as a table."""
    print(f"\n{title}: {measured['num_prompt_tokens']:.0f} prompt tokens, {measured['rounds']} rounds")
    width = max(map(len, measured["sides"]))
    print(f"  {'':{width}}{'TTFT':>12}{'full / this':>13}{'':18}{'of full':>9}{'computed':>10}{'forward':>9}")
    for name, row in measured["sides"].items():
        faster = row["full_over_this"]
        line = (
            f"  {name:{width}}{row['seconds']['median'] * 1e3:9.1f} ms{faster['median']:13.2f}"
            f"  {'[{min:.2f}, {max:.2f}]'.format(**faster):16}{row['share_of_full']['median']:9.1%}"
        )
        if "computed_share" in row:
            line += f"{row['computed_share']:10.1%}{row['forward_share_of_full']['median']:9.1%}"
        print(line, flush=True)
