"""What a store promises: entries found by either of their two hashes.

Knows keys, token ids and bytes; knows nothing of models, prompts or rotation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from kvboost_rag.engine.codecs import Packed
from kvboost_rag.engine.types import ChunkKeys, Fidelity


@dataclass
class Entry:
    """The KV of one chunk and what is needed to find, trust and evict it (the paper's CachedChunk, section 5).

    ``exact`` says that the KV came from a full computation behind exactly the prefix of ``keys.prefix``; any other KV
    can only be found by its content. ``warmed`` entries were ingested on purpose; the rest are by-products of prompts.
    ``importance``: mean length of the keys (equation 6). ``text``: of a warmed document, with its largest part, so that
    a store opened again can tell what to look for in prompts; ``chunking``: how that text was cut. ``anchored``: a
    second version of a warmed document, for use behind its own prefix only; the other one stays beside it.
    """

    keys: ChunkKeys
    ids: npt.NDArray[np.int64]
    packed: Packed
    exact: bool
    warmed: bool = False
    pinned: bool = False
    importance: float = 0.0
    text: str = ""
    chunking: str = "document"
    anchored: bool = False
    num_uses: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def bound(self) -> bool:
        """Whether it is of use behind its own prefix only, so that it never stands for others of its content."""
        return self.exact and (self.anchored or not self.warmed)

    @property
    def num_bytes(self) -> int:
        return self.packed.num_bytes + self.ids.nbytes


class WarmText(NamedTuple):
    """What an entry says of the document it is of, or the largest part of. ``num_tokens``: of the entry."""

    text: str
    num_tokens: int
    chunking: str
    content: bytes


@dataclass(frozen=True)
class Put:
    """What storing an entry did. ``evicted`` entries made room; ``stored`` is False when no room could be made."""

    stored: bool
    evicted: tuple[Entry, ...] = ()


@dataclass(frozen=True)
class StoreStats:
    num_entries: int
    num_warmed: int
    used_bytes: int
    max_bytes: int
    num_hits: int
    num_misses: int
    num_mismatches: int  # same hash, other tokens: never served


class Store(ABC):
    """Entries by prefix hash and by content hash under one byte budget. Safe from many threads."""

    tier: ClassVar[str]

    @property
    def identity(self) -> str:
        """A name for what is kept here: another store has another, and so has this one after it was cleared."""
        return ""

    @abstractmethod
    def find(self, keys: ChunkKeys, ids: npt.NDArray[np.int64], anywhere: bool = True) -> tuple[Entry, Fidelity] | None:
        """The lookup cascade of the paper's section 4.2.1: prefix hash, then content hash.

        Without ``anywhere`` only what was computed behind exactly that prefix is looked for. A hit counts only if the
        entry's token ids equal ``ids``. Marks the entry as used.
        """

    @abstractmethod
    def peek(self, content: bytes) -> Entry | None:
        """The entry of that content, without marking it used or counting."""

    def holds(self, keys: ChunkKeys) -> bool:
        """Whether there is KV for exactly that prefix. Neither marks it used nor counts."""
        return False

    def promote(self, content: bytes, ids: npt.NDArray[np.int64]) -> bool:
        """Bring the entry of that content to where it is fastest. Returns whether it was brought from elsewhere."""
        return False

    @abstractmethod
    def put(self, entry: Entry) -> Put:
        """Keep ``entry``, evicting others if need be. A by-product never displaces a warmed entry."""

    @abstractmethod
    def remove(self, content: bytes) -> int:
        """Forget every entry of that content. Returns how many there were."""

    @abstractmethod
    def clear(self) -> None: ...

    def close(self) -> None:
        """Drop what is in memory. What lies on disk stays for the next process."""
        self.clear()

    def tier_of(self, entry: Entry) -> str:
        """Where an entry that was just found came from."""
        return self.tier

    def texts(self) -> Iterator[WarmText]:
        """Texts of all warmed documents, the last used one last."""
        return iter(())

    @property
    @abstractmethod
    def warmed_capacity(self) -> int:
        """Bytes that warmed documents may hold in all."""

    @abstractmethod
    def stats(self) -> StoreStats: ...
