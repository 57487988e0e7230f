"""Disk tier: writes that fail or are killed leave only whole entries, and processes that share a folder agree."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from engine.test_store import keys_of
from entries import document, file_size, folder_bytes, get, holds, ids_of, left_in, store

from kvboost_rag.engine.store import disk as disk_module
from kvboost_rag.engine.store import folder as folder_module
from kvboost_rag.engine.store.disk import DiskStore
from kvboost_rag.engine.store.entryfile import FileName
from kvboost_rag.engine.types import Fidelity
from kvboost_rag.errors import CacheWarning

__all__ = ["store"]
pytestmark = pytest.mark.filterwarnings("error::kvboost_rag.errors.CacheWarning")


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
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})",
        "from entries import DiskStore, document, holds",
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
