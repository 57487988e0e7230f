"""What calls return besides text: results and reports, as plain values that can show themselves.

Knows numbers; knows nothing of how they came about. How they are drawn is in ``show``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvboost_rag.engine.types import Report
from kvboost_rag.errors import OptionError
from kvboost_rag.show.picture import Picture, Shown
from kvboost_rag.show.reading import ReadDocument, as_html, as_rich
from kvboost_rag.show.strip import Reads


def _numbers(ids: Sequence[int]) -> list[str]:
    return [f"{token} " for token in ids]


def _without_tokenizer(result: Any) -> dict[str, Any]:
    """What is pickled or copied: a tokenizer cannot be, so tokens read as numbers there."""
    return {**vars(result), "reads": _numbers}


@dataclass(frozen=True)
class GenerationResult(Shown):
    """A finished generation. ``finish_reason``: ``"stop"``, ``"length"`` or ``"cancelled"``.

    As the last value of a notebook's cell, or with ``show()`` in a terminal, it draws where the prompt's tokens came
    from and where the time went. ``reads``: what ids read as there.
    """

    text: str
    finish_reason: str
    report: Report
    reads: Reads = field(default=_numbers, repr=False, compare=False)

    @property
    def ttft_seconds(self) -> float:
        """Seconds from the call to the first token: tokenising, lookup, stitching and repair included."""
        return self.report.ttft_seconds

    def __getstate__(self) -> dict[str, Any]:
        return _without_tokenizer(self)

    def against(self, full: GenerationResult | None) -> Picture:
        """The picture of this result beside ``full``, the same prompt with ``mode="baseline"``: measured bars instead
        of expected ones. Raises OptionError if it is another prompt's, or another mode's."""
        if full is None:
            return Picture(self.report, self.reads, self.text)
        mode, length = full.report.mode, full.report.num_prompt_tokens
        if mode != "baseline" or length != self.report.num_prompt_tokens:
            raise OptionError.bad_value(
                "full",
                f"a result of mode {mode!r} with {length} prompt tokens",
                f"the result of mode='baseline' for the same prompt ({self.report.num_prompt_tokens} tokens)",
            )
        return Picture(self.report, self.reads, self.text, full.ttft_seconds)

    def show(self, full: GenerationResult | None = None) -> None:
        """Print the picture in the terminal; ``full`` as in ``against``. Raises MissingExtraError without rich."""
        self.against(full).show()

    def save_html(self, path: str | os.PathLike[str], full: GenerationResult | None = None) -> Path:
        """Write the picture as a page that needs nothing else; ``full`` as in ``against``. Returns its path."""
        return self.against(full).save_html(path)

    def _repr_html_(self) -> str:
        return self.against(None)._repr_html_()

    def _drawn(self, width: int) -> Any:
        return self.against(None)._drawn(width)


@dataclass(frozen=True)
class PrefillResult(Shown):
    """``logits``: (vocab,) float32, of the prompt's last position. Shows itself as a ``GenerationResult`` does."""

    logits: torch.Tensor
    report: Report
    reads: Reads = field(default=_numbers, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return _without_tokenizer(self)

    def _repr_html_(self) -> str:
        return Picture(self.report, self.reads)._repr_html_()

    def _drawn(self, width: int) -> Any:
        return Picture(self.report, self.reads)._drawn(width)


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
class WarmReport(Shown):
    """What warming did. Shows itself in notebooks, and in a terminal with ``show()``."""

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
    documents: list[ReadDocument] = field(default_factory=list, repr=False)  # those already warm first

    def _repr_html_(self) -> str:
        return as_html(str(self), self.documents)

    def _drawn(self, width: int) -> Any:
        return as_rich(str(self), self.documents, width)

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
