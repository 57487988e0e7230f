"""``ask``: an answer, what it is from, and what it took; and which model and embedder give it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cli.conftest import FILES, Cli

from kvboost_rag import hub
from kvboost_rag.cli import choices, embedding
from kvboost_rag.cli.choices import Common, choose
from kvboost_rag.cli.corpus import Corpus, Settings

CAPTAIN = "Who is the captain of the ferry Marigold?"


def test_the_answer_goes_out_and_one_line_about_it_to_the_side(cli: Cli, store: Path) -> None:
    done = cli("ask", CAPTAIN, "--k", 3, "--max-new-tokens", 8)
    assert done.code == 0, done.err
    assert done.out.endswith("\n")
    assert done.out.strip()
    line = done.err.splitlines()[-1]
    assert line.startswith("documents hit 3/3, ")
    assert " tokens computed, TTFT " in line
    assert all(name in line for name in FILES)


def test_json_holds_the_answer_its_sources_and_the_report(cli: Cli, store: Path) -> None:
    done = cli("ask", CAPTAIN, "--k", 2, "--max-new-tokens", 8, "--json")
    found = done.json
    assert found["question"] == CAPTAIN
    assert found["answer"] == cli("ask", CAPTAIN, "--k", 2, "--max-new-tokens", 8).out.strip()
    assert found["sources"][0]["file"] == "docs/ferry.txt"
    report = found["report"]
    assert report["num_document_hits"] == len(report["documents"]) == 2
    assert report["repair"] == "query"
    assert {document["tier"] for document in report["documents"]} == {"disk"}
    assert "full" not in found


def test_more_passages_than_there_are(cli: Cli, store: Path) -> None:
    done = cli("ask", CAPTAIN, "--k", 50, "--max-new-tokens", 2)
    assert done.code == 0
    assert "the store has 3 passages, fewer than --k 50" in done.err
    assert "documents hit 3/3" in done.err


def test_the_same_text_from_two_files_is_in_the_prompt_once(cli: Cli, store: Path, docs: Path) -> None:
    (docs / "copy.md").write_text(FILES["docs/ferry.txt"])
    assert cli("warm", docs).code == 0
    found = cli("ask", CAPTAIN, "--k", 4, "--max-new-tokens", 2, "--json").json
    assert [source["source"] for source in found["sources"]].count("docs/ferry.txt") == 1
    assert len(found["sources"]) == 3


def test_full_prefill_beside_it(cli: Cli, store: Path) -> None:
    options = ["--compare", "--quality", "exact", "--max-new-tokens", 6]
    done = cli("ask", CAPTAIN, *options)
    assert "(full prefill " in done.err
    assert "ms, the same answer)" in done.err
    found = cli("ask", CAPTAIN, *options, "--json").json
    assert found["full"]["report"]["mode"] == "baseline"
    assert found["full"]["answer"] == found["answer"]
    assert found["report"]["repair"] == "full"


def test_the_picture_in_a_file_and_in_the_terminal(cli: Cli, store: Path, tmp_path: Path) -> None:
    page = tmp_path / "strip.html"
    done = cli("ask", CAPTAIN, "--max-new-tokens", 4, "--html", page, "--show", "--compare")
    assert done.code == 0, done.err
    assert f"written: {page}" in done.err
    assert "captain" in page.read_text(encoding="utf-8")
    assert "3 of 3 documents found" in done.out
    quiet = cli("ask", CAPTAIN, "--max-new-tokens", 4, "--show", "--json")
    assert quiet.json["answer"] is not None
    assert "3 of 3 documents found" in quiet.err
    assert "3 of 3 documents found" not in quiet.out
    nowhere = cli("ask", CAPTAIN, "--html", tmp_path / "nowhere" / "strip.html")
    assert (nowhere.code, nowhere.out) == (1, "")
    assert "html=" in nowhere.err


@pytest.mark.parametrize(
    "arguments, code, said",
    [
        (["ask", CAPTAIN, "--k", "0"], 2, "'--k'"),
        (["ask", CAPTAIN, "--max-new-tokens", "none"], 2, "'--max-new-tokens'"),
        (["ask", CAPTAIN, "--repair", "hope"], 2, "'--repair'"),
        (["ask", CAPTAIN, "--quality", "best"], 2, "one of exact, high, fast, or a number from 0 to 1"),
        (["ask", CAPTAIN, "--recompute-ratio", "2"], 2, "'--recompute-ratio'"),
        (["ask", CAPTAIN, "--quality", "high", "--repair", "none"], 1, "quality='high' picks the repair itself"),
        (["ask", "  "], 1, "QUESTION='  ' is not valid"),
        (["ask"], 2, "Missing argument"),
        (["ask", CAPTAIN, "--embedder", "another"], 1, "the vectors in .kvboost come from the embedder 'words'"),
        (["ask", CAPTAIN, "--max-new-tokens", "5000"], 1, "too many. Send fewer or shorter documents"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(cli: Cli, store: Path, arguments: list[str], code: int, said: str) -> None:
    done = cli(*arguments)
    assert (done.code, done.out) == (code, "")
    assert said in done.err
    assert "Traceback" not in done.err


def test_without_a_store_or_without_passages(cli: Cli, store: Path) -> None:
    done = cli("ask", CAPTAIN, "--store", "nowhere")
    assert (done.code, done.out) == (1, "")
    assert done.err == "error: there is no store in nowhere: make one with kvboost-rag warm PATH\n"
    (store / "store.json").write_text("{")
    done = cli("ask", CAPTAIN, "--json")
    assert (done.code, done.out) == (1, "")
    assert "store.json is broken" in done.err
    Corpus(store, Settings(model="m", embedder="words")).save()
    done = cli("ask", CAPTAIN)
    assert done.code == 1
    assert "there are no passages in .kvboost" in done.err


def test_another_model_reads_again_in_the_same_store(
    cli: Cli, store: Path, other_model: Path, model_folder: Path
) -> None:
    first = cli("ask", CAPTAIN, "--model", other_model, "--max-new-tokens", 2)
    assert first.code == 0, first.err
    assert f"the store was made with {model_folder}; documents are read again for {other_model}" in first.err
    assert "not read before by this model: 3 of 3 documents warmed" in first.err
    second = cli("ask", CAPTAIN, "--model", other_model, "--max-new-tokens", 2)
    assert "not read before" not in second.err
    assert "documents hit 3/3" in second.err
    settings = json.loads((store / "store.json").read_text())
    assert settings["model"] == str(model_folder)
    assert sorted(settings["models"].values()) == [
        f"{each} (float32)" for each in sorted((str(model_folder), str(other_model)))
    ]
    assert len(list((store / "kv").iterdir())) == 2


def test_the_store_says_which_model(cli: Cli, store: Path, monkeypatch: pytest.MonkeyPatch, model_folder: Path) -> None:
    monkeypatch.delenv("KVBOOST_MODEL")
    done = cli("ask", CAPTAIN, "--max-new-tokens", 2)
    assert f"loading {model_folder} on " in done.err
    assert "documents hit 3/3" in done.err


def test_the_store_may_be_named_by_the_environment(cli: Cli, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = shutil.move(store, store.parent / "elsewhere")
    monkeypatch.setenv("KVBOOST_STORE", str(moved))
    assert cli("ask", CAPTAIN, "--max-new-tokens", 2).code == 0


def test_a_document_whose_kv_is_gone_is_read_again(cli: Cli, store: Path) -> None:
    shutil.rmtree(store / "kv")
    done = cli("ask", CAPTAIN, "--max-new-tokens", 2)
    assert "not read before by this model: 3 of 3" in done.err
    assert "documents hit 3/3" in done.err


@pytest.mark.parametrize("installed", [True, False])
def test_what_is_used_where_nothing_is_said(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "BUNDLED_PACKAGE", "json" if installed else "not_there")
    monkeypatch.setattr(hub, "EMBEDDER_PACKAGE", "json" if installed else "not_there")
    found = choose(Common(Path("s")), Settings())
    usual = ("bundled", "bundled") if installed else (choices.DEFAULT_MODEL, choices.DEFAULT_EMBEDDER)
    assert (found.model, found.embedder, found.dtype, found.kv_dtype) == (*usual, "auto", "auto")


def test_what_is_said_wins_over_the_store(tmp_path: Path) -> None:
    kept = Settings(model="m", dtype="float16", kv_dtype="int8", embedder="e")
    assert choose(Common(Path("s")), kept) == choices.Chosen("m", "e", "float16", "int8")
    other = choose(Common(Path("s"), model="other", embedder="f", kv_dtype="int4"), kept)
    assert other == choices.Chosen("other", "f", "auto", "int4")
    assert choices.whole(str(tmp_path / ".." / tmp_path.name)) == str(tmp_path)
    assert choices.whole("bundled") == "bundled"


class Recorder:
    """As a sentence-transformers model."""

    def encode_document(self, texts: list[str], show_progress_bar: bool) -> list[list[float]]:
        return [[float(len(text)), 1.0] for text in texts]

    def encode_query(self, text: str, show_progress_bar: bool) -> list[float]:
        return [float(len(text)), 2.0]


def test_questions_and_documents_are_embedded_each_in_their_way() -> None:
    embedder = embedding.SentenceEmbedder(Recorder())
    assert embedder.documents(("a", "bb")).tolist() == [[1.0, 1.0], [2.0, 1.0]]
    assert embedder.question("ccc").tolist() == [3.0, 2.0]
    assert embedder.documents(["a"]).dtype == embedder.question("a").dtype == "float32"


def test_an_embedder_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(embedding.ModelNotFoundError, match="no embedder could be loaded from"):
        embedding.load(str(tmp_path / "nothing"))
    monkeypatch.setitem(__import__("sys").modules, "sentence_transformers", None)
    with pytest.raises(embedding.MissingExtraError, match=r'pip install "kvboost-rag\[cli\]"'):
        embedding.load("bundled")
