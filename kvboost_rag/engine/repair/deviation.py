"""CacheBlendRecompute: recomputes the tokens whose keys have changed most (paper, section 4.6.2, algorithm 2).

The paper's probe is a forward pass over all cached tokens through all layers, after which most of what it computed is
thrown away: a full prefill in disguise. As in CacheBlend itself, the probe here stops at the check layer: tokens whose
keys deviate there are those that deviate in later layers too. It costs about one layer of a prefill, and the selected
tokens are then computed through all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from kvboost_rag.engine.repair.base import MEASURES, DeviationProbe, Repair, RepairView, Reused, check_ratio
from kvboost_rag.errors import OptionError


@dataclass(frozen=True)
class DeviationRepair(Repair):
    """The ``recompute_ratio`` of reused tokens whose keys at ``check_layer`` deviate most from fresh ones.

    ``measure``: ``"cosine"`` (the paper's, mean over heads) or ``"squared"`` (sum of squared differences). The paper
    advises a ratio of 0.25 for structured output (section 7.2). Where less than ``min_hit_ratio`` of the prompt is
    reused, the probe does not pay (section 7.4): what little is reused is then all recomputed.
    """

    name: ClassVar[str] = "deviation"
    recompute_ratio: float = 0.15
    check_layer: int = 1
    measure: str = "cosine"
    min_hit_ratio: float = 0.1

    def __post_init__(self) -> None:
        check_ratio(self.recompute_ratio)
        check_ratio(self.min_hit_ratio, "min_hit_ratio")
        if self.measure not in MEASURES:
            raise OptionError.bad_value("measure", self.measure, f"one of {', '.join(map(repr, MEASURES))}")
        if isinstance(self.check_layer, bool) or not isinstance(self.check_layer, int) or self.check_layer < 1:
            raise OptionError.bad_value(
                "check_layer", self.check_layer, "a layer, 1 or more: the keys of layer 0 depend on no other token"
            )

    @property
    def probe(self) -> DeviationProbe:
        return DeviationProbe(self.check_layer, self.measure, self.min_hit_ratio)

    def with_ratio(self, ratio: float) -> DeviationRepair:
        return replace(self, recompute_ratio=check_ratio(ratio))

    def num_selected(self, spans: Sequence[Reused]) -> int:
        return round(self.recompute_ratio * sum(map(len, spans)))

    def select(self, view: RepairView) -> torch.Tensor:
        candidates = view.positions()
        if view.deviation is None:
            return candidates
        budget = round(self.recompute_ratio * candidates.shape[0])
        return candidates[view.deviation[candidates].topk(budget).indices].sort().values
