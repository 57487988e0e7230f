"""The rows of the table: how documents were encoded, and what is repaired. Named sets of them.

Knows names and strategies; knows nothing of how an encoding is made (``encoded.py``) or what is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvboost_rag.engine.repair import BoundaryRepair, DeviationRepair, FullRepair, NoRepair, QueryRepair, Repair
from kvboost_rag.engine.repair.query import USUAL_MOST, USUAL_RATIO

JOINED = "joined tokenisation, full prefill"
REFERENCE = "alone, rotated, none"
CHUNK_SIZES = (32, 128, 512)
PRIMER_LENGTHS = (16, 64, 960)  # besides the usual one


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    encoding: str
    repair: Repair


def _percent(share: float) -> str:
    return f"{share * 100:g} %"


def _query(repair: QueryRepair) -> str:
    if repair.recompute_ratio is None:
        most = USUAL_MOST if repair.max_tokens is None else repair.max_tokens
        return f"query {_percent(USUAL_RATIO)}, at most {most}"
    return f"query {_percent(repair.recompute_ratio)}"


DESCRIBED: dict[str, Callable[[Any], str]] = {
    "none": lambda r: "none",
    "full": lambda r: "full",
    "query": _query,
    "boundary": lambda r: f"boundary {'first' if r.side == 'start' else 'last'} {r.num_tokens}",
    "deviation": lambda r: f"deviation {_percent(r.recompute_ratio)}" + (", squared" if r.measure == "squared" else ""),
}
# Said behind a name: the package's default, and what the paper does.
MARKED = {
    ("primer", QueryRepair()): " (default)",
    ("", DeviationRepair(0.15)): " (paper)",
    ("", BoundaryRepair("end", 16)): " (paper)",
}

PLAINLY = {"alone": REFERENCE, "not rotated": "alone, not rotated, none"}


def row(encoding: str, repair: Repair) -> Row:
    if repair == NoRepair() and encoding in PLAINLY:
        return Row(PLAINLY[encoding], encoding, repair)
    mark = MARKED.get((encoding, repair), "") or MARKED.get(("", repair), "")
    return Row(f"{encoding}, {DESCRIBED[repair.name](repair)}{mark}", encoding, repair)


def rows(encodings: Sequence[str], repairs: Sequence[Repair]) -> list[Row]:
    return [row(encoding, repair) for encoding in encodings for repair in repairs]


NONE, DEFAULT, MORE = NoRepair(), QueryRepair(), QueryRepair(0.15)
BUDGETS: list[Repair] = [
    NONE,
    *(QueryRepair(share) for share in (0.02, 0.05, 0.10, 0.15, 0.30)),
    *(DeviationRepair(share) for share in (0.05, 0.15, 0.30)),
    DeviationRepair(0.15, measure="squared"),
    *(BoundaryRepair(side, count) for side in ("start", "end") for count in (4, 16, 32, 64)),
    FullRepair(),
]
SETS: dict[str, list[Row]] = {
    # What a claim needs, in half an hour for 50 questions.
    "core": [
        row("alone", NONE),
        *rows(["header"], [NONE, MORE, DeviationRepair(0.15), BoundaryRepair("end", 16)]),
        *rows(["primer"], [NONE, DEFAULT, MORE, FullRepair()]),
    ],
    # Every strategy and budget, behind nothing, behind the prompt's own header, behind a primer.
    "repair": [row("not rotated", NONE), *rows(["alone", "header", "primer"], BUDGETS)],
    # What documents are read behind.
    "primer": [
        *rows(["alone", "header"], [NONE, DEFAULT]),
        *rows([f"shared primer {n}" for n in PRIMER_LENGTHS], [NONE]),
        *rows(["shared primer", "bundled primer", "last read", "primer", "first exact"], [NONE, DEFAULT]),
    ],
    # Documents cut into chunks, each encoded without the ones before it.
    "chunks": [
        *rows(["alone", "primer"], [NONE, DEFAULT, MORE]),
        *rows([f"chunks of {n} alone" for n in CHUNK_SIZES], [NONE, MORE]),
        *rows([f"chunks of {n} primed" for n in CHUNK_SIZES], [NONE, DEFAULT]),
    ],
    # What the default's most costs: with --docs 12 a share of 5 % is three times as many tokens.
    "most": rows(
        ["primer"], [NONE, QueryRepair(max_tokens=64), DEFAULT, QueryRepair(max_tokens=192), QueryRepair(0.05)]
    ),
    "codecs": rows(["primer", "primer int8", "primer int4"], [NONE, DEFAULT]),
}
SETS["all"] = list({each.name: each for name in list(SETS) for each in SETS[name]}.values())


def choose(name: str | None, prefixes: Sequence[str] | None) -> list[Row]:
    """Rows of a set whose names start with one of ``prefixes``, the reference always among them. Without a set: all
    that the prefixes name, or ``core``. Raises SystemExit for a prefix that names none."""
    found = SETS[name or ("all" if prefixes else "core")]
    if prefixes:
        for prefix in prefixes:
            if not any(each.name.startswith(prefix) for each in found):
                raise SystemExit(f"--rows {prefix!r}: no row of this set starts so; there are:\n" + _listed(found))
        found = [each for each in found if each.name.startswith(tuple(prefixes))]
    return [row("alone", NONE), *(each for each in found if each.name != REFERENCE)]


def _listed(found: Sequence[Row]) -> str:
    return "\n".join(f"  {each.name}" for each in found)
