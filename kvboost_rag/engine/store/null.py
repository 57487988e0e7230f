"""The store that keeps nothing: reuse switched off, without a condition anywhere else."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvboost_rag.engine.store.base import Entry, Put, Store, StoreStats
from kvboost_rag.engine.types import ChunkKeys, Fidelity


class NullStore(Store):
    tier: ClassVar[str] = "none"

    def find(self, keys: ChunkKeys, ids: npt.NDArray[np.int64], anywhere: bool = True) -> tuple[Entry, Fidelity] | None:
        return None

    def peek(self, content: bytes) -> Entry | None:
        return None

    def put(self, entry: Entry) -> Put:
        return Put(stored=False)

    def remove(self, content: bytes) -> int:
        return 0

    def clear(self) -> None:
        pass

    @property
    def warmed_capacity(self) -> int:
        return 0

    def stats(self) -> StoreStats:
        return StoreStats(0, 0, 0, 0, 0, 0, 0)
