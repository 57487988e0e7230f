"""A thousand generates on a store that is always full, many of them cancelled: nothing is lost, held or wrong after."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import pytest
from conftest import build_model, build_tokenizer, document

from kvboost_rag import KVBoost
from kvboost_rag.report import GenerationResult

PATIENCE = 60  # seconds after which a test gives up waiting for other threads, ten times that for all calls
NUM_CALLERS, NUM_CALLS = 4, 250
SHAPE = {"num_hidden_layers": 2, "eos_token_id": None}  # texts end with their length: there is more to be cancelled
WARMED, NEW = ([document(number, words=5) for number in numbers] for numbers in (range(8), range(8, 12)))
BUDGET = 75_000  # of 12 kB a document: three warmed ones and as many met in passing


def started(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def all_end(threads: Iterable[threading.Thread], patience: float = PATIENCE) -> bool:
    deadline = time.monotonic() + patience
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


@dataclass(frozen=True)
class Call:
    """A request: which documents, what is asked and how."""

    documents: tuple[str, ...]
    question: str
    options: tuple[tuple[str, Any], ...]

    @classmethod
    def drawn(cls, rng: random.Random) -> Call:
        """One of 60 prompts, some of whose documents were never warmed; half of them exact and greedy."""
        number = rng.randrange(60)
        own = random.Random(number)
        chosen = [*own.sample(WARMED, 2), *own.sample(NEW, own.randrange(2))]
        if rng.random() < 0.5:
            options = {"repair": "full", "max_new_tokens": 3}
        else:
            options = {
                "repair": rng.choice(["none", "boundary", "query"]),
                "max_new_tokens": rng.choice([1, 2, 3]),
                "temperature": rng.choice([0.0, 1.0]),
            }
        return cls(tuple(own.sample(chosen, len(chosen))), f"number {number}?", tuple(options.items()))

    @property
    def is_exact(self) -> bool:
        return dict(self.options)["repair"] == "full"

    def ask(self, ask: Callable[..., Any], boost: KVBoost) -> Any:
        """``ask``: ``boost.generate`` or ``boost.stream``."""
        return ask(boost.prompt(self.documents, self.question, instruction="Read:"), **dict(self.options))


@dataclass
class Storm:
    """What callers saw."""

    boost: KVBoost
    others: set[threading.Thread]  # that ran before
    whole: list[tuple[Call, GenerationResult]] = field(default_factory=list)
    parts: list[tuple[Call, str]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)  # why streams that another thread closed ended, where they said
    most_used_bytes: int = 0
    errors: list[BaseException] = field(default_factory=list)

    def calls(self, seed: int) -> None:
        rng = random.Random(seed)
        ways = [self.generate, self.read, self.close_here, self.close_elsewhere, self.forget]
        try:
            for number in range(NUM_CALLS):
                call = Call.drawn(rng)
                rng.choice(ways)(call, rng.randrange(3))
                if number % 10 == 0:
                    self.boost.warm(rng.choice(WARMED), progress=False)
                self.most_used_bytes = max(self.most_used_bytes, self.boost.stats().used_bytes)
        except BaseException as error:
            self.errors.append(error)

    def generate(self, call: Call, num_pieces: int) -> None:
        self.whole.append((call, call.ask(self.boost.generate, self.boost)))

    def read(self, call: Call, num_pieces: int) -> None:
        stream = call.ask(self.boost.stream, self.boost)
        text = "".join(stream)
        assert stream.result.text == text
        self.whole.append((call, stream.result))

    def close_here(self, call: Call, num_pieces: int) -> None:
        with call.ask(self.boost.stream, self.boost) as stream:
            pieces = list(islice(stream, num_pieces))
        assert list(stream) == []
        self.parts.append((call, "".join(pieces)))

    def close_elsewhere(self, call: Call, num_pieces: int) -> None:
        """Another thread closes the stream, this one goes on reading."""
        stream = call.ask(self.boost.stream, self.boost)
        pieces = list(islice(stream, num_pieces))
        closer = started(stream.close)
        pieces += stream
        assert all_end([closer])
        self.parts.append((call, "".join(pieces)))
        try:
            self.reasons.append(stream.result.finish_reason)
        except RuntimeError:  # closed before the end was read
            self.reasons.append("")

    def forget(self, call: Call, num_pieces: int) -> None:
        """Nobody closes the stream; it goes when this function ends."""
        stream = call.ask(self.boost.stream, self.boost)
        self.parts.append((call, "".join(islice(stream, num_pieces))))


@pytest.fixture(scope="module")
def storm() -> Iterator[Storm]:
    """The thousand calls, over."""
    boost = KVBoost(build_model(**SHAPE), build_tokenizer(), max_cache_bytes=BUDGET, warmed_share=0.5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *args, **kwargs: None)  # not everything fits: that is the point
        boost.warm(WARMED, progress=False)
        others = set(threading.enumerate())
        storm = Storm(boost, others)
        callers = [started(partial(storm.calls, seed)) for seed in range(NUM_CALLERS)]
        assert all_end(callers, 10 * PATIENCE)
        all_end(set(threading.enumerate()) - others)  # those of forgotten streams, by themselves
        yield storm
    assert all_end([started(boost.close)])  # waits for the engine's lock


def test_every_call_came_back_and_the_store_was_always_full(storm: Storm) -> None:
    assert storm.errors == []
    assert len(storm.whole) + len(storm.parts) == NUM_CALLERS * NUM_CALLS
    assert {result.finish_reason for _, result in storm.whole} == {"length"}
    assert storm.reasons.count("cancelled") > 10
    num_stored = sum(result.report.num_stored_tokens for _, result in storm.whole)
    assert num_stored * storm.boost.engine.bytes_per_token > 10 * BUDGET  # so most of it was evicted again


def test_no_thread_is_left_over(storm: Storm) -> None:
    assert set(threading.enumerate()) <= storm.others


def test_what_was_not_cancelled_is_what_a_fresh_engine_gives(storm: Storm) -> None:
    with KVBoost(build_model(**SHAPE), build_tokenizer()) as fresh:
        calls = {call for call, _ in [*storm.whole, *storm.parts] if call.is_exact}
        expected = {call: call.ask(fresh.generate, fresh).text for call in calls}
    assert len(set(expected.values())) > 20  # or one could not be told from another
    for call, result in storm.whole:
        assert not call.is_exact or result.text == expected[call]
    for call, text in storm.parts:
        assert not call.is_exact or expected[call].startswith(text)


def test_the_budget_was_kept_and_every_byte_is_accounted_for(storm: Storm) -> None:
    store = storm.boost.engine.store
    entries = list(store._recency.values())
    used = store.stats().used_bytes
    assert used == sum(entry.num_bytes for entry in entries)
    assert 0.5 * BUDGET < used <= storm.most_used_bytes <= BUDGET
    assert sum(entry.num_bytes for entry in entries if entry.warmed) <= store.warmed_capacity
    by_content = [entry for entries in store._content.values() for entry in entries]
    assert sorted(map(id, by_content)) == sorted(map(id, entries))
    assert {id(entry) for entry in store._exact.values()} == {id(entry) for entry in entries if entry.exact}


def test_no_lock_is_held(storm: Storm) -> None:
    done = []

    def use() -> None:
        storm.boost.warm(WARMED[0], progress=False)
        prompt = storm.boost.prompt(WARMED[:1], "why?")
        done.append(storm.boost.generate(prompt, max_new_tokens=2).report.num_new_tokens)
        done.append("".join(storm.boost.stream(prompt, max_new_tokens=2)))
        storm.boost.clear()

    assert all_end([started(use)])
    assert done[0] == 2
    assert storm.boost.stats().used_bytes == storm.boost.stats().num_entries == 0
