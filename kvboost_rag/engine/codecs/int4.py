"""KV in half a byte a number (paper, section 4.5).

Knows how two codes share a byte; everything else is ``kivi``'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvboost_rag.engine.codecs.kivi import KiviCodec


@dataclass(frozen=True)
class Int4Codec(KiviCodec):
    """16 levels a group: less than a third of float16's bytes."""

    name: ClassVar[str] = "int4"
    bits: ClassVar[int] = 4

    def pack(self, codes: torch.Tensor) -> torch.Tensor:
        """Byte i holds code i in its low half and code i + size in its high half; an odd count leaves one half zero."""
        size = self.packed_size(codes.numel())
        packed = codes[:size].clone()
        packed[: codes.numel() - size] |= codes[size:] << 4
        return packed

    def unpack(self, packed: torch.Tensor, count: int) -> torch.Tensor:
        size = packed.numel()
        codes = torch.empty(2 * size, dtype=torch.uint8, device=packed.device)
        torch.bitwise_and(packed, 15, out=codes[:size])
        torch.bitwise_right_shift(packed, 4, out=codes[size:])
        return codes[:count]
