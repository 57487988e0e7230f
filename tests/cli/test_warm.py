"""``warm``: what is new is added, what was changed replaced, what is there skipped, whatever happens in between."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.conftest import FILES, TOKENS, Cli, Words
from conftest import build_tokenizer

from kvboost_rag.cli import embedding, loading
from kvboost_rag.cli.corpus import Corpus
from kvboost_rag.engine.engine import Engine
from kvboost_rag.tokens import Tokens


def passages(store: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (store / "passages.jsonl").read_text().splitlines()]


def warmed(store: Path) -> list[Path]:
    """The KV files of documents; prompts' headers have files too."""
    return sorted(store.glob("kv/*/*-w*.safetensors"))


def test_files_of_a_folder_are_read_and_kept(cli: Cli, docs: Path, tmp_path: Path, model_folder: Path) -> None:
    (docs / "picture.png").write_bytes(b"\x89PNG")
    (docs / ".hidden.md").write_text("not to be read")
    done = cli("warm", "docs", "--passage-tokens", TOKENS, "--json")
    assert done.code == 0, done.err
    counts = {"added": 3, "changed": 0, "removed": 0, "blank": 0, "unreadable": 0, "unchanged": 0, "skipped": 1}
    assert done.json["files"] == counts
    assert done.json["skipped_kinds"] == {".png": 1}
    assert done.json["warm"]["num_warmed"] == done.json["num_passages"] == done.json["num_new_passages"] == 3
    store = tmp_path / ".kvboost"
    assert {item["source"] for item in passages(store)} == set(FILES)
    assert len(warmed(store)) == 3
    settings = json.loads((store / "store.json").read_text())
    assert settings["model"] == str(model_folder)
    assert settings["passage_tokens"] == int(TOKENS)
    assert len(Corpus.open(store).vectors) == 3


def test_without_json_it_is_said_in_lines(cli: Cli, docs: Path) -> None:
    done = cli("warm", docs, "--passage-tokens", TOKENS)
    assert "files: 3 added\n" in done.out
    assert "passages: 3, 3 of them new\n" in done.out
    assert "read: 3 passages, " in done.out


def test_the_second_run_adds_nothing(cli: Cli, store: Path, docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path: path.stat().st_mtime_ns for path in warmed(store)}

    def fail(name: str) -> embedding.Embedder:
        raise AssertionError("nothing is to be embedded")

    monkeypatch.setattr(embedding, "load", fail)
    done = cli("warm", docs, "--json").json
    assert done["files"]["unchanged"] == 3
    assert done["files"]["added"] == done["files"]["changed"] == done["num_new_passages"] == 0
    assert (done["warm"]["num_warmed"], done["warm"]["num_already_warm"]) == (0, 3)
    assert {path: path.stat().st_mtime_ns for path in warmed(store)} == before


def test_a_changed_file_is_replaced_and_its_kv_forgotten(cli: Cli, store: Path, docs: Path) -> None:
    before = warmed(store)
    (docs / "ferry.txt").write_text("The ferry is laid up for the winter, and her captain has gone to sea.")
    (docs / "new.md").write_text("The bakery in Rope Lane sells rye bread.")
    done = cli("warm", docs, "--json").json
    assert (done["added"], done["changed"]) == (["docs/new.md"], ["docs/ferry.txt"])
    assert done["num_new_passages"] == done["warm"]["num_warmed"] == 2
    texts = {item["text"] for item in passages(store)}
    assert FILES["docs/ferry.txt"] not in texts
    assert len(texts) == 4
    assert len(set(before) - set(warmed(store))) == 1
    assert len(warmed(store)) == 4


def test_files_that_are_gone_stay_until_they_are_to_go(cli: Cli, store: Path, docs: Path) -> None:
    (docs / "ferry.txt").unlink()
    assert cli("warm", docs, "--json").json["num_passages"] == 3
    done = cli("warm", docs, "--remove-missing", "--json").json
    assert done["removed"] == ["docs/ferry.txt"]
    assert done["num_passages"] == len(passages(store)) == len(warmed(store)) == 2
    for path in docs.rglob("*.*"):
        path.unlink()
    assert cli("warm", docs, "--remove-missing", "--json").json["num_passages"] == 0


def test_text_that_stays_elsewhere_keeps_its_kv(cli: Cli, store: Path, docs: Path) -> None:
    (docs / "copy.md").write_text(FILES["docs/ferry.txt"])
    assert cli("warm", docs, "--json").json["num_new_passages"] == 0
    (docs / "ferry.txt").unlink()
    done = cli("warm", docs, "--remove-missing", "--json").json
    assert (done["warm"]["num_warmed"], done["num_passages"], len(warmed(store))) == (0, 3, 3)


def test_another_size_cuts_again(cli: Cli, store: Path, docs: Path) -> None:
    done = cli("warm", docs, "--passage-tokens", 60, "--json").json
    assert done["files"]["changed"] == 3
    assert done["num_passages"] > 3
    count = Tokens(build_tokenizer()).encode
    assert all(len(count(item["text"])) <= 60 for item in passages(store))
    assert len(warmed(store)) == done["num_passages"]
    assert cli("warm", docs, "--json").json["files"]["unchanged"] == 3


def test_another_embedder_makes_new_vectors(cli: Cli, store: Path, docs: Path) -> None:
    done = cli("warm", docs, "--embedder", "another")
    assert "all passages get new vectors, by another" in done.err
    assert Corpus.open(store).settings.embedder == "another"
    assert cli("ask", "Who is the captain?", "--k", 1, "--max-new-tokens", 2).code == 0


class Interrupted(Words):
    """Ctrl-C in the second batch."""

    num_batches = 0

    def documents(self, texts: list[str]) -> embedding.Vectors:
        self.num_batches += 1
        if self.num_batches == 2:
            raise KeyboardInterrupt
        return super().documents(texts)


def test_interrupted_while_embedding_it_goes_on(cli: Cli, docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvboost_rag.cli.session.EMBEDDED_AT_ONCE", 2)
    with monkeypatch.context() as patch:
        patch.setattr(embedding, "load", lambda name: Interrupted())
        done = cli("warm", docs, "--passage-tokens", TOKENS)
    assert (done.code, done.err.splitlines()[-1]) == (130, "interrupted")
    assert len(Corpus.open(Path(".kvboost")).without_vector()) == 1
    asked = cli("ask", "Who is the captain?", "--k", 1, "--max-new-tokens", 2)
    assert "1 passages have no vector" in asked.err
    done = cli("warm", docs, "--json")
    assert done.json["files"]["unchanged"] == 3
    assert not Corpus.open(Path(".kvboost")).without_vector()
    assert done.json["warm"]["num_warmed"] + done.json["warm"]["num_already_warm"] == 3


def test_interrupted_while_reading_it_goes_on(cli: Cli, docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, num_read = Engine.warm, 0

    def interrupted(self: Engine, *args: object, **options: object) -> object:
        nonlocal num_read
        if num_read == 2:
            raise KeyboardInterrupt
        num_read += 1
        return read(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "warm", interrupted)
        done = cli("warm", docs, "--passage-tokens", TOKENS)
    assert done.code == 130
    assert "what was read is kept" in done.err
    assert len(warmed(Path(".kvboost"))) == 2
    done = cli("warm", docs, "--json").json["warm"]
    assert (done["num_warmed"], done["num_already_warm"]) == (1, 2)


@pytest.mark.parametrize(
    "name, data, said",
    [
        ("broken.jsonl", b'{"text": "a"}\n\n{"text": ', "broken.jsonl, line 3: not JSON"),
        ("fields.jsonl", b'{"body": "a"}\n', "fields.jsonl, line 1: a line is"),
        ("latin.txt", "eins\nzwölf".encode("latin1"), "latin.txt, line 2: not UTF-8 (byte 0xf6)"),
        ("torn.pdf", b"%PDF-1.4 and nothing more", "torn.pdf: pypdf cannot read it"),
    ],
)
def test_a_broken_file_is_named_and_nothing_written(cli: Cli, docs: Path, name: str, data: bytes, said: str) -> None:
    (docs / name).write_bytes(data)
    done = cli("warm", docs)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("error: ")
    assert said in done.err
    assert not Path(".kvboost").exists()
    done = cli("warm", docs, "--skip-unreadable", "--passage-tokens", TOKENS, "--json")
    assert (done.code, done.json["files"]["unreadable"], done.json["files"]["added"]) == (0, 1, 3)
    assert f"left out: {docs / name}" in done.err


def test_what_cannot_be_read_at_all(cli: Cli, docs: Path, tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    done = cli("warm", "picture.png")
    assert (done.code, done.out) == (1, "")
    assert (
        f"PATH='picture.png' is not valid; PATH takes folders, and files that end in {', '.join(loading.KINDS)}"
        in done.err
    )
    (tmp_path / "empty").mkdir()
    done = cli("warm", "empty")
    assert done.code == 1
    assert "PATH='empty' is not valid; PATH takes something to read" in done.err
    done = cli("warm", "nowhere")
    assert (done.code, done.out) == (2, "")
    assert "nowhere" in done.err


def test_blank_files_are_counted(cli: Cli, docs: Path) -> None:
    (docs / "blank.md").write_text(" \n\n")
    done = cli("warm", docs, "--passage-tokens", TOKENS, "--json").json
    assert (done["files"]["blank"], done["files"]["added"], done["num_passages"]) == (1, 3, 3)


def test_the_store_itself_is_not_read(cli: Cli, docs: Path, tmp_path: Path) -> None:
    assert cli("warm", ".", "--store", "kept", "--passage-tokens", TOKENS, "--json").json["files"]["added"] == 3
    done = cli("warm", ".", "--store", "kept", "--json").json
    assert (done["files"]["unchanged"], done["files"]["added"]) == (3, 0)


@pytest.mark.parametrize(
    "option, value, said",
    [
        ("--passage-tokens", "3000", "2048"),
        ("--max-cache-bytes", "lots", "bytes as a whole number, or such as 2GB or 512MiB"),
        ("--kv-dtype", "int2", "int2"),
        ("--dtype", "float8", "float8"),
    ],
)
def test_a_wrong_option_is_wrong_usage(cli: Cli, docs: Path, option: str, value: str, said: str) -> None:
    done = cli("warm", docs, option, value)
    assert (done.code, done.out) == (2, "")
    assert option in done.err
    assert said in done.err


def test_the_models_dtypes_are_those_of_the_last_run(cli: Cli, store: Path, docs: Path) -> None:
    done = cli("warm", docs, "--dtype", "bfloat16", "--kv-dtype", "int8", "--json")
    assert (done.code, done.json["warm"]["num_warmed"]) == (0, 3)
    settings = Corpus.open(store).settings
    assert (settings.dtype, settings.kv_dtype) == ("bfloat16", "int8")
    assert sorted(name.rsplit(" ", 1)[1] for name in settings.models.values()) == ["(bfloat16)", "(float32)"]
    asked = cli("ask", "why?", "--max-new-tokens", 2)
    assert "documents hit 3/3" in asked.err
    assert "not read before" not in asked.err


def test_a_store_that_cannot_be_written(cli: Cli, docs: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    done = cli("warm", docs, "--store", "file/store")
    assert (done.code, done.out) == (1, "")
    assert done.err.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in done.err


def test_a_device_that_is_not_there(cli: Cli, docs: Path) -> None:
    done = cli("warm", docs, "--device", "tpu:7")
    assert (done.code, done.out) == (1, "")
    assert "error: device='tpu:7' is not valid; device takes what this machine has: cpu" in done.err


def test_a_model_that_is_not_there(cli: Cli, docs: Path) -> None:
    done = cli("warm", docs, "--model", "./no-model")
    assert (done.code, done.out) == (1, "")
    assert "error: model folder './no-model' does not exist" in done.err
    assert "Traceback" not in done.err
