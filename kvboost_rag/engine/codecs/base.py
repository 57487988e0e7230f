"""What a codec promises: KV in, something to keep, KV out.

Knows tensors and bytes; knows nothing of where the result is kept or which document it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import torch

from kvboost_rag.engine.types import KV


class Packed(Protocol):
    """KV as a codec keeps it. ``codec``: the name of the one that can read it."""

    @property
    def codec(self) -> str: ...

    @property
    def num_bytes(self) -> int: ...


class Codec(ABC):
    """Turns KV into something smaller and back. Stateless, safe from many threads."""

    name: ClassVar[str]
    bits: ClassVar[int | None]  # None: as computed
    position_free: ClassVar[bool] = False  # takes and gives keys without rotation (``KV.position`` None)

    @abstractmethod
    def encode(self, kv: KV) -> Packed:
        """What is kept of ``kv``. Shares nothing with it that the caller may still change."""

    @abstractmethod
    def decode(self, packed: Any, first: int = 0, last: int | None = None) -> KV:
        """The KV of layers [first, last) again, of all if not given. The caller must not write into it."""

    @abstractmethod
    def dump(self, packed: Any) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Contiguous tensors and facts to write to a file. ``load`` reads them back."""

    @abstractmethod
    def load(self, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, str]) -> Packed:
        """What ``dump`` gave. Raises KeyError or ValueError if something is missing or does not fit together."""
