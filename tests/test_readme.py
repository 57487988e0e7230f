"""The README tells the truth about the files, and its Python uses public names. `test_docs.py` runs it."""

from __future__ import annotations

import ast
import re

import pages
from pages import ROOT

README = pages.README.read_text(encoding="utf-8")


def tree_paths() -> list[str]:
    """Paths named in the file tree, read off its indentation."""
    block = README.split("## File tree")[1].split("```")[1]
    folders: list[tuple[int, str]] = []
    paths = []
    for line in block.strip("\n").splitlines():
        indent = len(line) - len(line.lstrip())
        names = re.split(r"\s{2,}", line.strip())[0].split()
        folders = [f for f in folders if f[0] < indent]
        parent = "".join(name for _, name in folders)
        paths += [parent + name for name in names]
        if names[0].endswith("/"):
            folders.append((indent, names[0]))
    return paths


def test_every_path_in_the_file_tree_exists() -> None:
    paths = tree_paths()
    assert len(paths) > 30
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_module_of_the_package_is_in_the_file_tree() -> None:
    named = README.split("## File tree")[1].split("```")[1]
    missing = [
        p.name for p in (ROOT / "kvboost_rag").glob("*.py") if p.name not in named and not p.name.startswith("_")
    ]
    engine = (p.name for p in (ROOT / "kvboost_rag/engine").glob("*.py") if p.stem != "__init__")
    missing += [name for name in engine if name not in named]
    for family in ("codecs", "store", "repair"):
        line = next(line for line in named.splitlines() if line.strip().startswith(f"{family}/"))
        stems = {p.stem for p in (ROOT / "kvboost_rag/engine" / family).glob("*.py")} - {"__init__"}
        missing += [stem for stem in stems if not re.search(rf"\b{stem}\b", line)]
    assert missing == []


def test_python_blocks_parse_and_use_public_names() -> None:
    import kvboost_rag

    blocks = pages.python_blocks(pages.README)
    assert blocks
    for block in blocks:
        for node in ast.walk(ast.parse(block.text)):
            if isinstance(node, ast.ImportFrom) and node.module == "kvboost_rag":
                assert {alias.name for alias in node.names} <= set(kvboost_rag.__all__)


def test_the_strategies_table_names_every_strategy() -> None:
    from kvboost_rag import REPAIRS

    table = README.split("## Strategies")[1].split("## Limits")[0]
    assert set(re.findall(r'^\| `"(\w+)"`', table, flags=re.MULTILINE)) == set(REPAIRS)
