"""SelectiveRecompute: a fixed window at each chunk seam (paper, section 4.6.1, algorithm 1).

The paper takes the last R = 16 tokens of each chunk. Those lack nothing that tokens before them do not lack too, and
recomputing them was measured to change nothing; the *first* tokens of a chunk, which stood in for the start of the
text when it was encoded alone, are the ones that help. So the side is an option and ``start`` its default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvboost_rag.engine.repair.base import Repair, RepairView, check_count, head_positions, tail_positions
from kvboost_rag.errors import OptionError


@dataclass(frozen=True)
class BoundaryRepair(Repair):
    """``num_tokens`` (the paper's R) at the ``start`` or ``end`` of every reused chunk."""

    name: ClassVar[str] = "boundary"
    side: str = "start"
    num_tokens: int = 16

    def __post_init__(self) -> None:
        if self.side not in ("start", "end"):
            raise OptionError.bad_value("side", self.side, "'start' or 'end'")
        check_count(self.num_tokens, "num_tokens")

    def select(self, view: RepairView) -> torch.Tensor:
        pick = head_positions if self.side == "start" else tail_positions
        return pick(view.spans, self.num_tokens)
