"""What a codec promises: KV in, something to keep, KV out.

Knows tensors and bytes; knows nothing of where the result is kept or which document it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Protocol

from kvboost_rag.engine.types import KV


class Packed(Protocol):
    """KV as a codec keeps it."""

    @property
    def num_bytes(self) -> int: ...


class Codec(ABC):
    """Turns KV into something smaller and back. Stateless, safe from many threads."""

    name: ClassVar[str]
    bits: ClassVar[int | None]  # None: as computed

    @abstractmethod
    def encode(self, kv: KV) -> Packed:
        """What is kept of ``kv``. Shares nothing with it that the caller may still change."""

    @abstractmethod
    def decode(self, packed: Packed) -> KV:
        """The KV again. The caller must not write into it."""
