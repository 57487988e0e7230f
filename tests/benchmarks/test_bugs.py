"""``benchmarks/bug_localization.py`` and what it stands on: samples, conditions, resuming, tables and figures."""

from __future__ import annotations

import argparse
import ast
import json
import sysconfig
from collections import Counter
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from conftest import build_model

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
SOURCE = '''
def clamp(value, low, high):
    """Between low and high."""
    if not low:
        low = min(value, 0)
    if value < low and high:
        return low + 1
    return max(high, low, True)
'''


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def built() -> list[Any]:
    bugs = import_module("bugs")
    buckets = (bugs.Bucket("short", 100, 180, 6), bugs.Bucket("long", 180, 250, 2))
    return bugs.build(lambda text: len(text) // 3, buckets, num_questions=3)


@pytest.fixture
def groups() -> list[Any]:
    """Two short documents, three questions about each, and a longer one with two; tokens are three characters."""
    return built()


@pytest.fixture
def runner(tokenizer: Any) -> Any:
    sides = import_module("bug_sides")
    made = partial(sides.Runner, build_model(max_position_embeddings=4096), tokenizer)
    running = []

    def make(names: Any = tuple(sides.CONDITIONS), layout: str = "leading") -> Any:
        running.append(made(names, "64MB", layout))
        return running[-1]

    yield make
    for each in running:
        each.close()


def test_every_kind_of_bug_can_be_planted_and_parsed() -> None:
    mutations = import_module("bug_mutations")
    found = mutations.edits(SOURCE)
    assert {edit.kind for edit in found} == set(mutations.DESCRIPTIONS)
    for edit in found:
        lines = SOURCE.split("\n")
        lines[edit.line] = edit.applied(lines[edit.line])
        assert ast.dump(ast.parse("\n".join(lines))) != ast.dump(ast.parse(SOURCE))


@pytest.mark.parametrize(
    ("line", "kind", "changed"),
    [
        ("x = a <= b", "comparison", "x = a >= b"),
        ("x = a is not b", "comparison", "x = a is b"),
        ("x = a not in b", "comparison", "x = a in b"),
        ("x = a // b", "operator", "x = a * b"),
        ("x = (a and b)", "junction", "x = (a or b)"),
        ("x = f(a, g(b))", "arguments", "x = f(g(b), a)"),
        ("if a or b: pass", "condition", "if not (a or b): pass"),
        ("x = 'a' + b", "operator", None),
        ("x = f'{a + 1}'", "operator", None),
        ("x = 0x10", "number", None),
    ],
)
def test_bugs(line: str, kind: str, changed: str | None) -> None:
    found = [edit.applied(line) for edit in import_module("bug_mutations").edits(line) if edit.kind == kind]
    assert found == ([] if changed is None else [changed])


def test_samples_are_the_same_each_time_and_as_many_as_the_buckets_say(groups: list[Any]) -> None:
    bugs = import_module("bugs")
    assert bugs.data_hash(groups) == bugs.data_hash(built())
    assert Counter(group.bucket for group in groups for _ in group.questions) == {"short": 6, "long": 2}
    assert all((group.num_tokens < 180) == (group.bucket == "short") for group in groups)
    assert sum(bucket.num_samples for bucket in bugs.BUCKETS) == 1000


def test_one_line_of_four_is_not_the_librarys(groups: list[Any]) -> None:
    library = Path(sysconfig.get_path("stdlib"))
    for group in groups:
        ast.parse(group.document)
        original = [line.strip() for line in (library / group.source).read_text().expandtabs().split("\n")]
        assert len({(q.text, q.choices) for q in group.questions}) == len(group.questions)
        for question in group.questions:
            right = question.choices["ABCD".index(question.answer)]
            assert len(set(question.choices)) == 4
            if question.kind == "line":
                assert [choice for choice in question.choices if choice not in original] in ([right], [])
                assert all(group.document.count(choice) == 1 for choice in question.choices)


def test_a_limit_takes_whole_documents(groups: list[Any]) -> None:
    bugs = import_module("bugs")
    assert [len(group.questions) for group in bugs.limited(groups, 5)] == [3, 2]
    assert bugs.limited(groups, None) == bugs.limited(groups, 99) == groups
    assert sum(len(group.questions) for group in bugs.limited(groups, 2)) == 2


def test_a_document_stands_first_and_is_followed_by_its_question(groups: list[Any], runner: Any) -> None:
    sides, group = import_module("bug_sides"), groups[0]
    boost = runner(["BASELINE"]).any
    prompts = [sides.render(boost, group.document, group.questions[0], n, "leading") for n in (0, 1)]
    assert prompts[0] == prompts[1]
    assert prompts[0].documents == [group.document]
    assert prompts[0].text.split(group.document)[1].startswith("\n\n" + group.questions[0].text.split("\n")[0])
    assert "Answer:" in prompts[0].text
    varied = [sides.render(boost, group.document, group.questions[0], n, "preamble") for n in (0, 1)]
    assert varied[0].header() != varied[1].header()


def records_of(runner: Any, groups: list[Any]) -> list[dict[str, Any]]:
    measure, journal = import_module("bug_localization").measure, import_module("bug_journal").Journal(None)
    journal.open({"settings": {}}, resume=False)
    return measure(runner, groups, journal)


def test_later_questions_find_the_document_and_the_ingested_one_is_found_at_once(
    groups: list[Any], runner: Any
) -> None:
    records = records_of(runner(), groups)
    assert [record["number"] for record in records] == list(range(8))
    assert [record["first"] for record in records].count(True) == 3
    for record in records:
        sides, size = record["sides"], record["num_document_tokens"]
        assert sides["BASELINE"]["reuse_ratio"] == 0
        for name in ("PREFIX_CACHE", "CHUNK_REUSE"):  # what they reuse is exact here
            assert (sides[name]["num_exact_tokens"] > size) == (not record["first"])
            assert sides[name]["agrees"] and sides[name]["kl"] < 1e-4
        assert sides["INGESTED"]["num_approximate_tokens"] > 0.8 * size
        assert sides["INGESTED_FIRST"]["num_exact_tokens"] > 0.8 * size
        assert sides["INGESTED_FIRST"]["num_repaired_tokens"] == 0
        assert sides["INGESTED"]["num_repaired_tokens"] > 0 == sides["INGESTED_NONE"]["num_repaired_tokens"]
        assert all(side["ttft_seconds"] > 0 for side in sides.values())
    assert {record["began"] for record in records} == set(records[0]["sides"])


def test_behind_changing_preambles_a_prefix_cache_finds_nothing(groups: list[Any], runner: Any) -> None:
    records = records_of(runner(["BASELINE", "PREFIX_CACHE", "CHUNK_REUSE"], "preamble"), groups[:1])
    later = [record["sides"] for record in records if not record["first"]]
    assert later
    assert all(sides["PREFIX_CACHE"]["num_exact_tokens"] < records[0]["num_document_tokens"] for sides in later)
    assert all(sides["CHUNK_REUSE"]["num_approximate_tokens"] > 0 for sides in later)


def test_documents_are_warmed_as_many_at_a_time_as_fit(groups: list[Any], runner: Any) -> None:
    made = runner(["INGESTED"])
    boost = made.sides["ingested"].boost
    assert [len(shelf) for shelf in made.shelves(groups)] == [3]
    boost.engine.store.max_warmed_bytes = boost.estimate([groups[0].document, groups[1].document]).num_bytes
    assert sum(len(shelf) for shelf in made.shelves(groups)) == 3
    assert len(list(made.shelves(groups))) > 1


def arguments(path: Path, **changes: Any) -> argparse.Namespace:
    given = {"model": "shape:tiny", "device": "cpu", "dtype": "float32", "json": path, "limit": None, "questions": 3}
    given |= {"conditions": ["BASELINE", "CHUNK_REUSE"], "layout": "leading", "cache": "64MB", "memory": 0}
    return argparse.Namespace(**given | {"resume": False} | changes)


def test_a_stopped_run_goes_on(tmp_path: Path, groups: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark, sides = import_module("bug_localization"), import_module("bug_sides")
    monkeypatch.setattr(benchmark.bugs, "build", lambda *a, **k: groups)
    path, sample = tmp_path / "bugs.json", sides.Runner.sample

    def stopped(runner: Any, group: Any, index: int, number: int) -> Any:
        if number == len(groups[0].questions) + 1:
            raise KeyboardInterrupt
        return sample(runner, group, index, number)

    monkeypatch.setattr(sides.Runner, "sample", stopped)
    with pytest.raises(KeyboardInterrupt):
        benchmark.run(arguments(path))
    journal = path.with_suffix(".jsonl")
    assert len(journal.read_text().splitlines()) == 1 + len(groups[0].questions) + 1
    journal.write_text(journal.read_text() + '{"number": 7, "gro')  # cut off in the middle of a line
    monkeypatch.setattr(sides.Runner, "sample", sample)
    with pytest.raises(SystemExit, match="--resume"):
        benchmark.run(arguments(path))
    with pytest.raises(SystemExit, match="layout"):
        benchmark.run(arguments(path, resume=True, layout="preamble"))
    result = benchmark.run(arguments(path, resume=True))
    assert not journal.exists() and json.loads(path.read_text()) == json.loads(json.dumps(result))
    assert result["num_resumed"] == len(groups[0].questions)
    assert [record["number"] for record in result["records"]] == list(range(8))
    assert result["num_samples"] == 8 and result["num_cold"] == 3


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        benchmark = import_module("bug_localization")
        groups = built()
        patch.setattr(benchmark.bugs, "build", lambda *a, **k: groups)
        names = ["BASELINE", "PREFIX_CACHE", "CHUNK_REUSE", "INGESTED"]
        return benchmark.run(arguments(tmp_path_factory.mktemp("bugs") / "r.json", conditions=names))


def test_tables_and_figures(result: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figures, paper = import_module("bug_figures"), import_module("bug_paper")
    written = figures.draw(result, tmp_path / "figures", ["svg"])
    assert [path.name[:7] for path in written] == [f"figure{n}" for n in range(2, 8)]
    assert all(path.stat().st_size > 1000 for path in written)
    table = paper.table(result)
    assert "| accuracy (Table 2) | 99.1% / " in table and "TTFT, p95, ms (Table 3) | – / " in table
    assert len({line.count("|") for line in table.splitlines() if "|" in line}) == 1
    assert "CHUNK_REUSE" in import_module("bug_summary").show(result)


def test_intervals_and_ratios_are_those_of_the_documents(result: dict[str, Any]) -> None:
    summary, records = import_module("bug_summary"), result["records"]
    for record in records:
        for name, side in record["sides"].items():
            side["ttft_seconds"] = 0.4 if name == "BASELINE" or record["first"] else 0.1
    faster = summary.summary(records)["speedup"]["INGESTED"]
    assert faster["cold"]["of_means"] == pytest.approx(1)
    assert faster["warm"]["of_means"] == faster["warm"]["mean_of_ratios"] == pytest.approx(4)
    low, high = faster["all"]["of_means_interval"]
    assert low <= faster["all"]["of_means"] <= high
    assert summary.summary(records)["quality"]["BASELINE"]["agreement_interval"] == (1.0, 1.0)


def test_a_model_that_likes_one_letter_is_told_by_what_it_likes_more_than_usual() -> None:
    summary = import_module("bug_summary")

    def record(group: int, answer: str, scores: list[float], other: list[float]) -> dict[str, Any]:
        sides = {"BASELINE": {"scores": scores}, "INGESTED": {"scores": other}}
        return {"group": group, "answer": answer, "sides": sides}

    records = [
        record(0, "B", [-0.5, -1.0, -5.0, -5.0], [-0.1, -3.0, -5.0, -5.0]),
        record(1, "A", [-0.1, -3.0, -5.0, -5.0], [-0.1, -3.0, -5.0, -5.0]),
    ]
    assert summary._centred(records, "BASELINE") == ["B", "A"]
    assert summary._centred(records, "INGESTED") == ["A", "A"]
