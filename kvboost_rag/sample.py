"""A small corpus written for this project, to try things on: passages about an invented island, and questions.

Knows files; knows nothing of models. No model has read these texts before, so a right answer comes from the passages.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent / "data" / "demo"


class Question(NamedTuple):
    """``answer`` stands word for word in the passage named ``passage``."""

    question: str
    answer: str
    passage: str


def passages() -> dict[str, str]:
    """Texts by name, in the order of their names."""
    files = sorted((FOLDER / "passages").glob("*.md"))
    return {file.stem: file.read_text(encoding="utf-8").strip() for file in files}


def questions() -> list[Question]:
    """One for each of 24 passages."""
    return [Question(**item) for item in json.loads((FOLDER / "questions.json").read_text(encoding="utf-8"))]


def demo_questions() -> list[str]:
    """Those the bundled model answers rightly with the default repair."""
    asked: list[str] = json.loads((FOLDER / "demo_questions.json").read_text(encoding="utf-8"))
    return asked
