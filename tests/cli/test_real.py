"""The command as it is installed, with the bundled model and embedder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvboost_rag import sample

QUESTION = sample.demo_questions()[0]


def command(folder: Path, *arguments: str) -> Any:
    """What the command prints with --json."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVBOOST_")}
    if "KVBOOST_CACHE" in os.environ:
        environment["KVBOOST_CACHE"] = os.environ["KVBOOST_CACHE"]
    code = "import sys; from kvboost_rag.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments, "--json"], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.real_model
def test_a_folder_is_warmed_and_asked(tmp_path: Path) -> None:
    own = next(item for item in sample.questions() if item.question == QUESTION)
    passages = sample.passages()
    others = [name for name in passages if name != own.passage][:2]
    (tmp_path / "docs").mkdir()
    for name in (own.passage, *others):
        (tmp_path / "docs" / f"{name}.md").write_text(passages[name], encoding="utf-8")

    warmed = command(tmp_path, "warm", "docs", "--passage-tokens", "1024")
    assert (warmed["model"], warmed["embedder"]) == ("bundled", "bundled")
    assert warmed["warm"]["num_warmed"] == warmed["num_passages"] == 3
    again = command(tmp_path, "warm", "docs")
    assert (again["warm"]["num_warmed"], again["warm"]["num_already_warm"]) == (0, 3)

    asked = command(tmp_path, "ask", QUESTION, "--k", "3", "--max-new-tokens", "32")
    assert asked["report"]["num_document_hits"] == len(asked["report"]["documents"]) == 3
    assert asked["sources"][0]["file"] == f"docs/{own.passage}.md"
    assert own.answer in asked["answer"]
    checked = command(tmp_path, "store", "check")
    assert checked["ok"] and checked["num_files"] >= 3
