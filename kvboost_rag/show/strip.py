"""The strip: a prompt cut into its documents and the text between them, every token with its source and its text.

Knows a trace and how ids read as text; knows nothing of colours, HTML or terminals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from kvboost_rag.engine.types import DocumentReport, Report, Source

NAMES = {
    Source.EXACT: "reused exactly",
    Source.MOVED: "reused after moving",
    Source.REPAIRED: "repaired",
    Source.LIVE: "live",
}
NUM_LEVELS = 5  # of attention: 0 where it was not measured or is small
LEAST_ATTENTION = 0.5  # share of a prompt's document tokens that are at level 0

HEADING_SPANS = 30
TITLE_CHARACTERS = 48

Reads = Callable[[Sequence[int]], list[str]]  # what each of some ids reads as; they concatenate to the text


@dataclass(frozen=True)
class Span:
    """Neighbouring tokens [start, start + len(tokens)) with one source and one level of attention."""

    start: int
    tokens: tuple[str, ...]
    source: Source
    level: int = 0

    @property
    def text(self) -> str:
        return "".join(self.tokens)


@dataclass(frozen=True)
class Stretch:
    """A document of the prompt, or the text before, between or behind documents. ``number`` counts documents from 1
    and is 0 for text; ``counts``: tokens by ``Source``."""

    title: str
    start: int
    spans: tuple[Span, ...]
    counts: tuple[int, ...]
    number: int = 0
    document: DocumentReport | None = None

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)

    @property
    def heading(self) -> str:
        """The title, and of a document how it begins."""
        if not self.number:
            return self.title
        beginning = "".join(span.text for span in self.spans[:HEADING_SPANS])
        return f"{self.number} {title_of(beginning)}".rstrip()


def stretches(report: Report, reads: Reads) -> list[Stretch]:
    """The whole prompt of ``report`` in order; nothing if it has no trace."""
    trace = report.trace
    if trace is None or not len(trace.ids):
        return []
    levels, tokens = attention_levels(report), reads(trace.ids.tolist())
    found = []
    for number, document, start, end in _parts(report):
        sources = trace.sources[start:end]
        counts = tuple(np.bincount(sources, minlength=len(Source)).tolist())
        spans = tuple(_spans(tokens[start:end], sources, levels[start:end], start))
        found.append(Stretch(_title(report, number, start, end), start, spans, counts, number, document))
    return found


def attention_levels(report: Report) -> npt.NDArray[np.int64]:
    """How much the question attends to each token of the prompt (num_tokens,): 0 to NUM_LEVELS - 1, by rank among the
    tokens of documents. The least attended half has 0, and so has everything where nothing was measured."""
    trace = report.trace
    assert trace is not None, "a prompt without a trace has no levels"
    levels = np.zeros(len(trace.ids), dtype=np.int64)
    inside = np.zeros(len(trace.ids), dtype=bool)
    for document in report.documents:
        inside[document.start : document.start + document.num_tokens] = True
    if trace.attention is None or not inside.any():
        return levels
    found = trace.attention[inside]
    # Each level holds a third of the tokens of the level below it: what stands out is few.
    bounds = [1 - (1 - LEAST_ATTENTION) * 3.0**-step for step in range(NUM_LEVELS - 1)]
    levels[inside] = np.searchsorted(np.quantile(found, bounds), found, side="right")
    return levels


def _parts(report: Report) -> Iterator[tuple[int, DocumentReport | None, int, int]]:
    """(number, document, start, end), text between documents with number 0."""
    at = 0
    for number, document in enumerate(report.documents, start=1):
        if document.start > at:
            yield 0, None, at, document.start
        at = document.start + document.num_tokens
        yield number, document, document.start, at
    if at < report.num_prompt_tokens:
        yield 0, None, at, report.num_prompt_tokens


def _title(report: Report, number: int, start: int, end: int) -> str:
    if number:
        return f"document {number}"
    if not report.documents:
        return "prompt"
    if start == 0:
        return "before the documents"
    return "question" if end == report.num_prompt_tokens else "between"


def _spans(
    tokens: Sequence[str], sources: npt.NDArray[np.uint8], levels: npt.NDArray[np.int64], start: int
) -> Iterator[Span]:
    kinds = zip(sources.tolist(), levels.tolist(), strict=True)
    at = 0
    for (source, level), run in groupby(kinds):
        end = at + len(list(run))
        yield Span(start + at, tuple(tokens[at:end]), Source(source), level)
        at = end


def title_of(text: str) -> str:
    """The first line that says something, cut to fit a row."""
    line = next((line.strip() for line in text.splitlines() if line.strip(" \t#")), "").lstrip("# ")
    return line if len(line) <= TITLE_CHARACTERS else line[: TITLE_CHARACTERS - 1] + "…"
