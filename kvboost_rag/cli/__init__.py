"""The command ``kvboost-rag``: documents read into a folder, questions asked of it, from a terminal.

Knows what is imported when, and exit codes: 0 done, 1 an error or a check that failed, 2 wrong usage, 130 interrupted.
Importing this package loads neither typer nor torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvboost_rag.errors import MissingExtraError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code."""
    try:
        return _run(argv)
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except KeyboardInterrupt:  # while modules are loaded
        return 130


def _run(argv: Sequence[str] | None) -> int:
    try:
        import rich  # noqa: F401  # what typer draws help with, and what tables are made of
        import typer  # noqa: F401
    except ImportError as error:
        print(f"error: {MissingExtraError.of(error.name or 'typer', 'cli')}", file=sys.stderr)
        return 1
    from kvboost_rag.cli.app import app

    app(args=None if argv is None else list(argv), prog_name="kvboost-rag")
    return 0
