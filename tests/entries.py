"""Entries whose KV follows from their number, and what a folder holds of them, for the tests of the disk tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine.test_store import keys_of

from kvboost_rag.engine.codecs import CODECS
from kvboost_rag.engine.store import Entry
from kvboost_rag.engine.store.disk import DiskStore
from kvboost_rag.engine.store.entryfile import FileName
from kvboost_rag.engine.types import KV


def ids_of(number: int, num_tokens: int = 5) -> tuple[int, ...]:
    return tuple(range(number * 1000, number * 1000 + num_tokens))


def document(number: int, num_tokens: int = 5, dtype: torch.dtype = torch.float32, behind: bytes = b"", **flags: Any):
    """Entry number ``number``: always the same tokens and KV. Warmed unless ``flags`` say otherwise."""
    ids = ids_of(number, num_tokens)
    generator = torch.Generator().manual_seed(number)
    keys, values = (torch.randn(2, 3, num_tokens, 8, generator=generator).to(dtype) for _ in range(2))
    options = {"exact": False, "warmed": True, "importance": number / 3, "text": f"text {number}", **flags}
    return Entry(keys_of(ids, behind), np.array(ids, dtype=np.int64), KV(keys, values, position=7), **options)


def passing(number: int, **options: Any) -> Entry:
    return document(number, **{"exact": True, "warmed": False, "text": "", **options})


def same(found: Entry, put: Entry) -> bool:
    """Equal in everything that is kept, tensors bit for bit."""
    (tensors, facts), (expected, expected_facts) = (CODECS[e.packed.codec].dump(e.packed) for e in (found, put))
    facets = ("keys", "exact", "warmed", "pinned", "importance", "text")
    return (
        np.array_equal(found.ids, put.ids)
        and facts == expected_facts
        and tensors.keys() == expected.keys()
        and all(bits_equal(tensors[name], expected[name]) for name in expected)
        and all(getattr(found, name) == getattr(put, name) for name in facets)
    )


def bits_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def get(store: DiskStore, wanted: Entry) -> Entry | None:
    hit = store.load(wanted.keys, wanted.ids)
    return hit and hit[0]


def holds(store: DiskStore, wanted: Entry) -> bool:
    found = get(store, wanted)
    return found is not None and same(found, wanted)


def path_of(store: DiskStore, one: Entry) -> Path:
    return store.path / str(FileName.of(one))


def file_size(tmp_path: Path, **options: Any) -> int:
    store = DiskStore(tmp_path / "size")
    store.put(document(1, **options))
    return store.stats().used_bytes


def left_in(folder: Path) -> list[str]:
    return [p.name for p in folder.iterdir() if FileName.parse(p.name) is None]


def folder_bytes(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.iterdir())


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path / "kv")
