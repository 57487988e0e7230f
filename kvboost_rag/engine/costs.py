"""Whether reuse pays: what it would cost against computing everything, by what both have cost so far.

Knows counts and seconds; knows nothing of tensors, stores or text. Reuse loses where little is reused (a tiny document
saves less than the extra pass that scores it costs), where much is repaired, or where loading is slow (the paper's
section 7.4 names the first). Nothing is run to find out: the seconds of a request's own steps, and of the documents
that were warmed before it, are the calibration. Until forwards of very different sizes were seen, reuse is taken to
pay.

A forward of ``n`` rows that see ``k`` keys each costs ``fixed + slope * n * (1 + k / k0)``: ``k0`` is the number of
keys at which attention takes as long as everything else, which the model's shape tells. The line is Theil and Sen's,
the median slope between the sizes seen, which one slow moment of the machine does not move.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Any

WINDOW = 9  # of each size and tier, the last ones count
SPREAD = 4  # the largest forward seen must be that many times the smallest
MIN_SAVED_SECONDS = 0.003  # a full prefill that would save less than this is not worth giving up a hit for


@dataclass(frozen=True)
class Work:
    """Rows of a forward, how many keys each sees on average, and through which share of the layers they run."""

    num_rows: int
    num_keys: float
    share: float = 1.0


@dataclass(frozen=True)
class Verdict:
    """Seconds expected."""

    reuse_seconds: float
    full_seconds: float

    @property
    def pays(self) -> bool:
        """Whether reuse is to be done."""
        return self.reuse_seconds - self.full_seconds <= MIN_SAVED_SECONDS


class Costs:
    """Learns from observations. Safe from many threads."""

    def __init__(self, balanced_keys: float, settle: Callable[[], None] = lambda: None):
        """``balanced_keys``: k0, the keys at which attention costs as much as the rest of a row. ``settle``: waits
        until the device has done what it was given."""
        self.balanced_keys, self._settle = balanced_keys, settle
        self._lock = threading.Lock()
        self._forwards: defaultdict[int, deque[tuple[float, float]]] = defaultdict(_window)  # by size: units, seconds
        self._loads: defaultdict[str, deque[float]] = defaultdict(_window)  # by tier: seconds a byte

    @contextmanager
    def forward(self, work: Work) -> Iterator[None]:
        """Observe the forward inside the context."""
        started = time.perf_counter()
        yield
        self._settle()
        self.forward_took(work, time.perf_counter() - started)

    @contextmanager
    def loading(self, moved_bytes: Mapping[str, int]) -> Iterator[None]:
        """Observe the laying out of KV, by tier, inside the context."""
        started = time.perf_counter()
        yield
        self._settle()
        self.loading_took(moved_bytes, time.perf_counter() - started)

    def forward_took(self, work: Work, seconds: float) -> None:
        if work.num_rows:
            with self._lock:
                self._forwards[work.num_rows.bit_length()].append((self._units(work), seconds))

    def loading_took(self, moved_bytes: Mapping[str, int], seconds: float) -> None:
        """What comes from several tiers at once tells nothing of either."""
        if len(moved_bytes) == 1:
            ((tier, num_bytes),) = moved_bytes.items()
            with self._lock:
                self._loads[tier].append(seconds / max(num_bytes, 1))

    def judge(self, passes: Sequence[Work], moved_bytes: Mapping[str, int], instead: Work) -> Verdict | None:
        """Reuse that takes ``passes`` and loads ``moved_bytes``, by tier, against the forward it saves; None until
        enough was observed."""
        line = self._fitted()
        with self._lock:
            a_byte = {tier: median(seen) for tier, seen in self._loads.items()}
        if line is None:
            return None
        fixed, slope = line
        reuse, full = (
            sum(work.share * (fixed + slope * self._units(work)) for work in works) for works in (passes, [instead])
        )
        loading = sum(a_byte.get(tier, 0.0) * num_bytes for tier, num_bytes in moved_bytes.items())
        return Verdict(reuse + loading, full)

    def full_prefill(self, num_tokens: int) -> float:
        """Seconds that computing a whole prompt would take; 0 until enough was observed."""
        line = self._fitted()
        return 0.0 if line is None else line[0] + line[1] * self._units(Work(num_tokens, (num_tokens + 1) / 2))

    def _fitted(self) -> tuple[float, float] | None:
        with self._lock:
            return _line([_medians(seen) for seen in self._forwards.values()])

    def _units(self, work: Work) -> float:
        return work.num_rows * (1 + work.num_keys / self.balanced_keys)


def _window() -> deque[Any]:
    return deque(maxlen=WINDOW)


def _medians(seen: Sequence[tuple[float, float]]) -> tuple[float, float]:
    units, seconds = zip(*seen, strict=True)
    return median(units), median(seconds)


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Fixed cost and slope through ``points`` (units, seconds), neither of them negative; None where the points lie too
    close together to tell."""
    if not points or max(points)[0] < SPREAD * min(points)[0]:
        return None
    slope = max(0.0, median((t - s) / (v - u) for (u, s), (v, t) in combinations(points, 2) if u != v))
    return max(0.0, median(seconds - slope * units for units, seconds in points)), slope
