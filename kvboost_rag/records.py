"""Results as they come out of an engine, for those who asked through something that returns text only.

Knows lists that are open for results; knows nothing of engines.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvboost_rag.report import GenerationResult


class Records:
    """Hands every finished result to all lists that are open. Safe from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: list[list[GenerationResult]] = []

    def add(self, result: GenerationResult) -> None:
        with self._lock:
            for each in self._open:
                each.append(result)

    @contextmanager
    def collected(self) -> Iterator[list[GenerationResult]]:
        """A list that is open until the context ends; it stays readable afterwards."""
        results: list[GenerationResult] = []
        with self._lock:
            self._open.append(results)
        try:
            yield results
        finally:
            with self._lock:
                self._open = [each for each in self._open if each is not results]
