"""One result as a picture, which notebooks, browsers and terminals each draw in their own way.

Knows a report, an answer and how ids read as text; draws through ``html`` and ``terminal``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kvboost_rag.engine.types import Report
from kvboost_rag.show import html, terminal
from kvboost_rag.show.strip import Reads, Stretch, stretches
from kvboost_rag.show.times import Bar, bars

TITLE = "kvboost-rag: where a prompt's tokens came from"


class Shown:
    """What draws itself: as the last value of a notebook's cell, with rich, with ``show``, into a file."""

    def _repr_html_(self) -> str:
        raise NotImplementedError

    def _drawn(self, width: int) -> Any:
        """For rich, in ``width`` columns."""
        raise NotImplementedError

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        yield self._drawn(options.max_width)

    def show(self) -> None:
        """Print in the terminal. Raises MissingExtraError without rich."""
        terminal.rich_part("rich.console.Console")(highlight=False).print(self)

    def save_html(self, path: str | os.PathLike[str]) -> Path:
        """Write a page that needs nothing else. Returns its path."""
        target = Path(path).expanduser()
        target.write_text(html.page(self._repr_html_(), TITLE), encoding="utf-8")
        return target


@dataclass(frozen=True)
class Picture(Shown):
    """``reads``: what ids read as, one text each. ``full_seconds``: TTFT of a full prefill of the same prompt, if
    measured."""

    report: Report
    reads: Reads
    answer: str = ""
    full_seconds: float | None = None

    @cached_property
    def stretches(self) -> list[Stretch]:
        return stretches(self.report, self.reads)

    @property
    def bars(self) -> list[Bar]:
        return bars(self.report, self.full_seconds)

    def _repr_html_(self) -> str:
        return html.strip(self.report, self.stretches, self.bars, self.answer)

    def _drawn(self, width: int) -> Any:
        return terminal.strip(self.report, self.stretches, self.bars, width)

    def __repr__(self) -> str:
        return str(self.report)
