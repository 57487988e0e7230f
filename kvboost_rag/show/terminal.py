"""A strip and its bars in a terminal, drawn with rich. Every source has a glyph of its own, for those without colours.

Knows stretches and bars; knows nothing of HTML. rich is asked for when something is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvboost_rag.engine.types import Report, Source
from kvboost_rag.errors import MissingExtraError
from kvboost_rag.show.strip import NAMES, Stretch
from kvboost_rag.show.times import Bar, speedup

GLYPHS = {Source.EXACT: "█", Source.MOVED: "▓", Source.REPAIRED: "▲", Source.LIVE: "░"}
SHORT = {Source.EXACT: "exact", Source.MOVED: "moved", Source.REPAIRED: "repaired", Source.LIVE: "live"}
STYLES = {Source.EXACT: "green", Source.MOVED: "bright_blue", Source.REPAIRED: "yellow", Source.LIVE: "bright_black"}
HEIGHTS = " ▁▂▃▄▅▆▇█"
MAX_STRIP = 100  # columns
MAX_BAR = 50
COUNTS_WIDTH, LEAST_TITLE = 52, 12  # what a narrow terminal cuts is the titles


def rich_part(name: str) -> Any:
    """One name of rich, by its dotted path. Raises MissingExtraError."""
    module, _, attribute = name.rpartition(".")
    try:
        found = __import__(module, fromlist=[attribute])
    except ImportError as error:
        raise MissingExtraError.of("rich", "cli") from error
    return getattr(found, attribute)


def strip(report: Report, stretches: Sequence[Stretch], bars: Sequence[Bar], width: int) -> Any:
    """Everything about one prompt but the answer, as something rich can print in ``width`` columns."""
    group, text = rich_part("rich.console.Group"), rich_part("rich.text.Text")
    parts = [text(_summary(report)), *(text(note, style="dim") for note in report.notes)]
    if stretches:
        parts += [*_rows(report, stretches, min(width, MAX_STRIP)), _key(report), _documents(stretches, width)]
    return group(*parts, *times(bars, width))


def _summary(report: Report) -> str:
    hits = f", {report.num_document_hits} of {len(report.documents)} documents found" if report.documents else ""
    how = f"repair {report.repair}" if report.mode != "baseline" else "computed in full"
    return f"{report.num_prompt_tokens:,} prompt tokens{hits}, {how}"


def _rows(report: Report, stretches: Sequence[Stretch], width: int) -> list[Any]:
    """The strip, what was repaired above it, the documents' numbers below."""
    assert report.trace is not None, "stretches come from a trace"
    text = rich_part("rich.text.Text")
    sources = report.trace.sources
    columns = np.array_split(sources, min(width, len(sources)))
    above, strip = text(), text()
    for column in columns:
        share = float((column == Source.REPAIRED).mean())
        above.append(HEIGHTS[int(np.ceil(share * (len(HEIGHTS) - 1)))], style=STYLES[Source.REPAIRED])
        rest = column[column != Source.REPAIRED]
        main = Source(int(np.bincount(rest).argmax())) if len(rest) else Source.REPAIRED
        strip.append(GLYPHS[main], style=STYLES[main])
    below = [" "] * len(columns)
    for stretch in stretches:
        if stretch.number:
            at = int((stretch.start + stretch.num_tokens / 2) * len(columns) / len(sources))
            label = str(stretch.number)
            below[at : at + len(label)] = label
    numbers = "".join(below).rstrip()
    rows = [strip, text(numbers, style="dim")] if numbers else [strip]
    return [above, *rows] if report.num_repaired_tokens else rows


def _key(report: Report) -> Any:
    text = rich_part("rich.text.Text")()
    for source, count in report.counts.items():
        glyph = HEIGHTS[4] if source is Source.REPAIRED else GLYPHS[source]
        text.append(glyph, style=STYLES[source])
        text.append(f" {NAMES[source]} {count:,}   ")
    return text


def _documents(stretches: Sequence[Stretch], width: int) -> Any:
    table = rich_part("rich.table.Table")(box=None, padding=(0, 2, 0, 0))
    for name in ("", "tokens", *SHORT.values(), "from"):
        side = "left" if name in ("", "from") else "right"
        room = {"max_width": max(LEAST_TITLE, width - COUNTS_WIDTH)} if name == "" else {"min_width": len(name)}
        table.add_column(name, justify=side, no_wrap=True, **room)
    for stretch in stretches:
        if stretch.title != "between":
            counts = [str(stretch.counts[source]) if stretch.counts[source] else "" for source in SHORT]
            tier = stretch.document.tier if stretch.document else ""
            table.add_row(stretch.heading, str(stretch.num_tokens), *counts, tier)
    return table


def times(bars: Sequence[Bar], width: int) -> list[Any]:
    """Time to first token, one bar under the other on one scale."""
    if not bars:
        return []
    text = rich_part("rich.text.Text")
    longest, room = max(bar.seconds for bar in bars) or 1.0, max(10, min(MAX_BAR, width - 40))
    rows = []
    for bar in bars:
        style = "bright_black" if bar.name == "full prefill" else "blue"
        row = text(f"{'TTFT, ' + bar.name:<20}")
        row.append("━" * max(1, round(room * bar.seconds / longest)), style=style)
        rows.append(row.append(f" {bar.label}"))
    ratio = speedup(bars)
    return [*rows, text(f"{'':<20}{ratio}", style="bold")] if ratio else rows
