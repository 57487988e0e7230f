"""Run the notebooks and keep their outputs: what `make notebooks` does.

python notebooks/execute.py [NAME ...]
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent


def execute(path: Path, timeout_seconds: int = 600) -> nbformat.NotebookNode:
    """The notebook at ``path`` with fresh outputs. Raises CellExecutionError with the failing cell."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=timeout_seconds, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}
    ).execute()
    return notebook


def tidy(notebook: nbformat.NotebookNode) -> None:
    """Leave out what differs from run to run and nobody reads: progress bars, timings of cells."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr"]


if __name__ == "__main__":
    names = sys.argv[1:] or sorted(p.name for p in FOLDER.glob("*.ipynb"))
    for name in names:
        print(name, flush=True)
        done = execute(FOLDER / name)
        tidy(done)
        nbformat.write(done, FOLDER / name)
