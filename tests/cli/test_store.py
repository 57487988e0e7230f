"""``store``: what is there, what is broken, and getting rid of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cli.conftest import FILES, TOKENS, Cli

from kvboost_rag.cli import kvfiles
from kvboost_rag.cli.corpus import Corpus


def kv_files(store: Path) -> list[Path]:
    return sorted(store.glob("kv/*/*.safetensors"))


def test_show(cli: Cli, store: Path, model_folder: Path) -> None:
    found = cli("store", "show", "--json").json
    assert found["settings"]["model"] == str(model_folder)
    assert {each["source"]: each["num_passages"] for each in found["sources"]} == dict.fromkeys(FILES, 1)
    assert found["num_passages"] == 3
    assert found["kv_bytes"] == sum(path.stat().st_size for path in kv_files(store))
    assert [each["model"] for each in found["kv"]] == [f"{model_folder} (float32)"]
    assert found["budget"]["max_cache_bytes"] == 2_000_000_000
    said = cli("store", "show", "--max-cache-bytes", "500MB")
    assert said.code == 0, said.err
    for part in (
        f"passages   3, cut to {TOKENS} tokens",
        "500.0 MB in memory",
        "docs/ferry.txt",
        f"model      {model_folder}",
    ):
        assert part in said.out


def test_show_without_a_store(cli: Cli) -> None:
    done = cli("store", "show", "--json")
    assert (done.code, done.out) == (1, "")
    assert done.err == "error: there is no store in .kvboost: make one with kvboost-rag warm PATH\n"


def test_check_reads_every_file(cli: Cli, store: Path) -> None:
    done = cli("store", "check")
    assert done.code == 0, done.err
    assert f"{len(kv_files(store))} KV files: {len(kv_files(store))} of " in done.out
    assert "all of them can be read" in done.out


@pytest.mark.parametrize("damage", ["truncated", "flipped", "renamed"])
def test_check_finds_a_broken_file(cli: Cli, store: Path, docs: Path, damage: str) -> None:
    victim = next(path for path in kv_files(store) if "-w" in path.name)
    data = victim.read_bytes()
    if damage == "truncated":
        victim.write_bytes(data[: len(data) // 2])
    elif damage == "flipped":
        victim.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    else:
        victim = victim.rename(victim.with_name("ab" * 32 + victim.name[64:]))
    done = cli("store", "check", "--json")
    assert done.code == 1
    assert [each["file"] for each in done.json["broken"]] == [str(victim.relative_to(store.parent))]
    assert not done.json["ok"]
    assert "broken: " in cli("store", "check").out
    assert victim.exists()
    assert ", deleted" in cli("store", "check", "--delete").out
    assert not victim.exists()
    assert cli("store", "check").code == 0
    again = cli("warm", docs, "--json").json["warm"]
    assert (again["num_warmed"], again["num_already_warm"]) == (1, 2)
    assert cli("ask", "why?", "--max-new-tokens", 2, "--json").json["report"]["num_document_hits"] == 3


def test_check_tells_models_apart(cli: Cli, store: Path, other_model: Path) -> None:
    assert cli("ask", "why?", "--model", other_model, "--max-new-tokens", 2).code == 0
    done = cli("store", "check", "--json")
    assert (done.code, done.json["of_another_model"]) == (0, [])
    assert f"{other_model} (float32)" in done.json["files_by_model"]
    (known, _) = kvfiles.folders(store / "kv")
    strange = shutil.copytree(known, known.with_name("0123456789abcdef"))
    done = cli("store", "check", "--json")
    assert done.code == 1
    assert {Path(path).parent.name for path in done.json["of_another_model"]} == {strange.name}
    assert done.json["broken"] == []
    assert "of a model this store was never used with: " in cli("store", "check").out


def test_forget(cli: Cli, store: Path, docs: Path, other_model: Path) -> None:
    assert cli("ask", "why?", "--model", other_model, "--max-new-tokens", 2).code == 0
    before = kv_files(store)
    done = cli("store", "forget", "docs/ferry.txt", "--json").json
    assert (done["sources"], done["num_passages"]) == (["docs/ferry.txt"], 1)
    assert done["num_kv_files"] == len(before) - len(kv_files(store)) >= 2
    corpus = Corpus.open(store)
    assert {passage.source for passage in corpus.passages} == FILES.keys() - {"docs/ferry.txt"}
    assert len(corpus.vectors) == 2
    assert not any(FILES["docs/ferry.txt"].encode() in path.read_bytes() for path in kv_files(store))
    assert cli("ask", "why?", "--max-new-tokens", 2, "--json").json["report"]["num_document_hits"] == 2
    done = cli("store", "forget", "docs/")
    assert "dropped 2 passages and " in done.out
    assert Corpus.open(store).passages == []


def test_forget_keeps_what_another_source_says_too(cli: Cli, store: Path, docs: Path) -> None:
    (docs / "copy.md").write_text(FILES["docs/ferry.txt"])
    assert cli("warm", docs).code == 0
    before = kv_files(store)
    done = cli("store", "forget", "docs/copy.md", "--json").json
    assert (done["num_passages"], done["num_kv_files"]) == (1, 0)
    assert kv_files(store) == before


def test_forget_names_what_is_near(cli: Cli, store: Path) -> None:
    done = cli("store", "forget", "docs/fery.txt")
    assert (done.code, done.out) == (1, "")
    assert "no passage in .kvboost is from docs/fery.txt (did you mean docs/ferry.txt?)" in done.err
    assert len(Corpus.open(store).passages) == 3


@pytest.mark.parametrize("answer, left", [("n\n", True), ("", True), ("y\n", False)])
def test_clear_asks(cli: Cli, store: Path, answer: str, left: bool) -> None:
    num_files = len(kv_files(store))
    done = cli("store", "clear", typed=answer)
    assert done.code == (1 if left else 0)
    assert done.out == ("" if left else f"deleted .kvboost, {num_files} KV files\n")
    assert "Delete the store in .kvboost?" in done.err
    assert store.exists() is left


def test_clear_leaves_what_is_not_its_own(cli: Cli, store: Path) -> None:
    (store / "notes.txt").write_text("mine")
    (store / "kv" / "more").mkdir()
    (store / "store.json").write_text("{")
    done = cli("store", "clear", "--yes", "--json")
    assert done.json["num_kv_files"] >= 3
    assert sorted(str(path.relative_to(store)) for path in store.rglob("*")) == ["kv", "kv/more", "notes.txt"]
    done = cli("store", "clear", "--yes")
    assert (done.code, done.err) == (1, "error: there is no store in .kvboost\n")


def test_a_source_of_lines_is_forgotten_by_its_own_name(cli: Cli, tmp_path: Path) -> None:
    lines = [{"text": "Herring is sold by the barrel.", "source": "wiki/Herring"}, {"text": "Rye bread."}]
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert cli("warm", "lines.jsonl", "--passage-tokens", TOKENS).code == 0
    shown = cli("store", "show", "--json").json["sources"]
    assert [(each["source"], each["file"]) for each in shown] == [
        ("wiki/Herring", "lines.jsonl"),
        ("lines.jsonl:2", "lines.jsonl"),
    ]
    assert cli("store", "forget", "wiki/Herring", "--json").json["num_passages"] == 1
    assert cli("store", "forget", "lines.jsonl", "--json").json["sources"] == ["lines.jsonl:2"]
