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

    def unpack(self, packed: torch.Tensor, count: int, first: int = 0) -> torch.Tensor:
        size = packed.numel()
        num_low = min(max(size - first, 0), count)  # of the codes asked for, how many lie in low halves
        high = max(first - size, 0)
        codes = torch.empty(count, dtype=torch.uint8, device=packed.device)
        torch.bitwise_and(packed[first : first + num_low], 15, out=codes[:num_low])
        torch.bitwise_right_shift(packed[high : high + count - num_low], 4, out=codes[num_low:])
        return codes
