"""A generation that is read while it runs, from a thread or from an event loop.

Knows threads, queues and event loops; knows nothing of models. The work goes on in a thread of its own at its own pace;
errors in it are raised to the reader; closing the stream, or letting go of it, ends the work at the next token.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType

from kvboost_rag.report import GenerationResult

Emit = Callable[[str], None]
Work = Callable[[Emit, threading.Event], GenerationResult]
Item = str | BaseException | GenerationResult  # pieces, and at the end one of the others


def deferred(make: Callable[[], Work]) -> Work:
    """Work that is also made where it is done."""
    return lambda emit, cancelled: make()(emit, cancelled)


class _Stream:
    """What both kinds of stream share: a thread at work, and how it ended."""

    def __init__(self, work: Work, post: Callable[[Item], None]):
        self._cancelled = threading.Event()
        self._result: GenerationResult | None = None
        self._ended = False
        # The thread must not hold the stream itself: a forgotten stream could never be collected.
        self._thread = threading.Thread(
            target=_run, args=(work, post, self._cancelled), name="kvboost-stream", daemon=True
        )
        self._thread.start()

    def _piece(self, item: Item) -> str | None:
        """A piece of text, or None at the end. Raises what the work raised."""
        if isinstance(item, str):
            return item
        self._ended = True
        if isinstance(item, BaseException):
            raise item
        self._result = item
        return None

    @property
    def result(self) -> GenerationResult:
        """The finished generation. Raises RuntimeError while the stream has not been read to its end."""
        if self._result is None:
            raise RuntimeError("the stream has no result before it is read to its end")
        return self._result

    def __del__(self) -> None:
        if hasattr(self, "_cancelled"):  # not if there was no event loop to be made in
            self._cancelled.set()


class TextStream(_Stream, Iterator[str]):
    """Iterates over text pieces as they become certain. ``result`` is there when the iteration has ended."""

    def __init__(self, work: Work):
        self._pieces: queue.SimpleQueue[Item] = queue.SimpleQueue()
        super().__init__(work, self._pieces.put)

    def __next__(self) -> str:
        piece = None if self._ended else self._piece(self._pieces.get())
        if piece is None:
            raise StopIteration
        return piece

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


class AsyncTextStream(_Stream, AsyncIterator[str]):
    """As ``TextStream`` for an event loop, which is never blocked: pieces are handed to it as they come, and no thread
    of its executor waits for them. Made inside a running loop, read in the same one."""

    def __init__(self, work: Work):
        self._pieces: asyncio.Queue[Item] = asyncio.Queue()
        super().__init__(work, _into(self._pieces, asyncio.get_running_loop()))

    async def __anext__(self) -> str:
        piece = None if self._ended else self._piece(await self._pieces.get())
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def aclose(self) -> None:
        """End the work and wait until it has let go of the engine. Safe to call twice."""
        self._cancelled.set()
        while not self._ended:
            item = await self._pieces.get()
            self._ended = not isinstance(item, str)
        self._thread.join()  # which has nothing left to do

    async def __aenter__(self) -> AsyncTextStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def _into(pieces: asyncio.Queue[Item], loop: asyncio.AbstractEventLoop) -> Callable[[Item], None]:
    def post(item: Item) -> None:
        loop.call_soon_threadsafe(pieces.put_nowait, item)

    return post


def _run(work: Work, post: Callable[[Item], None], cancelled: threading.Event) -> None:
    item: Item
    try:
        item = work(post, cancelled)
    except BaseException as error:  # the reader's, not this thread's
        item = error
    try:
        post(item)
    except RuntimeError:  # the reader's event loop is closed: nobody reads any more
        return
