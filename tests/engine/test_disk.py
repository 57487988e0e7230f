"""Disk tier: what was put comes back bit for bit or not at all, whatever happens to files and whoever shares them."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine.test_store import FINGERPRINT, StoreContract, keys_of, restless
from safetensors.torch import load_file, save_file

from kvboost_rag.engine.codecs import CODECS
from kvboost_rag.engine.keys import content_hash
from kvboost_rag.engine.store import Entry, MemoryStore, Put, Store
from kvboost_rag.engine.store import disk as disk_module
from kvboost_rag.engine.store import entryfile as entryfile_module
from kvboost_rag.engine.store import folder as folder_module
from kvboost_rag.engine.store.disk import DiskStore
from kvboost_rag.engine.store.entryfile import FileName, OnDisk
from kvboost_rag.engine.store.tiered import TieredStore
from kvboost_rag.engine.types import KV, Fidelity
from kvboost_rag.errors import CacheWarning, OptionError

__all__ = ["restless"]
pytestmark = pytest.mark.filterwarnings("error::kvboost_rag.errors.CacheWarning")
Damage = Callable[[Path], None]


def ids_of(number: int, num_tokens: int = 5) -> tuple[int, ...]:
    return tuple(range(number * 1000, number * 1000 + num_tokens))


def document(number: int, num_tokens: int = 5, dtype: torch.dtype = torch.float32, behind: bytes = b"", **flags: Any):
    """Entry number ``number``: always the same tokens and KV. Warmed unless ``flags`` say otherwise."""
    ids = ids_of(number, num_tokens)
    generator = torch.Generator().manual_seed(number)
    keys, values = (torch.randn(2, 3, num_tokens, 8, generator=generator).to(dtype) for _ in range(2))
    options = {"exact": False, "warmed": True, "importance": number / 3, "text": f"text {number}", **flags}
    return Entry(keys_of(ids, behind), np.array(ids, dtype=np.int64), KV(keys, values, position=7), **options)


def passing(number: int, **options: Any) -> Entry:
    return document(number, **{"exact": True, "warmed": False, "text": "", **options})


def same(found: Entry, put: Entry) -> bool:
    """Equal in everything that is kept, tensors bit for bit."""
    (tensors, facts), (expected, expected_facts) = (CODECS[e.packed.codec].dump(e.packed) for e in (found, put))
    facets = ("keys", "exact", "warmed", "pinned", "importance", "text")
    return (
        np.array_equal(found.ids, put.ids)
        and facts == expected_facts
        and tensors.keys() == expected.keys()
        and all(bits_equal(tensors[name], expected[name]) for name in expected)
        and all(getattr(found, name) == getattr(put, name) for name in facets)
    )


def bits_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def get(store: DiskStore, wanted: Entry) -> Entry | None:
    hit = store.load(wanted.keys, wanted.ids)
    return hit and hit[0]


def holds(store: DiskStore, wanted: Entry) -> bool:
    found = get(store, wanted)
    return found is not None and same(found, wanted)


def path_of(store: DiskStore, one: Entry) -> Path:
    return store.path / str(FileName.of(one))


def file_size(tmp_path: Path, **options: Any) -> int:
    store = DiskStore(tmp_path / "size")
    store.put(document(1, **options))
    return store.stats().used_bytes


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path / "kv")


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
        assert [found for _, found, _ in store.texts()] == [text]

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
        assert {text for _, text, _ in found} == {"text 1", "text 2", "text 3"}
        ours = {text for content, text, _ in found if content_hash(tokens[text], FINGERPRINT) == content}
        assert ours == {"text 1", "text 2"}
        assert all(num_tokens == 5 for *_, num_tokens in found)


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


def left_in(folder: Path) -> list[str]:
    return [p.name for p in folder.iterdir() if FileName.parse(p.name) is None]


class TestWriting:
    @pytest.mark.parametrize("step", ["fsync", "replace"])
    def test_a_write_that_fails_is_a_miss_and_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
    ):
        store, one = DiskStore(tmp_path, fsync=True), document(1)

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(disk_module.os, step, full)
            with pytest.warns(CacheWarning, match="No space left") as caught:
                assert not any(store.put(document(n)) for n in (1, 2, 3))
            assert len(caught) == 1
        assert get(store, one) is None and store.peek(one.keys.content) is None
        assert list(tmp_path.iterdir()) == []
        assert store.put(one) and holds(store, one)

    def test_a_disk_that_fills_up_midway_is_a_miss_and_leaves_nothing(self, store: DiskStore):
        """A limit on the size of files: half of the entry is written, then the system says no."""
        small, big = document(1), document(2, num_tokens=5000)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (big.num_bytes // 2, limits[1]))
        try:
            with pytest.warns(CacheWarning, match="could not be written"):
                assert not store.put(big)
            assert store.put(small)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert get(store, big) is None and holds(store, small)
        assert left_in(store.path) == []
        assert store.put(big) and holds(store, big)

    def test_a_write_that_fails_keeps_what_was_there(self, store: DiskStore, monkeypatch: pytest.MonkeyPatch):
        old, new = document(1, behind=b"old"), document(1, behind=b"new")
        store.put(old)
        with monkeypatch.context() as patch:
            patch.setattr(disk_module.os, "replace", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
            with pytest.warns(CacheWarning):
                assert not store.put(new)
        assert holds(store, old)

    def test_abandoned_temporary_files_are_deleted_on_open_and_fresh_ones_are_not(self, tmp_path: Path):
        for name, age in ((".1-2-ab", folder_module.ABANDONED_SECONDS + 60), (".3-4-cd", 60)):
            path = tmp_path / f"{name}{folder_module.TEMPORARY}"
            path.write_bytes(b"half an entry")
            os.utime(path, times=(path.stat().st_atime, path.stat().st_mtime - age))
        (tmp_path / "notes.txt").write_text("mine")
        os.utime(tmp_path / "notes.txt", times=(0, 0))
        DiskStore(tmp_path, max_bytes=0)
        assert {p.name for p in tmp_path.iterdir()} == {f".3-4-cd{folder_module.TEMPORARY}", "notes.txt"}

    def test_kills_in_the_middle_of_writing_leave_only_whole_entries(self, tmp_path: Path):
        """Processes that write in a loop are killed at random times, six of them one after another."""
        run_here(
            """
            import os, random, signal, time
            rng = random.Random(0)
            entries = [document(n, num_tokens=10_000) for n in range(6)]
            for _ in range(6):
                child = os.fork()
                if child == 0:
                    store = DiskStore(FOLDER)
                    while True:
                        store.put(entries[rng.randrange(6)])
                time.sleep(rng.uniform(0.05, 0.3))
                os.kill(child, signal.SIGKILL)
                assert os.waitpid(child, 0)[1] == signal.SIGKILL
            """,
            tmp_path,
        )
        store = DiskStore(tmp_path)
        assert store.stats().num_entries > 0
        names = {p.name for p in tmp_path.iterdir() if FileName.parse(p.name)}
        entries = [document(n, num_tokens=10_000) for n in range(6)]
        assert names <= {str(FileName.of(one)) for one in entries}
        for one in entries:
            assert holds(store, one) is (str(FileName.of(one)) in names)


def script(code: str, folder: Path) -> list[str]:
    lines = [
        f"import sys; sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]!r}",
        "from test_disk import *; from test_disk import document, passing, get, holds, path_of, DiskStore",
        f"FOLDER = {str(folder)!r}",
    ]
    return [sys.executable, "-c", "\n".join([*lines, *(line[12:] for line in code.splitlines())])]


def run_here(code: str, folder: Path) -> None:
    subprocess.run(script(code, folder), check=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})


class TestTwoProcesses:
    def test_what_one_writes_and_deletes_the_other_finds_and_misses(self, tmp_path: Path):
        code = """
            store = DiskStore(FOLDER)
            for line in sys.stdin:
                verb, number = line.split()
                one = document(int(number), behind=b"their primer")
                done = {"put": store.put, "get": lambda e: holds(store, e),
                        "remove": lambda e: store.remove(e.keys.content)}[verb](one)
                print(int(done), flush=True)
            """
        store, wanted = DiskStore(tmp_path), document(1, behind=b"their primer")
        assert get(store, wanted) is None
        other = subprocess.Popen(script(code, tmp_path), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert other.stdin is not None and other.stdout is not None

        def ask(question: str) -> int:
            other.stdin.write(f"{question}\n")
            other.stdin.flush()
            return int(other.stdout.readline())

        try:
            for _ in range(3):
                assert ask("put 1") == 1
                assert holds(store, wanted)
                elsewhere = store.load(keys_of(ids_of(1), b"our prefix"), wanted.ids)
                assert elsewhere is not None and elsewhere[1] is Fidelity.APPROXIMATE
                assert ask("remove 1") == 1
                assert get(store, wanted) is None and store.peek(wanted.keys.content) is None
                assert get(store, document(2, behind=b"their primer")) is None
                assert ask("get 2") == 0
                ours = document(2, behind=b"their primer")
                assert store.put(ours)
                assert ask("get 2") == 1
                assert store.remove(ours.keys.content) == 1
                assert ask("get 2") == 0
        finally:
            other.send_signal(signal.SIGKILL)
            other.communicate()

    def test_a_file_that_appears_right_after_a_look_is_seen(self, store: DiskStore):
        """Within one tick of the file system's clock: the folder's stamp alone would not tell."""
        other = DiskStore(store.path)
        for number in range(5):
            assert get(store, document(number)) is None
            stamp = store.path.stat().st_mtime_ns
            other.put(document(number))
            os.utime(store.path, ns=(stamp, stamp))
            assert holds(store, document(number))

    def test_a_settled_folder_is_not_listed_again(self, store: DiskStore, monkeypatch: pytest.MonkeyPatch):
        store.put(document(1))
        os.utime(store.path, times=(1e9, 1e9))
        get(store, document(2))
        monkeypatch.setattr(folder_module.os, "scandir", None)
        assert get(store, document(2)) is None and holds(store, document(1))

    def test_what_the_other_used_is_not_evicted_as_old(self, tmp_path: Path):
        size = file_size(tmp_path)
        first, second = DiskStore(tmp_path / "kv", 3 * size), DiskStore(tmp_path / "kv", 3 * size)
        for number in range(3):
            first.put(document(number))
        assert holds(second, document(0))
        assert first.put(document(3))
        assert holds(first, document(0)) and get(first, document(1)) is None

    def test_both_keep_the_capacity_together(self, tmp_path: Path):
        size = file_size(tmp_path)
        stores = [DiskStore(tmp_path / "kv", 4 * size) for _ in range(2)]
        for number in range(20):
            assert stores[number % 2].put(document(number))
            assert folder_bytes(tmp_path / "kv") <= 4 * size


def folder_bytes(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.iterdir())


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
