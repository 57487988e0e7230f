"""``kvboost-rag chat``: a conversation over a store, a question a line.

Knows turns and commands; retrieval and generation are ``ask``'s.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from kvboost_rag.cli import printing
from kvboost_rag.cli.choices import Common, choose
from kvboost_rag.cli.commands.ask import Answer, Emit, Plan, found, picture, spoken, stream, summary
from kvboost_rag.cli.conversation import Turn, fitted
from kvboost_rag.cli.corpus import Corpus
from kvboost_rag.cli.session import Session, check_searchable, opened
from kvboost_rag.errors import KVBoostError

HELP = "/sources: where the last answer is from; /strip: its prompt, drawn; /new: forget the conversation; /quit"
PROMPT = "> "


@dataclass
class Chat:
    """``turns``: what the next prompt holds of the conversation; ``answers``: everything that was answered."""

    session: Session
    plan: Plan
    emit: Callable[[], Emit]
    quiet: bool = False
    turns: list[Turn] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    num_failed: int = 0
    done: bool = False

    def take(self, line: str) -> None:
        """One line of input: a command, or a question."""
        text = line.strip()
        if text.startswith("/"):
            self._command(text)
        elif text:
            self._question(text)

    def _question(self, question: str) -> None:
        """An answer that cannot be given, or is broken off, leaves the conversation as it was."""
        try:
            answer = self.answer(question)
        except KVBoostError as error:
            self.num_failed += 1
            printing.error(error)
            return
        except KeyboardInterrupt:
            if not printing.is_terminal(sys.stdin):
                raise
            printing.note("\nbroken off")
            return
        self.answers.append(answer)
        self.turns.append(Turn(question, answer.text))
        printing.note(summary(answer))

    def answer(self, question: str) -> Answer:
        passages = found(self.session, question, self.plan.k)
        texts = [passage.text for passage in passages]
        prompt, self.turns = fitted(self.session.engine, self.turns, texts, question, self.plan.max_new_tokens)
        return Answer(question, passages, stream(self.session, prompt, self.plan.max_new_tokens, self.emit()))

    def _command(self, text: str) -> None:
        commands = {"/sources": self._sources, "/strip": self._strip, "/new": self.turns.clear, "/quit": self._quit}
        commands.get(text, lambda: printing.note(HELP))()

    def _sources(self) -> None:
        if not self.answers:
            printing.note("nothing was answered yet")
        for passage in self.answers[-1].passages if self.answers else ():
            beginning = " ".join(passage.text.split())[:80]
            self._say(f"{passage.source}: {beginning}")

    def _strip(self) -> None:
        if self.answers:
            picture(self.answers[-1], Plan(show=True), self.quiet)
        else:
            printing.note("nothing was answered yet")

    def _quit(self) -> None:
        self.done = True

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr if self.quiet else sys.stdout, flush=True)


def run(common: Common, plan: Plan, quiet: bool = False) -> Chat:
    """Talk until the input ends. Raises KVBoostError before the first question only."""
    corpus = Corpus.open(common.store)
    check_searchable(corpus, choose(common, corpus.settings))
    with opened(common, corpus, **(plan.reuse or {})) as session:
        chat = Chat(session, plan, (lambda: lambda piece: None) if quiet else spoken, quiet)
        if printing.is_terminal(sys.stdin):
            printing.note(f"{len(corpus.passages)} passages. {HELP}, or Ctrl-D")
        for line in lines(quiet):
            chat.take(line)
            if chat.done:
                break
    return chat


def lines(quiet: bool = False) -> Iterator[str]:
    """Standard input, prompted for where someone is typing; never on a standard output that is read by a program."""
    typing = printing.is_terminal(sys.stdin)
    seen = typing and not quiet and printing.is_terminal(sys.stdout)
    if seen:
        _line_editing()
    while True:
        if typing and not seen:
            print(PROMPT, end="", file=sys.stderr, flush=True)
        try:
            yield input(PROMPT if seen else "")
        except EOFError:
            if typing:
                printing.note("")
            return


def _line_editing() -> None:
    """History and cursor keys for ``input``, where Python has them."""
    with suppress(ImportError):
        import readline  # noqa: F401
