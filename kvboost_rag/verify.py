"""Does reuse change the answers to my prompts, and what does it save? Measured on the prompts themselves.

Knows an engine's logits and timings; knows nothing of how they come about.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvboost_rag.engine.engine import Engine, Prefilled
from kvboost_rag.engine.repair import Repair
from kvboost_rag.engine.types import Report, Segment


@dataclass(frozen=True)
class Comparison:
    """One prompt. ``kl``: KL(full || reuse), nats, mean over the tokens that full prefill generates; ``agreement``:
    share of them for which both have the same most likely token; ``seconds``: TTFT of full prefill and of reuse."""

    kl: float
    agreement: float
    full_seconds: float
    reuse_seconds: float
    report: Report

    @property
    def speedup(self) -> float:
        return self.full_seconds / self.reuse_seconds


@dataclass(frozen=True)
class VerifyReport:
    """What ``verify`` measured, prompt by prompt. ``str()`` gives the means in a line."""

    comparisons: tuple[Comparison, ...]
    repair: str

    def mean(self, name: str) -> float:
        """The mean of one field or of ``speedup`` over the prompts; NaN without prompts."""
        values = [float(getattr(each, name)) for each in self.comparisons]
        return sum(values) / len(values) if values else float("nan")

    @property
    def worst(self) -> Comparison | None:
        """The prompt on which reuse strays furthest."""
        return max(self.comparisons, key=lambda each: each.kl, default=None)

    def __str__(self) -> str:
        return (
            f"{len(self.comparisons)} prompts, repair {self.repair}: KL {self.mean('kl'):.4f} nats a token, same token "
            f"{self.mean('agreement'):.1%}, TTFT {self.mean('full_seconds') * 1e3:.0f} ms full and "
            f"{self.mean('reuse_seconds') * 1e3:.0f} ms with reuse ({self.mean('speedup'):.1f} times)"
        )


def compare(engine: Engine, segments: Sequence[Segment], strategy: Repair, num_tokens: int) -> Comparison:
    """Compare full prefill with reuse on one prompt. The caller holds the engine's lock."""
    started = time.perf_counter()
    full = engine.prefill(segments, strategy, "baseline", num_tokens)
    full_seconds = time.perf_counter() - started
    started = time.perf_counter()
    reuse = engine.prefill(segments, strategy, "reuse", num_tokens)
    reuse_seconds = time.perf_counter() - started
    ids, expected = greedy(engine, full, num_tokens)
    expected = expected.log_softmax(-1)
    strayed = engine.extend(reuse, ids).log_softmax(-1)
    return Comparison(
        kl=float((expected.exp() * (expected - strayed)).sum(-1).mean()),
        agreement=float((expected.argmax(-1) == strayed.argmax(-1)).float().mean()),
        full_seconds=full_seconds,
        reuse_seconds=reuse_seconds,
        report=reuse.report,
    )


def greedy(engine: Engine, prefilled: Prefilled, num_tokens: int) -> tuple[list[int], torch.Tensor]:
    """The most likely token again and again, end tokens passed over, and the logits (num_tokens, vocab) it came from.

    Advances the cache of ``prefilled`` by all but the last.
    """
    logits = [prefilled.logits]
    ids = [int(prefilled.logits.argmax())]
    while len(ids) < num_tokens:
        logits.append(engine.model.forward(torch.tensor(ids[-1:]), prefilled.cache)[-1])
        ids.append(int(logits[-1].argmax()))
    return ids, torch.stack(logits)
