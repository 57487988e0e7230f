"""``benchmarks/quality.py`` and its plot, on a tiny random model: the same rows, in seconds."""

from __future__ import annotations

import json
import random
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
WORDS = ("river", "stone", "lamp", "keeper", "ferry", "bell", "mill", "otter", "glass", "canal", "barley", "storm")


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Questions in MuSiQue's form, short ones."""
    draw = random.Random(0)
    items = [
        {
            "ctxs": [{"title": f"T{q}{i}", "text": " ".join(draw.choices(WORDS, k=12)) + " "} for i in range(4)],
            "question": f"who {q}?",
            "answers": ["the keeper", "a keeper"],
        }
        for q in range(3)
    ]
    path = tmp_path / "questions.json"
    path.write_text(json.dumps(items), encoding="utf-8")
    return path


def measured(data: Path, *words: str) -> dict[str, Any]:
    quality = import_module("quality")
    small = ["--model", "shape:tiny", "--data", str(data), "--docs", "2", "--tokens", "4"]
    return quality.run(quality.parse([*small, *words]))


def line(result: dict[str, Any], row: str, kind: str = "questions") -> dict[str, Any]:
    (found,) = (each for each in result["rows"] if each["row"] == row and each["kind"] == kind)
    return found


def test_a_run_is_saved_resumed_and_drawn(data: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    options = ["--questions", "3", "--block", "2", "--json", str(path)]
    chosen = ["--rows", "alone, not rotated", "header, query 15", "primer, none", "first exact, none", "primer, full"]
    rows = import_module("rows")
    first = measured(data, *options, *chosen)
    assert json.loads(path.read_text()) == json.loads(json.dumps(first))
    assert {each["num_questions"] for each in first["rows"]} == {3}
    assert line(first, rows.REFERENCE)["ratio"] == 1
    full = line(first, "primer, full")
    assert full["kl"] == pytest.approx(0, abs=1e-6)
    assert full["same_top"] == full["identical"] == 1
    assert full["gold_diff"] == pytest.approx(0, abs=1e-4)
    assert line(first, "primer, none")["kl_p95"] > line(first, "primer, none")["kl"] > 1e-5
    assert line(first, "first exact, none")["kl"] < line(first, "primer, none")["kl"]
    assert line(first, rows.JOINED)["work"] == 1
    assert line(first, "primer, none")["work"] == line(first, "alone, not rotated, none")["work"] < 0.5

    quality = import_module("quality")
    calls: list[str] = []
    measure = quality.measure
    quality.measure = lambda *given: calls.append(given[2].name) or measure(*given)
    try:
        more = measured(data, *options, "--resume", *chosen, "primer int8, none")
    finally:
        quality.measure = measure
    assert len(calls) == 3  # the new row alone
    assert more["per_question"].items() >= first["per_question"].items()
    assert set(more["strategies"]) == set(first["strategies"]) | {"primer int8, none"}
    with pytest.raises(SystemExit, match="another run: num_tokens"):
        measured(data, *options, "--resume", *chosen, "--tokens", "5")

    import_module("quality_plot").main([str(path), "--out", str(tmp_path / "images/kl.png")])
    assert (tmp_path / "images/kl.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "images/kl.svg").read_text()


def test_gold_is_what_score_says(data: Path) -> None:
    """Measured over the cache that the generated tokens were run over, cut back: as if they never had been."""
    fidelity, quality, common = (import_module(name) for name in ("fidelity", "quality", "common"))
    from kvboost_rag import KVBoost
    from kvboost_rag.engine.repair import NoRepair

    arguments = quality.parse(["--model", "shape:tiny", "--data", str(data), "--docs", "2", "--questions", "1"])
    model, tokenizer = common.load(arguments)
    with KVBoost(model, tokenizer, break_even=False) as boost:
        (case,) = quality.cases_of(boost, arguments)
        assert tokenizer.decode(case.gold_ids) == "the keeper"
        boost.warm(case.prompt.documents, progress=False)
        full = fidelity.truth(boost, case.prompt, 5, case.gold_ids)
        found = fidelity.measure(boost, case.prompt, NoRepair(), full)
        for gold, options in ((full.gold, {"mode": "baseline"}), (found["gold"], {"repair": "none"})):
            assert gold == pytest.approx(float(boost.score(case.prompt, case.gold_ids, **options).mean()), abs=1e-5)
        again = boost.logits(case.prompt, full.ids, repair="none")
        assert found["kl"] == pytest.approx(float(fidelity.divergence(full.logits, again).mean()), abs=1e-6)
        boost.forget(case.prompt.documents)
        with pytest.raises(RuntimeError, match="not warm"):
            fidelity.measure(boost, case.prompt, NoRepair(), full)


def test_identical_answers_end_with_the_end_token() -> None:
    fidelity = import_module("fidelity")

    def logits(*ids: int) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor(ids), 8).float()

    class Engine:
        def extend(self, prefilled: Any, ids: Any) -> torch.Tensor:
            return logits(1, 2, 7)

    class Report:
        num_computed_tokens, num_prompt_tokens = 1, 4

    class Prefilled:
        report, ids = Report, [0]
        cache = type("Cache", (), {"get_seq_length": staticmethod(lambda: 1)})

    for num_answer, same in ((2, 1.0), (3, 0.0)):  # the third token differs
        full = fidelity.Truth((1, 2, 3), logits(1, 2, 3), num_answer, (), None)
        found = fidelity.compared(Engine(), Prefilled, full)
        assert (found["identical"], found["gold_diff"], found["work"]) == (same, None, 0.25)
        assert found["same_top"] == pytest.approx(2 / 3)


def test_kinds_of_prompts(data: Path) -> None:
    questions = import_module("questions")
    result = measured(data, "--questions", "2", "--kinds", "questions", "summary", "--rows", "primer, none")
    assert line(result, "primer, none", "questions")["gold_diff"] is not None
    assert line(result, "primer, none", "summary")["gold_diff"] is None
    assert [len(q["ids"]) for q in result["questions"]] == [4, 4, 4, 4]
    asked = questions.code(4, 4)
    assert asked == questions.code(4, 4)
    for question in asked:
        assert len(set(question.documents)) == 4
        assert all(len(text) > questions.CODE_CHARACTERS for text in question.documents)
        assert question.gold
        assert not any(question.question in text for text in question.documents)
    assert questions.of_kind("long", data, 1, 2)[0].gold is None
    assert questions.of_kind("questions", data, 1, 2)[0].gold == "the keeper"
    assert len(questions.own_corpus(30, 4)) == 24


def test_rows_are_told_apart_and_chosen() -> None:
    rows, encoded = import_module("rows"), import_module("encoded")
    everything = rows.SETS["all"]
    assert len({row.name for row in everything}) == len(everything)
    assert len({(row.encoding, row.repair) for row in everything}) == len(everything)
    assert {row.encoding for row in everything} == set(encoded.ENCODINGS)
    for name in rows.SETS:
        assert rows.choose(name, None)[0].name == rows.REFERENCE
    assert [row.name for row in rows.choose(None, ["primer, query 5 %, at most 128"])] == [
        rows.REFERENCE,
        "primer, query 5 %, at most 128 (default)",
    ]
    with pytest.raises(SystemExit, match="no row"):
        rows.choose("core", ["primer, nothing"])
    assert encoded.families(["primer", "alone", "primer int8", "not rotated"]) == [
        ["primer", "primer int8"],
        ["alone", "not rotated"],
    ]


def test_the_plot_reads_older_files(tmp_path: Path) -> None:
    plot = import_module("quality_plot")
    result = json.loads((BENCHMARKS / "results/quality_musique_smollm2.json").read_text(encoding="utf-8"))
    points = plot.points_of(result, "questions")
    lines = plot.strategies(points)
    query = lines["primer", "query"]
    assert [p.budget for p in query] == ["", "5 %", "15 %"]
    assert [p.work for p in query] == sorted(p.work for p in query)
    assert 0 < plot.floor_of(result, "questions") < 0.1
    with pytest.raises(SystemExit, match="no row"):
        plot.plot([result], tmp_path / "kl.png", ["first exact"])


@pytest.mark.parametrize("encoding", ["chunks of 32 alone", "chunks of 32 primed", "shared primer 16", "last read"])
def test_every_document_of_a_prompt_is_found(encoding: str, data: Path) -> None:
    """``measure`` refuses a prompt whose documents are not all there."""
    result = measured(data, "--questions", "1", "--rows", f"{encoding}, none")
    assert line(result, f"{encoding}, none")["work"] < 0.6
