"""The store in memory: two dictionaries, one byte budget, an exchangeable policy of eviction (paper, section 4.4).

Knows entries, bytes and who was used last; knows nothing of what the KV means, and leaves it to ``eviction`` which of
several entries may better be lost. Warmed documents may fill all of the budget but the share
kept for by-products (prompt headers, documents met in passing); by-products live in what warmed documents leave, and
give way to them down to that share. So traffic cannot flush the corpus, and a full corpus cannot starve the header.
"""

from __future__ import annotations

import threading
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvboost_rag.engine.store.base import Entry, Put, Store, StoreStats, WarmText
from kvboost_rag.engine.store.eviction import resolve_eviction
from kvboost_rag.engine.types import ChunkKeys, Fidelity
from kvboost_rag.errors import OptionError


class MemoryStore(Store):
    """``max_bytes`` in all, of which warmed documents may hold ``warmed_share``.

    ``eviction``: a name of ``EVICTIONS``. ``num_protected``: that many entries, the last ones used, go only where
    nothing else makes room, the least recently used first; pinned ones never go. Raises OptionError.

    Why gdsf: with room for 30 / 60 % of 50 documents of steady Zipf popularity it finds 47.3 / 78.5 % of those asked
    for, lru 44.8 / 74.3 %, importance 39.7 / 67.4 %. Where popularity is dealt out anew every 50 prompts lru is ahead
    by 0.2 / 1.7 points (``benchmarks/eviction.py``).
    """

    tier: ClassVar[str] = "memory"

    def __init__(self, max_bytes: int, warmed_share: float = 0.9, eviction: str = "gdsf", num_protected: int = 8):
        if not isinstance(num_protected, int) or num_protected < 0:
            raise OptionError.bad_value("num_protected", num_protected, "a whole number of entries, 0 or more")
        self.eviction = resolve_eviction(eviction)
        self.num_protected = num_protected
        self.max_bytes = max_bytes
        self.max_warmed_bytes = int(max_bytes * warmed_share)
        self._lock = threading.RLock()
        self._exact: dict[bytes, Entry] = {}
        self._content: dict[bytes, list[Entry]] = {}
        self._recency: OrderedDict[int, Entry] = OrderedDict()  # id(entry) -> entry, oldest use first
        self._used = {True: 0, False: 0}  # bytes by `warmed`
        self._num_hits = self._num_misses = self._num_mismatches = 0
        self._identity = uuid.uuid4().hex

    @property
    def identity(self) -> str:
        return self._identity

    def find(self, keys: ChunkKeys, ids: npt.NDArray[np.int64], anywhere: bool = True) -> tuple[Entry, Fidelity] | None:
        with self._lock:
            for entry, fidelity in (
                (self._exact.get(keys.prefix), Fidelity.EXACT),
                (self._best(keys.content) if anywhere else None, Fidelity.APPROXIMATE),
            ):
                if entry is None:
                    continue
                if not np.array_equal(entry.ids, ids):
                    self._num_mismatches += 1
                    continue
                entry.num_uses += 1
                self._recency.move_to_end(id(entry))
                self.eviction.used(entry)
                self._num_hits += 1
                return entry, fidelity
            self._num_misses += 1
            return None

    def holds(self, keys: ChunkKeys) -> bool:
        with self._lock:
            return keys.prefix in self._exact

    def texts(self) -> Iterator[WarmText]:
        with self._lock:
            entries = list(self._recency.values())
        return (WarmText(e.text, e.num_tokens, e.chunking, e.keys.content) for e in entries if e.text)

    def peek(self, content: bytes) -> Entry | None:
        with self._lock:
            return self._best(content)

    def _best(self, content: bytes) -> Entry | None:
        """Of several entries of one content, the one made to be reused anywhere."""
        entries = self._content.get(content, ())
        return max(entries, key=lambda e: (e.warmed and not e.anchored, not e.exact), default=None)

    def put(self, entry: Entry) -> Put:
        with self._lock:
            replaced = self._replaced_by(entry)
            if any(old.warmed and (not entry.warmed or (entry.bound and not old.bound)) for old in replaced):
                return Put(stored=False)
            victims = self._victims(entry, replaced)
            if victims is None:
                return Put(stored=False)
            for victim in victims:
                self.eviction.evicted(victim)
            for gone in replaced + victims:
                self._drop(gone)
            self._index(entry)
            return Put(stored=True, evicted=tuple(victims))

    def _replaced_by(self, entry: Entry) -> list[Entry]:
        """Entries that ``entry`` stands for from now on.

        What is bound to its prefix (a header, a primer, a second version) replaces only its like: behind another
        prefix, or as a document for any place, the same content is another entry.
        """
        found = [self._exact[entry.keys.prefix]] if entry.exact and entry.keys.prefix in self._exact else []
        if not entry.bound:
            found += [old for old in self._content.get(entry.keys.content, ()) if not old.bound]
        return list({id(old): old for old in found}.values())

    def _victims(self, entry: Entry, replaced: list[Entry]) -> list[Entry] | None:
        """What must go, besides ``replaced``, so that ``entry`` fits, or None if it cannot. Changes nothing."""
        victims: list[Entry] = []
        used = dict(self._used)
        for old in replaced:
            used[old.warmed] -= old.num_bytes

        def evict(warmed: bool, allowed: int) -> None:
            if used[warmed] <= allowed:
                return  # the usual case: no order is worked out
            for old in self._in_order(warmed, spared=replaced):
                victims.append(old)
                used[warmed] -= old.num_bytes
                if used[warmed] <= allowed:
                    return

        size = entry.num_bytes
        if entry.warmed:
            evict(warmed=True, allowed=self.max_warmed_bytes - size)
            evict(warmed=False, allowed=self.max_bytes - used[True] - size)
            fits = used[True] + size <= self.max_warmed_bytes
        else:
            evict(warmed=False, allowed=self.max_bytes - used[True] - size)
            fits = True
        return victims if fits and used[True] + used[False] + size <= self.max_bytes else None

    def _in_order(self, warmed: bool, spared: list[Entry]) -> list[Entry]:
        """Who may go, first to last: by rank, then the protected ones. Sorting is stable: equals go by last use."""
        by_last_use = list(self._recency.values())
        num_free = max(len(by_last_use) - self.num_protected, 0)
        never = {id(old) for old in spared}
        free, protected = (
            [old for old in part if old.warmed is warmed and not old.pinned and id(old) not in never]
            for part in (by_last_use[:num_free], by_last_use[num_free:])
        )
        return sorted(free, key=self.eviction.rank) + protected

    def _index(self, entry: Entry) -> None:
        if entry.exact:
            self._exact[entry.keys.prefix] = entry
        self._content.setdefault(entry.keys.content, []).append(entry)
        self._recency[id(entry)] = entry
        self._used[entry.warmed] += entry.num_bytes
        self.eviction.used(entry)

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
        self.eviction.forget(entry)

    def remove(self, content: bytes) -> int:
        with self._lock:
            gone = list(self._content.get(content, ()))
            for entry in gone:
                self._drop(entry)
            return len(gone)

    def clear(self) -> None:
        with self._lock:
            self._identity = uuid.uuid4().hex
            for entry in list(self._recency.values()):
                self._drop(entry)

    @property
    def warmed_capacity(self) -> int:
        return self.max_warmed_bytes

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
