"""Entries in files: one each, no index, one byte budget that outlives the process (paper, section 4.4).

Knows what to look for, what replaces what, and what to do about a file that cannot be trusted; knows nothing of tensors
or of what is in memory. Departs from the paper's fixed slots and JSON index: a file is found by its name, which says
all that a lookup has to know, appears whole or not at all (written under another name, then renamed), and may be
written, found and deleted by several processes at once. Whatever is wrong with a file makes it a miss and a
``CacheWarning``, never an exception and never other KV than was asked for.

Files of other models, tokenizers or tenants may lie in the same folder: their names never match, because all that goes
into the hashes, but they count toward ``max_bytes`` and are evicted like any other. Other names are left alone.
"""

from __future__ import annotations

import os
import secrets
import shutil
import threading
import time
import uuid
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvboost_rag.engine.store import entryfile
from kvboost_rag.engine.store.base import Entry, WarmText
from kvboost_rag.engine.store.entryfile import BrokenFileError, FileName
from kvboost_rag.engine.store.folder import TEMPORARY, Folder
from kvboost_rag.engine.types import ChunkKeys, Fidelity
from kvboost_rag.errors import CacheWarning, OptionError

IDENTITY = "store-id"  # the file that names a folder's contents


@dataclass(frozen=True)
class DiskStats:
    num_entries: int
    num_warmed: int
    used_bytes: int
    max_bytes: int | None
    num_hits: int
    num_mismatches: int  # same hash, other tokens: never served


class DiskStore:
    """Entries in the files of ``folder``, ``max_bytes`` in all (None: no limit). Safe from many threads and processes.

    Least recently used goes first, by-products before warmed entries, pinned ones never; a by-product never displaces
    a warmed entry. ``fsync``: what was put survives a power cut too (without, it may be lost; it is never read as
    something else). ``own``: nothing but this store's entries is in the folder, so ``clear`` deletes them all. Opening
    lists the folder and opens no file. Raises OptionError if it cannot be used.
    """

    def __init__(
        self, folder: str | os.PathLike[str], max_bytes: int | None = None, fsync: bool = False, own: bool = False
    ):
        self.path, self.max_bytes, self.fsync, self.own = Path(folder), max_bytes, fsync, own
        if max_bytes is not None and max_bytes < 0:
            raise OptionError.bad_value("max_bytes", max_bytes, "a number of bytes, or None for no limit")
        self._lock = threading.RLock()  # held for names and sizes, never while a file is read or written
        self._folder = Folder(self.path, max_bytes)
        self._known: set[bytes] = set()  # contents this store wrote or read: what clear() may delete
        self._num_hits = self._num_mismatches = 0
        self._write_failed = False
        self._identity = uuid.uuid4().hex  # until the folder says another
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OptionError.bad_value("folder", str(folder), f"a folder that can be written to ({error})") from error
        self._folder.delete_abandoned()
        self._folder.refresh()
        self._folder.trim()

    @property
    def identity(self) -> str:
        """A name for what the folder holds, kept in it: the same for all who open it, until it is cleared."""
        path = self.path / IDENTITY
        with suppress(OSError), path.open("x", encoding="ascii") as file:
            file.write(self._identity)
        with suppress(OSError, UnicodeDecodeError):
            return path.read_text(encoding="ascii") or self._identity
        return self._identity

    # Reading

    def load(self, keys: ChunkKeys, ids: npt.NDArray[np.int64], anywhere: bool = True) -> tuple[Entry, Fidelity] | None:
        """Behind this prefix first, then (``anywhere``) by content; the entry's token ids equal ``ids``. Marks it as
        used."""
        if not anywhere and not self.holds(keys):
            return None
        for name in self._candidates(keys.content, keys.prefix):
            exact = name.exact and name.prefix == keys.prefix
            if not (exact or anywhere):
                continue
            try:
                entry = entryfile.read(self.path / str(name))
            except (OSError, MemoryError, BrokenFileError) as error:
                self._give_up(name, error)
                continue
            with self._lock:
                if not np.array_equal(entry.ids, ids):
                    self._num_mismatches += 1
                    continue
                self._num_hits += 1
                self._known.add(name.content)
                self._folder.touch(name)
            return entry, Fidelity.EXACT if exact else Fidelity.APPROXIMATE
        return None

    def peek(self, content: bytes) -> Entry | None:
        """The entry ``load`` would try first, from its header alone: without ids, with ``OnDisk`` in place of KV."""
        entry = next(self._headers(self._candidates(content)), None)
        if entry is not None:
            with self._lock:
                self._known.add(content)
        return entry

    def holds(self, keys: ChunkKeys) -> bool:
        """Whether there is a file for exactly that prefix. Does not open it."""
        with self._lock:
            return any(name.exact and name.prefix == keys.prefix for name in self._folder.of_content(keys.content))

    def has(self, entry: Entry) -> bool:
        """Whether a file of ``entry``'s name is there. Does not open it."""
        with self._lock:
            return FileName.of(entry) in self._folder

    def texts(self) -> Iterator[WarmText]:
        """The text of every warmed entry that has one, the last used one last; headers only.

        Other models' are among them: the caller keeps those whose content hash the text gives. ``peek`` makes an
        entry known to ``clear``.
        """
        with self._lock:
            self._folder.refresh()
            files = self._folder.files
            names = sorted((name for name in files if name.warmed), key=lambda name: files[name].used)
        for entry in self._headers(names):
            if entry.text:
                num_tokens: int = entry.packed.num_tokens  # type: ignore[attr-defined]
                yield WarmText(entry.text, num_tokens, entry.chunking, entry.keys.content)

    def _headers(self, names: Iterable[FileName]) -> Iterator[Entry]:
        for name in names:
            try:
                yield entryfile.read_header(self.path / str(name))
            except (OSError, MemoryError, BrokenFileError) as error:
                self._give_up(name, error)

    def _candidates(self, content: bytes, prefix: bytes | None = None) -> Iterator[FileName]:
        """Files to try, best first. Looks at the folder again when those it knows of did not do."""
        tried: set[FileName] = set()
        for look_again in (False, True):
            with self._lock:
                if look_again:
                    self._folder.refresh()
                files = self._folder.files
                names = sorted(
                    self._folder.of_content(content) - tried,
                    key=lambda n: (
                        n.exact and n.prefix == prefix,
                        n.warmed and not n.bound,
                        not n.exact,
                        files[n].used,
                    ),
                    reverse=True,
                )
            for name in names:
                tried.add(name)
                yield name

    def _give_up(self, name: FileName, error: Exception) -> None:
        """A file could not be read: gone is gone, broken is deleted, and what the system refuses is left alone."""
        with self._lock:
            if isinstance(error, FileNotFoundError):
                self._folder.forget(name)
                return
            if isinstance(error, BrokenFileError):
                self._folder.delete(name)
            else:
                self._folder.refuse(name)
        warnings.warn(f"{self.path / str(name)} is not used: {error}", CacheWarning, stacklevel=4)

    # Writing

    def put(self, entry: Entry) -> bool:
        """Keep ``entry``. False if there is no room, a warmed entry stands in its place, or it cannot be written."""
        if self.max_bytes is not None and entry.num_bytes > self.max_bytes:
            return False
        name, data = FileName.of(entry), entryfile.dump(entry)
        with self._lock:
            self._folder.refresh()
            replaced = self._replaced_by(name)
            if any(old.warmed and (not name.warmed or (name.bound and not old.bound)) for old in replaced):
                return False
            if not self._folder.make_room(len(data), name.warmed, replaced):
                return False
            self._folder.reserved_bytes += len(data)
        try:
            self._write(self.path / str(name), data)
        except OSError as error:
            self._warn_of_write(error)
            return False
        finally:
            with self._lock:
                self._folder.reserved_bytes -= len(data)
        with self._lock:
            self._folder.add(name, len(data), time.time_ns())
            self._known.add(name.content)
            self._write_failed = False
            for old in replaced - {name}:
                self._folder.delete(old)
        return True

    def _replaced_by(self, name: FileName) -> set[FileName]:
        """Files that ``name`` stands for from now on; the same rule as in memory."""
        same = self._folder.of_content(name.content)
        found = {old for old in same if name.exact and old.exact and old.prefix == name.prefix}
        if not name.bound:
            found |= {old for old in same if not old.bound}
        return found

    def _write(self, path: Path, data: bytes) -> None:
        """All of it under its name, or nothing. Raises OSError."""
        temporary = self.path / f".{os.getpid()}-{threading.get_ident()}-{secrets.token_hex(4)}{TEMPORARY}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)  # someone may have deleted it
            with temporary.open("xb") as file:
                file.write(data)
                if self.fsync:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise

    def _warn_of_write(self, error: OSError) -> None:
        """Once, until writing works again: a full disk stays full for many entries."""
        with self._lock:
            if self._write_failed:
                return
            self._write_failed = True
        warnings.warn(f"KV could not be written to {self.path}: {error}", CacheWarning, stacklevel=3)

    # Removing

    def remove(self, content: bytes) -> int:
        """Delete every file of that content, readable or not. Returns how many there were to read."""
        with self._lock:
            self._folder.refresh()
            names = list(self._folder.of_content(content))
            for name in [*names, *self._folder.refused_of_content(content)]:
                self._folder.delete(name)
            return len(names)

    def clear(self) -> None:
        """Delete every file of a content that this store wrote, read or peeked at since it was opened; no other,
        unless the folder is its own."""
        with self._lock, suppress(OSError):
            self._identity = uuid.uuid4().hex
            (self.path / IDENTITY).unlink()
        with self._lock:
            known, self._known = self._known, set()
            if self.own:
                self._folder.refresh()
                known |= {name.content for name in self._folder.files}
        for content in known:
            self.remove(content)

    @property
    def capacity(self) -> int:
        """Bytes that entries may hold in all: the limit, or what they hold and the disk has left."""
        if self.max_bytes is not None:
            return self.max_bytes
        with self._lock, suppress(OSError):
            return self._folder.used_bytes + shutil.disk_usage(self.path).free
        return 0

    def stats(self) -> DiskStats:
        with self._lock:
            files, used_bytes = self._folder.files, self._folder.used_bytes
            num_warmed = sum(name.warmed for name in files)
            return DiskStats(len(files), num_warmed, used_bytes, self.max_bytes, self._num_hits, self._num_mismatches)
