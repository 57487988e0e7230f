"""The notebooks run from top to bottom on the bundled model."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


@pytest.mark.real_model
@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda p: p.stem)
def test_notebook_runs_and_ends_with_a_picture(path: Path) -> None:
    spec = importlib.util.spec_from_file_location("execute", NOTEBOOKS / "execute.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    notebook = module.execute(path)
    assert any("image/png" in output.get("data", {}) for output in notebook.cells[-1].outputs)
