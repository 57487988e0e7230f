"""A lock that is handed over in the order it was asked for.

A plain lock lets the thread that releases it take it again at once, so a long generation would starve every other
request. Here one generation step, then the next thread's turn.
"""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType


class FairLock:
    """First come, first served; not reentrant."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._waiting: deque[threading.Event] = deque()
        self._taken = False

    def acquire(self) -> None:
        with self._mutex:
            if not self._taken:
                self._taken = True
                return
            turn = threading.Event()
            self._waiting.append(turn)
        try:
            turn.wait()
        except BaseException:  # Ctrl-C while waiting: leave the queue, or pass on a turn that has just come
            with self._mutex:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                    raise
            self.release()
            raise

    def release(self) -> None:
        with self._mutex:
            if self._waiting:
                self._waiting.popleft().set()  # stays taken: it is the next thread's now
            else:
                self._taken = False

    def pass_on(self) -> None:
        """Let everyone who waits go first, then carry on."""
        if self._waiting:
            self.release()
            self.acquire()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()
