"""Memory in front of a disk: what memory cannot hold is found again, and so is what another process read.

Knows which tier is asked first and when entries move between the two; knows nothing of files, budgets or KV.
Warmed documents are written through at once, by-products (prompt headers, documents met in passing) when memory evicts
them. A hit on disk is brought back into memory, and served all the same if memory has no room for it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import ClassVar
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from kvboost_rag.engine.store.base import Entry, Put, Store, StoreStats, WarmText
from kvboost_rag.engine.store.disk import DiskStore
from kvboost_rag.engine.types import ChunkKeys, Fidelity


@dataclass(frozen=True)
class TieredStats(StoreStats):
    """Entries and bytes are those in memory; ``num_hits`` are those of both tiers. What is in memory may be on disk."""

    num_disk_hits: int
    num_disk_entries: int
    num_disk_warmed: int
    used_disk_bytes: int
    max_disk_bytes: int | None


class TieredStore(Store):
    """``memory`` over ``disk``. Safe from many threads: hits in memory never wait for the disk, others take turns."""

    tier: ClassVar[str] = "tiered"

    def __init__(self, memory: Store, disk: DiskStore):
        self.memory, self.disk = memory, disk
        self._lock = threading.RLock()  # so that nothing removed comes back from the other tier
        self._from_disk: WeakValueDictionary[int, Entry] = WeakValueDictionary()  # id(entry) -> entry, just loaded
        self._unsaved: WeakValueDictionary[bytes, Entry] = WeakValueDictionary()  # exact by-products by prefix
        self._num_misses = 0

    @property
    def identity(self) -> str:
        return self.disk.identity

    def find(self, keys: ChunkKeys, ids: npt.NDArray[np.int64], anywhere: bool = True) -> tuple[Entry, Fidelity] | None:
        """Memory, behind the prefix and then by content; then the disk in the same way (paper, section 4.2.1)."""
        hit = self.memory.find(keys, ids, anywhere)
        if hit is None:
            with self._lock:
                hit = self.memory.find(keys, ids, anywhere)  # another thread may have brought it while this one waited
                if hit is None:
                    return self._bring(keys, ids, anywhere)
        self._from_disk.pop(id(hit[0]), None)
        return hit

    def _bring(
        self, keys: ChunkKeys, ids: npt.NDArray[np.int64], anywhere: bool = True
    ) -> tuple[Entry, Fidelity] | None:
        hit = self.disk.load(keys, ids, anywhere)
        if hit is None:
            self._num_misses += 1
            return None
        entry, _ = hit
        entry.num_uses += 1
        self._from_disk[id(entry)] = entry
        self._spill(self.memory.put(entry).evicted)
        return hit

    def tier_of(self, entry: Entry) -> str:
        """Where an entry that was just found came from: "disk" when it had to be read, "memory" from then on."""
        return "disk" if self._from_disk.get(id(entry)) is entry else "memory"

    def peek(self, content: bytes) -> Entry | None:
        """The entry of that content, a warmed one if either tier has one.

        One that is on disk only comes from its header: no ids, and ``OnDisk`` in place of KV. Its flags and text hold.
        """
        here = self.memory.peek(content)
        if here is not None and here.warmed and not here.anchored:
            return here
        there = self.disk.peek(content)
        return there if here is None or (there is not None and there.warmed) else here

    def holds(self, keys: ChunkKeys) -> bool:
        return self.memory.holds(keys) or self.disk.holds(keys)

    def promote(self, content: bytes, ids: npt.NDArray[np.int64]) -> bool:
        """From disk into memory, if memory has no warmed entry of it."""
        here = self.memory.peek(content)
        if here is not None and here.warmed and not here.anchored:
            return False
        with self._lock:
            hit = self.disk.load(ChunkKeys(prefix=b"", content=content), ids)
            if hit is None:
                return False
            put = self.memory.put(hit[0])
            self._spill(put.evicted)
            return put.stored

    def put(self, entry: Entry) -> Put:
        """Keep ``entry`` in memory, and on disk if it is warmed. ``evicted``: what is in neither tier any more."""
        with self._lock:
            put = self.memory.put(entry)
            saved = entry.warmed and self.disk.put(entry)
            if put.stored and entry.exact and not entry.warmed:
                self._unsaved[entry.keys.prefix] = entry
            return Put(put.stored or saved, self._spill(put.evicted))

    def _spill(self, evicted: Iterable[Entry]) -> tuple[Entry, ...]:
        """Move to disk what memory evicted. Returns what the disk did not take."""
        return tuple(entry for entry in evicted if not self._on_disk(entry))

    def _on_disk(self, entry: Entry) -> bool:
        return self.disk.has(entry) or self.disk.put(entry)

    def remove(self, content: bytes) -> int:
        """Forget that content in both tiers. Returns how many entries the tier had that had more of them."""
        with self._lock:
            for prefix, entry in list(self._unsaved.items()):
                if entry.keys.content == content:
                    del self._unsaved[prefix]
            return max(self.memory.remove(content), self.disk.remove(content))

    def clear(self) -> None:
        """Forget everything in memory, and delete every file whose content this store wrote, read or peeked at.

        Other files in the folder stay (another model's, or never touched since it was opened), unless it is the disk
        store's own.
        """
        with self._lock:
            self._unsaved.clear()
            self.memory.clear()
            self.disk.clear()

    def close(self) -> None:
        """Write the exact by-products that are still in memory (prompt headers), so that the next process has them."""
        with self._lock:
            self._spill(list(self._unsaved.values()))
            self._unsaved.clear()
            self.memory.close()

    def texts(self) -> Iterator[WarmText]:
        """Warmed documents are on disk, whatever is in memory: from the headers of the files."""
        return self.disk.texts()

    @property
    def warmed_capacity(self) -> int:
        return max(self.memory.warmed_capacity, self.disk.capacity)

    def stats(self) -> TieredStats:
        with self._lock:
            memory, disk = self.memory.stats(), self.disk.stats()
            both = asdict(memory) | {
                "num_hits": memory.num_hits + disk.num_hits,
                "num_misses": self._num_misses,
                "num_mismatches": memory.num_mismatches + disk.num_mismatches,
            }
            return TieredStats(
                **both,
                num_disk_hits=disk.num_hits,
                num_disk_entries=disk.num_entries,
                num_disk_warmed=disk.num_warmed,
                used_disk_bytes=disk.used_bytes,
                max_disk_bytes=disk.max_bytes,
            )
