"""``kvboost-rag ask``: one question to a store, answered as it is generated.

Knows the way from a question to an answer and what is said about it; finding and generating are others'.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvboost_rag.cli import printing
from kvboost_rag.cli.choices import Common, choose
from kvboost_rag.cli.corpus import Corpus
from kvboost_rag.cli.passages import Passage
from kvboost_rag.cli.session import Session, check_searchable, opened
from kvboost_rag.errors import KVBoostError, OptionError
from kvboost_rag.prompt import Prompt
from kvboost_rag.report import GenerationResult

Emit = Callable[[str], None]


@dataclass(frozen=True)
class Answer:
    """``passages``: what the prompt held, in its order; ``full``: the same prompt computed in full, if that was asked
    for."""

    question: str
    passages: Sequence[Passage]
    result: GenerationResult
    full: GenerationResult | None = None

    @property
    def text(self) -> str:
        return self.result.text.strip()

    def to_dict(self) -> dict[str, Any]:
        found = {
            "question": self.question,
            "answer": self.text,
            "sources": [{"id": p.id, "source": p.source, "file": p.file} for p in self.passages],
            "finish_reason": self.result.finish_reason,
            "report": self.result.report.to_dict(),
        }
        if self.full is None:
            return found
        return found | {"full": {"answer": self.full.text.strip(), "report": self.full.report.to_dict()}}


@dataclass(frozen=True)
class Plan:
    """``reuse``: options of the engine's calls; ``html``, ``show``: where the picture of the prompt goes."""

    k: int = 4
    max_new_tokens: int = 128
    reuse: dict[str, Any] | None = None
    compare: bool = False
    html: Path | None = None
    show: bool = False


def run(common: Common, question: str, plan: Plan, quiet: bool = False) -> Answer:
    """Answer ``question``; streams to standard output unless ``quiet``. Raises KVBoostError."""
    if not question.strip():
        raise OptionError.bad_value("QUESTION", question, "words")
    if plan.html is not None and not plan.html.expanduser().resolve().parent.is_dir():
        raise OptionError.bad_value("html", str(plan.html), "a file in a folder that is there")
    corpus = Corpus.open(common.store)
    check_searchable(corpus, choose(common, corpus.settings))
    with opened(common, corpus, **(plan.reuse or {})) as session:
        answer = ask(session, question, plan, (lambda piece: None) if quiet else spoken())
        printing.note(summary(answer))
        picture(answer, plan, quiet)
    return answer


def ask(session: Session, question: str, plan: Plan, emit: Emit) -> Answer:
    """Find, read what was not read, and answer."""
    passages = found(session, question, plan.k)
    prompt = session.engine.prompt(documents=[passage.text for passage in passages], question=question)
    result = stream(session, prompt, plan.max_new_tokens, emit)
    full = None
    if plan.compare:
        full = session.engine.generate(prompt, mode="baseline", max_new_tokens=plan.max_new_tokens)
    return Answer(question, passages, result, full)


def found(session: Session, question: str, k: int) -> list[Passage]:
    """The passages a question is answered from, all of them warm."""
    passages = session.search(question, k)
    if len(passages) < k:
        printing.note(f"note: the store has {len(passages)} passages, fewer than --k {k}")
    session.read(passages)
    return passages


def stream(session: Session, prompt: Prompt, max_new_tokens: int, emit: Emit) -> GenerationResult:
    """Generate, each piece of text to ``emit`` as it comes."""
    with session.engine.stream(prompt, max_new_tokens=max_new_tokens) as pieces:
        for piece in pieces:
            emit(piece)
        emit("\n")
        return pieces.result


def spoken() -> Emit:
    """Writes to standard output, from the first character that is no white space."""
    begun = False

    def emit(piece: str) -> None:
        nonlocal begun
        text = piece if begun else piece.lstrip()
        begun = begun or bool(text)
        if text or piece == "\n":
            print(text or piece, end="", flush=True)

    return emit


def summary(answer: Answer) -> str:
    """One line: what was reused and how long it took, and full prefill beside it if it was asked for."""
    report = answer.result.report
    sources = ", ".join(dict.fromkeys(passage.source for passage in answer.passages))
    line = (
        f"documents hit {report.num_document_hits}/{len(report.documents)}, "
        f"{report.num_computed_tokens} of {report.num_prompt_tokens} tokens computed, "
        f"TTFT {report.ttft_seconds * 1e3:.0f} ms"
    )
    if answer.full is not None:
        same = "the same answer" if answer.full.text == answer.result.text else "another answer"
        line += f" (full prefill {answer.full.ttft_seconds * 1e3:.0f} ms, {same})"
    return f"{line}; from {sources}"


def picture(answer: Answer, plan: Plan, quiet: bool) -> None:
    """The strip of the prompt to a file, and to the terminal (to standard error where output is JSON)."""
    if plan.html is not None:
        printing.note(f"written: {save_html(answer, plan.html)}")
    if plan.show:
        with to_stderr() if quiet else contextlib.nullcontext():
            answer.result.show(full=answer.full)


def save_html(answer: Answer, path: Path) -> Path:
    try:
        return Path(answer.result.save_html(path.expanduser(), full=answer.full))
    except OSError as error:
        raise KVBoostError(f"{path} could not be written: {error.strerror or error}") from error


@contextlib.contextmanager
def to_stderr() -> Iterator[None]:
    with contextlib.redirect_stdout(sys.stderr):
        yield
