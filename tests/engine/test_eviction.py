"""Policies of eviction: whatever the policy, budget, pins and warmed documents are safe; each ranks as it says."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from kvboost_rag.engine.store import EVICTIONS, Entry, Eviction, MemoryStore
from kvboost_rag.engine.store.eviction import resolve_eviction
from kvboost_rag.engine.types import ChunkKeys
from kvboost_rag.errors import OptionError


@dataclass(frozen=True)
class Weight:
    """KV of which only the size matters."""

    num_bytes: int
    codec: str = "raw"


def entry(number: int, size: int = 100, num_tokens: int = 1, **flags: Any) -> Entry:
    """An approximate by-product of ``size`` bytes in all, unless ``flags`` say otherwise."""
    ids = np.full(num_tokens, number, dtype=np.int64)
    keys = ChunkKeys(prefix=b"", content=number.to_bytes(4, "little"))
    return Entry(keys, ids, Weight(size - ids.nbytes), **{"exact": False, **flags})


def find(store: MemoryStore, one: Entry) -> bool:
    return store.find(one.keys, one.ids) is not None


def holds(store: MemoryStore, one: Entry) -> bool:
    return store.peek(one.keys.content) is one


def rate(policy: str | None, seed: int) -> float:
    """Hit rate of 100 rounds of 14 out of 50 equal documents, drawn by Zipf and shuffled; room for 30."""
    rng = np.random.default_rng(seed)
    weights = 1 / np.arange(1, 51)
    store = MemoryStore(3000, **({} if policy is None else {"eviction": policy}))
    for _ in range(100):
        drawn = [entry(int(i)) for i in rng.permutation(rng.choice(50, 14, replace=False, p=weights / weights.sum()))]
        for one in [one for one in drawn if not find(store, one)]:
            assert store.put(one).stored
            assert store.stats().used_bytes <= 3000
    stats = store.stats()
    return stats.num_hits / (stats.num_hits + stats.num_misses)


@pytest.mark.parametrize("policy", EVICTIONS)
class TestEveryPolicy:
    @pytest.mark.parametrize("seed", range(10))
    def test_random_traffic_breaks_no_promise(self, policy: str, seed: int):
        rng = random.Random(seed)
        store = MemoryStore(2000, rng.choice([0.5, 0.9, 1.0]), policy, num_protected=rng.choice([0, 2, 8]))
        kept: dict[int, Entry] = {}
        for _ in range(400):
            number = rng.randrange(40)
            new = entry(
                number,
                size=rng.randrange(20, 400),
                warmed=rng.random() < 0.4,
                pinned=rng.random() < 0.02,
                importance=rng.random(),
            )
            put = store.put(new)
            assert store.stats().used_bytes <= 2000
            assert not any(victim.pinned or victim is new for victim in put.evicted)
            assert new.warmed or not any(victim.warmed for victim in put.evicted)
            assert not any(holds(store, victim) for victim in put.evicted)
            assert put.stored is holds(store, new)
            if put.stored:
                kept[number] = new
            for victim in put.evicted:
                del kept[int(victim.ids[0])]
            for _ in range(rng.randrange(4)):
                find(store, entry(rng.randrange(40)))
            if rng.random() < 0.05:
                gone = entry(rng.randrange(40))
                assert store.remove(gone.keys.content) == (kept.pop(int(gone.ids[0]), None) is not None)
        assert all(holds(store, one) for one in kept.values())
        assert store.stats().num_entries == len(kept)
        assert store.stats().used_bytes == sum(one.num_bytes for one in kept.values())

    @pytest.mark.parametrize("is_warmed", [True, False])
    def test_pinned_entries_stay_though_nothing_ranks_lower(self, policy: str, is_warmed: bool):
        store = MemoryStore(1000, 1.0, policy)
        pinned = entry(0, size=500, pinned=True, warmed=is_warmed, importance=-1.0)
        store.put(pinned)
        for number in range(1, 50):
            assert store.put(entry(number, warmed=is_warmed, importance=1.0)).stored
        assert not store.put(entry(99, size=501, warmed=is_warmed)).stored
        assert holds(store, pinned)

    def test_the_entry_just_put_is_never_its_own_victim(self, policy: str):
        store = MemoryStore(1000, eviction=policy)
        for number in range(10):
            store.put(entry(number, importance=10.0))
            find(store, entry(number))
        newest = entry(99, importance=0.0)
        assert store.put(newest).stored
        assert holds(store, newest)

    def test_by_products_never_displace_warmed_documents(self, policy: str):
        store = MemoryStore(1000, 0.8, policy, num_protected=0)
        corpus = [entry(number, warmed=True, importance=0.0) for number in range(8)]
        for one in corpus:
            store.put(one)
        for number in range(100, 150):
            passing = entry(number, importance=10.0)
            assert store.put(passing).stored
            find(store, passing)
        assert not store.put(entry(200, size=201, importance=10.0)).stored
        assert all(holds(store, one) for one in corpus)

    @pytest.mark.parametrize("seed", range(5))
    def test_victims_go_in_the_order_of_rank_and_then_of_last_use(self, policy: str, seed: int):
        rng = random.Random(seed)
        store = MemoryStore(2000, eviction=policy, num_protected=5)
        last_used: list[Entry] = []
        for number in range(20):
            one = entry(number, importance=rng.choice([1.0, 2.0, 3.0]))
            store.put(one)
            last_used.append(one)
        for _ in range(60):
            one = rng.choice(last_used)
            find(store, one)
            last_used.remove(one)
            last_used.append(one)
        expected = sorted(last_used[:15], key=store.eviction.rank) + last_used[15:]
        assert store.put(entry(99, size=1800)).evicted == tuple(expected[:18])

    def test_the_last_ones_used_are_spared_while_others_make_room(self, policy: str):
        store = MemoryStore(1000, eviction=policy, num_protected=8)
        entries = [entry(number, importance=-number) for number in range(10)]  # the newer, the lower
        for one in entries:
            store.put(one)
        for one in entries[:2]:  # often used, but not lately
            for _ in range(5):
                find(store, one)
        for one in entries[2:]:
            find(store, one)
        put = store.put(entry(99, size=200))
        assert {int(victim.ids[0]) for victim in put.evicted} == {0, 1}

    def test_the_last_ones_used_give_way_where_nothing_else_makes_room(self, policy: str):
        store = MemoryStore(400, eviction=policy, num_protected=8)
        entries = [entry(number, importance=-number) for number in range(4)]
        for one in entries:
            store.put(one)
        find(store, entries[0])
        assert store.put(entry(99, size=200)).evicted == (entries[1], entries[2])
        assert not store.put(entry(98, size=401)).stored

    def test_a_refused_entry_changes_nothing_not_even_the_order(self, policy: str):
        store = MemoryStore(300, eviction=policy, num_protected=0)
        entries = [entry(number) for number in range(3)]
        for one in entries:
            store.put(one)
        assert not store.put(entry(0, size=301)).stored
        assert store.put(entry(99)).evicted == (entries[0],)

    def test_a_thousand_puts_and_finds_under_a_tiny_budget_leave_the_books_in_order(self, policy: str):
        rng = random.Random(7)
        store = MemoryStore(250, eviction=policy)
        for _ in range(1000):
            one = entry(rng.randrange(10), size=rng.randrange(20, 120), importance=rng.random())
            if not find(store, one):
                store.put(one)
        left = [one for number in range(10) if (one := store.peek(entry(number).keys.content)) is not None]
        assert 0 < store.stats().used_bytes == sum(one.num_bytes for one in left) <= 250
        assert store.stats().num_entries == len(left)
        store.clear()
        assert (store.stats().num_entries, store.stats().used_bytes) == (0, 0)
        assert not getattr(store.eviction, "_priorities", None)

    def test_it_is_listed_under_its_name_and_made_anew_each_time(self, policy: str):
        one, other = resolve_eviction(policy), resolve_eviction(policy)
        assert isinstance(one, Eviction)
        assert one.name == policy
        assert one is not other


@pytest.mark.parametrize("name", ["fifo", "", "LRU", None, ["lru"]])
def test_an_unknown_policy_is_refused_and_the_choices_are_named(name: Any):
    with pytest.raises(OptionError, match=r"eviction=.*'lru', 'importance', 'gdsf'"):
        MemoryStore(1000, eviction=name)


@pytest.mark.parametrize("number", [-1, 1.5, "8"])
def test_a_wrong_number_of_protected_entries_is_refused(number: Any):
    with pytest.raises(OptionError, match=r"num_protected=.*0 or more"):
        MemoryStore(1000, num_protected=number)


# Each policy


def test_lru_ranks_by_nothing_but_the_last_use():
    store = MemoryStore(300, eviction="lru", num_protected=0)
    a, b, c = (entry(number, importance=-number) for number in range(3))
    for one in (a, b, c):
        store.put(one)
    for one in (c, c, c, b, a):
        find(store, one)
    assert store.put(entry(9, size=200)).evicted == (c, b)


def test_importance_ranks_by_the_importance_and_then_by_the_last_use():
    store = MemoryStore(1000, eviction="importance", num_protected=0)
    long, short = entry(0, size=600, num_tokens=60, importance=1.0), entry(1, size=20, num_tokens=1, importance=2.0)
    tied = [entry(number, importance=1.5) for number in (2, 3)]
    for one in (short, tied[0], tied[1], long):
        store.put(one)
    for _ in range(5):
        find(store, long)
    find(store, tied[0])
    assert store.put(entry(9, size=980)).evicted == (long, tied[1], tied[0])
    assert holds(store, short)


def test_gdsf_ranks_by_uses_and_what_a_byte_saves():
    policy = resolve_eviction("gdsf")
    once, often, bulky = entry(0), entry(1, num_uses=3), entry(2, size=200, num_uses=3)
    for one in (once, often, bulky):
        policy.used(one)
    assert [policy.rank(one) for one in (once, bulky, often)] == pytest.approx([0.01, 0.02, 0.04])


def test_gdsf_lets_old_favourites_age():
    store = MemoryStore(300, eviction="gdsf", num_protected=0)
    favourite = entry(0)
    store.put(favourite)
    for _ in range(4):
        find(store, favourite)
    held = []
    for number in range(100, 120):
        store.put(entry(number))
        held.append(holds(store, favourite))
    assert all(held[:4]) and not held[-1]  # uses count for a while, and not for ever


def test_gdsf_ages_by_what_was_evicted_only():
    policy = resolve_eviction("gdsf")
    removed, evicted = entry(0, num_uses=9), entry(1, num_uses=1)
    for one in (removed, evicted):
        policy.used(one)
    policy.forget(removed)
    policy.evicted(evicted)
    policy.forget(evicted)
    policy.used(fresh := entry(2))
    assert policy.rank(fresh) == pytest.approx(0.02 + 0.01)


@pytest.mark.parametrize("seed", range(5))
def test_in_steady_traffic_the_default_finds_as_much_as_lru(seed: int):
    assert rate(None, seed) >= rate("lru", seed)


def test_the_options_name_every_policy() -> None:
    from kvboost_rag.engine.config import EVICTION_NAMES

    assert tuple(EVICTIONS) == EVICTION_NAMES
