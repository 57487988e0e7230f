"""Memory over disk: all that was put is served from one of the two, from many threads too, and nothing else is."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from engine.test_store import StoreContract, restless
from entries import bits_equal, document, file_size, folder_bytes, get, ids_of, left_in, passing, path_of, same

from kvboost_rag.engine.store import Entry, MemoryStore, Put, Store
from kvboost_rag.engine.store.disk import DiskStore
from kvboost_rag.engine.store.tiered import TieredStore
from kvboost_rag.engine.types import Fidelity
from kvboost_rag.errors import CacheWarning

__all__ = ["restless"]
pytestmark = pytest.mark.filterwarnings("error::kvboost_rag.errors.CacheWarning")


class TestTieredContract(StoreContract):
    """A disk without room changes nothing of what memory promises."""

    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.path = tmp_path

    def make(self, max_bytes: int = 1000, warmed_share: float = 0.8) -> Store:
        return TieredStore(MemoryStore(max_bytes, warmed_share), DiskStore(self.path, max_bytes=0))


SIZE = document(0).num_bytes


@pytest.fixture
def tiered(tmp_path: Path) -> Iterator[TieredStore]:
    """Three documents fit into memory."""
    yield TieredStore(MemoryStore(3 * SIZE, 1.0), DiskStore(tmp_path / "kv"))


def find(store: Store, wanted: Entry) -> Entry | None:
    hit = store.find(wanted.keys, wanted.ids)
    return hit and hit[0]


class TestTiered:
    def test_twenty_documents_through_a_memory_of_three(self, tiered: TieredStore):
        """cases.md, row 55: a disk tier that returned other requests' KV."""
        documents = [document(n) for n in range(20)]
        for one in documents:
            assert tiered.put(one) == Put(stored=True)
        rng = random.Random(0)
        for number in [*range(20), *(rng.randrange(20) for _ in range(200))]:
            found = find(tiered, documents[number])
            assert found is not None and same(found, documents[number])
            assert tiered.stats().used_bytes <= 3 * SIZE
        stats = tiered.stats()
        assert (stats.num_hits, stats.num_misses, stats.num_mismatches) == (220, 0, 0)
        assert 170 <= stats.num_disk_hits < 220
        assert (stats.num_entries, stats.num_disk_entries, stats.num_disk_warmed) == (3, 20, 20)

    def test_the_tier_of_a_hit_is_disk_once_and_memory_from_then_on(self, tiered: TieredStore):
        for number in range(4):
            tiered.put(document(number))
        for number, expected in ((3, ["memory", "memory"]), (0, ["disk", "memory"])):
            found = [find(tiered, document(number)), None]
            tiers = [tiered.tier_of(found[0])]  # type: ignore[arg-type]
            found[1] = find(tiered, document(number))
            tiers.append(tiered.tier_of(found[1]))  # type: ignore[arg-type]
            assert tiers == expected and found[0] is found[1]

    def test_what_memory_has_no_room_for_is_served_from_disk(self, tiered: TieredStore):
        big = document(1, num_tokens=100)
        assert tiered.put(big) == Put(stored=True)
        for _ in range(2):
            found = find(tiered, big)
            assert found is not None and same(found, big) and tiered.tier_of(found) == "disk"
        assert tiered.stats().num_entries == 0

    def test_by_products_reach_the_disk_when_memory_evicts_them(self, tiered: TieredStore):
        for number in range(3):
            tiered.put(passing(number))
        assert tiered.stats().num_disk_entries == 0
        assert tiered.put(passing(3)).evicted == ()
        assert tiered.stats().num_disk_entries == 1
        hit = tiered.find(passing(0).keys, passing(0).ids)
        assert hit is not None and same(hit[0], passing(0)) and hit[1] is Fidelity.EXACT

    def test_by_products_reach_the_disk_when_a_document_from_disk_takes_their_room(self, tiered: TieredStore):
        DiskStore(tiered.disk.path).put(document(9))
        for number in range(3):
            tiered.put(passing(number))
        assert find(tiered, document(9)) is not None
        assert all(find(tiered, passing(number)) is not None for number in range(3))

    def test_what_the_disk_does_not_take_is_evicted(self, tmp_path: Path):
        store = TieredStore(MemoryStore(SIZE, 1.0), DiskStore(tmp_path, max_bytes=0))
        first = passing(1)
        store.put(first)
        assert store.put(passing(2)).evicted == (first,)

    def test_reopened_it_has_every_warmed_document_and_after_closing_the_headers(self, tiered: TieredStore):
        kept = [document(1), document(2), passing(3, behind=b"header")]
        for one in kept:
            tiered.put(one)
        tiered.put(passing(4, exact=False))
        tiered.close()
        reopened = TieredStore(MemoryStore(3 * SIZE, 1.0), DiskStore(tiered.disk.path))
        for one in kept:
            found = find(reopened, one)
            assert found is not None and same(found, one)
        assert reopened.find(kept[2].keys, kept[2].ids)[1] is Fidelity.EXACT  # type: ignore[index]

    def test_peeking_prefers_a_warmed_entry_of_either_tier(self, tiered: TieredStore):
        warm = document(1)
        tiered.put(warm)
        assert tiered.peek(warm.keys.content) is warm
        reopened = TieredStore(MemoryStore(3 * SIZE), DiskStore(tiered.disk.path))
        reopened.put(passing(1, behind=b"header"))
        found = reopened.peek(warm.keys.content)
        assert found is not None and found.warmed and found.text == "text 1"
        assert reopened.peek(b"unknown") is None
        assert reopened.stats().num_hits == reopened.stats().num_misses == 0

    @pytest.mark.parametrize("closed", [False, True])
    def test_what_was_removed_stays_away_from_both_tiers(self, tiered: TieredStore, closed: bool):
        header = passing(1, behind=b"header")
        for one in (document(1), header, *(document(n) for n in range(2, 6))):
            tiered.put(one)
        assert tiered.remove(header.keys.content) == 2
        if closed:
            tiered.close()
        for store in (tiered, TieredStore(MemoryStore(3 * SIZE), DiskStore(tiered.disk.path))):
            assert find(store, document(1)) is None and store.peek(header.keys.content) is None

    def test_clearing_drops_both_tiers_but_not_what_others_wrote(self, tiered: TieredStore):
        DiskStore(tiered.disk.path).put(document(9))
        for one in (document(1), passing(2)):
            tiered.put(one)
        tiered.clear()
        tiered.close()
        assert find(tiered, document(1)) is None and find(tiered, passing(2)) is None
        assert tiered.stats().num_entries == 0 and find(tiered, document(9)) is not None

    def test_equal_hashes_never_serve_other_tokens(self, tiered: TieredStore):
        for number in range(5):
            tiered.put(document(number))
        for number in range(5):
            assert tiered.find(document(number).keys, np.array(ids_of(7), dtype=np.int64)) is None
        assert tiered.stats().num_mismatches >= 5

    def test_a_damaged_file_is_a_miss(self, tiered: TieredStore):
        for number in range(4):
            tiered.put(document(number))
        os.truncate(path_of(tiered.disk, document(0)), 300)
        with pytest.warns(CacheWarning):
            assert find(tiered, document(0)) is None
        assert find(tiered, document(1)) is not None

    @pytest.mark.parametrize("max_files", [None, 5])
    def test_from_many_threads_nothing_is_mixed_up_or_raised(
        self, tmp_path: Path, restless: None, max_files: int | None
    ):
        """cases.md, rows 56 and 68: warming, spilling, evicting, removing and getting the same documents."""
        max_bytes = max_files and max_files * file_size(tmp_path)
        store = TieredStore(MemoryStore(3 * SIZE), DiskStore(tmp_path / "kv", max_bytes))

        def work(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(60):
                number = rng.randrange(12)
                if rng.random() < 0.5:
                    store.put((document if rng.random() < 0.5 else passing)(number))
                found = find(store, document(number))
                if found is not None:
                    expected = document(number)
                    assert found.ids.tolist() == expected.ids.tolist()
                    assert bits_equal(found.packed.keys, expected.packed.keys)
                    assert bits_equal(found.packed.values, expected.packed.values)
                    assert store.tier_of(found) in ("memory", "disk")
                store.peek(document(rng.randrange(12)).keys.content)
                if rng.random() < 0.1:
                    store.remove(document(number).keys.content)
                assert store.stats().used_bytes <= 3 * SIZE

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(work, range(16)))
        assert left_in(store.disk.path) == []
        assert folder_bytes(store.disk.path) == store.disk.stats().used_bytes
        assert max_bytes is None or folder_bytes(store.disk.path) <= max_bytes
        store.clear()
        assert folder_bytes(store.disk.path) == store.stats().used_bytes == 0

    def test_a_disk_used_from_many_threads_raises_nothing_and_keeps_its_capacity(self, tmp_path: Path, restless: None):
        limit = 5 * file_size(tmp_path)
        stores = [DiskStore(tmp_path / "kv", limit) for _ in range(2)]

        def work(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(40):
                store, one = rng.choice(stores), document(rng.randrange(10))
                store.put(one)
                found = get(store, document(rng.randrange(10)))
                assert found is None or same(found, document(int(found.ids[0]) // 1000))
                if rng.random() < 0.1:
                    store.remove(one.keys.content)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        assert left_in(tmp_path / "kv") == []
        fresh = DiskStore(tmp_path / "kv", limit)
        assert folder_bytes(fresh.path) == fresh.stats().used_bytes <= limit
