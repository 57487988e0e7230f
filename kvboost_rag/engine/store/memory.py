"""The store in memory: two dictionaries, one byte budget, least recently used goes first (paper, section 4.4).

Knows entries and bytes; knows nothing of what the KV means. Warmed documents may fill all of the budget but the share
kept for by-products (prompt headers, documents met in passing); by-products live in what warmed documents leave, and
give way to them down to that share. So traffic cannot flush the corpus, and a full corpus cannot starve the header.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvboost_rag.engine.store.base import Entry, Put, Store, StoreStats
from kvboost_rag.engine.types import ChunkKeys, Fidelity


class MemoryStore(Store):
    """``max_bytes`` in all, of which warmed documents may hold ``warmed_share``."""

    tier: ClassVar[str] = "memory"

    def __init__(self, max_bytes: int, warmed_share: float = 0.9):
        self.max_bytes = max_bytes
        self.max_warmed_bytes = int(max_bytes * warmed_share)
        self._lock = threading.RLock()
        self._exact: dict[bytes, Entry] = {}
        self._content: dict[bytes, list[Entry]] = {}
        self._recency: OrderedDict[int, Entry] = OrderedDict()  # id(entry) -> entry, oldest use first
        self._used = {True: 0, False: 0}  # bytes by `warmed`
        self._num_hits = self._num_misses = self._num_mismatches = 0

    def find(self, keys: ChunkKeys, ids: npt.NDArray[np.int64]) -> tuple[Entry, Fidelity] | None:
        with self._lock:
            for entry, fidelity in (
                (self._exact.get(keys.prefix), Fidelity.EXACT),
                (self._best(keys.content), Fidelity.APPROXIMATE),
            ):
                if entry is None:
                    continue
                if not np.array_equal(entry.ids, ids):
                    self._num_mismatches += 1
                    continue
                entry.num_uses += 1
                self._recency.move_to_end(id(entry))
                self._num_hits += 1
                return entry, fidelity
            self._num_misses += 1
            return None

    def peek(self, content: bytes) -> Entry | None:
        with self._lock:
            return self._best(content)

    def _best(self, content: bytes) -> Entry | None:
        """Of several entries of one content, the one made to be reused anywhere."""
        entries = self._content.get(content, ())
        return max(entries, key=lambda e: (e.warmed, not e.exact), default=None)

    def put(self, entry: Entry) -> Put:
        with self._lock:
            replaced = self._replaced_by(entry)
            if any(old.warmed and not entry.warmed for old in replaced):
                return Put(stored=False)
            for old in replaced:
                self._drop(old)
            victims = self._victims(entry)
            if victims is None:
                for old in replaced:  # nothing is lost by an entry that does not fit
                    self._index(old)
                return Put(stored=False)
            for victim in victims:
                self._drop(victim)
            self._index(entry)
            return Put(stored=True, evicted=tuple(victims))

    def _replaced_by(self, entry: Entry) -> list[Entry]:
        """Entries that ``entry`` stands for from now on.

        An exact by-product (a header, a primer) replaces only its like: behind another prefix, or as a document, the
        same content is another entry.
        """
        found = [self._exact[entry.keys.prefix]] if entry.exact and entry.keys.prefix in self._exact else []
        if not _is_exact_by_product(entry):
            found += [old for old in self._content.get(entry.keys.content, ()) if not _is_exact_by_product(old)]
        return list({id(old): old for old in found}.values())

    def _victims(self, entry: Entry) -> list[Entry] | None:
        """What must go so that ``entry`` fits, or None if it cannot."""
        victims: list[Entry] = []
        used = dict(self._used)

        def evict(warmed: bool, allowed: int) -> None:
            for old in self._recency.values():
                if used[warmed] <= allowed:
                    return
                if old.warmed is warmed and not old.pinned:
                    victims.append(old)
                    used[warmed] -= old.num_bytes

        size = entry.num_bytes
        if entry.warmed:
            evict(warmed=True, allowed=self.max_warmed_bytes - size)
            evict(warmed=False, allowed=self.max_bytes - used[True] - size)
            fits = used[True] + size <= self.max_warmed_bytes
        else:
            evict(warmed=False, allowed=self.max_bytes - used[True] - size)
            fits = True
        return victims if fits and used[True] + used[False] + size <= self.max_bytes else None

    def _index(self, entry: Entry) -> None:
        if entry.exact:
            self._exact[entry.keys.prefix] = entry
        self._content.setdefault(entry.keys.content, []).append(entry)
        self._recency[id(entry)] = entry
        self._used[entry.warmed] += entry.num_bytes

    def _drop(self, entry: Entry) -> None:
        if self._exact.get(entry.keys.prefix) is entry:
            del self._exact[entry.keys.prefix]
        others = [old for old in self._content[entry.keys.content] if old is not entry]
        if others:
            self._content[entry.keys.content] = others
        else:
            del self._content[entry.keys.content]
        del self._recency[id(entry)]
        self._used[entry.warmed] -= entry.num_bytes

    def remove(self, content: bytes) -> int:
        with self._lock:
            gone = list(self._content.get(content, ()))
            for entry in gone:
                self._drop(entry)
            return len(gone)

    def clear(self) -> None:
        with self._lock:
            for entry in list(self._recency.values()):
                self._drop(entry)

    def stats(self) -> StoreStats:
        with self._lock:
            return StoreStats(
                num_entries=len(self._recency),
                num_warmed=sum(entry.warmed for entry in self._recency.values()),
                used_bytes=self._used[True] + self._used[False],
                max_bytes=self.max_bytes,
                num_hits=self._num_hits,
                num_misses=self._num_misses,
                num_mismatches=self._num_mismatches,
            )


def _is_exact_by_product(entry: Entry) -> bool:
    return entry.exact and not entry.warmed
