"""What a repair strategy promises: given what was reused, which tokens to recompute.

Knows spans of positions and, if it asked for it, how much the question attends to each; knows nothing of models or
caches. Choosing is all a strategy does: executing the choice is the fused forward's job (``engine/forward.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvboost_rag.errors import OptionError


@dataclass(frozen=True)
class Reused:
    """Tokens [start, end) of the prompt whose KV was reused approximately."""

    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class RepairView:
    """All a strategy may look at.

    ``attention``: (num_prompt_tokens,) float32, how much the question attends to each position (the largest
    probability of any head and question token, summed over layers); None unless the strategy ``needs_attention``.
    ``deviation``: (num_prompt_tokens,) float32, how far the reused key of each position is from a fresh one at the
    strategy's check layer; None unless it asks for a ``probe``, and where that was not worth it.
    """

    spans: Sequence[Reused]
    attention: torch.Tensor | None = None
    deviation: torch.Tensor | None = None

    @property
    def num_reused_tokens(self) -> int:
        return sum(len(span) for span in self.spans)

    def positions(self) -> torch.Tensor:
        """Every approximately reused position, ascending, (num_reused_tokens,) int64."""
        return _join([torch.arange(span.start, span.end) for span in self.spans])


@dataclass(frozen=True)
class DeviationProbe:
    """Compare reused keys with fresh ones at ``layer`` by ``measure``, if at least ``min_hit_ratio`` of the prompt is
    reused."""

    layer: int
    measure: str
    min_hit_ratio: float


# How far keys (rows, heads, head_dim) are from others: (rows,) float32
MEASURES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cosine": lambda old, new: 1 - torch.cosine_similarity(old, new, dim=-1).mean(dim=-1),
    "squared": lambda old, new: (old - new).square().sum(dim=(-1, -2)),
}


class Repair(ABC):
    """A strategy. Subclasses are frozen dataclasses; each field is an option."""

    name: ClassVar[str]
    needs_attention: ClassVar[bool] = False
    wanted: ClassVar[bool] = False  # whatever it costs

    @property
    def probe(self) -> DeviationProbe | None:
        """The measurement of deviation that the strategy wants to see, if any."""
        return None

    @abstractmethod
    def select(self, view: RepairView) -> torch.Tensor:
        """Positions to recompute: ascending, unique int64, each inside one of ``view.spans``."""

    def num_selected(self, spans: Sequence[Reused]) -> int:
        """How many positions of ``spans`` will be recomputed, told before anything was measured."""
        return int(self.select(RepairView(spans)).shape[0])

    def with_ratio(self, ratio: float) -> Repair:
        """The same strategy recomputing ``ratio`` (0 to 1) of the reused tokens.

        Raises OptionError where the strategy's choice is not a matter of a ratio.
        """
        raise OptionError(
            f"recompute_ratio={ratio!r} does not apply to repair={self.name!r}; it applies to 'query' and 'deviation'"
        )


def check_ratio(ratio: float, option: str = "recompute_ratio") -> float:
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio <= 1:
        raise OptionError.bad_value(option, ratio, "a number from 0 to 1")
    return float(ratio)


def check_count(count: int, option: str, otherwise: str = "") -> None:
    """``otherwise``: what the option takes besides."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise OptionError.bad_value(option, count, f"a whole number of tokens, 0 or more{otherwise}")


def _join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(parts)) if parts else torch.empty(0, dtype=torch.int64)


def head_positions(spans: Sequence[Reused], count: int) -> torch.Tensor:
    """The first ``count`` positions of every span, ascending."""
    return _join([torch.arange(span.start, min(span.start + count, span.end)) for span in spans])


def tail_positions(spans: Sequence[Reused], count: int) -> torch.Tensor:
    """The last ``count`` positions of every span, ascending."""
    return _join([torch.arange(max(span.end - count, span.start), span.end) for span in spans])
