"""TextStream: pieces in order, errors to the reader, and no work goes on behind a stream nobody reads."""

from __future__ import annotations

import gc
import threading
import time

import pytest

from kvboost_rag.engine.types import Report
from kvboost_rag.report import GenerationResult
from kvboost_rag.stream import Emit, TextStream

PATIENCE = 10  # seconds after which a test gives up waiting for another thread


def result(text: str = "", reason: str = "stop") -> GenerationResult:
    return GenerationResult(text, reason, Report())


class Worker:
    """Work that emits ``pieces`` and, if it ``lasts``, goes on until it is cancelled."""

    def __init__(self, *pieces: str, lasts: bool = False, error: BaseException | None = None):
        self.pieces, self.lasts, self.error = pieces, lasts, error
        self.cancelled, self.ended = threading.Event(), False

    def __call__(self, emit: Emit, cancelled: threading.Event) -> GenerationResult:
        self.cancelled = cancelled
        for piece in self.pieces:
            emit(piece)
        if self.lasts:
            assert cancelled.wait(PATIENCE)
            time.sleep(0.02)  # letting go takes a moment: close() has to wait for it
        self.ended = True
        if self.error is not None:
            raise self.error
        return result("".join(self.pieces), "cancelled" if cancelled.is_set() else "stop")


def test_pieces_come_in_order_and_the_result_behind_them():
    stream = TextStream(Worker("a", "b", "", "c"))
    assert list(stream) == ["a", "b", "", "c"]
    assert stream.result == result("abc")


def test_pieces_can_be_read_while_the_work_goes_on():
    with TextStream(Worker("a", "b", lasts=True)) as stream:
        assert [next(stream), next(stream)] == ["a", "b"]


def test_there_is_no_result_before_the_end():
    stream = TextStream(Worker("a"))
    with pytest.raises(RuntimeError, match="read to its end"):
        _ = stream.result
    assert next(stream) == "a"
    with pytest.raises(RuntimeError, match="read to its end"):
        _ = stream.result
    assert list(stream) == []
    assert stream.result == result("a")


def test_a_stream_that_has_ended_stays_ended():
    stream = TextStream(Worker("a"))
    assert list(stream) == ["a"]
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(stream)


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), SystemExit(1)], ids=repr)
def test_an_error_in_the_work_reaches_the_reader_behind_its_pieces(error: BaseException):
    stream = TextStream(Worker("a", error=error))
    assert next(stream) == "a"
    with pytest.raises(type(error)) as raised:
        next(stream)
    assert raised.value is error
    with pytest.raises(StopIteration):
        next(stream)
    with pytest.raises(RuntimeError, match="no result"):
        _ = stream.result


def test_close_ends_the_work_and_waits_for_it():
    worker = Worker("a", lasts=True)
    stream = TextStream(worker)
    assert next(stream) == "a"
    stream.close()
    assert worker.ended and worker.cancelled.is_set()


@pytest.mark.parametrize("worker", [Worker("a", lasts=True), Worker("a"), Worker(error=ValueError("no"))])
def test_closing_twice_is_closing_once(worker: Worker):
    stream = TextStream(worker)
    stream.close()
    stream.close()
    assert worker.ended
    assert list(stream) == []


def test_a_stream_read_to_its_end_keeps_its_result_when_closed():
    stream = TextStream(Worker("a"))
    list(stream)
    stream.close()
    assert stream.result == result("a")


def test_leaving_the_block_closes_the_stream_and_lets_errors_through():
    worker = Worker("a", lasts=True)
    with pytest.raises(LookupError), TextStream(worker):
        raise LookupError
    assert worker.ended


def test_closing_frees_a_reader_that_waits_in_another_thread():
    stream = TextStream(Worker("a", lasts=True))
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.extend(stream), daemon=True)
    reader.start()
    while not read:
        time.sleep(0.001)
    stream.close()
    reader.join(PATIENCE)
    assert not reader.is_alive()
    assert read == ["a"]


@pytest.mark.parametrize("read_one", [False, True])
def test_a_forgotten_stream_cancels_its_work(read_one: bool):
    started, given = threading.Event(), []

    def work(emit: Emit, cancelled: threading.Event) -> GenerationResult:
        given.append(cancelled)
        emit("a")
        started.set()
        cancelled.wait(PATIENCE)
        return result()

    stream = TextStream(work)
    if read_one:
        assert next(stream) == "a"
    assert started.wait(PATIENCE)
    assert not given[0].is_set()
    del stream
    gc.collect()
    assert given[0].wait(PATIENCE)


def test_streams_do_not_mix():
    streams = [TextStream(Worker(*(f"{i}:{j} " for j in range(50)))) for i in range(8)]
    assert ["".join(stream) for stream in streams] == ["".join(f"{i}:{j} " for j in range(50)) for i in range(8)]
