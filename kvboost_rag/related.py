"""Finds, among documents read so far, the one that shares most with a new one.

Knows token ids; knows nothing of text, models or KV. Documents are compared by their runs of five tokens, a fixed
quarter of which is kept (chosen by hash, so that equal runs are kept everywhere). That finds what matters for reading:
neighbouring chunks of one text, versions, quotations. It does not find documents that merely treat the same subject.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

import numpy as np

RUN_TOKENS = 5
KEPT_SHARE = 4  # one run in four
MIN_SHARED = 0.05  # of the new document's runs
MAX_PER_RUN = 16  # a run that stands in more documents than this says nothing about any

_WEIGHTS = np.array([0x9E3779B97F4A7C15 * (2 * i + 1) % 2**64 for i in range(RUN_TOKENS)], dtype=np.uint64)

Name = TypeVar("Name", bound=Hashable)


def runs(ids: Sequence[int]) -> frozenset[int]:
    """Hashes of the kept runs of ``ids``."""
    if len(ids) < RUN_TOKENS:
        return frozenset()
    windows = np.lib.stride_tricks.sliding_window_view(np.asarray(ids, dtype=np.uint64), RUN_TOKENS)
    mixed = (windows + np.uint64(1)) * _WEIGHTS  # wraps around, as hashes may
    hashes = np.bitwise_xor.reduce(mixed ^ (mixed >> np.uint64(29)), axis=1)
    hashes = (hashes ^ (hashes >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    kept = hashes[(hashes >> np.uint64(40)) % np.uint64(KEPT_SHARE) == 0]
    return frozenset(int(h) for h in kept)


class RelatedIndex(Generic[Name]):
    """Names of documents by what they say. Looking one up costs its own length, whatever the number of documents."""

    def __init__(self) -> None:
        self._names: dict[int, list[Name]] = {}

    def add(self, name: Name, found: frozenset[int]) -> None:
        for run in found:
            names = self._names.setdefault(run, [])
            if len(names) < MAX_PER_RUN and name not in names:
                names.append(name)

    def related(self, found: frozenset[int]) -> list[Name]:
        """Names of documents that share at least MIN_SHARED of ``found``, most first, earlier first among equals."""
        shared: Counter[Name] = Counter()
        for run in sorted(found):
            shared.update(self._names.get(run, ()))
        return [name for name, count in shared.most_common() if count >= MIN_SHARED * len(found)]

    def clear(self) -> None:
        self._names.clear()
