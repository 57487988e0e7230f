"""A generation that is read while it runs.

Knows threads and queues; knows nothing of models. The work goes on in a thread of its own at its own pace; errors in
it are raised to the reader; closing the stream, or letting go of it, ends the work at the next token.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from types import TracebackType

from kvboost_rag.report import GenerationResult

Emit = Callable[[str], None]
Work = Callable[[Emit, threading.Event], GenerationResult]


class TextStream(Iterator[str]):
    """Iterates over text pieces as they become certain. ``result`` is there when the iteration has ended."""

    def __init__(self, work: Work):
        self._pieces: queue.SimpleQueue[str | BaseException | GenerationResult] = queue.SimpleQueue()
        self._cancelled = threading.Event()
        self._result: GenerationResult | None = None
        self._ended = False
        # The thread must not hold the stream itself: a forgotten stream could never be collected.
        self._thread = threading.Thread(
            target=_run, args=(work, self._pieces, self._cancelled), name="kvboost-stream", daemon=True
        )
        self._thread.start()

    def __next__(self) -> str:
        if self._ended:
            raise StopIteration
        item = self._pieces.get()
        if isinstance(item, str):
            return item
        self._ended = True
        if isinstance(item, GenerationResult):
            self._result = item
            raise StopIteration
        raise item

    @property
    def result(self) -> GenerationResult:
        """The finished generation. Raises RuntimeError while the stream has not been read to its end."""
        if self._result is None:
            raise RuntimeError("the stream has no result before it is read to its end")
        return self._result

    def close(self) -> None:
        """End the work and wait until it has let go of the engine. Safe to call twice."""
        self._cancelled.set()
        self._thread.join()
        self._ended = True

    def __enter__(self) -> TextStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self._cancelled.set()


def _run(
    work: Work, pieces: queue.SimpleQueue[str | BaseException | GenerationResult], cancelled: threading.Event
) -> None:
    try:
        pieces.put(work(pieces.put, cancelled))
    except BaseException as error:  # the reader's, not this thread's
        pieces.put(error)
