"""Recomputes what the question looks at: the default.

A first pass of the question over the reused cache shows which tokens it attends to; those are the ones whose missing
context can reach the answer. The first few tokens of every document go with them: they served as attention sinks when
the document was encoded. Why not the paper's key deviation (section 4.6.2): it spends the budget on tokens that
changed, whether or not the question ever reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from kvboost_rag.engine.repair.base import Repair, RepairView, Reused, check_ratio, head_positions
from kvboost_rag.errors import OptionError


@dataclass(frozen=True)
class QueryRepair(Repair):
    """The ``recompute_ratio`` of reused tokens the question attends to most, the first ``num_first_tokens`` of every
    chunk among them as far as the budget goes."""

    name: ClassVar[str] = "query"
    needs_attention: ClassVar[bool] = True
    recompute_ratio: float = 0.05
    num_first_tokens: int = 4

    def __post_init__(self) -> None:
        check_ratio(self.recompute_ratio)
        if not isinstance(self.num_first_tokens, int) or self.num_first_tokens < 0:
            raise OptionError.bad_value(
                "num_first_tokens", self.num_first_tokens, "a whole number of tokens, 0 or more"
            )

    def with_ratio(self, ratio: float) -> QueryRepair:
        return replace(self, recompute_ratio=check_ratio(ratio))

    def num_selected(self, spans: Sequence[Reused]) -> int:
        return round(self.recompute_ratio * sum(map(len, spans)))

    def select(self, view: RepairView) -> torch.Tensor:
        budget = round(self.recompute_ratio * view.num_reused_tokens)
        candidates = view.positions()
        if budget >= candidates.shape[0]:
            return candidates
        if budget == 0:
            return candidates[:0]
        assert view.attention is not None, "a strategy that needs attention is always given it"
        scores = view.attention[candidates].clone()
        first = head_positions(view.spans, min(self.num_first_tokens, budget // max(1, len(view.spans))))
        scores[torch.isin(candidates, first)] = float("inf")
        return candidates[scores.topk(budget).indices].sort().values
