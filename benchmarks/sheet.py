"""What was measured so far, question by question, and the table made of it.

Knows numbers and result files; knows nothing of models or of how the numbers came about. A file is complete after every
question, and a later run goes on from it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
import numpy as np
from rows import JOINED, REFERENCE, SETS

Measured = dict[str, Any]


class Sheet:
    """One result file. ``about``: what the run is, of which ``same`` must agree with a file that is continued."""

    def __init__(self, path: Path | None, about: dict[str, Any], questions: list[dict[str, Any]]):
        self.path, self.about = path, about
        self.questions = questions  # what identifies each: its kind, a hash of its prompt, later what was generated
        self.measured: dict[str, list[Measured | None]] = {}

    def resume(self, same: Sequence[str]) -> int:
        """Take over what the file holds, if there is one. Returns the number of measurements.

        Raises SystemExit if it is of another run.
        """
        if self.path is None or not self.path.is_file():
            return 0
        old = json.loads(self.path.read_text(encoding="utf-8"))
        for name in same:
            if old.get(name) != self.about[name]:
                raise SystemExit(f"{self.path} is of another run: {name} {old.get(name)!r}, now {self.about[name]!r}")
        for number, (before, now) in enumerate(zip(old["questions"], self.questions, strict=True)):
            if any(before.get(name) != value for name, value in now.items()):
                raise SystemExit(f"{self.path} is of another run: question {number} has another prompt")
        self.questions = old["questions"]
        self.measured = old["per_question"]
        self.about["strategies"] = old["strategies"] | self.about["strategies"]
        return sum(each is not None for found in self.measured.values() for each in found)

    def generated(self, number: int, facts: dict[str, Any]) -> None:
        """Note what full prefill gave. Raises SystemExit if it gave other ids when the file was begun."""
        known = self.questions[number]
        if "ids" in known and known["ids"] != facts["ids"]:
            raise SystemExit(f"{self.path}: full prefill generates other tokens for question {number} than before")
        known.update(facts)

    def has(self, row: str, number: int) -> bool:
        return row in self.measured and self.measured[row][number] is not None

    def note(self, row: str, number: int, measured: Measured) -> None:
        self.measured.setdefault(row, [None] * len(self.questions))[number] = measured

    def rows(self) -> list[dict[str, Any]]:
        """The table, kind by kind."""
        kinds = dict.fromkeys(question["kind"] for question in self.questions)
        return [line for kind in kinds for line in self._of_kind(kind)]

    def _of_kind(self, kind: str) -> list[dict[str, Any]]:
        numbers = [n for n, question in enumerate(self.questions) if question["kind"] == kind]
        lines = []
        order = [JOINED, *(row.name for row in SETS["all"])]
        for name in sorted(self.measured, key=order.index):
            shared = [n for n in numbers if self.has(name, n) and self.has(REFERENCE, n)]
            if shared:
                found, reference = ([self.measured[row][n] for n in shared] for row in (name, REFERENCE))
                lines.append({"kind": kind, "row": name, "num_questions": len(shared), **summed(found, reference)})
        return lines

    def result(self) -> dict[str, Any]:
        return {**self.about, "rows": self.rows(), "questions": self.questions, "per_question": self.measured}

    def save(self) -> None:
        common.save(self.path, self.result())


def summed(found: list[Any], reference: list[Any]) -> dict[str, Any]:
    """One line of the table. ``kl_p95`` is over single tokens, the intervals are over questions."""
    kl, base = (np.array([each["kl"] for each in side]) for side in (found, reference))
    gold = np.array([each["gold_diff"] for each in found if each["gold_diff"] is not None])
    tokens = [float(value) for each in found for value in each["kl_tokens"].split()]
    return {
        "kl": float(kl.mean()),
        "kl_p95": float(np.percentile(tokens, 95)),
        **{name: float(np.mean([each[name] for each in found])) for name in ("kl_first", "same_top", "identical")},
        "gold_diff": float(gold.mean()) if len(gold) else None,
        "gold_interval": common.interval(gold, np.ones(len(gold))) if len(gold) else None,
        "work": float(np.mean([each["work"] for each in found])),
        "ratio": float(kl.mean() / base.mean()),
        "ratio_interval": common.interval(kl, base),
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    width = 2 + max((len(line["row"]) for line in rows), default=0)
    for kind in dict.fromkeys(line["kind"] for line in rows):
        lines = [line for line in rows if line["kind"] == kind]
        print(f"\n{kind}, {max(line['num_questions'] for line in lines)} prompts")
        head = f"{'KL':>8}{'95 %':>8}{'first':>8}{'same top':>10}{'same text':>11}{'work':>8}"
        print(f"{'':{width}}{head}   KL relative to '{REFERENCE}'   gold diff, nats a token")
        for line in lines:
            print(_line(line, width))


def _line(line: dict[str, Any], width: int) -> str:
    low, high = line["ratio_interval"]
    relative = f"{line['ratio']:.2f}  [{low:.2f}, {high:.2f}]"
    gold = ""
    if line["gold_diff"] is not None:
        low, high = line["gold_interval"]
        gold = f"{line['gold_diff']:+.3f}  [{low:+.3f}, {high:+.3f}]"
    return (
        f"{line['row']:{width}}{line['kl']:8.4f}{line['kl_p95']:8.4f}{line['kl_first']:8.4f}{line['same_top']:10.1%}"
        f"{line['identical']:11.0%}{line['work']:8.1%}   {relative:42}{gold}"
    )
