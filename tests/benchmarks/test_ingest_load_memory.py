"""The benchmarks of ingestion, load, memory and of one request's steps run, and their results hang together.

Smallest sizes, a model of random weights; nothing is said about times.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
Run = Callable[..., dict[str, Any]]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """A benchmark as a module. They are scripts: each sees the others of its folder, no package."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.fixture
def run(script: Callable[[str], Any], tmp_path: Path) -> Run:
    """What a benchmark writes when it is called with these options."""

    def called(name: str, *options: object) -> dict[str, Any]:
        path = tmp_path / "new folder" / f"{name}.json"
        script(name).main(["--model", "shape:tiny", "--json", str(path), *map(str, options)])
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        assert {"command", "model", "dtype", "machine", "versions"} <= set(found)
        assert str(tmp_path) not in json.dumps(found)
        return found

    return called


def by_way(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["way"]: row for row in result["rows"]}


def test_ingestion(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    result = run("ingest", "--documents", 2, "--tokens", 80, "--rounds", 2, "--reload", 1)
    rows = by_way(result)
    assert list(rows) == ["prefill", "warm", "warm, no primer", "warm int8", "warm int4", "warm to disk"]
    assert rows["prefill"]["of_prefill"]["median"] == 1
    for row in rows.values():
        assert len(row["seconds"]) == 2
        assert row["tokens_per_second"]["min"] > 0
        assert row["of_prefill"]["min"] <= row["of_prefill"]["median"] <= row["of_prefill"]["max"]
        assert row["of_prefill_after_the_first"]["median"] > 0
    kept = {name: row["bytes_per_token"] for name, row in rows.items() if name != "prefill"}
    assert kept["warm"] == kept["warm to disk"] == rows["warm"]["raw_bytes_per_token"]
    assert kept["warm int4"] < kept["warm int8"] < kept["warm"]
    assert [reload["kv_dtype"] for reload in result["reload"]] == ["auto", "int8", "int4"]
    assert "bar 0.9" in capsys.readouterr().out


def test_reload_from_disk(run: Run) -> None:
    results = run("disk", "--documents", 1)["results"]
    assert [result["kv_dtype"] for result in results] == ["auto", "int8", "int4"]
    sizes = [result["documents"][0]["bytes"] for result in results]
    assert sizes == sorted(sizes, reverse=True)
    assert all(result["prefill_over_load"] > 0 for result in results)


def test_load(run: Run) -> None:
    options = ("--documents", 5, "--tokens", 48, "--requests", 4, "--rounds", 1, "--new", 3, "--threads", 1, 3)
    result = run("load", *options, "--tasks", 4, "--baseline", 1)
    rows = by_way(result)
    assert list(rows) == ["1 thread", "3 threads", "event loop, 4 tasks", "baseline"]
    assert result["num_different"] == 0
    for name, row in rows.items():
        assert row["num_requests"] == (1 if name == "baseline" else 4)
        assert 0 < row["ttft_seconds"]["median"] <= row["ttft_seconds"]["p95"]
        assert row["ttft_seconds"]["max"] <= row["latency_seconds"]["max"]
        assert row["requests_per_second"]["median"] > 0
    assert rows["1 thread"]["throughput_of_one_thread"]["median"] == 1
    assert rows["baseline"]["seconds_over_reuse"]["median"] > 0


def test_an_answer_that_differs_is_counted(script: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    load = script("load")
    answers = iter(range(100))
    monkeypatch.setattr(load.Load, "ask", lambda self, prompt, **options: load.Answer((next(answers),), 0.1, 0.2))
    options = [
        "--tokens",
        "48",
        "--requests",
        "2",
        "--rounds",
        "1",
        "--threads",
        "1",
        "--tasks",
        "0",
        "--baseline",
        "0",
    ]
    with pytest.raises(SystemExit, match="2 answers differ"):
        load.main(["--model", "shape:tiny", *options])


def test_memory(run: Run, script: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """One measurement in a process of its own, the others in this one: a process takes seconds to begin."""
    memory, common = script("memory"), script("common")
    apart = memory.apart

    def once(way: str, context: int, arguments: Any) -> dict[str, Any]:
        if way == "reuse":
            return apart(way, context, arguments)
        return memory.measure(*common.load(arguments), way, context, arguments.device, arguments.new)

    monkeypatch.setattr(memory, "apart", once)
    rows = by_way(run("memory", "--contexts", 640, "--new", 2))
    assert list(rows) == ["reuse", "reuse int8", "baseline"]
    for name, row in rows.items():
        assert 0 < row["num_prompt_tokens"] <= 638
        assert row["request_bytes"] == row["peak_bytes"] - row["before_bytes"] >= 0
        assert row["kv_buffer_bytes"] == (row["num_prompt_tokens"] + 2) * 1024  # 2 x 4 layers x 2 heads x 16 x 4 bytes
        counts = ("num_reused_tokens", "num_repaired_tokens", "num_live_tokens")
        assert sum(row[count] for count in counts) == row["num_prompt_tokens"]
        assert (row["num_reused_tokens"] > 0) == (row["document_bytes"] > 0) == (name != "baseline")
        assert row["store_bytes"] >= row["document_bytes"]
    assert rows["reuse int8"]["codecs"] == ["int8"]
    assert rows["reuse int8"]["document_bytes"] < rows["reuse"]["document_bytes"]


def test_a_measurement_that_fails_costs_a_line(run: Run, script: Callable[[str], Any], monkeypatch: Any) -> None:
    monkeypatch.setattr(script("memory"), "apart", lambda *arguments: 1 / 0)
    assert run("memory", "--contexts", 512)["rows"] == []


@pytest.mark.parametrize("repair", ["none", "query"])
def test_steps_of_a_request(run: Run, repair: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--context", 640, "--rounds", 1, "--repair", repair, "--top", 5]
    result = run("profile_request", *options, *(["--disk", "--kv-dtype", "int8"] if repair == "query" else []))
    steps = result["step_seconds"]
    assert (steps["scout pass"] > 0) == (result["num_repaired_tokens"] > 0) == (repair == "query")
    assert result["tiers"] == (["disk"] if repair == "query" else ["memory"])
    assert (steps["load"] > 0) == (repair == "query")
    assert 0 < steps["dequantise"] + steps["rotate"] <= steps["stitch"]
    whole = ("tokenise", "look up", "stitch", "scout pass", "fused forward", "first token and the rest")
    assert sum(steps[name] for name in whole) == pytest.approx(steps["ttft"])
    assert set(result["report_seconds"]) == {"lookup", "stitch", "repair", "forward", "ttft"}
    assert "step: fused forward" in "".join(result["operators"])
    assert "fused forward" in capsys.readouterr().out
