"""The map of the paper names files that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROWS = [
    line.split("|")
    for line in (ROOT / "docs/paper.md").read_text(encoding="utf-8").splitlines()
    if "`" in line and line.startswith("|")
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[1].strip()} {row[2].strip()}")
def test_every_section_has_its_code_and_its_test(row: list[str]) -> None:
    code, tests = (re.findall(r"`([^`]+\.py)`", cell) for cell in row[3:5])
    assert code
    assert tests
    assert all((ROOT / "kvboost_rag" / name).is_file() for name in code), code
    assert all((ROOT / "tests" / name).is_file() for name in tests), tests
