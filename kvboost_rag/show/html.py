"""A strip and its bars as one piece of HTML: for a notebook's cell, or a page of its own. No scripts, nothing fetched.

Knows stretches and bars; knows nothing of terminals. Colours are half transparent over whatever background there is, so
that light and dark themes both read; a repaired token is underlined too, for those who cannot tell the colours.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from kvboost_rag.engine.types import Report, Source
from kvboost_rag.show.strip import NAMES, Span, Stretch
from kvboost_rag.show.times import Bar, format_seconds, speedup

CLASSES = {Source.EXACT: "e", Source.MOVED: "m", Source.REPAIRED: "r", Source.LIVE: "l"}
UNFOLDED_TOKENS = 400  # a prompt up to this long is shown open
LEAST_WIDTH = 1 / 500  # of a document's picture, so that a single repaired token is seen
SHOWN_TOKENS = 24  # in the text under the pointer

STYLE = """
.kvb{font:13px/1.5 system-ui,sans-serif;max-width:72em;margin:.5em 0}
.kvb .strip{display:flex;gap:3px;margin:.4em 0 0}
.kvb .strip>div{min-width:2px;text-align:center;font-size:11px;opacity:.95;overflow:hidden}
.kvb svg{display:block;width:100%;height:26px;background:rgba(128,128,128,.12)}
.kvb .key span{margin-right:1.4em;white-space:nowrap}
.kvb .key i{display:inline-block;width:.9em;height:.9em;margin-right:.4em;vertical-align:-.1em}
.kvb .bars{display:grid;grid-template-columns:max-content 1fr;gap:2px .8em;margin:.6em 0;align-items:center}
.kvb .bar{display:flex;align-items:center;white-space:nowrap}
.kvb .bar i{display:block;height:14px;box-sizing:border-box}
.kvb .bar i{background:#0072b2;border-right:1px solid rgba(255,255,255,.6)}
.kvb .bar.x i{background:rgba(128,128,128,.55)}
.kvb .bar span{margin-left:.6em}
.kvb summary{cursor:pointer}
.kvb .text{white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:isolate}
.kvb .text{margin:.3em 0 .8em 1.1em;max-height:24em;overflow:auto}
.kvb .e{background:rgba(0,158,115,.38)}.kvb .m{background:rgba(86,180,233,.34)}
.kvb .r{background:rgba(230,159,0,.6);text-decoration:underline}.kvb .l{background:rgba(128,128,128,.3)}
.kvb svg .e{fill:#009e73}.kvb svg .m{fill:#56b4e9}.kvb svg .r{fill:#e69f00}.kvb svg .l{fill:#8c8c8c}
.kvb i.e{background:#009e73}.kvb i.m{background:#56b4e9}.kvb i.r{background:#e69f00}.kvb i.l{background:#8c8c8c}
.kvb .a1{box-shadow:inset 0 -2px rgba(213,94,0,.35)}.kvb .a2{box-shadow:inset 0 -3px rgba(213,94,0,.55)}
.kvb .a3{box-shadow:inset 0 -4px rgba(213,94,0,.75)}.kvb .a4{box-shadow:inset 0 -5px rgb(213,94,0)}
.kvb .note{opacity:.75}
.kvb table{border-collapse:collapse}.kvb td{padding:1px .8em 1px 0;text-align:left}
"""


def page(body: str, title: str) -> str:
    """``body`` as a document of its own, in the reader's light or dark scheme."""
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        "<style>:root{color-scheme:light dark}body{background:Canvas;color:CanvasText;margin:2em}</style></head>"
        f"<body>{body}</body></html>\n"
    )


def frame(*parts: str) -> str:
    return f'<div class="kvb"><style>{STYLE}</style>{"".join(parts)}</div>'


def strip(report: Report, stretches: Sequence[Stretch], bars: Sequence[Bar], answer: str = "") -> str:
    """Everything about one prompt."""
    said = f"<div><b>{escape(readable(answer.strip()))}</b></div>" if answer.strip() else ""
    return frame(said, _summary(report), _strip(stretches), _key(report), times(bars), _texts(report, stretches))


def _summary(report: Report) -> str:
    hits = f"{report.num_document_hits} of {len(report.documents)} documents found" if report.documents else ""
    repair = f"repair {report.repair}" if report.mode != "baseline" else "computed in full"
    words = [f"{report.num_prompt_tokens:,} prompt tokens", hits, repair]
    notes = "".join(f'<div class="note">{escape(note)}</div>' for note in report.notes)
    return f"<div>{' · '.join(filter(None, words))}</div>{notes}"


def _strip(stretches: Sequence[Stretch]) -> str:
    """One picture a stretch, as wide as it has tokens."""
    cells = "".join(
        f'<div style="flex:{s.num_tokens} 0 0" title="{escape(told(s))}">{_picture(s)}{s.number or "&nbsp;"}</div>'
        for s in stretches
    )
    return f'<div class="strip">{cells}</div>' if cells else ""


def _picture(stretch: Stretch) -> str:
    """Spans side by side; repaired ones last, over the others, never too thin to be seen."""
    least = stretch.num_tokens * LEAST_WIDTH
    rects = [
        f'<rect class="{CLASSES[source]}" x="{start}" width="{max(width, least if repaired else 0):g}" height="1"/>'
        for repaired in (False, True)
        for source, start, width in _runs(stretch)
        if (source is Source.REPAIRED) == repaired
    ]
    return f'<svg viewBox="0 0 {stretch.num_tokens} 1" preserveAspectRatio="none">{"".join(rects)}</svg>'


def _runs(stretch: Stretch) -> list[tuple[Source, int, int]]:
    """(source, start within the stretch, tokens), whatever the attention."""
    runs: list[tuple[Source, int, int]] = []
    for span in stretch.spans:
        start, width = span.start - stretch.start, len(span.tokens)
        if runs and runs[-1][0] is span.source:
            start, width = runs[-1][1], runs[-1][2] + width
            runs.pop()
        runs.append((span.source, start, width))
    return runs


def _key(report: Report) -> str:
    total = max(report.num_prompt_tokens, 1)
    items = (
        f'<span><i class="{CLASSES[source]}"></i>{NAMES[source]} {count:,} ({count / total:.1%})</span>'
        for source, count in report.counts.items()
    )
    looked = report.trace is not None and report.trace.attention is not None
    heat = '<span><i class="a4"></i>what the question looks at</span>' if looked else ""
    return f'<div class="key">{"".join(items)}{heat}</div>'


def times(bars: Sequence[Bar]) -> str:
    """Time to first token, one bar under the other on one scale."""
    if not bars:
        return ""
    longest = max(bar.seconds for bar in bars) or 1.0
    rows = []
    for bar in bars:
        steps = "".join(
            f'<i style="width:{70 * seconds / longest:.2f}%" title="{escape(name)}: {format_seconds(seconds)}"></i>'
            for name, seconds in bar.steps
        )
        kind = "bar x" if bar.name == "full prefill" else "bar"
        rows.append(f'<div>TTFT, {bar.name}</div><div class="{kind}">{steps}<span>{escape(bar.label)}</span></div>')
    ratio = speedup(bars)
    said = f"<div></div><div><b>{ratio}</b></div>" if ratio else ""
    return f'<div class="bars">{"".join(rows)}{said}</div>'


def _texts(report: Report, stretches: Sequence[Stretch]) -> str:
    unfolded = " open" if report.num_prompt_tokens <= UNFOLDED_TOKENS else ""
    return "".join(
        f'<details{unfolded}><summary>{escape(told(s))}</summary><div class="text">{"".join(map(_span, s.spans))}'
        "</div></details>"
        for s in stretches
        if s.title != "between"
    )


def told(stretch: Stretch) -> str:
    """A stretch in a line: its tokens by source, and from where they came."""
    counts = [f"{stretch.counts[source]} {NAMES[source]}" for source in NAMES if stretch.counts[source]]
    tier = stretch.document.tier if stretch.document else ""
    return f"{stretch.heading}: {stretch.num_tokens} tokens, {', '.join(counts)}{f', from {tier}' if tier else ''}"


def _span(span: Span) -> str:
    shown = "|".join(readable(token) for token in span.tokens[:SHOWN_TOKENS])
    more = "|…" if len(span.tokens) > SHOWN_TOKENS else ""
    last = span.start + len(span.tokens) - 1
    where = f"token {span.start}" if last == span.start else f"tokens {span.start}-{last}"
    level = f" a{span.level}" if span.level else ""
    title = escape(f"{where}, {NAMES[span.source]}: {shown}{more}")
    return f'<span class="{CLASSES[span.source]}{level}" title="{title}">{escape(readable(span.text))}</span>'


def readable(text: str) -> str:
    """Without characters that no page may hold."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
