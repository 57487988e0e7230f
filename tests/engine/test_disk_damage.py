"""Disk tier: a file or a folder that is broken, gone or refused is a miss, never wrong KV and never an error."""

from __future__ import annotations

import errno
import os
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from entries import document, get, holds, path_of, same, store
from safetensors.torch import load_file, save_file

from kvboost_rag.engine.store import Entry
from kvboost_rag.engine.store import entryfile as entryfile_module
from kvboost_rag.engine.store.disk import DiskStore
from kvboost_rag.errors import CacheWarning, OptionError

__all__ = ["store"]
pytestmark = pytest.mark.filterwarnings("error::kvboost_rag.errors.CacheWarning")
Damage = Callable[[Path], None]


def truncate(num_bytes: int) -> Damage:
    return lambda path: os.truncate(path, num_bytes if num_bytes >= 0 else path.stat().st_size + num_bytes)


def rewrite(**changes: Any) -> Damage:
    """A valid safetensors file with other facts in its header."""

    def damage(path: Path) -> None:
        header = entry_header(path) | changes
        save_file(load_file(path), path, {k: v for k, v in header.items() if v is not None})

    return damage


def entry_header(path: Path) -> dict[str, str]:
    with entryfile_module.safe_open(path, framework="pt") as file:
        return dict(file.metadata())


def resealed(**changes: str) -> Damage:
    """Other facts in a header whose checksum is right."""

    def damage(path: Path) -> None:
        header = {k: v for k, v in entry_header(path).items() if k != "checksum"} | changes
        save_file(load_file(path), path, header | {"checksum": entryfile_module._header_checksum(header)})

    return damage


DAMAGES: dict[str, Damage] = {
    **{f"truncated at {n}": truncate(n) for n in (0, 1, 7, 8, 9, 100, 500, 1000, -1, -8, -100)},
    "a byte too many": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "not safetensors": lambda path: path.write_text("KV" * 1000),
    "a huge header length": lambda path: path.write_bytes(b"\xff" * 1000),
    "foreign safetensors": lambda path: save_file({"weight": torch.ones(3)}, path),
    "foreign safetensors with facts": lambda path: save_file({"keys": torch.ones(3)}, path, {"format": "pt"}),
    "another version": rewrite(format="kvboost-rag 0"),
    "another version, resealed": resealed(format="kvboost-rag 2"),
    "an unknown codec": resealed(codec="int3"),
    "another codec's tensors": lambda path: save_file({"token_ids": torch.arange(5)}, path, entry_header(path)),
    "facts of no codec": resealed(facts="{}"),
    "facts that are no JSON": resealed(facts="{"),
    "another number of tokens": resealed(num_tokens="4"),
    "no checksum": rewrite(checksum=None),
    "an altered text": rewrite(text='"other"'),
    "an altered position": rewrite(facts='{"position": "8"}'),
    "another document's file": lambda path: path.write_bytes(entryfile_module.dump(document(2))),
    "another kind's file": lambda path: path.write_bytes(entryfile_module.dump(document(1, exact=True))),
}


class TestDamage:
    @pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
    @pytest.mark.parametrize("reopen", [False, True], ids=["open", "reopened"])
    def test_a_damaged_file_is_a_miss_warns_once_and_is_not_tried_again(
        self, store: DiskStore, damage: Damage, reopen: bool
    ):
        one, other = document(1), document(5)
        assert store.put(one) and store.put(other)
        damage(path_of(store, one))
        store = DiskStore(store.path) if reopen else store
        with pytest.warns(CacheWarning, match=path_of(store, one).name) as caught:
            assert get(store, one) is None
        assert len(caught) == 1
        assert get(store, one) is None
        assert not path_of(store, one).exists()
        assert holds(store, other)
        assert store.put(one) and holds(store, one)

    @pytest.mark.parametrize("look", [lambda s, e: s.peek(e.keys.content), lambda s, e: next(s.texts(), None)])
    def test_looking_at_headers_survives_damage_too(self, store: DiskStore, look: Callable[[DiskStore, Entry], object]):
        one = document(1)
        for damage in (truncate(9), DAMAGES["foreign safetensors"], rewrite(text='"other"'), rewrite(format="2")):
            store.put(one)
            damage(path_of(store, one))
            with pytest.warns(CacheWarning):
                assert look(store, one) is None

    def test_a_flipped_bit_anywhere_is_found(self, store: DiskStore):
        one = document(1)
        store.put(one)
        path = path_of(store, one)
        data = path.read_bytes()
        rng = random.Random(0)
        header_size = 8 + int.from_bytes(data[:8], "little")
        offsets = {*range(header_size), *rng.sample(range(header_size, len(data)), 300), len(data) - 1}
        for offset in sorted(offsets):
            flipped = bytearray(data)
            flipped[offset] ^= 1 << rng.randrange(8)
            path.write_bytes(flipped)
            store = DiskStore(store.path)
            with warnings.catch_warnings(record=True):
                warnings.simplefilter("always")
                found = get(store, one)
            # a flip that JSON does not see (the case of a \u escape's digit) changes nothing
            assert found is None or (offset < header_size and same(found, one)), offset

    def test_a_file_deleted_by_someone_is_a_miss_without_a_warning(self, store: DiskStore):
        one = document(1)
        store.put(one)
        path_of(store, one).unlink()
        assert get(store, one) is None and store.peek(one.keys.content) is None
        assert store.stats().used_bytes == 0
        assert store.put(one) and holds(store, one)

    def test_a_folder_deleted_by_someone_is_made_again(self, store: DiskStore):
        one = document(1)
        store.put(one)
        path_of(store, one).unlink()
        store.path.rmdir()
        assert get(store, one) is None
        assert store.put(one) and holds(store, one)

    @pytest.mark.parametrize("before", [True, False])
    def test_a_directory_of_that_name_is_a_miss(self, store: DiskStore, before: bool):
        one, other = document(1), document(2)
        store.put(other)
        if not before:
            store.put(one)
            path_of(store, one).unlink()
        path_of(store, one).mkdir()
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            assert get(store, one) is None
            assert not store.put(one)
        assert get(store, one) is None
        assert holds(store, other)

    @pytest.mark.parametrize("error", [PermissionError(errno.EACCES, "denied"), OSError(errno.EMFILE, "too many")])
    def test_what_the_system_refuses_to_read_is_a_miss_and_left_alone(
        self, store: DiskStore, monkeypatch: pytest.MonkeyPatch, error: OSError
    ):
        one = document(1)
        store.put(one)

        def refuse(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr(entryfile_module, "safe_open", refuse)
        with pytest.warns(CacheWarning, match="is not used") as caught:
            assert get(store, one) is None
        assert get(store, one) is None and len(caught) == 1
        assert path_of(store, one).exists()
        store.remove(one.keys.content)
        assert not path_of(store, one).exists()

    @pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
    def test_an_unreadable_file_is_a_miss(self, store: DiskStore):
        one = document(1)
        store.put(one)
        path_of(store, one).chmod(0)
        with pytest.warns(CacheWarning):
            assert get(store, one) is None

    def test_a_folder_that_cannot_be_one_is_said_so(self, tmp_path: Path):
        (tmp_path / "file").write_text("")
        with pytest.raises(OptionError, match="folder="):
            DiskStore(tmp_path / "file")
        with pytest.raises(OptionError, match="max_bytes=-1"):
            DiskStore(tmp_path, max_bytes=-1)
