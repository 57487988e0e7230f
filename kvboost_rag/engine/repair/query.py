"""Recomputes what the question looks at: the default.

A first pass of the question over the reused cache shows which tokens it attends to; those are the ones whose missing
context can reach the answer. The first few tokens of every document go with them: they served as attention sinks when
the document was encoded. Why not the paper's key deviation (section 4.6.2): it spends the budget on tokens that
changed, whether or not the question ever reads them. Why the default has a most: a share grows with the prompt, and at
8K tokens takes twice the time, for fidelity that a caller who wants it can ask for (benchmarks/NOTES.md has both).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from kvboost_rag.engine.repair.base import Repair, RepairView, Reused, check_count, check_ratio, head_positions

USUAL_RATIO = 0.05
USUAL_MOST = 128  # tokens


@dataclass(frozen=True)
class QueryRepair(Repair):
    """The reused tokens the question attends to most: ``recompute_ratio`` of them, but at most ``max_tokens``.

    Without a ratio it is 5 %, and then at most 128 tokens unless ``max_tokens`` says otherwise; a ratio that is given
    is kept to, however many tokens that is. The first ``num_first_tokens`` of every chunk are among them as far as the
    budget goes. Raises OptionError.
    """

    name: ClassVar[str] = "query"
    needs_attention: ClassVar[bool] = True
    recompute_ratio: float | None = None
    num_first_tokens: int = 4
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.recompute_ratio is not None:
            check_ratio(self.recompute_ratio)
        check_count(self.num_first_tokens, "num_first_tokens")
        if self.max_tokens is not None:
            check_count(self.max_tokens, "max_tokens", ", or None")

    def with_ratio(self, ratio: float) -> QueryRepair:
        return replace(self, recompute_ratio=check_ratio(ratio))

    def num_selected(self, spans: Sequence[Reused]) -> int:
        ratio, most = self.recompute_ratio, self.max_tokens
        if ratio is None:
            ratio, most = USUAL_RATIO, USUAL_MOST if most is None else most
        share = round(ratio * sum(map(len, spans)))
        return share if most is None else min(share, most)

    def select(self, view: RepairView) -> torch.Tensor:
        budget = self.num_selected(view.spans)
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
