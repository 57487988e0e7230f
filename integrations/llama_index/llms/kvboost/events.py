"""LlamaIndex's callbacks and events around a stream of responses, and an end for all of it.

Knows LlamaIndex's callback decorators; knows nothing of what streams. The decorators let go of a stream they wrap but
do not close it: an engine would go on for a reader who has left, as long as a handler keeps the exception.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from typing import Any


def observed(
    callback: Callable[[], Any], llm: Any, prompt: Any, responses: Generator[Any], kwargs: Mapping[str, Any]
) -> Generator[Any]:
    """``responses`` as a method of ``llm`` decorated with ``callback`` would give them for ``prompt`` and ``kwargs``.
    Closed with the stream that is returned."""

    def method(llm: Any, prompt: Any, **kwargs: Any) -> Generator[Any]:
        return responses

    return _closing(callback()(method)(llm, prompt, **kwargs), responses)


async def aobserved(
    callback: Callable[[], Any], llm: Any, prompt: Any, responses: AsyncGenerator[Any], kwargs: Mapping[str, Any]
) -> AsyncGenerator[Any]:
    """As ``observed`` for an event loop."""

    async def method(llm: Any, prompt: Any, **kwargs: Any) -> AsyncGenerator[Any]:
        return responses

    return _aclosing(await callback()(method)(llm, prompt, **kwargs), responses)


def _closing(events: Generator[Any], responses: Generator[Any]) -> Generator[Any]:
    try:
        yield from events
    finally:
        responses.close()


async def _aclosing(events: AsyncGenerator[Any], responses: AsyncGenerator[Any]) -> AsyncGenerator[Any]:
    try:
        async for response in events:
            yield response
    finally:
        await events.aclose()
        await responses.aclose()
