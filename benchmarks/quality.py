"""How far reuse strays from a full prefill, and what repair buys back.

    python benchmarks/quality.py --data PATH --questions 20

Protocol: a document is its title line (if any) and its text, stripped; blank lines between documents stay outside
their chunks. Each question gets its first ``--docs`` passages in an order shuffled by a fixed seed. Full prefill
generates ``--tokens`` tokens greedily, not stopped at the end token; every row is fed the same prompt ids and those
tokens (teacher forcing). KL is KL(full || row) in nats: the mean over questions of the mean per token, and the 95th
percentile of single tokens. Each row is compared with "alone, rotated, none" of the same run: encoded with nothing in
front, keys rotated to their place, nothing repaired. Intervals are 95 % bootstrap intervals, resampling questions.
``same text``: share of questions that get the same greedy answer, up to its end token. ``work``: share of the prompt's
tokens computed at question time. ``gold diff``: by how much the data's own answer is likelier, nats a token, than after
full prefill. ``joined`` tokenises the whole prompt as one text: the natural floor.

``--set`` picks rows (``rows.py``), ``--rows`` those of them whose names start so; ``encoded.py`` says how documents
are read, ``questions.py`` what prompts of other ``--kinds`` are. Questions go in blocks of ``--block``: only a block's
documents are in memory, one way of reading them at a time, and they are the corpus from which the default primer
chooses. The ``--json`` file is complete after every question; with ``--resume`` a run goes on from it, with more rows
if more are asked for.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import common
from encoded import Encodings, families
from fidelity import Truth, joined, measure, truth
from questions import KINDS, build_prompt, gold_ids, of_kind
from rows import JOINED, SETS, Row, choose
from sheet import Sheet, show

from kvboost_rag import KVBoost, Prompt

SAME = ("model", "dtype", "data", "num_questions", "num_documents", "num_tokens", "block", "kinds")


@dataclass(frozen=True)
class Case:
    """One prompt of the run. ``number``: its place in the sheet."""

    number: int
    kind: str
    prompt: Prompt
    gold_ids: tuple[int, ...]
    num_tokens: int

    @property
    def identity(self) -> dict[str, Any]:
        return {"kind": self.kind, "prompt": hashlib.sha256(self.prompt.text.encode()).hexdigest()[:16]}


def cases_of(boost: KVBoost, arguments: argparse.Namespace) -> list[Case]:
    asked = [q for kind in arguments.kinds for q in of_kind(kind, arguments.data, arguments.questions, arguments.docs)]
    cases = []
    for number, question in enumerate(asked):
        num_tokens = arguments.tokens * KINDS[question.kind].length
        gold = gold_ids(question, boost.chat_format, boost.tokens.encode, num_tokens)
        cases.append(Case(number, question.kind, build_prompt(boost.chat_format, question), gold, num_tokens))
    return cases


def blocks(cases: Sequence[Case], size: int) -> Iterator[list[Case]]:
    """At most ``size`` prompts of one kind: they begin alike."""
    for _, group in groupby(cases, key=lambda case: case.kind):
        members = list(group)
        yield from (members[at : at + size] for at in range(0, len(members), size))


def run_block(plain: KVBoost, tokenizer: Any, block: Sequence[Case], rows: Sequence[Row], sheet: Sheet) -> None:
    """Measure what is missing: full prefill of every prompt, then one way of reading its documents after the other."""
    wanted = [JOINED, *(row.name for row in rows)]
    missing = [case for case in block if not all(sheet.has(name, case.number) for name in wanted)]
    truths = {case.number: reference(plain, case, sheet) for case in missing}
    texts = [document for case in block for document in case.prompt.documents]
    for family in families(row.encoding for row in rows):
        of_family = [row for row in rows if row.encoding in family]
        left = [case for case in missing if not all(sheet.has(row.name, case.number) for row in of_family)]
        if not left:
            continue
        with Encodings(plain.engine.model.module, tokenizer, texts, block[0].prompt) as encodings:
            started = time.perf_counter()
            for name in family:
                _ = encodings[name]
            common.log(f"  {', '.join(family)}: read in {time.perf_counter() - started:.0f} s")
            for case in left:
                measure_rows(encodings, case, of_family, truths[case.number], sheet)


def reference(plain: KVBoost, case: Case, sheet: Sheet) -> Truth:
    """Full prefill, and the joined row if it is missing."""
    started = time.perf_counter()
    full = truth(plain, case.prompt, case.num_tokens, case.gold_ids)
    text = plain.tokens.decode(full.ids[: full.num_answer])
    sheet.generated(case.number, {"ids": list(full.ids), "text": text, "gold_ids": case.gold_ids, "gold": full.gold})
    if not sheet.has(JOINED, case.number):
        sheet.note(JOINED, case.number, joined(plain, case.prompt, full))
        sheet.save()
    common.log(f"{case.kind} {case.number + 1}/{len(sheet.questions)}: full {time.perf_counter() - started:.1f} s")
    return full


def measure_rows(encodings: Encodings, case: Case, rows: Sequence[Row], full: Truth, sheet: Sheet) -> None:
    started = time.perf_counter()
    for row in rows:
        if not sheet.has(row.name, case.number):
            sheet.note(row.name, case.number, measure(encodings[row.encoding], case.prompt, row.repair, full))
    sheet.save()
    common.log(f"  {case.number + 1}: {len(rows)} rows, {time.perf_counter() - started:.1f} s")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    rows = choose(arguments.set, arguments.rows)
    model, tokenizer = common.load(arguments)
    with KVBoost(model, tokenizer, break_even=False) as plain:
        cases = cases_of(plain, arguments)
        about = common.about(arguments) | {
            "data": arguments.data.name if arguments.data else "the sample corpus",
            "num_questions": arguments.questions,
            "num_documents": arguments.docs,
            "num_tokens": arguments.tokens,
            "block": arguments.block,
            "kinds": arguments.kinds,
            "strategies": {
                row.name: {"encoding": row.encoding, "repair": row.repair.name, **dataclasses.asdict(row.repair)}
                for row in rows
            },
        }
        sheet = Sheet(arguments.json, about, [case.identity for case in cases])
        if arguments.resume:
            common.log(f"{sheet.resume(SAME)} measurements taken over")
        common.log(f"{len(cases)} prompts, {len(rows) + 1} rows")
        for block in blocks(cases, arguments.block):
            run_block(plain, tokenizer, block, rows, sheet)
        sheet.save()
        return sheet.result()


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = common.parser(__doc__)
    parser.add_argument("--data", type=Path, help="questions with passages; the project's own corpus if left out")
    parser.add_argument("--questions", type=int, default=20, help="of each kind (20)")
    parser.add_argument("--docs", type=int, default=4, help="passages per question (4)")
    parser.add_argument("--tokens", type=int, default=24, help="tokens generated and compared (24)")
    parser.add_argument("--set", choices=SETS, help="which rows (core, or all of them if --rows is given)")
    parser.add_argument("--rows", nargs="*", help="only rows whose name starts with one of these")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["questions"], help="what is asked (questions)")
    parser.add_argument("--block", type=int, default=10, help="questions whose documents are in memory together (10)")
    parser.add_argument("--resume", action="store_true", help="go on with what the --json file holds")
    arguments = parser.parse_args(words)
    if arguments.resume and arguments.json is None:
        parser.error("--resume goes on with a --json file: name it")
    return arguments


def main(words: Sequence[str] | None = None) -> None:
    show(run(parse(words))["rows"])


if __name__ == "__main__":
    main()
