"""KV in a byte a number (paper, section 4.5).

Knows that a code is a byte; everything else is ``kivi``'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvboost_rag.engine.codecs.kivi import KiviCodec


@dataclass(frozen=True)
class Int8Codec(KiviCodec):
    """256 levels a group: about half of float16's bytes."""

    name: ClassVar[str] = "int8"
    bits: ClassVar[int] = 8

    def pack(self, codes: torch.Tensor) -> torch.Tensor:
        return codes

    def unpack(self, packed: torch.Tensor, count: int, first: int = 0) -> torch.Tensor:
        return packed[first : first + count]
