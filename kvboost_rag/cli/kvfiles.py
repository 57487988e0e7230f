"""The KV files of a store: how many, whether they can be read, and how to get rid of them. No model is needed.

Knows the folder ``kv/``, the engine's file names and files; knows nothing of passages or engines. Each model has a
folder of its own in it, named by the beginning of its fingerprint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MODEL_FOLDER = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True)
class Usage:
    """One model's folder. ``name``: of the folder, the first 16 digits of the model's fingerprint."""

    name: str
    num_files: int
    num_bytes: int


def folders(kv: Path) -> list[Path]:
    """One for each model."""
    if not kv.is_dir():
        return []
    return sorted(path for path in kv.iterdir() if path.is_dir() and MODEL_FOLDER.fullmatch(path.name))


def usage(kv: Path) -> list[Usage]:
    """What the names and sizes say; no file is opened."""
    found = []
    for folder in folders(kv):
        sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
        found.append(Usage(folder.name, len(sizes), sum(sizes)))
    return found


def files(folder: Path) -> list[Path]:
    from kvboost_rag.engine.store.entryfile import FileName

    return sorted(path for path in folder.iterdir() if FileName.parse(path.name) is not None)


def fault(path: Path) -> str:
    """What is wrong with a file, all of it read; empty if nothing is."""
    from kvboost_rag.engine.store import entryfile

    try:
        entryfile.read(path)
    except (OSError, MemoryError, entryfile.BrokenFileError) as error:
        return str(error) or type(error).__name__
    return ""


def forget(kv: Path, texts: Iterable[str]) -> int:
    """Delete the KV of these documents, every model's. Returns the number of files.

    Files that do not tell their text go with the one of the same content that does.
    """
    from kvboost_rag.engine.store.entryfile import FileName

    wanted = set(texts)
    num_deleted = 0
    for folder in folders(kv) if wanted else []:
        names = {path: FileName.parse(path.name) for path in files(folder)}
        contents = {name.content for path, name in names.items() if name and _text(path) in wanted}
        for path, name in names.items():
            if name and name.content in contents:
                path.unlink(missing_ok=True)
                num_deleted += 1
    return num_deleted


def _text(path: Path) -> str | None:
    from kvboost_rag.engine.store import entryfile

    try:
        return entryfile.read_header(path).text or None
    except (OSError, MemoryError, entryfile.BrokenFileError):
        return None


def clear(kv: Path) -> int:
    """Delete every KV file, and folders that are empty then. Returns the number of files."""
    num_deleted = 0
    for folder in folders(kv):
        for path in _own(folder):
            path.unlink(missing_ok=True)
            num_deleted += path.suffix == ".safetensors"
        with suppress(OSError):  # what else is there stays
            folder.rmdir()
    with suppress(OSError):
        kv.rmdir()
    return num_deleted


def _own(folder: Path) -> Iterator[Path]:
    from kvboost_rag.engine.store.disk import IDENTITY
    from kvboost_rag.engine.store.folder import TEMPORARY

    yield from files(folder)
    yield from (path for path in folder.iterdir() if path.name == IDENTITY or path.name.endswith(TEMPORARY))
