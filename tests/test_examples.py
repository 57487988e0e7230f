"""The examples run: on a tiny random model, what must hold for any model; the slow ones as a reader would run them."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from conftest import CHAT_TEMPLATE, build_model, build_tokenizer, document, embed

from kvboost_rag import KVBoost, demo, sample
from kvboost_rag.engine.types import Report
from kvboost_rag.report import GenerationResult
from kvboost_rag.stream import AsyncTextStream

FOLDER = Path(__file__).parent.parent / "examples"
EXAMPLES = sorted(path for path in FOLDER.glob("*.py") if not path.name.startswith("_"))
QUESTION = "Which village was the first to grow blue barley?"


# The files


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short_and_says_how_it_is_run(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 60
    said = ast.get_docstring(ast.parse(text)) or ""
    assert said
    if path in EXAMPLES:
        assert f"python examples/{path.name} [MODEL]" in said


# On a tiny random model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A saved model and a tokenizer that needs some 600 tokens for a passage of the sample corpus."""
    target = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer().train_new_from_iterator(sample.passages().values(), 1500)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(target)
    build_model(vocab_size=1500, max_position_embeddings=8192).save_pretrained(target)
    return str(target)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports an example by the beginning of its name, with an embedder that needs no model."""
    from llama_index.core.instrumentation import get_dispatcher

    monkeypatch.setattr(demo, "embedder", lambda: lambda texts: [embed(text) for text in texts])
    monkeypatch.syspath_prepend(str(FOLDER))
    handlers = get_dispatcher().event_handlers
    before = list(handlers)

    def by_name(beginning: str) -> ModuleType:
        (path,) = FOLDER.glob(f"{beginning}_*.py")
        spec = importlib.util.spec_from_file_location(f"example_{beginning}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    yield by_name
    handlers[:] = before


def hits(output: str) -> list[tuple[int, int]]:
    """Every "documents hit n/m" of what was printed."""
    return [(int(hit), int(of)) for hit, of in re.findall(r"documents hit (\d+)/(\d+)", output)]


def test_quickstart(load: Any, folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    load("01").main(folder)
    output = capsys.readouterr().out
    assert output.startswith("6 of 6 documents warmed")
    assert hits(output) == [(3, 3)] * 2
    assert "full prefill of the last prompt" in output


def test_langchain_chain(load: Any, folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    load("02").main(folder)
    output = capsys.readouterr().out
    assert output.startswith("6 of 6 passages read\n")
    assert hits(output) == [(3, 3)] * 2
    shares = [int(share) for share in re.findall(r"(\d+)% of \d+ prompt tokens reused", output)]
    assert len(shares) == 2
    assert min(shares) > 80


def test_langchain_agent(load: Any, folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    load("03").main(folder)
    output = capsys.readouterr().out
    assert hits(output) == [(3, 3)] * 3
    counts = [int(count) for count in re.findall(r"(\d) passages read for this question", output)]
    assert counts[0] == 3
    assert len(counts) == 3
    assert sum(counts) <= 6  # none of them twice


def test_llamaindex_query_engine(load: Any, folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    load("04").main(folder)
    output = capsys.readouterr().out
    assert output.startswith("6 of 6 documents warmed")
    assert hits(output) == [(3, 3)] * 2


def test_chat_with_memory(load: Any, folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    example = load("05")
    example.main(folder)
    output = capsys.readouterr().out
    turns = len(example.TURNS)
    assert output.startswith(f"{turns} of {turns} documents warmed")
    assert hits(output) == [(turn, turn) for turn in range(1, turns + 1)]  # those of all turns so far
    prompts = [int(count) for count in re.findall(r"(\d+) prompt tokens", output)]
    assert prompts == sorted(set(prompts))
    assert output.count("TTFT") == turns + 1


def test_persistent_store(
    load: Any, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    example = load("07")
    example.main(folder)
    first = capsys.readouterr().out
    example.main(folder)
    second = capsys.readouterr().out
    assert first.startswith("0 of 4 passages are in ")
    assert second.startswith("4 of 4 passages are in ")
    assert "documents warmed" in first
    assert "documents warmed" not in second
    tiers = [re.findall(r"^document \d: \d+ tokens from (\w+)$", each, re.MULTILINE) for each in (first, second)]
    assert tiers == [["memory"] * 3, ["disk"] * 3]
    assert hits(first) == hits(second) == [(3, 3)]


def test_batch_over_a_corpus(load: Any, folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    load("08").main(folder)
    printed = capsys.readouterr()
    questions = [item.question for item in sample.questions()][6:12]
    lines = [line for line in printed.out.splitlines() if " | " in line]
    assert [line.split(" | ")[0] for line in lines] == questions
    assert len(printed.out.splitlines()) == len(questions) + 2  # what was read, an answer a line, the hits
    assert hits(printed.out) == [(18, 18)]
    assert "generating: 100%" in printed.err


def test_two_frameworks_one_engine(load: Any, folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    load("09").main(folder)
    output = capsys.readouterr().out
    assert output.startswith("6 of 6 passages read through LangChain")
    assert hits(output) == [(3, 3)]


# The server


class Client:
    """An ASGI client that asks a question; it goes away after ``patience`` pieces, if given."""

    def __init__(self, question: str, patience: int | None = None):
        self.question, self.patience = question, patience
        self.status = 0
        self.pieces: list[str] = []
        self.gone = asyncio.Event()
        self._asked = False

    async def ask(self, app: Any) -> None:
        scope = {"type": "http", "method": "POST", "path": "/ask", "query_string": b"", "http_version": "1.1"}
        scope |= {"asgi": {"version": "3.0", "spec_version": "2.3"}}  # as uvicorn says
        await app(scope | {"headers": [(b"content-type", b"application/json")]}, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": json.dumps({"question": self.question}).encode()}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self.status = message.get("status", self.status)
        if message.get("body"):
            self.pieces.append(message["body"].decode())
        if self.patience is not None and len(self.pieces) >= self.patience:
            self.gone.set()


def test_streaming_server(
    load: Any, folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``main`` serves an app that answers."""
    served: list[int] = []
    client = Client(QUESTION)

    def run(app: Any, port: int) -> None:
        served.append(port)
        asyncio.run(client.ask(app))

    monkeypatch.setitem(sys.modules, "uvicorn", SimpleNamespace(run=run))
    monkeypatch.setenv("PORT", "8123")
    load("06").main(folder)
    assert capsys.readouterr().out.startswith("6 of 6 documents warmed")
    assert served == [8123]
    assert client.status == 200
    assert "".join(client.pieces)


async def test_the_servers_pieces_are_the_text(load: Any, boost: KVBoost) -> None:
    documents = [document(1), document(2)]
    boost.warm(documents, progress=False)
    client = Client("word1x1?")
    await client.ask(load("06").build_app(boost, lambda question: documents))
    whole = boost.generate(boost.prompt(documents=documents, question="word1x1?"), max_new_tokens=64)
    assert "".join(client.pieces) == whole.text
    assert len(client.pieces) > 1


@pytest.mark.parametrize("patience", [0, 3], ids=["before the first piece", "in the middle"])
async def test_the_server_stops_for_a_client_that_goes_away(load: Any, patience: int) -> None:
    """The work here ends in no other way than by being cancelled."""
    ended, streams = threading.Event(), []

    def work(emit: Callable[[str], None], cancelled: threading.Event) -> GenerationResult:
        while not cancelled.wait(0.01):
            if patience:
                emit("more ")
        ended.set()
        return GenerationResult("", "cancelled", Report())

    class Endless:
        def prompt(self, documents: Sequence[str], question: str) -> str:
            return question

        def astream(self, prompt: str, **options: Any) -> AsyncTextStream:
            streams.append(AsyncTextStream(work))  # held here: it cannot end by being forgotten
            return streams[-1]

    client = Client(QUESTION, patience)
    await asyncio.wait_for(client.ask(load("06").build_app(Endless(), lambda question: [])), timeout=60)
    assert await asyncio.to_thread(ended.wait, 60)
    assert len(streams) == 1
    assert len(client.pieces) >= patience


# On the bundled model, as a reader runs them

SERVER = "06_streaming_server"
SAID = {
    "01_quickstart": "documents hit 3/3",
    "02_langchain_chain": "documents hit 3/3",
    "03_langchain_agent": "documents hit 3/3",
    "04_llamaindex_query_engine": "documents hit 3/3",
    "05_chat_with_memory": "documents hit 4/4",
    "07_persistent_store": "tokens from disk",
    "08_batch_over_a_corpus": "documents hit 18/18",
    "09_two_frameworks_one_engine": "documents hit 3/3",
}
RUNS = {"07_persistent_store": 2}


def surroundings(tmp_path: Path, **environment: str) -> dict[str, Any]:
    """For a process of its own, with a folder of its own for temporary files."""
    return {"cwd": tmp_path, "env": {**os.environ, "TMPDIR": str(tmp_path), **environment}, "text": True}


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.parametrize("path", [path for path in EXAMPLES if path.stem != SERVER], ids=lambda path: path.stem)
def test_on_the_bundled_model(path: Path, tmp_path: Path) -> None:
    for _ in range(RUNS.get(path.stem, 1)):
        command = [sys.executable, str(path)]
        done = subprocess.run(command, capture_output=True, timeout=1200, **surroundings(tmp_path))
        assert done.returncode == 0, done.stderr
    print(done.stdout)
    assert SAID[path.stem] in done.stdout


@pytest.mark.slow
@pytest.mark.real_model
def test_the_server_on_the_bundled_model(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command, pipe = [sys.executable, str(FOLDER / f"{SERVER}.py")], subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, **surroundings(tmp_path, PORT=str(port)))
    try:
        answer = _ask(f"http://127.0.0.1:{port}/ask", process)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    print(answer)
    assert process.returncode == 0, errors
    assert output.startswith("6 of 6 documents warmed")
    assert "Nether Cobb" in answer


def _ask(url: str, process: subprocess.Popen[str]) -> str:
    """The answer, once there is a server."""
    body = json.dumps({"question": QUESTION}).encode()
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    while process.poll() is None:
        try:
            with urllib.request.urlopen(request, timeout=600) as response:
                return response.read().decode()
        except urllib.error.URLError:
            time.sleep(1)
    raise AssertionError("the server ended before it answered")
