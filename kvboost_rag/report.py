"""What calls return besides text: results and reports, as plain values.

Knows numbers; knows nothing of how they came about.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvboost_rag.engine.types import Report


@dataclass(frozen=True)
class GenerationResult:
    """A finished generation. ``finish_reason``: ``"stop"``, ``"length"`` or ``"cancelled"``."""

    text: str
    finish_reason: str
    report: Report

    @property
    def ttft_seconds(self) -> float:
        """Seconds from the call to the first token: tokenising, lookup, stitching and repair included."""
        return self.report.ttft_seconds


@dataclass(frozen=True)
class PrefillResult:
    """``logits``: (vocab,) float32, of the prompt's last position."""

    logits: torch.Tensor
    report: Report


@dataclass(frozen=True)
class Estimate:
    """What warming would take, before any work."""

    num_documents: int
    num_tokens: int
    num_bytes: int
    budget_bytes: int  # what warmed documents may hold in all
    num_fitting: int  # how many of them fit, in order, into an empty store

    def __str__(self) -> str:
        return (
            f"{self.num_documents} documents, {self.num_tokens} tokens, {format_bytes(self.num_bytes)} of KV; "
            f"the budget for warmed documents is {format_bytes(self.budget_bytes)}: {self.num_fitting} of "
            f"{self.num_documents} fit"
        )


@dataclass
class WarmReport:
    """What warming did."""

    num_documents: int = 0
    num_warmed: int = 0
    num_already_warm: int = 0
    num_blank: int = 0
    num_tokens: int = 0  # of the documents warmed now
    num_bytes: int = 0
    num_evicted: int = 0  # warmed documents that gave way
    num_rejected: int = 0  # documents for which no room could be made
    seconds: float = 0.0
    num_related: int = 0  # documents read behind one they share text with
    num_first: int = 0  # second versions, straight behind the header

    def __str__(self) -> str:
        rate = f", {self.num_tokens / self.seconds:.0f} tokens/s" if self.num_tokens and self.seconds else ""
        extra = "".join(
            f", {count} {what}"
            for count, what in (
                (self.num_already_warm, "already warm"),
                (self.num_blank, "blank"),
                (self.num_evicted, "evicted"),
                (self.num_rejected, "without room"),
                (self.num_first, "also behind the header"),
            )
            if count
        )
        return (
            f"{self.num_warmed} of {self.num_documents} documents warmed{extra}: {self.num_tokens} tokens, "
            f"{format_bytes(self.num_bytes)} in {self.seconds:.1f} s{rate}"
        )


def format_bytes(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
