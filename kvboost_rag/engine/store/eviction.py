"""Which entry a full store gives up first (paper, section 4.4.1). ``EVICTIONS`` is the one list of policies.

Knows what an entry says of itself and that it was used; knows nothing of budgets, nor of the entries that the store
protects whatever the policy: pinned ones, the last ones used, warmed documents from by-products.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from kvboost_rag.engine.store.base import Entry
from kvboost_rag.errors import OptionError


class Eviction(ABC):
    """A policy, one instance per store. The store calls it under its lock."""

    name: ClassVar[str]

    @abstractmethod
    def rank(self, entry: Entry) -> float:
        """The lowest goes first; among equals the least recently used one, which is the store's to know."""

    def used(self, entry: Entry) -> None:  # noqa: B027  # most policies keep no state
        """``entry`` was stored, or found (``num_uses`` counts that already)."""

    def evicted(self, entry: Entry) -> None:  # noqa: B027
        """``entry`` is about to go, to make room. Its rank still counts."""

    def forget(self, entry: Entry) -> None:  # noqa: B027
        """``entry`` is gone, for whatever reason: evicted, replaced or removed."""


class LruEviction(Eviction):
    """All are equal, so the least recently used goes first."""

    name: ClassVar[str] = "lru"

    def rank(self, entry: Entry) -> float:
        return 0.0


class ImportanceEviction(Eviction):
    """The paper's: the mean length of the keys (equation 6), in which the number of tokens does not count."""

    name: ClassVar[str] = "importance"

    def rank(self, entry: Entry) -> float:
        return entry.importance


class GdsfEviction(Eviction):
    """Greedy-Dual-Size-Frequency: what its bytes save, and how often, with a clock that lets old favourites age.

    Priority at each use: clock + uses * cost / bytes. Being stored is the first use; the cost is that of computing the
    KV again, in tokens. The clock rises to the priority of what is evicted, so an entry that is not used any more
    falls behind newer ones, however popular it was.
    """

    name: ClassVar[str] = "gdsf"

    def __init__(self) -> None:
        self.clock = 0.0
        self._priorities: dict[int, float] = {}  # id(entry) -> priority at its last use

    def rank(self, entry: Entry) -> float:
        return self._priorities[id(entry)]

    def used(self, entry: Entry) -> None:
        saved = entry.num_tokens / max(entry.num_bytes, 1)
        self._priorities[id(entry)] = self.clock + (1 + entry.num_uses) * saved

    def evicted(self, entry: Entry) -> None:
        self.clock = max(self.clock, self.rank(entry))

    def forget(self, entry: Entry) -> None:
        self._priorities.pop(id(entry), None)


EVICTIONS: dict[str, type[Eviction]] = {
    "lru": LruEviction,
    "importance": ImportanceEviction,
    "gdsf": GdsfEviction,
}


def resolve_eviction(name: str) -> Eviction:
    """A new instance of the policy of that name. Raises OptionError."""
    if not isinstance(name, str) or name not in EVICTIONS:
        raise OptionError.bad_value("eviction", name, f"one of {', '.join(map(repr, EVICTIONS))}")
    return EVICTIONS[name]()
