"""The notebooks run from top to bottom on the bundled model, and what is committed of them is what they give."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import nbformat
import pytest

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))
QUICK = {"01_langchain_rag"}
OF_A_MACHINE = re.compile(r"/(?:home|root|work|tmp|Users)/")  # paths begin so


@pytest.fixture(scope="module")
def execute() -> ModuleType:
    spec = importlib.util.spec_from_file_location("execute", NOTEBOOKS / "execute.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def is_picture(output: nbformat.NotebookNode) -> bool:
    data = output.get("data", {})
    return "image/png" in data or 'class="kvb"' in data.get("text/html", "")


@pytest.mark.real_model
@pytest.mark.parametrize(
    "path", [pytest.param(p, marks=[] if p.stem in QUICK else pytest.mark.slow, id=p.stem) for p in PATHS]
)
def test_notebook_runs_and_ends_with_a_picture(path: Path, execute: ModuleType) -> None:
    notebook = execute.execute(path)
    assert any(map(is_picture, notebook.cells[-1].outputs))


@pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem)
def test_the_committed_outputs_are_complete_and_tell_nothing_of_the_machine(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert any(map(is_picture, cells[-1].outputs))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
    assert not OF_A_MACHINE.search(str(outputs))
