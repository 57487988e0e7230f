"""The demo says what is wrong, and its main job runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvboost_rag import demo, sample


def test_a_broken_cache_folder_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("KVBOOST_CACHE", str(blocked))
    assert demo.main([]) == 1
    error = capsys.readouterr().err
    assert "KVBOOST_CACHE" in error
    assert "Traceback" not in error


def test_a_wrong_ratio_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--recompute-ratio", "7"]) == 1
    assert "recompute_ratio=7.0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        demo.main(["--repair", "hope"])
    assert "invalid choice: 'hope'" in capsys.readouterr().err


def test_interrupting_leaves_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupted)
    assert demo.main([]) == 130


def test_the_corpus_is_what_the_demo_promises() -> None:
    passages, questions, shown = sample.passages(), sample.questions(), sample.demo_questions()
    assert len(passages) >= 24
    assert len(shown) >= 6
    assert set(shown) <= {item.question for item in questions}
    for item in questions:
        assert item.answer in passages[item.passage]


@pytest.mark.slow
@pytest.mark.real_model
def test_the_main_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--questions", "1", "--json", str(tmp_path / "out.json")]) == 0
    output = capsys.readouterr().out
    assert output.strip().splitlines()[-1].startswith("mean TTFT ratio (full / reuse): ")
    assert "LangChain chain: 'The captain of the Marigold is Josun Tarrow.' (documents hit 4/4" in output
    assert "LlamaIndex query engine: " in output
    (only,) = json.loads((tmp_path / "out.json").read_text())["questions"]
    assert only["num_document_hits"] == only["num_documents"] == 4
    assert only["num_reused_tokens"] > only["num_repaired_tokens"] > 0
