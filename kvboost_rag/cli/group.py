"""How commands end: errors and interruptions as a line and an exit code, warnings as notes.

Knows typer's groups and this package's errors; knows nothing of what the commands are.
"""

from __future__ import annotations

import errno
import warnings
from typing import Any

import typer
from typer.core import TyperGroup

from kvboost_rag.cli import printing
from kvboost_rag.errors import KVBoostError

INTERRUPTED = 130


class Commands(TyperGroup):
    """What goes wrong on purpose, or with files, is one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        printing.tolerant()
        with warnings.catch_warnings():
            warnings.showwarning = printing.warned
            try:
                return super().invoke(ctx)
            except KVBoostError as error:
                printing.error(error)
                raise typer.Exit(1) from error
            except OSError as error:
                if error.errno == errno.EPIPE:  # who read the output has gone: typer's to deal with
                    raise
                printing.error(error)
                raise typer.Exit(1) from error
            except KeyboardInterrupt as error:
                printing.note("interrupted")
                raise typer.Exit(INTERRUPTED) from error
