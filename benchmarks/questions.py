"""What is asked: data sets, and the prompts made of them.

Knows files, wordings and chat templates; knows nothing of caches or of what is measured. Four kinds of prompt:

- ``questions``: a short answer from several passages. The wording is the one the paper's peers use for MuSiQue.
- ``long``: the same passages and question, answered in detail; four times as many tokens are compared.
- ``summary``: the same passages, to be summarised.
- ``code``: functions of a module of Python's standard library, and half of one more to be continued. What these
  modules hold changes with the release of Python, so such figures are compared within one.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import random
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import common

from kvboost_rag import sample
from kvboost_rag.prompt import ChatFormat, Piece, Prompt, document_pieces

CODE_CHARACTERS = 2000  # of a document of functions; about 600 tokens
CODE_LINES = (8, 60)  # of a function worth continuing
GOLD_LINES = 3
# fmt: off
MODULES = (
    "argparse", "calendar", "configparser", "dataclasses", "difflib", "fractions", "ftplib", "gettext",
    "imaplib", "inspect", "ipaddress", "mailbox", "optparse", "pickle", "pickletools", "plistlib", "pprint",
    "random", "shutil", "smtplib", "statistics", "subprocess", "tarfile", "textwrap", "tokenize", "traceback",
    "uuid", "threading", "typing", "turtle",
)
# fmt: on


@dataclass(frozen=True)
class Kind:
    """How a prompt is worded, around its documents. ``length``: how many times ``--tokens`` are compared;
    ``gold``: whether the data's answer is what such a prompt asks for."""

    instruction: str
    question: str
    length: int = 1
    gold: bool = True


KINDS = {
    "questions": Kind(
        "You will be given several passages and then a question about them. Answer directly from the passages, in at "
        "most five words, and do not repeat the question.\nPassages:\n\n",
        "\n\nAnswer directly from the passages above, in at most five words.\nQuestion: {question}\nAnswer:",
    ),
    "long": Kind(
        "You will be given several passages and then a question about them. Answer from the passages, in detail.\n"
        "Passages:\n\n",
        "\n\nAnswer from the passages above, in several sentences, saying how you know.\nQuestion: {question}\nAnswer:",
        length=4,
        gold=False,
    ),
    "summary": Kind(
        "You will be given several passages. Summarise them.\nPassages:\n\n",
        "\n\nSummarise the passages above, each of them in one sentence.\nSummary:",
        gold=False,
    ),
    "code": Kind(
        "You will be given functions of a Python module and then the beginning of one more function of it.\nCode:\n\n",
        "\n\nContinue this function of the same module. Answer with code only, from where it ends.\n\n{question}",
    ),
}


@dataclass(frozen=True)
class Question:
    """Documents in the order of the prompt. ``gold``: the answer the data has for it, or None."""

    documents: list[str]
    question: str
    gold: str | None = None
    kind: str = "questions"


def load(path: Path, num_questions: int, num_docs: int) -> list[Question]:
    """Questions in the form of MuSiQue's public files: ``[{"ctxs": [{"title", "text"}], "question", "answers"}]``."""
    shuffle = random.Random(common.SEED)
    questions = []
    for item in json.loads(path.read_text(encoding="utf-8"))[:num_questions]:
        documents = [f"{c.get('title', '').strip()}\n{c['text'].strip()}".strip() for c in item["ctxs"][:num_docs]]
        shuffle.shuffle(documents)
        answers = item.get("answers") or [None]
        questions.append(Question(documents, item["question"], answers[0]))
    return questions


def own_corpus(num_questions: int, num_docs: int) -> list[Question]:
    """The project's own passages: each question's passage among others drawn by a fixed seed."""
    passages = sample.passages()
    draw = random.Random(common.SEED)
    questions = []
    for item in sample.questions()[:num_questions]:
        others = [text for name, text in passages.items() if name != item.passage]
        documents = [passages[item.passage], *draw.sample(others, num_docs - 1)]
        draw.shuffle(documents)
        questions.append(Question(documents, item.question, item.answer))
    return questions


def code(num_questions: int, num_docs: int) -> list[Question]:
    """Functions to be continued, module by module in turn; documents are other functions of the same module."""
    pools: dict[str, list[str]] = {}
    for name in MODULES:
        if len(pools) == num_questions:
            break
        functions = _functions(_source(name))
        if sum(map(len, functions)) > (num_docs + 2) * CODE_CHARACTERS:
            pools[name] = functions
    names = list(pools)
    questions = []
    for number in range(num_questions):
        draw = random.Random(common.SEED * 1000 + number)
        functions = pools[names[number % len(names)]]
        low, high = CODE_LINES
        asked = draw.choice([f for f in functions if low <= len(f.splitlines()) <= high])
        documents = draw.sample(_packed([f for f in functions if f != asked]), num_docs)
        lines = asked.splitlines()
        half = len(lines) // 2
        gold = "\n".join(lines[half : half + GOLD_LINES])
        questions.append(Question(documents, "\n".join(lines[:half]), gold, "code"))
    return questions


def _source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return ""
    return Path(spec.origin).read_text(encoding="utf-8")


def _functions(source: str) -> list[str]:
    """Functions and methods, decorators included, in the order of the module; those inside others not."""
    lines = source.splitlines()
    found = []

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                start = min([child.lineno, *(d.lineno for d in child.decorator_list)]) - 1
                found.append(textwrap.dedent("\n".join(lines[start : child.end_lineno])).strip())
            elif isinstance(child, ast.stmt):
                visit(child)

    visit(ast.parse(source))
    return list(dict.fromkeys(found))


def _packed(functions: list[str]) -> list[str]:
    """Neighbours together, up to CODE_CHARACTERS; no piece is much shorter than that."""
    packs, now = [], ""
    for function in functions:
        if len(function) > CODE_CHARACTERS:
            continue
        now = f"{now}\n\n\n{function}".strip()
        if len(now) > CODE_CHARACTERS:
            packs.append(now)
            now = ""
    return packs


def of_kind(kind: str, data: Path | None, num_questions: int, num_docs: int) -> list[Question]:
    """Questions of one of KINDS: of the data, or of the project's own corpus where there is none."""
    if kind == "code":
        return code(num_questions, num_docs)
    asked = load(data, num_questions, num_docs) if data else own_corpus(num_questions, num_docs)
    return [replace(q, kind=kind, gold=q.gold if KINDS[kind].gold else None) for q in asked]


def build_prompt(chat_format: ChatFormat, question: Question) -> Prompt:
    kind = KINDS[question.kind]
    content = [
        Piece(kind.instruction),
        *document_pieces(question.documents),
        Piece(kind.question.format(question=question.question)),
    ]
    return chat_format.render([{"role": "user", "content": content}])


def gold_ids(question: Question, chat_format: ChatFormat, encode: Callable[[str], Any], most: int) -> tuple[int, ...]:
    """The answer as it would stand in the prompt: at the start of the assistant's turn, or behind a space where no
    template opens one. At most so many ids, none if there is no answer."""
    if not question.gold:
        return ()
    return tuple(encode(question.gold if chat_format.has_template else f" {question.gold}"))[:most]
