"""FairLock: first come, first served, and never lost to an exception."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from kvboost_rag.engine import lock as module
from kvboost_rag.engine.lock import FairLock

PATIENCE = 10  # seconds after which a test gives up waiting for another thread


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.0005)


def queue_up(lock: FairLock, jobs: list[Callable[[], None]]) -> list[threading.Thread]:
    """Threads that wait for ``lock``, which is taken, in the order of ``jobs``."""

    def wait_and(job: Callable[[], None]) -> None:
        with lock:
            job()

    threads = []
    for job in jobs:
        before = len(lock._waiting)
        threads.append(threading.Thread(target=wait_and, args=(job,), daemon=True))
        threads[-1].start()
        until(lambda before=before: len(lock._waiting) > before)
    return threads


def join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def is_free(lock: FairLock) -> bool:
    free = threading.Event()
    threading.Thread(target=lambda: (lock.acquire(), free.set(), lock.release()), daemon=True).start()
    return free.wait(PATIENCE)


def test_the_lock_is_handed_over_in_the_order_it_was_asked_for():
    lock, order = FairLock(), []
    with lock:
        threads = queue_up(lock, [lambda i=i: order.append(i) for i in range(20)])
        assert order == []
    join(threads)
    assert order == list(range(20))


def test_a_thread_that_releases_cannot_overtake_those_who_wait():
    lock, order = FairLock(), []
    with lock:
        threads = queue_up(lock, [lambda: order.append("waited")])
    with lock:
        order.append("came back")
    join(threads)
    assert order == ["waited", "came back"]


def test_only_one_thread_is_inside():
    lock, inside, most = FairLock(), [], []

    def work() -> None:
        for _ in range(100):
            with lock:
                inside.append(1)
                most.append(len(inside))
                inside.pop()
                lock.pass_on()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    join(threads)
    assert len(most) == 800 and set(most) == {1}


def test_passing_on_lets_everyone_who_waits_go_first_then_carries_on():
    lock, order = FairLock(), []
    with lock:
        threads = queue_up(lock, [lambda i=i: order.append(i) for i in range(3)])
        lock.pass_on()
        order.append("holder")
    join(threads)
    assert order == [0, 1, 2, "holder"]


def test_two_that_pass_on_take_turns():
    lock, order = FairLock(), []

    def step_by_step(name: str) -> None:
        for step in range(3):
            order.append(f"{name}{step}")
            until(lambda: len(lock._waiting) == 1)
            lock.pass_on()

    with lock:
        threads = queue_up(lock, [lambda: step_by_step("a"), lambda: step_by_step("b")])
    join(threads)
    assert order == ["a0", "b0", "a1", "b1", "a2", "b2"]


def test_passing_on_to_nobody_keeps_the_lock():
    lock, order = FairLock(), []
    with lock:
        lock.pass_on()
        threads = queue_up(lock, [lambda: order.append("next")])  # has to wait: the lock is still taken
        assert order == []
    join(threads)
    assert order == ["next"]


def test_an_exception_inside_frees_the_lock_for_the_next():
    lock, order = FairLock(), []
    with pytest.raises(LookupError), lock:
        threads = queue_up(lock, [lambda: order.append("next")])
        raise LookupError
    join(threads)
    assert order == ["next"]
    assert is_free(lock)


class Interrupted(threading.Event):
    """Ctrl-C while waiting; ``turn_comes`` runs just before."""

    turn_comes: Callable[[], None] = staticmethod(lambda: None)

    def wait(self, timeout: float | None = None) -> bool:
        type(self).turn_comes()
        raise KeyboardInterrupt


def interrupt(monkeypatch: pytest.MonkeyPatch, turn_comes: Callable[[], None] = lambda: None) -> None:
    event = type("Event", (Interrupted,), {"turn_comes": staticmethod(turn_comes)})
    monkeypatch.setattr(module, "threading", SimpleNamespace(Event=event, Lock=threading.Lock))


def test_an_interrupted_wait_leaves_the_queue(monkeypatch: pytest.MonkeyPatch):
    lock, order = FairLock(), []
    with lock:
        before = queue_up(lock, [lambda: order.append("before")])
        with monkeypatch.context() as patch:
            interrupt(patch)
            with pytest.raises(KeyboardInterrupt):
                lock.acquire()
        behind = queue_up(lock, [lambda: order.append("behind")])
        assert order == []
    join(before + behind)
    assert order == ["before", "behind"]
    assert is_free(lock)


def test_a_turn_that_comes_with_the_interrupt_is_passed_on(monkeypatch: pytest.MonkeyPatch):
    lock = FairLock()
    lock.acquire()
    with monkeypatch.context() as patch:
        interrupt(patch, turn_comes=lock.release)  # the holder lets go: it is the interrupted thread's turn now
        with pytest.raises(KeyboardInterrupt):
            lock.acquire()
    assert is_free(lock)
