"""The command in an empty folder, with a tiny random model and an embedding without a model."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import build_model, build_tokenizer, embed
from transformers.utils import logging

from kvboost_rag import hub
from kvboost_rag.cli import embedding, main

TOKENS = "120"  # of a passage; the tokenizer makes about one of each character


@dataclass(frozen=True)
class Run:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Cli = Callable[..., Run]


class Words:
    """Texts with words in common are near one another."""

    def documents(self, texts: Sequence[str]) -> embedding.Vectors:
        return np.array([embed(text) for text in texts], dtype=np.float32)

    def question(self, text: str) -> embedding.Vectors:
        return self.documents([text])[0]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    build_model(max_position_embeddings=4096, num_hidden_layers=2).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("other")
    build_model("qwen2", max_position_embeddings=4096, num_hidden_layers=2).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def loaded() -> Callable[..., hub.Loaded]:
    """``hub.load`` that reads each folder once: a closed engine leaves its model as it was."""
    load = hub.load

    @lru_cache
    def once(name: object, dtype: object) -> hub.Loaded:
        return load(name, dtype=dtype)

    def again(name: object, dtype: object = "auto", **options: object) -> hub.Loaded:
        return once(name, dtype) if Path(str(name)).is_dir() else load(name, dtype=dtype, **options)

    return again


@pytest.fixture(autouse=True)
def _surroundings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_folder: Path, loaded: Callable[..., hub.Loaded]
) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "load", loaded)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("KVBOOST_MODEL", str(model_folder))
    monkeypatch.delenv("KVBOOST_STORE", raising=False)
    monkeypatch.setattr(embedding, "load", lambda name: Words())
    verbosity = logging.get_verbosity()
    yield
    logging.set_verbosity(verbosity)
    logging.enable_progress_bar()


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs the command; ``typed`` is its standard input."""

    def run(*arguments: object, typed: str = "") -> Run:
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Run(code, captured.out, captured.err)

    return run


FILES = {
    "docs/lighthouse.md": "The lighthouse of Port Amble was built by Edda Moor in 1871. It stands on a granite skerry.",
    "docs/ferry.txt": "The ferry Marigold sails at six and at noon. Her captain is Josun Tarrow of the north quay.",
    "docs/deep/market.rst": "The fish market opens at four. Herring is sold by the barrel, and mackerel by the pound.",
}


def write_files(folder: Path) -> None:
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    write_files(tmp_path)
    return tmp_path / "docs"


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """A folder with the three files and their store."""
    folder = tmp_path_factory.mktemp("made")
    write_files(folder)
    options = [
        "--model",
        model_folder,
        "--embedder",
        "words",
        "--passage-tokens",
        TOKENS,
        "--store",
        folder / ".kvboost",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedding, "load", lambda name: Words())
        assert main(["warm", *map(str, [folder / "docs", *options])]) == 0
    return folder


@pytest.fixture
def store(made_once: Path, docs: Path, tmp_path: Path) -> Path:
    """A store with the three files."""
    return shutil.copytree(made_once / ".kvboost", tmp_path / ".kvboost")
