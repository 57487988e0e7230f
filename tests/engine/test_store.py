"""Stores: found by either hash, never other tokens, never over budget, and traffic cannot flush the corpus."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from kvboost_rag.engine.keys import content_hash, prefix_hash
from kvboost_rag.engine.store import EVICTIONS, Entry, MemoryStore, NullStore, Put, Store
from kvboost_rag.engine.types import ChunkKeys, Fidelity

FINGERPRINT = b"engine"
MakeStore = Callable[..., Store]


@dataclass(frozen=True)
class Weight:
    """KV of which only the size matters."""

    num_bytes: int
    codec: str = "raw"


def keys_of(ids: tuple[int, ...], behind: bytes = b"") -> ChunkKeys:
    return ChunkKeys(prefix_hash(ids, behind, FINGERPRINT), content_hash(ids, FINGERPRINT))


def entry(*ids: int, behind: bytes = b"", size: int = 100, **flags: Any) -> Entry:
    """An entry of ``size`` bytes in all. An exact by-product unless ``flags`` say otherwise."""
    array = np.array(ids, dtype=np.int64)
    return Entry(keys_of(ids, behind), array, Weight(size - array.nbytes), **{"exact": True, **flags})


def warmed(*ids: int, **options: Any) -> Entry:
    return entry(*ids, warmed=True, **options)


def filled(store: Store, entries: Iterable[Entry]) -> Store:
    for one in entries:
        assert store.put(one).stored
    return store


def get(store: Store, wanted: Entry) -> tuple[Entry, Fidelity] | None:
    return store.find(wanted.keys, wanted.ids)


def holds(store: Store, wanted: Entry) -> bool:
    hit = get(store, wanted)
    return hit is not None and hit[0] is wanted


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns as often as the interpreter lets them."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


class StoreContract:
    """What every store that keeps something promises. Subclasses say how to make one."""

    def make(self, max_bytes: int = 1000, warmed_share: float = 0.8) -> Store:
        raise NotImplementedError

    @pytest.fixture
    def store(self) -> Store:
        return self.make()

    # Lookup

    def test_an_exact_entry_is_exact_behind_its_prefix_and_approximate_elsewhere(self, store: Store):
        one = entry(1, 2, behind=b"prefix")
        assert store.put(one) == Put(stored=True)
        assert get(store, one) == (one, Fidelity.EXACT)
        assert store.find(keys_of((1, 2), b"another prefix"), one.ids) == (one, Fidelity.APPROXIMATE)

    def test_an_approximate_entry_is_never_exact(self, store: Store):
        one = entry(1, 2, exact=False)
        store.put(one)
        assert get(store, one) == (one, Fidelity.APPROXIMATE)

    def test_without_anywhere_only_the_exact_prefix_is_looked_for(self, store: Store):
        document, passing = warmed(1, 2), entry(1, 2, behind=b"header")
        filled(store, [document, passing])
        assert store.find(passing.keys, passing.ids, anywhere=False) == (passing, Fidelity.EXACT)
        assert store.find(keys_of((1, 2), b"else"), passing.ids, anywhere=False) is None

    def test_the_exact_entry_is_preferred_over_the_contents(self, store: Store):
        document, passing = warmed(1, 2), entry(1, 2, behind=b"header")
        filled(store, [document, passing])
        assert get(store, passing) == (passing, Fidelity.EXACT)
        assert get(store, document) == (document, Fidelity.EXACT)
        assert store.find(keys_of((1, 2), b"else"), document.ids) == (document, Fidelity.APPROXIMATE)
        assert store.peek(document.keys.content) is document

    def test_what_was_never_stored_is_a_miss(self, store: Store):
        store.put(entry(1, 2))
        assert get(store, entry(3)) is None
        assert get(store, entry(1)) is None

    def test_hits_and_misses_are_counted(self, store: Store):
        one = entry(1, 2)
        store.put(one)
        for wanted in (one, entry(1, 2, behind=b"else"), entry(3)):
            get(store, wanted)
        stats = store.stats()
        assert (stats.num_hits, stats.num_misses, stats.num_mismatches) == (2, 1, 0)
        assert one.num_uses == 2

    def test_peeking_marks_and_counts_nothing(self, store: Store):
        first = entry(0)
        filled(store, [first, *(entry(i) for i in range(1, 10))])
        assert store.peek(first.keys.content) is first
        assert store.peek(b"unknown") is None
        assert first.num_uses == store.stats().num_hits == store.stats().num_misses == 0
        assert store.put(entry(10)).evicted == (first,)

    # Equal hashes, other tokens (cases.md, row 65)

    @pytest.mark.parametrize("ids", [(9, 9), (1,), (1, 2, 3), (2, 1), ()])
    def test_equal_hashes_never_serve_other_tokens(self, store: Store, ids: tuple[int, ...]):
        one = entry(1, 2)
        store.put(one)
        assert store.find(one.keys, np.array(ids, dtype=np.int64)) is None
        stats = store.stats()
        assert (stats.num_hits, stats.num_misses) == (0, 1)
        assert stats.num_mismatches >= 1
        assert get(store, one) == (one, Fidelity.EXACT)

    def test_a_collision_of_the_prefix_hash_leaves_the_content_hash_to_answer(self, store: Store):
        one, other = entry(1, 2), entry(3, 4)
        filled(store, [one, other])
        collided = ChunkKeys(prefix=one.keys.prefix, content=other.keys.content)
        assert store.find(collided, other.ids) == (other, Fidelity.APPROXIMATE)
        assert store.stats().num_mismatches == 1

    # Budget

    def test_sizes_are_ids_and_kv_together(self, store: Store):
        filled(store, [entry(1, 2, 3, size=124), warmed(4, size=76)])
        stats = store.stats()
        assert (stats.num_entries, stats.num_warmed, stats.used_bytes, stats.max_bytes) == (2, 1, 200, 1000)

    @pytest.mark.parametrize("kind", [entry, warmed])
    def test_the_least_recently_used_goes_first(self, kind: Callable[..., Entry]):
        store = self.make(max_bytes=300, warmed_share=1.0)
        a, b, c = (kind(i) for i in range(3))
        filled(store, [a, b, c])
        assert holds(store, a) and holds(store, c)
        assert store.put(kind(3)).evicted == (b,)
        assert store.put(kind(4, size=200)).evicted == (a, c)

    def test_being_found_by_content_is_use_too(self):
        store = self.make(max_bytes=200)
        a, b = filled_with = [entry(1), entry(2)]
        filled(store, filled_with)
        store.find(keys_of((1,), b"else"), a.ids)
        assert store.put(entry(3)).evicted == (b,)

    @pytest.mark.parametrize("flags", [{}, {"warmed": True}, {"exact": False}])
    def test_an_entry_larger_than_the_budget_is_refused_and_nothing_is_lost(self, store: Store, flags: dict[str, Any]):
        kept = [entry(i) for i in range(2)] + [warmed(i) for i in range(2, 10)]
        filled(store, kept)
        before = store.stats()
        assert store.put(entry(99, size=1001, **flags)) == Put(stored=False)
        assert store.put(entry(0, size=1001, **flags)) == Put(stored=False)  # would replace one
        assert store.stats() == before
        assert all(holds(store, one) for one in kept)

    def test_a_store_without_room_keeps_nothing(self):
        store = self.make(max_bytes=0)
        assert store.put(entry(1)) == store.put(warmed(1)) == Put(stored=False)
        assert store.stats().num_entries == 0

    def test_an_entry_of_exactly_the_budget_fits(self):
        assert self.make(max_bytes=100).put(entry(1, size=100)).stored
        assert self.make(max_bytes=125).put(warmed(1, size=100)).stored
        assert not self.make(max_bytes=125).put(warmed(1, size=101)).stored

    # Warmed documents and by-products

    def test_by_products_never_displace_warmed_entries(self, store: Store):
        corpus = [warmed(i) for i in range(8)]
        filled(store, corpus)
        for i in range(100, 150):
            put = store.put(entry(i, size=100 + i % 2 * 50))
            assert put.stored
            assert not any(victim.warmed for victim in put.evicted)
        assert store.put(entry(200, size=201)) == Put(stored=False)
        assert all(holds(store, one) for one in corpus)

    def test_by_products_may_use_all_that_warmed_documents_leave(self, store: Store):
        filled(store, [entry(i) for i in range(10)])
        assert store.stats().used_bytes == 1000

    def test_warmed_entries_displace_by_products_down_to_the_reserved_share(self, store: Store):
        passing = [entry(i) for i in range(10)]
        filled(store, passing)
        corpus = [warmed(i) for i in range(100, 108)]
        assert [store.put(one).evicted for one in corpus] == [(one,) for one in passing[:8]]
        ninth = store.put(warmed(108))
        assert ninth.stored
        assert ninth.evicted == (corpus[0],)
        assert all(holds(store, one) for one in passing[8:] + corpus[1:])

    def test_warmed_entries_alone_stop_at_their_share(self, store: Store):
        for i in range(20):
            store.put(warmed(i))
        assert store.stats().used_bytes == 800

    @pytest.mark.parametrize("passing_exact", [True, False])
    def test_a_by_product_never_replaces_a_warmed_entry(self, store: Store, passing_exact: bool):
        document = warmed(1, 2)
        store.put(document)
        assert store.put(entry(1, 2, exact=passing_exact)) == Put(stored=False)
        assert get(store, document) == (document, Fidelity.EXACT)
        assert store.stats().num_entries == 1

    def test_a_warmed_entry_replaces_the_approximate_by_product_of_its_content(self, store: Store):
        passing, document = entry(1, 2, exact=False), warmed(1, 2, behind=b"primer")
        filled(store, [passing, document])
        assert get(store, passing) == (document, Fidelity.APPROXIMATE)
        assert (store.stats().num_entries, store.stats().num_warmed) == (1, 1)

    def test_a_warmed_entry_answers_for_its_content_beside_an_exact_by_product(self, store: Store):
        passing, document = entry(1, 2, behind=b"header"), warmed(1, 2, behind=b"primer")
        filled(store, [passing, document])
        assert get(store, passing) == (passing, Fidelity.EXACT)
        assert store.find(keys_of((1, 2), b"else"), document.ids) == (document, Fidelity.APPROXIMATE)
        assert store.peek(document.keys.content) is document
        assert (store.stats().num_entries, store.stats().num_warmed) == (2, 1)

    # Pins

    @pytest.mark.parametrize("is_warmed", [True, False])
    def test_pinned_entries_are_never_evicted(self, store: Store, is_warmed: bool):
        pinned = entry(0, warmed=is_warmed, pinned=True)
        store.put(pinned)
        for i in range(1, 40):
            store.put(entry(i, warmed=i % 2 == 0))
        assert holds(store, pinned)

    def test_when_pins_fill_the_room_others_are_refused_and_nothing_is_lost(self, store: Store):
        pinned, passing = [warmed(i, pinned=True) for i in range(8)], [entry(i) for i in range(8, 10)]
        filled(store, pinned + passing)
        assert store.put(warmed(10)) == Put(stored=False)
        assert all(holds(store, one) for one in pinned + passing)

    # Replacing and removing

    @pytest.mark.parametrize("flags", [{}, {"warmed": True}, {"exact": False}])
    def test_replacing_an_entry_leaks_no_bytes(self, store: Store, flags: dict[str, Any]):
        for size in (100, 300, 50, 50, 200):
            last = entry(1, 2, size=size, **flags)
            assert store.put(last) == Put(stored=True)
            assert (store.stats().num_entries, store.stats().used_bytes) == (1, size)
            assert holds(store, last)

    def test_putting_the_same_object_again_changes_nothing(self, store: Store):
        one = entry(1, 2)
        filled(store, [one, one])
        assert (store.stats().num_entries, store.stats().used_bytes) == (1, 100)

    def test_a_replaced_entry_makes_room_for_its_successor(self):
        store = self.make(max_bytes=200)
        other = entry(2)
        filled(store, [other, entry(1)])
        assert store.put(entry(1)) == Put(stored=True)
        assert holds(store, other)

    def test_removing_forgets_every_entry_of_that_content(self, store: Store):
        kept = entry(7)
        gone = [warmed(1, 2), entry(1, 2, behind=b"header"), entry(1, 2, behind=b"other header")]
        filled(store, [*gone, kept])
        assert store.remove(gone[0].keys.content) == 3
        assert store.remove(gone[0].keys.content) == store.remove(b"unknown") == 0
        assert all(get(store, one) is None for one in gone)
        assert store.peek(gone[0].keys.content) is None
        assert (store.stats().num_entries, store.stats().used_bytes) == (1, 100)
        assert holds(store, kept)

    def test_removing_everything_brings_the_used_bytes_to_zero(self, store: Store):
        entries = [warmed(1, pinned=True), entry(2), entry(3, exact=False), entry(1, behind=b"header")]
        filled(store, entries)
        for one in entries:
            store.remove(one.keys.content)
        assert (store.stats().num_entries, store.stats().used_bytes) == (0, 0)

    def test_clearing_forgets_everything_pinned_or_not(self, store: Store):
        entries = [warmed(1, pinned=True), entry(2), entry(3, exact=False), entry(1, behind=b"header")]
        filled(store, entries)
        store.clear()
        assert (store.stats().num_entries, store.stats().num_warmed, store.stats().used_bytes) == (0, 0, 0)
        assert all(get(store, one) is None for one in entries)
        filled(store, [warmed(i) for i in range(8)])  # and the whole room is there again

    def test_when_the_contents_entry_is_evicted_another_of_that_content_answers(self):
        store = self.make(max_bytes=200)
        first, second = entry(1, 2), entry(1, 2, behind=b"header")
        filled(store, [first, second])
        assert store.put(entry(3)).evicted == (first,)
        assert get(store, second) == (second, Fidelity.EXACT)
        assert store.find(keys_of((1, 2), b"else"), second.ids) == (second, Fidelity.APPROXIMATE)
        assert store.peek(second.keys.content) is second

    def test_an_approximate_by_product_never_costs_an_exact_one(self, store: Store):
        exact = entry(1, 2)
        filled(store, [exact])
        store.put(entry(1, 2, behind=b"approximate neighbours", exact=False))
        assert get(store, exact) == (exact, Fidelity.EXACT)

    def test_an_approximate_by_product_beside_an_exact_one_is_found_or_not_stored(self, store: Store):
        entries = [entry(1, 2), *(entry(1, 2, exact=False) for _ in range(3))]
        for one in entries:
            store.put(one)
        self.check_reachable(store, entries)

    # All at once

    @pytest.mark.parametrize("seed", range(30))
    def test_any_sequence_of_puts_keeps_every_promise(self, seed: int):
        rng = random.Random(seed)
        max_bytes, share = rng.choice([(500, 0.8), (1000, 0.5), (1500, 1.0), (80, 0.9)])
        store = self.make(max_bytes, share)
        tried: list[Entry] = []
        for _ in range(150):
            number = rng.randrange(8)
            new = entry(
                *range(number, number + 2),
                behind=rng.choice([b"", b"x", b"y"]),
                size=40 + 30 * number,
                exact=rng.random() < 0.7,
                warmed=rng.random() < 0.4,
                pinned=rng.random() < 0.05,
            )
            before = store.stats()
            put = store.put(new)
            tried.append(new)
            stats = store.stats()
            assert 0 <= stats.used_bytes <= max_bytes
            assert put.stored or (stats == before and not put.evicted)
            assert not any(victim.pinned for victim in put.evicted)
            assert new.warmed or not any(victim.warmed for victim in put.evicted)
            assert not put.stored or store.find(new.keys, new.ids) is not None
            if rng.random() < 0.1:
                store.remove(rng.choice(tried).keys.content)
            for _ in range(rng.randrange(3)):
                get(store, rng.choice(tried))
        self.check_reachable(store, tried)
        store.clear()
        assert store.stats().used_bytes == 0

    def check_reachable(self, store: Store, tried: list[Entry]) -> None:
        """Every byte that counts belongs to an entry that a lookup can find."""
        hits = [get(store, one) for one in tried]
        contents = [store.find(keys_of(tuple(one.ids.tolist()), b"never seen"), one.ids) for one in tried]
        found = {id(hit[0]): hit[0] for hit in hits + contents if hit is not None}
        assert store.stats().num_entries == len(found)
        assert store.stats().used_bytes == sum(one.num_bytes for one in found.values())
        assert store.stats().num_warmed == sum(one.warmed for one in found.values())

    def test_from_many_threads_nothing_is_mixed_up_or_lost(self, restless: None):
        store = self.make(max_bytes=1500)
        tried: list[Entry] = []

        def work(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(150):
                number = rng.randrange(30)
                one = entry(number, number + 1, warmed=rng.random() < 0.5, exact=rng.random() < 0.5)
                tried.append(one)
                store.put(one)
                hit = get(store, entry(rng.randrange(30), 0))
                assert hit is None
                wanted = rng.randrange(30)
                hit = get(store, entry(wanted, wanted + 1))
                assert hit is None or hit[0].ids.tolist() == [wanted, wanted + 1]
                assert store.stats().used_bytes <= 1500
                if rng.random() < 0.05:
                    store.remove(one.keys.content)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        self.check_reachable(store, tried)
        store.clear()
        assert store.stats().used_bytes == 0


class TestMemoryStore(StoreContract):
    """Under every policy: where entries differ in nothing but their last use, all of them give up the oldest."""

    @pytest.fixture(autouse=True, params=EVICTIONS)
    def choose(self, request: pytest.FixtureRequest) -> None:
        self.eviction = request.param

    def make(self, max_bytes: int = 1000, warmed_share: float = 0.8) -> Store:
        return MemoryStore(max_bytes, warmed_share, self.eviction)

    def test_it_names_its_tier(self, store: Store):
        assert store.tier == "memory"


def test_the_null_store_keeps_nothing():
    store, one = NullStore(), warmed(1, 2, pinned=True)
    assert store.put(one) == Put(stored=False)
    assert get(store, one) is None
    assert store.peek(one.keys.content) is None
    assert store.remove(one.keys.content) == 0
    store.clear()
    assert store.tier == "none"
    assert store.stats().num_entries == store.stats().used_bytes == store.stats().max_bytes == 0
