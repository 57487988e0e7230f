"""Where the time to first token went, beside what a full prefill takes.

Knows a report's seconds; knows nothing of how they are drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvboost_rag.engine.types import Report

REST = "tokenising, first token"


@dataclass(frozen=True)
class Bar:
    """``steps``: (name, seconds), in order. ``measured``: by the clock, or expected from other forwards."""

    name: str
    steps: tuple[tuple[str, float], ...]
    measured: bool = True

    @property
    def seconds(self) -> float:
        return sum(seconds for _, seconds in self.steps)

    @property
    def label(self) -> str:
        """The time for people: milliseconds below a second."""
        text = format_seconds(self.seconds)
        return text if self.measured else f"about {text} (expected)"


def bars(report: Report, full_seconds: float | None = None) -> list[Bar]:
    """The time of this prompt and, where it is known, that of a full prefill: ``full_seconds`` if it was measured, else
    what the report expects. Nothing if no time was taken."""
    if not report.ttft_seconds:
        return []
    name = "full prefill" if report.mode == "baseline" else "reuse"
    steps = [(step, seconds) for step, seconds in report.seconds.items() if seconds > 0]
    rest = report.ttft_seconds - sum(seconds for _, seconds in steps)
    found = [Bar(name, (*steps, (REST, max(rest, 0.0))))]
    full = full_seconds or report.full_prefill_seconds
    if full and report.mode != "baseline":
        found.append(Bar("full prefill", (("forward", full),), measured=full_seconds is not None))
    return found


def speedup(found: Sequence[Bar]) -> str:
    """How many times as fast, in words; empty if there is nothing to compare."""
    if len(found) < 2 or not found[0].seconds:
        return ""
    return f"{found[1].seconds / found[0].seconds:.1f} times"


def format_seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
