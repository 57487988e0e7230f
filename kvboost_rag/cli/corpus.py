"""The folder a store is kept in: what it was made with, its passages and their vectors.

Knows files and their forms; knows nothing of models or of the KV in ``kv/``. Every file appears whole or not at all
(written under another name, then renamed). Vectors are found by the text they are of, so files that were not written
together still fit: a passage without a vector gets one when documents are warmed again.

    store.json            format, model, dtype, kv_dtype, embedder, passage_tokens, and whose KV lies in which folder
    passages.jsonl        one passage a line: id, source, text, file, digest
    vectors.safetensors   "vectors" (passages, dimensions) float32 of length 1, ids in the header
    kv/                   the engine's cache_dir
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from kvboost_rag.cli.passages import Passage
from kvboost_rag.errors import KVBoostError

FORMAT = "kvboost-rag store 1"
SETTINGS, PASSAGES, VECTORS, KV = "store.json", "passages.jsonl", "vectors.safetensors", "kv"
PASSAGE_TOKENS = 512

Vectors = npt.NDArray[np.float32]


class StoreError(KVBoostError):
    """There is no store in a folder, or a file of it is broken; the message says which and what to do."""


@dataclass
class Settings:
    """What a store was made with. ``models``: the fingerprints of all models that have KV in it, and their names."""

    model: str = ""
    dtype: str = "auto"
    kv_dtype: str = "auto"
    embedder: str = ""
    passage_tokens: int = PASSAGE_TOKENS
    models: dict[str, str] = field(default_factory=dict)
    format: str = FORMAT


def read_settings(folder: Path) -> Settings:
    """Raises StoreError if there are none, or if they are broken or of another version."""
    path = folder / SETTINGS
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise StoreError(f"there is no store in {folder}: make one with kvboost-rag warm PATH") from error
    except (OSError, ValueError) as error:
        raise _broken(path, str(error)) from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise _broken(path, f"it does not say that its format is {FORMAT!r}")
    for each in fields(Settings):
        if each.name in found and type(found[each.name]) is not type(getattr(Settings(), each.name)):
            raise _broken(path, f"{each.name} is {found[each.name]!r}")
    return Settings(**{each.name: found[each.name] for each in fields(Settings) if each.name in found})


def is_store(folder: Path) -> bool:
    return (folder / SETTINGS).exists()


def _broken(path: Path, why: str) -> StoreError:
    return StoreError(f"{path} is broken ({why}); start again with kvboost-rag store clear, then warm")


class Corpus:
    """The passages of the store in ``folder``, and their vectors by passage id."""

    def __init__(
        self,
        folder: Path,
        settings: Settings | None = None,
        passages: Iterable[Passage] = (),
        vectors: Mapping[str, Vectors] | None = None,
    ):
        self.folder, self.settings = folder, settings or Settings()
        self.passages, self.vectors = list(passages), dict(vectors or {})

    @classmethod
    def open(cls, folder: Path) -> Corpus:
        """Raises StoreError."""
        return cls(folder, read_settings(folder), _read_passages(folder / PASSAGES), _read_vectors(folder / VECTORS))

    @classmethod
    def open_or_new(cls, folder: Path) -> Corpus:
        """Raises StoreError if the one that is there is broken."""
        return cls.open(folder) if is_store(folder) else cls(folder)

    @property
    def kv(self) -> Path:
        return self.folder / KV

    # Files

    def name_of(self, path: Path) -> str:
        """Of a file: from the folder that holds the store, if it lies there, so that both can be moved together."""
        whole = path.resolve()
        home = self.folder.resolve().parent
        return (whole.relative_to(home) if whole.is_relative_to(home) else whole).as_posix()

    def path_of(self, file: str) -> Path:
        return self.folder.resolve().parent / file

    def digests(self) -> dict[str, str]:
        """Of each file that has passages."""
        return {passage.file: passage.digest for passage in self.passages}

    def missing(self) -> list[str]:
        """Files that have passages and are there no more."""
        return [file for file in self.digests() if not self.path_of(file).is_file()]

    # Passages

    def texts(self) -> dict[str, str]:
        """By id, each once."""
        return {passage.id: passage.text for passage in self.passages}

    def replace(self, files: Iterable[str], passages: Iterable[Passage]) -> None:
        """Instead of all that these files had. What is new goes last."""
        gone = set(files)
        self.passages = [passage for passage in self.passages if passage.file not in gone] + list(passages)

    def without_vector(self) -> dict[str, str]:
        """Texts by id."""
        return {key: text for key, text in self.texts().items() if key not in self.vectors}

    def add_vectors(self, ids: Sequence[str], vectors: Vectors) -> None:
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        self.vectors.update(zip(ids, vectors / np.maximum(lengths, 1e-12), strict=True))

    def nearest(self, vector: Vectors, k: int) -> list[Passage]:
        """At most ``k`` passages of different texts, by cosine similarity, the nearest first."""
        known = {passage.id: passage for passage in reversed(self.passages) if passage.id in self.vectors}
        if not known:
            return []
        scores = np.stack([self.vectors[key] for key in known]) @ vector
        order = np.argsort(-scores, kind="stable")[:k]
        passages = list(known.values())
        return [passages[index] for index in order]

    # Writing

    def save(self) -> None:
        """Vectors first: those of passages that are not written yet do no harm."""
        self.folder.mkdir(parents=True, exist_ok=True)
        known = {passage.id: self.vectors[passage.id] for passage in self.passages if passage.id in self.vectors}
        rows = np.stack(list(known.values())) if known else np.empty((0, 0), dtype=np.float32)
        write(self.folder / VECTORS, save({"vectors": rows}, {"ids": json.dumps(list(known))}))
        lines = [json.dumps(passage._asdict()) + "\n" for passage in self.passages]
        write(self.folder / PASSAGES, "".join(lines).encode())
        self.save_settings()

    def save_settings(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write(self.folder / SETTINGS, json.dumps(asdict(self.settings), indent=1).encode())

    def delete(self) -> None:
        """Everything but ``kv/``."""
        for name in (SETTINGS, PASSAGES, VECTORS):
            (self.folder / name).unlink(missing_ok=True)
        with suppress(OSError):  # what else is there stays
            self.folder.rmdir()


def write(path: Path, data: bytes) -> None:
    """All of it under that name, or nothing. Raises OSError."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def _read_passages(path: Path) -> list[Passage]:
    found = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                found.append(_passage(json.loads(line), f"line {number}"))
    except FileNotFoundError:
        return []  # interrupted before there were any
    except (OSError, ValueError, TypeError) as error:
        raise _broken(path, f"line {len(found) + 1}: {error}") from error
    return found


def _passage(item: Any, where: str) -> Passage:
    passage = Passage(**item)
    if not all(isinstance(value, str) for value in passage):
        raise TypeError(f"{where} holds something else than strings")
    return passage


def _read_vectors(path: Path) -> dict[str, Vectors]:
    """What cannot be read is made again from the passages."""
    try:
        with safe_open(path, framework="np") as file:
            ids = json.loads((file.metadata() or {})["ids"])
            return dict(zip(ids, file.get_tensor("vectors"), strict=True))
    except (OSError, SafetensorError, KeyError, ValueError):
        return {}
