"""What became of documents that were to be read, as rows with bars.

Knows titles, tokens and outcomes; knows nothing of stores or engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

from kvboost_rag.show import html, terminal

UNFOLDED_ROWS = 12
MAX_BAR = 30
STYLES = {"read": ("m", "bright_blue"), "already warm": ("e", "green"), "no room": ("r", "yellow")}


class ReadDocument(NamedTuple):
    """``title``: how the document begins; ``outcome``: one of STYLES; ``behind``: the titles of what it was read
    behind, the nearest one last."""

    title: str
    num_tokens: int
    outcome: str
    behind: tuple[str, ...] = ()


def as_html(summary: str, documents: Sequence[ReadDocument]) -> str:
    longest = max((d.num_tokens for d in documents), default=1) or 1
    rows = [_row(document, longest) for document in documents]
    shown, folded = "".join(rows[:UNFOLDED_ROWS]), "".join(rows[UNFOLDED_ROWS:])
    more = f"{len(rows) - UNFOLDED_ROWS} more"
    rest = f"<details><summary>{more}</summary><table>{folded}</table></details>" if folded else ""
    return html.frame(f"<div>{escape(summary)}</div><table>{shown}</table>{rest}")


def _row(document: ReadDocument, longest: int) -> str:
    kind, _ = STYLES[document.outcome]
    width = max(2, round(160 * document.num_tokens / longest))
    behind = f"behind {' + '.join(document.behind)}" if document.behind else ""
    cells = (
        f'<div class="{kind}" style="width:{width}px;height:12px"></div>',
        str(document.num_tokens),
        document.outcome,
        escape(html.readable(document.title)),
        f'<span class="note">{escape(html.readable(behind))}</span>',
    )
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def as_rich(summary: str, documents: Sequence[ReadDocument], width: int) -> Any:
    group, text = terminal.rich_part("rich.console.Group"), terminal.rich_part("rich.text.Text")
    if not documents:
        return text(summary)
    table = terminal.rich_part("rich.table.Table")(box=None, padding=(0, 2, 0, 0), show_header=False)
    longest = max(d.num_tokens for d in documents) or 1
    room = max(5, min(MAX_BAR, width - 80))
    for document in documents[:UNFOLDED_ROWS]:
        bar = "▓" * max(1, round(room * document.num_tokens / longest))
        style = STYLES[document.outcome][1]
        table.add_row(text(bar, style=style), str(document.num_tokens), document.outcome, text(document.title))
    more = len(documents) - UNFOLDED_ROWS
    return group(text(summary), table, *([text(f"... and {more} more")] if more > 0 else []))
