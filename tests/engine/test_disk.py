"""Disk tier: what was put comes back bit for bit, by either hash, and the folder stays within its capacity."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from engine.test_store import FINGERPRINT, keys_of
from entries import document, file_size, folder_bytes, get, holds, ids_of, passing, path_of, same, store

from kvboost_rag.engine.codecs import CODECS
from kvboost_rag.engine.keys import content_hash
from kvboost_rag.engine.store import entryfile as entryfile_module
from kvboost_rag.engine.store.disk import DiskStore
from kvboost_rag.engine.store.entryfile import FileName, OnDisk
from kvboost_rag.engine.types import KV, Fidelity

__all__ = ["store"]
pytestmark = pytest.mark.filterwarnings("error::kvboost_rag.errors.CacheWarning")


class TestRoundTrip:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize("reopen", [False, True])
    def test_every_dtype_comes_back_bit_for_bit(self, store: DiskStore, dtype: torch.dtype, reopen: bool):
        one = document(1, dtype=dtype, exact=True, pinned=True)
        special = torch.tensor([7e4, -0.0, float("inf"), float("nan"), 1e-7], dtype=torch.float32)
        one.packed.keys[0, 0, 0, :5] = special.to(dtype)  # 7e4 is more than float16 holds (cases.md, row 64)
        assert store.put(one)
        store = DiskStore(store.path) if reopen else store
        found = get(store, one)
        assert found is not None and same(found, one)
        assert dtype is not torch.bfloat16 or found.packed.keys[0, 0, 0, 0] == torch.tensor(7e4).bfloat16()

    @pytest.mark.parametrize("name", CODECS)
    def test_every_codec_comes_back_bit_for_bit(self, store: DiskStore, name: str):
        codec = CODECS[name]
        kv = document(1, num_tokens=70).packed
        kv = KV(torch.randn(2, 3, 70, 64), torch.randn(2, 3, 70, 64), None if codec.position_free else 7)
        one = document(1, num_tokens=70)
        one.packed = codec.encode(kv)
        assert store.put(one)
        found = get(store, one)
        assert found is not None and found.packed.codec == name and same(found, one)
        assert torch.equal(codec.decode(found.packed).keys, codec.decode(one.packed).keys)

    @pytest.mark.parametrize("text", ["", "é 漢字 🦊", 'quotes " \\ \n\0', "\ud800 alone", "x" * 100_000])
    def test_any_text_comes_back(self, store: DiskStore, text: str):
        one = document(1, text=text)
        assert store.put(one)
        assert holds(store, one)
        assert [known.text for known in store.texts()] == ([text] if text else [])

    def test_views_of_one_storage_and_a_position_of_none_are_kept(self, store: DiskStore):
        one = document(1)
        whole = torch.randn(4, 3, 9, 8)
        one.packed = KV(whole[:2, :, 2:7], whole[2:, :, 2:7], position=None)
        assert store.put(one)
        assert holds(store, one)

    def test_what_was_loaded_outlives_its_file(self, store: DiskStore):
        one = document(1)
        store.put(one)
        found = get(store, one)
        path_of(store, one).write_bytes(b"")
        path_of(store, one).unlink()
        assert found is not None and same(found, one)

    def test_the_name_says_what_the_entry_is(self):
        for flags in range(8):
            one = document(1, warmed=bool(flags & 1), exact=bool(flags & 2), pinned=bool(flags & 4))
            name = FileName.of(one)
            assert FileName.parse(str(name)) == name
        for other in ("", "model.safetensors", "ab-cd-wx.safetensors", "abc-ab-we.safetensors", "ab-cd-we.tmp"):
            assert FileName.parse(other) is None


class TestLookup:
    def test_exact_behind_its_prefix_approximate_elsewhere(self, store: DiskStore):
        header = passing(1, behind=b"header")
        store.put(header)
        for store_now in (store, DiskStore(store.path)):
            assert store_now.load(header.keys, header.ids)[1] is Fidelity.EXACT  # type: ignore[index]
            elsewhere = store_now.load(keys_of(ids_of(1), b"else"), header.ids)
            assert elsewhere is not None and elsewhere[1] is Fidelity.APPROXIMATE
            assert elsewhere[0].keys == header.keys

    def test_an_approximate_entry_is_never_exact(self, store: DiskStore):
        one = document(1)
        store.put(one)
        assert store.load(one.keys, one.ids)[1] is Fidelity.APPROXIMATE  # type: ignore[index]

    def test_the_exact_entry_first_then_the_warmed_one(self, store: DiskStore):
        warm, header = document(1, behind=b"primer"), passing(1, behind=b"header")
        assert store.put(header) and store.put(warm)
        assert holds(store, warm) and holds(store, header)
        elsewhere = store.load(keys_of(ids_of(1), b"else"), warm.ids)
        assert elsewhere is not None and same(elsewhere[0], warm)

    @pytest.mark.parametrize("ids", [(9,), (), ids_of(1)[:-1], (*ids_of(1), 1), ids_of(2)])
    def test_equal_hashes_never_serve_other_tokens(self, store: DiskStore, ids: tuple[int, ...]):
        one = document(1)
        store.put(one)
        assert store.load(one.keys, np.array(ids, dtype=np.int64)) is None
        assert store.stats().num_mismatches == 1
        assert holds(store, one)

    def test_an_entry_put_under_the_keys_of_another_is_only_served_for_its_own_tokens(self, store: DiskStore):
        one, other = document(1), document(2)
        other.keys = one.keys
        assert store.put(one) and store.put(other)
        assert get(store, one) is None
        assert holds(store, other)

    def test_a_replaced_entry_is_gone_and_a_warmed_one_is_never_replaced_by_a_by_product(self, store: DiskStore):
        old, new = document(1, behind=b"old primer"), document(1, behind=b"new primer", pinned=True)
        assert store.put(old) and store.put(new)
        assert store.stats().num_entries == 1 and not path_of(store, old).exists()
        assert not store.put(passing(1, exact=False))
        assert holds(store, new)

    def test_peeking_reads_no_tensors_and_knows_the_flags(self, store: DiskStore, monkeypatch: pytest.MonkeyPatch):
        one = document(1, pinned=True)
        store.put(one)
        store = DiskStore(store.path)
        monkeypatch.setattr(entryfile_module, "read", None)
        found = store.peek(one.keys.content)
        assert found is not None and isinstance(found.packed, OnDisk)
        assert (found.warmed, found.pinned, found.exact, found.text) == (True, True, False, "text 1")
        assert (found.packed.num_tokens, found.packed.codec) == (5, "raw")
        assert store.peek(b"unknown") is None

    def test_texts_lets_the_caller_tell_its_own_documents_from_another_models(self, store: DiskStore):
        other = document(3)
        other.keys = keys_of(ids_of(3), b"")
        other.keys = type(other.keys)(other.keys.prefix, content_hash(ids_of(3), b"other model"))
        for one in (document(1), document(2), passing(4), other):
            assert store.put(one)
        tokens = {f"text {n}": ids_of(n) for n in range(5)}
        found = list(DiskStore(store.path).texts())
        assert {known.text for known in found} == {"text 1", "text 2", "text 3"}
        ours = {known.text for known in found if content_hash(tokens[known.text], FINGERPRINT) == known.content}
        assert ours == {"text 1", "text 2"}
        assert {(known.num_tokens, known.chunking) for known in found} == {(5, "document")}


class TestCapacity:
    def test_it_holds_and_the_least_recently_used_goes_first(self, tmp_path: Path):
        size = file_size(tmp_path)
        store = DiskStore(tmp_path / "kv", 3 * size)
        for number in range(3):
            store.put(document(number))
        assert holds(store, document(0))
        assert store.put(document(3))
        assert [holds(store, document(n)) for n in range(4)] == [True, False, True, True]
        assert folder_bytes(store.path) == store.stats().used_bytes <= 3 * size

    def test_it_holds_after_reopening_and_so_does_the_order_of_use(self, tmp_path: Path):
        size = file_size(tmp_path)
        store = DiskStore(tmp_path / "kv")
        for number in range(6):
            store.put(document(number))
        holds(store, document(0))
        store = DiskStore(store.path, 4 * size)
        assert folder_bytes(store.path) == store.stats().used_bytes <= 4 * size
        assert store.stats().num_entries == 4
        assert store.put(document(6))
        assert [holds(store, document(n)) for n in range(7)] == [True, False, False, False, True, True, True]

    def test_by_products_go_before_warmed_entries_and_pinned_ones_never(self, tmp_path: Path):
        size = file_size(tmp_path)
        store = DiskStore(tmp_path / "kv", 4 * size)
        pinned, warm = document(1, pinned=True), document(2)
        for one in (pinned, warm, passing(3), passing(4)):
            assert store.put(one)
        assert store.put(document(5)) and get(store, passing(3)) is None
        assert store.put(document(6)) and get(store, passing(4)) is None
        assert not store.put(passing(7)), "a by-product must not displace warmed entries"
        assert store.put(document(8)) and get(store, warm) is None and holds(store, pinned)
        for number in range(10, 20):
            store.put(document(number))
        assert holds(store, pinned)
        store = DiskStore(store.path, 0)
        assert holds(store, pinned) and store.stats().num_entries == 1

    def test_an_entry_larger_than_the_capacity_is_refused_and_nothing_is_lost(self, tmp_path: Path):
        size = file_size(tmp_path)
        store = DiskStore(tmp_path / "kv", 2 * size)
        store.put(document(1))
        assert not store.put(document(2, num_tokens=500))
        assert not store.put(document(1, num_tokens=5, text="long" * size))
        assert holds(store, document(1))

    def test_replacing_needs_no_extra_room(self, tmp_path: Path):
        size = file_size(tmp_path)
        store = DiskStore(tmp_path / "kv", 2 * size)
        for _ in range(3):
            assert store.put(document(1)) and store.put(document(2, behind=os.urandom(4)))
        assert store.stats().num_entries == 2 and store.stats().used_bytes == folder_bytes(store.path)

    def test_opening_ten_thousand_files_opens_none(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        for number in range(10_000):
            one = passing(0)
            name = FileName(number.to_bytes(32, "big"), one.keys.prefix, number % 2 == 0, True, False)
            (tmp_path / str(name)).touch()
        for module, name in ((entryfile_module, "safe_open"), (os, "open")):
            monkeypatch.setattr(module, name, None)
        monkeypatch.setattr("builtins.open", None)
        monkeypatch.setattr("io.open", None)
        store = DiskStore(tmp_path, max_bytes=10**9)
        assert (store.stats().num_entries, store.stats().num_warmed) == (10_000, 5_000)

    def test_removing_and_clearing_touch_only_what_is_ours(self, tmp_path: Path):
        theirs = DiskStore(tmp_path)
        theirs.put(document(9))
        (tmp_path / "model.safetensors").write_bytes(b"weights")
        store = DiskStore(tmp_path)
        for one in (document(1), passing(1, behind=b"header"), document(2)):
            assert store.put(one)
        assert store.remove(document(1).keys.content) == 2
        assert store.remove(document(1).keys.content) == store.remove(b"unknown") == 0
        store.clear()
        assert get(store, document(2)) is None
        assert (tmp_path / "model.safetensors").exists() and holds(store, document(9))
        store.clear()
        assert get(theirs, document(9)) is None
