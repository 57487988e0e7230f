"""``bench``: drawn prompts, measured; what is measured is ``verify``'s, and tested there."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from cli.conftest import Cli

from kvboost_rag import sample
from kvboost_rag.cli.commands import bench
from kvboost_rag.cli.commands.bench import Plan, about, drawn_from_sample, groups_of


def test_on_the_stores_own_passages(cli: Cli, store: Path, model_folder: Path) -> None:
    options = ["bench", "--num", 2, "--k", 2, "--repair", "full", "--json"]
    found = cli(*options).json
    assert (found["corpus"], found["model"], found["repair"], found["k"]) == (".kvboost", str(model_folder), "full", 2)
    assert len(found["prompts"]) == 2
    for each in found["prompts"]:
        assert each["report"]["num_document_hits"] == len(each["sources"]) == len(set(each["sources"])) == 2
        assert {document["tier"] for document in each["report"]["documents"]} == {"memory"}
        assert each["kl"] == pytest.approx(0, abs=1e-4)
        assert each["same_token"] == 1
        assert each["ratio"] == each["full_seconds"] / each["reuse_seconds"]
    assert found["mean"]["ratio"] == pytest.approx(sum(each["ratio"] for each in found["prompts"]) / 2)
    again = cli(*options).json
    assert [each["sources"] for each in again["prompts"]] == [each["sources"] for each in found["prompts"]]


def test_with_questions_from_a_file(cli: Cli, store: Path, tmp_path: Path) -> None:
    (tmp_path / "questions.txt").write_text(
        "Who is the captain of the ferry?\n\nWho built the lighthouse of Port Amble?\nAnd who not?\n"
    )
    done = cli("bench", "--questions", "questions.txt", "--num", 2, "--k", 1, "--json").json
    assert [each["sources"] for each in done["prompts"]] == [["docs/ferry.txt"], ["docs/lighthouse.md"]]
    assert not math.isnan(done["mean"]["kl"])


def test_the_table(cli: Cli, store: Path) -> None:
    done = cli("bench", "--num", 1, "--k", 5)
    assert done.code == 0, done.err
    assert "fewer than --k 5" in done.err
    for word in (*bench.COLUMNS, "mean", "repair query", "What do the passages say about"):
        assert word in done.out


def test_without_a_store_the_sample_corpus_is_used(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    short = {name: text[:200] for name, text in sample.passages().items()}
    monkeypatch.setattr(sample, "passages", lambda: short)
    done = cli("bench", "--num", 1, "--k", 2, "--json")
    assert done.json["corpus"] == "sample corpus"
    assert "the sample corpus is used" in done.err
    assert not Path(".kvboost").exists()


def test_questions_that_cannot_be_used(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "blank.txt").write_text("\n\n")
    (tmp_path / "latin.txt").write_bytes("zwölf?".encode("latin1"))
    (tmp_path / "fine.txt").write_text("why?")
    for name, code, said in (
        ("blank.txt", 1, "a file with at least one question"),
        ("latin.txt", 1, "a UTF-8 text file, one question a line"),
        ("nowhere.txt", 2, "nowhere.txt"),
        ("fine.txt", 1, "there is no store in .kvboost to answer from"),
    ):
        done = cli("bench", "--questions", name)
        assert (done.code, done.out) == (code, "")
        assert said in done.err


def test_the_same_seed_draws_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [str(number) for number in range(9)]
    assert groups_of(texts, Plan(seed=1)) == groups_of(texts, Plan(seed=1)) != groups_of(texts, Plan(seed=2))
    groups = groups_of(texts, Plan(num=12))
    assert all(own in group and len(set(group)) == 4 for own, group in groups)
    assert [own for own, _ in groups[9:]] == [own for own, _ in groups[:3]]
    assert {own for own, _ in groups} == set(texts)
    drawn = drawn_from_sample(Plan(num=50, k=3))
    assert drawn == drawn_from_sample(Plan(num=50, k=3))
    answers = {item.question: item.answer for item in sample.questions()}
    assert len(drawn) == len(answers)
    assert all(any(answers[each.question] in text for text in each.texts) for each in drawn)
    assert about("a b c d e f g h i j") == 'What do the passages say about "a b c d e f g h"?'
