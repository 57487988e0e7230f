"""The paper's workload (section 6.1), rebuilt from what every machine has: code of Python's standard library in which
bugs were planted, and multiple-choice questions about where they are and what they are.

Knows Python files, tokens as a count, and a seed; knows nothing of models or caches. A document is a run of functions
and classes of one module. Buckets, by tokens of the document, hold as many samples as the paper's. Successive questions
of a group are about one document: the first one finds nothing cached, the others do.

The paper does not say how many questions a group has. Its means and medians do, if cold requests cost what the baseline
costs and warm ones about the median: a share c of cold ones gives mean = c * baseline + (1 - c) * median, so
c = (142.4 - 76.1) / (639.1 - 76.1) = 1 / 8.5 for KVBoost, (165.5 - 80.0) / (639.1 - 80.0) = 1 / 6.5 for the prefix
cache. Hence eight.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import random
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path

from bug_mutations import DESCRIPTIONS, Edit, edits, statement_lines

SEED = 17
NUM_QUESTIONS = 8  # of a document
LETTERS = "ABCD"
MAX_BUGS = 4  # in one document
MAX_LINE = 100  # characters of a line that is offered as an answer
SAMPLE_LINES = 40  # that tell how many characters a token of a text has
MIN_OTHERS = 6  # lines without a bug, to choose wrong answers from
MAX_TRIES = 400  # until there is a document
# Tests, data written as code, what a distribution adds, and what only some machines have.
LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "pydoc_data", "ensurepip", "encodings", "distutils"}
LEFT_OUT |= {"site-packages", "dist-packages", "__pycache__", "__phello__", "tkinter", "lib-dynload"}


@dataclass(frozen=True)
class Bucket:
    """Documents of [low, high) tokens."""

    name: str
    low: int
    high: int
    num_samples: int


BUCKETS = (
    Bucket("0-500", 163, 500, 218),
    Bucket("500-1K", 500, 1000, 210),
    Bucket("1K-2K", 1000, 2000, 204),
    Bucket("2K+", 2000, 3500, 368),
)


@dataclass(frozen=True)
class Question:
    """``kind``: "line" (which of four lines has a bug) or "what" (what is wrong with a line)."""

    kind: str
    text: str
    choices: tuple[str, ...]
    answer: str


@dataclass(frozen=True)
class Group:
    """A document and the questions about it, asked one after the other."""

    number: int
    bucket: str
    source: str
    document: str
    num_tokens: int
    questions: tuple[Question, ...]


def question_text(question: Question) -> str:
    """The question with its choices, as it stands in a prompt."""
    choices = "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, question.choices, strict=True))
    return f"{question.text}\n{choices}"


def build(
    count_tokens: Callable[[str], int],
    buckets: Sequence[Bucket] = BUCKETS,
    num_questions: int = NUM_QUESTIONS,
    seed: int = SEED,
    library: Path | None = None,
) -> list[Group]:
    """All groups, buckets mixed; the same ones for the same seed, tokenizer and standard library.

    Raises ValueError if the library has too little code.
    """
    rng = random.Random(seed)
    shelf = _Library(library or Path(sysconfig.get_path("stdlib")))
    planned = [
        (bucket, min(num_questions, bucket.num_samples - at))
        for bucket in buckets
        for at in range(0, bucket.num_samples, num_questions)
    ]
    rng.shuffle(planned)
    return [_group(n, bucket, size, shelf, count_tokens, rng) for n, (bucket, size) in enumerate(planned)]


def data_hash(groups: Sequence[Group]) -> str:
    """A name for exactly these samples."""
    return hashlib.sha256(json.dumps([asdict(group) for group in groups]).encode()).hexdigest()[:16]


def limited(groups: Sequence[Group], limit: int | None) -> list[Group]:
    """``limit`` samples in whole groups, buckets in proportion; the last group is cut to make it exact."""
    sizes = [len(group.questions) for group in groups]
    if limit is None or limit >= sum(sizes):
        return list(groups)
    num_groups = -(-limit // max(sizes))
    names = sorted({group.bucket for group in groups})
    share = {name: num_groups * sum(g.bucket == name for g in groups) / len(groups) for name in names}
    counts = {name: int(share[name]) for name in names}
    for name in sorted(names, key=lambda name: counts[name] - share[name])[: num_groups - sum(counts.values())]:
        counts[name] += 1
    longest = sorted(groups, key=lambda group: -len(group.questions))
    chosen = [g for name in names for g in [g for g in longest if g.bucket == name][: counts[name]]]
    return list(_cut(sorted(chosen, key=lambda group: group.number), limit))


def _cut(groups: Sequence[Group], limit: int) -> Iterator[Group]:
    for group in groups:
        if limit > 0:
            yield Group(**{**vars(group), "questions": group.questions[:limit]})
        limit -= len(group.questions)


@dataclass(frozen=True)
class Source:
    """A module and where a document may begin and end, in lines counted from 0."""

    name: str
    lines: tuple[str, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]


class _Library:
    """The modules of a standard library, read when they are drawn; no part of one is taken twice."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._paths = sorted(_modules(folder), key=lambda path: path.as_posix())
        self._sources: dict[Path, Source | None] = {}
        self._taken: dict[str, list[tuple[int, int]]] = {}

    def draw(self, rng: random.Random) -> Source | None:
        path = rng.choice(self._paths)
        if path not in self._sources:
            self._sources[path] = _source(path.as_posix(), (self._folder / path).read_bytes())
        return self._sources[path]

    def is_free(self, source: Source, start: int, end: int) -> bool:
        return all(end <= left or right <= start for left, right in self._taken.get(source.name, ()))

    def take(self, source: Source, start: int, end: int) -> None:
        self._taken.setdefault(source.name, []).append((start, end))


def _modules(folder: Path) -> Iterator[Path]:
    for at, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in LEFT_OUT and not name.startswith("config-")]
        yield from (Path(at, n).relative_to(folder) for n in names if n.endswith(".py") and n[:10] != "_sysconfig")


def _source(name: str, content: bytes) -> Source | None:
    """None for what is not plain: no ASCII, no functions."""
    try:
        text = content.decode("ascii").replace("\r\n", "\n").expandtabs()
        tree = ast.parse(text)
    except (UnicodeDecodeError, SyntaxError, ValueError):
        return None
    starts, ends = [], []
    for node in tree.body:
        ends.append(node.end_lineno or 0)
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            starts.append(min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1)
        if isinstance(node, ast.ClassDef):
            ends += [part.end_lineno or 0 for part in node.body if isinstance(part, ast.FunctionDef)]
    return Source(name, tuple(text.split("\n")), tuple(starts), tuple(sorted(set(ends)))) if starts else None


def _group(
    number: int, bucket: Bucket, size: int, shelf: _Library, count_tokens: Callable[[str], int], rng: random.Random
) -> Group:
    for _ in range(MAX_TRIES):
        target, source = rng.randrange(bucket.low, bucket.high), shelf.draw(rng)
        if source is None:
            continue
        start, end = _cut_out(source, target, count_tokens, rng)
        made = _planted("\n".join(source.lines[start:end]).strip("\n"), size, rng)
        if made is None or not shelf.is_free(source, start, end):
            continue
        document, questions = made
        num_tokens = count_tokens(document)
        if bucket.low <= num_tokens < bucket.high:
            shelf.take(source, start, end)
            return Group(number, bucket.name, source.name, document, num_tokens, questions)
    raise ValueError(f"no document of {bucket.low} to {bucket.high} tokens was found in {MAX_TRIES} tries")


def _cut_out(source: Source, target: int, count_tokens: Callable[[str], int], rng: random.Random) -> tuple[int, int]:
    """Lines [start, end) of about ``target`` tokens, by what the beginning of them takes."""
    start = rng.choice(source.starts)
    beginning = "\n".join(source.lines[start : start + SAMPLE_LINES])
    wanted = target * len(beginning) / max(1, count_tokens(beginning))

    at = dict(enumerate(accumulate(len(line) + 1 for line in source.lines[start:]), start + 1))
    return start, min((end for end in source.ends if end > start), key=lambda end: abs(at[end] - wanted))


def _planted(text: str, num_questions: int, rng: random.Random) -> tuple[str, tuple[Question, ...]] | None:
    """``text`` with bugs in it, and questions about them; None if it is too plain for that."""
    try:
        possible = edits(text)
    except (SyntaxError, RecursionError):
        return None
    lines = text.split("\n")
    possible = [edit for edit in possible if _offerable(lines[edit.line], text)]
    places = sorted({edit.line for edit in possible})
    bugs = _drawn(possible, min(MAX_BUGS, max(1, len(places) // 4)), rng)
    for bug in bugs:
        lines[bug.line] = bug.applied(lines[bug.line])
    changed = "\n".join(lines)
    try:
        statements = statement_lines(changed)
    except SyntaxError:
        return None
    whole = [n for n in {*places, *statements} - {bug.line for bug in bugs} if _offerable(lines[n], changed)]
    others = [n for n in whole if n in places]  # they could have one of these bugs as well
    others = sorted(others if len(others) >= MIN_OTHERS else whole)
    if not bugs or len(others) < MIN_OTHERS or not all(_offerable(lines[bug.line], changed) for bug in bugs):
        return None
    return changed, _questions(bugs, lines, [lines[n].strip() for n in others], num_questions, rng)


def _drawn(possible: Sequence[Edit], count: int, rng: random.Random) -> list[Edit]:
    """At most ``count`` of them on lines of their own, rare kinds as likely as common ones."""
    bugs: list[Edit] = []
    for _ in range(count):
        left = [edit for edit in possible if edit.line not in {bug.line for bug in bugs}]
        if left:
            kind = rng.choice(sorted({edit.kind for edit in left}))
            bugs.append(rng.choice([edit for edit in left if edit.kind == kind]))
    return bugs


def _offerable(line: str, document: str) -> bool:
    """Whether it can be told from all other lines by its text, and is code of a fair length."""
    text = line.strip()
    return 8 <= len(text) <= MAX_LINE and text[0] not in "#'\"@" and document.count(text) == 1


def _questions(
    bugs: Sequence[Edit], lines: Sequence[str], others: Sequence[str], num_questions: int, rng: random.Random
) -> tuple[Question, ...]:
    """Both kinds in turn about each bug, no two alike."""
    made: list[Question] = []
    while len(made) < num_questions:
        bug, kind = bugs[len(made) // 2 % len(bugs)], ("line", "what")[len(made) % 2]
        line = lines[bug.line].strip()
        if kind == "line":
            right, wrong = line, rng.sample(others, 3)
            text = "One of these four lines of the code has a bug, the other three are right. Which one has it?"
        else:
            right = DESCRIPTIONS[bug.kind]
            wrong = rng.sample([d for d in DESCRIPTIONS.values() if d != right], 3)
            text = f"This line of the code has a bug:\n{line}\nWhat is wrong with it?"
        choices = rng.sample([right, *wrong], 4)
        question = Question(kind, text, tuple(choices), LETTERS[choices.index(right)])
        if all({*question.choices} != {*q.choices} or question.text != q.text for q in made):
            made.append(question)
    return tuple(made)
