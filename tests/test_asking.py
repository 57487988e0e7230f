"""Asking from an event loop: the same answers, and the loop goes on."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from conftest import document

from kvboost_rag import KVBoost, OptionError, PromptTooLongError
from kvboost_rag.report import GenerationResult
from kvboost_rag.stream import AsyncTextStream


def streams() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "kvboost-stream"]


@pytest.fixture
def asked(boost: KVBoost) -> Any:
    boost.warm([document(n) for n in range(3)], progress=False)
    return boost.prompt([document(2), document(0)], "what?")


async def test_answers_are_the_sequential_ones(boost: KVBoost, asked: Any) -> None:
    expected = boost.generate(asked, max_new_tokens=12)
    found = await boost.agenerate(asked, max_new_tokens=12)
    assert (found.text, found.finish_reason) == (expected.text, expected.finish_reason)
    assert found.report.num_document_hits == 2
    async with boost.astream(asked, max_new_tokens=12) as stream:
        assert "".join([piece async for piece in stream]) == expected.text
        assert stream.result.text == expected.text
    prompts = [asked, "Hello", document(1)]
    for many in (boost.agenerate_batch(prompts, max_new_tokens=5), boost.agenerate_many(prompts, max_new_tokens=5)):
        assert [r.text for r in await many] == [boost.generate(p, max_new_tokens=5).text for p in prompts]


async def test_sixteen_tasks_at_once(boost: KVBoost, asked: Any) -> None:
    prompts = [asked, "Hello", document(1), f"{document(0)} <|im_end|> and?"] * 4
    expected = [boost.generate(prompt, max_new_tokens=8).text for prompt in prompts]
    found = await asyncio.gather(*(boost.agenerate(prompt, max_new_tokens=8) for prompt in prompts))
    assert [result.text for result in found] == expected


async def test_the_loop_goes_on_while_text_is_generated(boost: KVBoost, asked: Any) -> None:
    """Each step of the work waits until the loop has ticked: were the loop blocked, it would wait for ever."""
    ticked = threading.Event()
    inner = boost.engine.lock.pass_on

    def pass_on() -> None:
        ticked.clear()
        assert ticked.wait(30)
        inner()

    boost.engine.lock.pass_on = pass_on

    async def ticker() -> None:
        while True:
            ticked.set()
            await asyncio.sleep(0.001)

    ticking = asyncio.create_task(ticker())
    result = await boost.agenerate(asked, max_new_tokens=5)
    ticking.cancel()
    assert result.report.num_new_tokens > 1


@pytest.mark.parametrize(
    ("prompt", "options", "error"),
    [
        ("x", {"temprature": 1}, OptionError),
        ("x " * 3000, {}, PromptTooLongError),
        (7, {}, TypeError),
        ("x", {"stop": ""}, OptionError),
    ],
)
async def test_errors_reach_the_reader(boost: KVBoost, prompt: Any, options: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        await boost.agenerate(prompt, **options)
    stream = boost.astream(prompt, **options)
    with pytest.raises(error):
        await anext(stream)
    assert [piece async for piece in stream] == []


async def test_an_error_in_the_middle_reaches_the_reader(boost: KVBoost, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(100))

    def pass_on() -> None:
        if next(calls) == 3:
            raise RuntimeError("in the middle")

    monkeypatch.setattr(boost.engine.lock, "pass_on", pass_on)
    with pytest.raises(RuntimeError, match="in the middle"):
        await boost.agenerate("Hello", max_new_tokens=50)
    assert (await boost.agenerate("Hello", max_new_tokens=2)).report.num_new_tokens == 2


async def test_cancelling_a_task_and_leaving_a_stream_free_the_engine(boost: KVBoost, asked: Any) -> None:
    async with boost.astream(asked, max_new_tokens=1000) as stream:
        async for _ in stream:
            break
    assert streams() == []
    task = asyncio.create_task(boost.agenerate(asked, max_new_tokens=1000))
    while not streams():
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await boost.agenerate("Hello", max_new_tokens=2)).report.num_new_tokens == 2
    assert streams() == []
    await stream.aclose()  # again
    with pytest.raises(RuntimeError, match="read to its end"):
        _ = stream.result


async def test_a_forgotten_stream_ends(boost: KVBoost, asked: Any) -> None:
    stream = boost.astream(asked, max_new_tokens=1000)
    await anext(stream)
    del stream
    for _ in range(30_000):
        if not streams():
            break
        await asyncio.sleep(0.001)
    assert streams() == []


def test_a_closed_loop_ends_the_work() -> None:
    started, cancelled = threading.Event(), threading.Event()

    def work(emit: Any, cancel: threading.Event) -> GenerationResult:
        started.set()
        assert cancelled.wait(30)
        emit("nobody hears")
        raise AssertionError("not reached")

    async def begin() -> AsyncTextStream:
        return AsyncTextStream(work)

    stream = asyncio.run(begin())
    assert started.wait(30)
    cancelled.set()
    stream._thread.join(30)
    assert not stream._thread.is_alive()


def test_an_async_stream_needs_a_running_loop(boost: KVBoost) -> None:
    with pytest.raises(RuntimeError):
        boost.astream("Hello")
