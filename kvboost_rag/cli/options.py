"""The options of the commands, as typer has them: names, choices, help.

Knows typer; knows nothing of what the options do.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from kvboost_rag.engine.config import parse_bytes
from kvboost_rag.errors import OptionError

QUALITY_NAMES = ("exact", "high", "fast")  # the keys of QUALITIES; a test compares


class RepairName(StrEnum):
    """The keys of ``REPAIRS``, without loading torch; a test compares."""

    NONE = "none"
    BOUNDARY = "boundary"
    DEVIATION = "deviation"
    QUERY = "query"
    FULL = "full"


class DtypeName(StrEnum):
    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class KVDtypeName(StrEnum):
    """``KV_DTYPES``; a test compares."""

    AUTO = "auto"
    INT8 = "int8"
    INT4 = "int4"


def check_bytes(value: str | None) -> str | None:
    """Raises BadParameter."""
    if value is not None:
        try:
            parse_bytes(value if not value.isdecimal() else int(value))
        except OptionError as error:
            raise typer.BadParameter("bytes as a whole number, or such as 2GB or 512MiB") from error
    return value


def check_quality(value: str | None) -> str | None:
    """Raises BadParameter."""
    if value is not None and value not in QUALITY_NAMES and not _is_share(value):
        raise typer.BadParameter(f"one of {', '.join(QUALITY_NAMES)}, or a number from 0 to 1")
    return value


def _is_share(value: str) -> bool:
    try:
        return 0 <= float(value) <= 1
    except ValueError:
        return False


def reuse(repair: str | None, ratio: float | None, quality: str | None) -> dict[str, Any]:
    """Options of the engine's calls; those not given are left out."""
    share = float(quality) if quality is not None and quality not in QUALITY_NAMES else quality
    given = {"repair": repair and str(repair), "recompute_ratio": ratio, "quality": share}
    return {name: value for name, value in given.items() if value is not None}


STORE = Path(".kvboost")
PLACE = "Store, model and memory"  # the help's panel for what most commands have
Function = TypeVar("Function", bound=Callable[..., None])


def command(to: typer.Typer, name: str | None = None) -> Callable[[Function], Function]:
    """Registers a function as a command of ``to``; its docstring is the help."""
    return lambda function: to.command(name, help=flowing(function.__doc__ or ""))(function)


def flowing(text: str) -> str:
    """Each paragraph in one line, to be broken where the terminal ends; indented ones, which are examples, as they
    are."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(each if each.startswith(" ") else " ".join(each.split()) for each in paragraphs)


Store = Annotated[
    Path,
    typer.Option(
        "--store",
        rich_help_panel=PLACE,
        envvar="KVBOOST_STORE",
        file_okay=False,
        help="The folder of the store.",
        metavar="FOLDER",
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        rich_help_panel=PLACE,
        envvar="KVBOOST_MODEL",
        metavar="NAME",
        help="A hub name, a folder, or bundled. If not given: the one the store was made with, else bundled if its "
        "package is installed, else Qwen/Qwen2.5-0.5B-Instruct.",
        show_default=False,
    ),
]
Embedder = Annotated[
    str | None,
    typer.Option(
        "--embedder",
        rich_help_panel=PLACE,
        metavar="NAME",
        help="A sentence-transformers name or folder, or bundled. If not given: the store's, else bundled if its "
        "package is installed, else sentence-transformers/all-MiniLM-L6-v2.",
        show_default=False,
    ),
]
Dtype = Annotated[
    DtypeName | None,
    typer.Option(
        "--dtype",
        rich_help_panel=PLACE,
        help="Of the weights and of KV as it is computed; auto: the checkpoint's.",
        show_default=False,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        rich_help_panel=PLACE,
        metavar="NAME",
        help="cpu, cuda, cuda:1, mps. If not given: cuda, else cpu.",
        show_default=False,
    ),
]
KVDtype = Annotated[
    KVDtypeName | None,
    typer.Option(
        "--kv-dtype",
        rich_help_panel=PLACE,
        help="How the KV of documents is kept; auto: as computed.",
        show_default=False,
    ),
]
MaxCacheBytes = Annotated[
    str | None,
    typer.Option(
        "--max-cache-bytes",
        rich_help_panel=PLACE,
        metavar="BYTES",
        callback=check_bytes,
        help="How much KV memory may hold, such as 500MB; the usual is 2GB.",
        show_default=False,
    ),
]
MaxPackedBytes = Annotated[
    str | None,
    typer.Option(
        "--max-packed-bytes",
        rich_help_panel=PLACE,
        metavar="BYTES",
        callback=check_bytes,
        help="How much memory copies of the weights may take on a CPU; the usual is 1GB.",
        show_default=False,
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document to standard output, and nothing else there.")
]
Repair = Annotated[
    RepairName | None,
    typer.Option(
        "--repair", help="What of the reused tokens is computed again; the usual is query.", show_default=False
    ),
]
Ratio = Annotated[
    float | None,
    typer.Option(
        "--recompute-ratio", min=0, max=1, help="The share of reused tokens to compute again.", show_default=False
    ),
]
Quality = Annotated[
    str | None,
    typer.Option(
        "--quality",
        metavar="NAME|SHARE",
        callback=check_quality,
        help="Instead of --repair: exact, high, fast, or a number from 0 to 1.",
        show_default=False,
    ),
]
K = Annotated[int, typer.Option("--k", min=1, help="How many passages a prompt holds.")]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="How long an answer may be.")]
