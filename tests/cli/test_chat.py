"""``chat``: a question a line, with what was said before in the prompt while it fits."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli.conftest import FILES, Cli
from conftest import document

from kvboost_rag import KVBoost
from kvboost_rag.cli import printing
from kvboost_rag.cli.commands import chat
from kvboost_rag.cli.conversation import Turn, conversation, fitted

CAPTAIN, BUILDER = "Who is the captain of the ferry?", "Who built the lighthouse of Port Amble?"
SHORT = ["--k", 1, "--max-new-tokens", 6]


def test_a_question_a_line(cli: Cli, store: Path) -> None:
    done = cli("chat", *SHORT, typed=f"{CAPTAIN}\n\n{BUILDER}\n")
    assert done.code == 0, done.err
    lines = [line for line in done.err.splitlines() if line.startswith("documents hit 1/1")]
    assert [line.rsplit(" ", 1)[1] for line in lines] == ["docs/ferry.txt", "docs/lighthouse.md"]
    assert ">" not in done.err


def test_earlier_turns_are_in_the_prompt_until_they_are_forgotten(cli: Cli, store: Path) -> None:
    found = cli("chat", *SHORT, "--json", typed=f"{CAPTAIN}\n{CAPTAIN}\n/new\n{CAPTAIN}\n").json
    first, second, third = (turn["report"]["num_prompt_tokens"] for turn in found["turns"])
    assert first == third < second
    assert [turn["sources"][0]["file"] for turn in found["turns"]] == ["docs/ferry.txt"] * 3
    assert found["num_failed"] == 0
    assert found["turns"][0]["answer"] == found["turns"][2]["answer"]


def test_commands(cli: Cli, store: Path) -> None:
    done = cli("chat", *SHORT, typed=f"/sources\n/strip\n{CAPTAIN}\n/sources\n/strip\n/wat\n/quit\n{BUILDER}\n")
    assert done.code == 0, done.err
    assert done.err.count("nothing was answered yet") == 2
    assert f"docs/ferry.txt: {FILES['docs/ferry.txt'][:80]}" in done.out
    assert "1 of 1 documents found" in done.out
    assert chat.HELP in done.err
    assert done.err.count("documents hit") == 1


def test_commands_beside_json(cli: Cli, store: Path) -> None:
    done = cli("chat", *SHORT, "--json", typed=f"{CAPTAIN}\n/sources\n/strip\n")
    assert len(done.json["turns"]) == 1
    assert "docs/ferry.txt: " in done.err
    assert "1 of 1 documents found" in done.err


def test_a_question_that_cannot_be_answered_ends_nothing(cli: Cli, store: Path) -> None:
    done = cli("chat", *SHORT, "--json", typed=f"{CAPTAIN}\n{'why ' * 2000}\n{CAPTAIN}\n")
    assert done.code == 1
    assert [turn["question"] for turn in done.json["turns"]] == [CAPTAIN, CAPTAIN]
    assert done.json["num_failed"] == 1
    assert "error: the prompt has " in done.err


def test_ctrl_c_while_questions_are_piped(cli: Cli, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(chat, "stream", interrupted)
    done = cli("chat", *SHORT, typed=CAPTAIN)
    assert (done.code, done.err.splitlines()[-1]) == (130, "interrupted")


class Typist(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_ctrl_c_while_someone_types_breaks_off_the_answer(
    cli: Cli, store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, asked = chat.stream, []

    def once(session: object, prompt: object, *rest: object) -> object:
        asked.append(prompt)
        if len(asked) == 1:
            raise KeyboardInterrupt
        return real(session, prompt, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(chat, "stream", once)
    monkeypatch.setattr(io, "StringIO", Typist)
    done = cli("chat", *SHORT, typed=f"{CAPTAIN}\n{CAPTAIN}\n")
    assert done.code == 0
    assert "broken off" in done.err
    assert done.err.count("documents hit") == 1
    assert done.err.count(chat.PROMPT) == 3
    assert "3 passages. /sources" in done.err
    assert chat.PROMPT not in done.out


def test_lines_end_with_the_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo"))
    assert list(chat.lines()) == ["one", "two"]
    assert not printing.is_terminal(io.StringIO())


@pytest.fixture
def engine(boost: KVBoost) -> Iterator[KVBoost]:
    yield boost


def test_without_turns_the_prompt_is_the_usual_one(engine: KVBoost) -> None:
    documents = [document(1), document(2)]
    assert conversation(engine.chat_format, [], documents, " why? ") == engine.prompt(documents, "why?")


def test_turns_stand_before_the_documents(engine: KVBoost) -> None:
    turns = [Turn("first?", "yes"), Turn("second?", "")]
    prompt = conversation(engine.chat_format, turns, [document(1)], "third?")
    order = [prompt.text.index(part) for part in ("first?", "yes", "second?", document(1), "third?")]
    assert order == sorted(order)
    assert prompt.documents == [document(1)]


def test_the_oldest_turns_go_first_when_there_is_no_room(engine: KVBoost) -> None:
    turns = [Turn(f"question {number}", "word " * 100) for number in range(6)]
    room = engine.context_tokens - 20
    prompt, kept = fitted(engine, turns, [document(1)], "why?", 20)
    assert 0 < len(kept) < len(turns)
    assert kept == turns[-len(kept) :]
    assert engine.count_tokens(prompt) <= room
    longer = conversation(engine.chat_format, turns[-len(kept) - 1 :], [document(1)], "why?")
    assert engine.count_tokens(longer) > room
    assert fitted(engine, turns, ["word " * 500], "why?", 20)[1] == []
