"""What the commands say: answers and tables on standard output, notes and errors on standard error.

Knows streams and rich's tables; knows nothing of stores or models. rich is loaded when a table is drawn.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, TextIO, TypeVar

from kvboost_rag.errors import BudgetWarning, CacheWarning, QuantizationWarning

PIPED_WIDTH = 140  # columns where there is no terminal to ask
OWN_WARNINGS = (BudgetWarning, CacheWarning, QuantizationWarning)
T = TypeVar("T")


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def error(text: object) -> None:
    note(f"error: {text}")


def document(value: Any) -> None:
    """One JSON document on standard output."""
    print(json.dumps(value, indent=1))


def warned(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Stands for ``warnings.showwarning``: this package's own in a line, others as Python writes them."""
    if issubclass(category, OWN_WARNINGS):
        note(f"note: {message}")
    else:
        note(warnings.formatwarning(message, category, filename, lineno, line).rstrip())


def confirmed(question: str) -> bool:
    """Ask on standard error. Only yes is yes; the end of the input is not."""
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def is_terminal(stream: TextIO) -> bool:
    return stream.isatty()


def tolerant() -> None:
    """What an encoding does not have becomes a question mark instead of an error."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError):  # not a real one, in tests
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], last: Sequence[str] | None = None) -> None:
    """A table on standard output: the first column to the left, the others to the right; ``last`` under a line."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(title=title, title_justify="left", show_footer=last is not None)
    for number, name in enumerate(columns):
        foot = Text(last[number]) if last else ""
        side = "right" if number else "left"
        drawn.add_column(name, foot, overflow="fold", justify=side)  # type: ignore[arg-type]
    for row in rows:
        drawn.add_row(*map(Text, row))
    console = Console()
    if not is_terminal(sys.stdout):
        console = Console(width=PIPED_WIDTH)
    console.print(drawn)


def track(items: Sequence[T], what: str) -> Iterable[T]:
    """``items``, with a bar on standard error if that is a terminal."""
    from tqdm.auto import tqdm

    shown: Iterable[T] = tqdm(items, desc=what, disable=not is_terminal(sys.stderr))
    return shown
