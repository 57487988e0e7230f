"""The command as a whole: help, exit codes, streams, and what is loaded when."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from cli.conftest import Cli

from kvboost_rag import demo
from kvboost_rag._version import __version__
from kvboost_rag.cli import app as module
from kvboost_rag.cli import options
from kvboost_rag.cli.app import app
from kvboost_rag.engine.config import KV_DTYPES
from kvboost_rag.engine.repair import REPAIRS
from kvboost_rag.errors import BudgetWarning
from kvboost_rag.options import QUALITIES

HEAVY = ("torch", "transformers", "sentence_transformers", "pypdf", "langchain_core", "llama_index.core")


def commands(group: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, *path, name)
        else:
            yield (*path, name), command


COMMANDS = dict(commands(typer.main.get_command(app)))


def test_these_are_the_commands() -> None:
    single = {"demo", "warm", "ask", "chat", "bench", "doctor"}
    assert set(COMMANDS) == {(name,) for name in single} | {("store", n) for n in ("show", "check", "forget", "clear")}


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_has_an_example_and_says_what_is_printed_and_written(cli: Cli, path: tuple[str, ...]) -> None:
    done = cli(*path, "--help")
    assert (done.code, done.err) == (0, "")
    assert f"    kvboost-rag {' '.join(path)}" in done.out.split("Example")[1]
    assert "Prints " in done.out
    assert any(word in done.out for word in ("Writes ", "Rewrites ", "Deletes ", "deleted"))
    assert "--json" in done.out


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom kvboost_rag.cli import main\n"
        "assert main(['--help']) == main(['ask', '--help']) == main(['store', 'show', '--help']) == 0\n"
        f"loaded = [name for name in {HEAVY!r} if name in sys.modules]\nassert not loaded, loaded"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "kvboost-rag warm docs/" in done.stdout


def test_without_typer_the_pip_command_is_named() -> None:
    for package in ("typer", "rich"):
        code = (
            f"import sys\nsys.modules[{package!r}] = None\nfrom kvboost_rag.cli import main\nsys.exit(main(['--help']))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(f"error: {package} is needed here and is not installed: pip install ")
        assert '"kvboost-rag[cli]"' in done.stderr


def test_the_version(cli: Cli) -> None:
    assert cli("--version").out == f"kvboost-rag {__version__}\n"


@pytest.mark.parametrize(
    "arguments", [["fly"], ["ask", "a", "b"], ["store", "burn"], ["warm"], ["ask", "a", "--wings"]]
)
def test_wrong_usage(cli: Cli, arguments: list[str]) -> None:
    done = cli(*arguments)
    assert (done.code, done.out) == (2, "")
    assert "Usage: kvboost-rag" in done.err


def test_names_are_those_of_the_engine() -> None:
    assert {name.value for name in options.RepairName} == set(REPAIRS)
    assert tuple(name.value for name in options.KVDtypeName) == KV_DTYPES
    assert tuple(QUALITIES) == options.QUALITY_NAMES


@pytest.mark.parametrize(
    "given, options_of_calls",
    [
        ((None, None, None), {}),
        ((options.RepairName.NONE, 0.1, None), {"repair": "none", "recompute_ratio": 0.1}),
        ((None, None, "high"), {"quality": "high"}),
        ((None, None, "0"), {"quality": 0.0}),
    ],
)
def test_options_of_calls(given: tuple[Any, Any, Any], options_of_calls: dict[str, Any]) -> None:
    assert options.reuse(*given) == options_of_calls


def test_paragraphs_flow_and_examples_do_not() -> None:
    text = """One line.

    A paragraph
    in two.

        first example
        second example
    """
    assert options.flowing(text) == "One line.\n\nA paragraph in two.\n\n    first example\n    second example"


def test_demo_gets_its_options(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []
    monkeypatch.setattr(demo, "main", lambda argv: given.append(argv) or 3)
    arguments = ["--repair", "none", "--recompute-ratio", "0.5", "--questions", "2", "--json", "out.json"]
    assert cli("demo", *arguments).code == 3
    assert cli("demo").code == 3
    assert sorted(given[0]) == sorted(arguments)
    assert given[1] == ["--repair", "query", "--questions", "8"]


def test_demo_takes_what_it_is_given(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(demo, "run", lambda arguments: seen.append(arguments) or 0)
    assert cli("demo", "--json", "out.json", "--recompute-ratio", "0.25").code == 0
    (found,) = seen
    assert (found.repair, found.questions, found.recompute_ratio, found.json) == ("query", 8, 0.25, Path("out.json"))


def test_the_packages_own_warnings_are_notes(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def warns(*arguments: object) -> object:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("too little room", BudgetWarning, stacklevel=1)
            warnings.warn("something else", UserWarning, stacklevel=1)
        raise KeyboardInterrupt

    before = warnings.showwarning
    monkeypatch.setattr("kvboost_rag.cli.commands.doctor.run", warns)
    done = cli("doctor")
    assert (done.code, done.out) == (130, "")
    first, second, *_, last = done.err.splitlines()
    assert (first, last) == ("note: too little room", "interrupted")
    assert second.endswith("UserWarning: something else")
    assert warnings.showwarning is before


def test_completion_comes_from_typer(cli: Cli) -> None:
    assert module.app.info.name == "kvboost-rag"
    assert "--install-completion" in cli("--help").out
