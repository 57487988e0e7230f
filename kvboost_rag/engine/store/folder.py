"""What lies in a folder of entries, kept in step with it: names, sizes, last uses, and what goes when room is needed.

Knows names and ``stat``; opens no file and knows nothing of what is in one. Not safe from threads: ``DiskStore`` is.
"""

from __future__ import annotations

import heapq
import os
import time
import warnings
from collections.abc import Iterable, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvboost_rag.engine.store.entryfile import FileName
from kvboost_rag.errors import CacheWarning

TEMPORARY = ".kvboost.tmp"
ABANDONED_SECONDS = 3600  # a temporary file that old has lost its writer
SETTLED_NANOSECONDS = 2_000_000_000  # file systems stamp folders this coarsely: a younger stamp may hide a change


@dataclass
class File:
    num_bytes: int
    used: int  # nanoseconds; the file's mtime, so that it outlives the process


class Folder:
    """The entries' files in ``path``. ``reserved_bytes``: of files that are being written."""

    def __init__(self, path: Path, max_bytes: int | None):
        self.path, self.max_bytes = path, max_bytes
        self.files: dict[FileName, File] = {}
        self.used_bytes = self.reserved_bytes = 0
        self._names: dict[str, FileName] = {}
        self._by_content: dict[bytes, set[FileName]] = {}
        self._refused: set[FileName] = set()  # cannot be read, or not be deleted
        self._listed = -1  # mtime of the folder as it was listed

    # What is there

    def refresh(self) -> None:
        """List the folder again if it changed: other processes write and delete here too."""
        try:
            changed = self.path.stat().st_mtime_ns
            if changed == self._listed:
                return
            settled = time.time_ns() - changed > SETTLED_NANOSECONDS
            self._list()
            self._listed = changed if settled else -1
        except FileNotFoundError:
            for name in list(self.files):
                self.forget(name)
        except OSError:
            pass  # what is known stays known; each file is checked when it is read

    def _list(self) -> None:
        found: set[str] = set()
        with os.scandir(self.path) as items:
            for item in items:
                found.add(item.name)
                name = None if item.name in self._names else FileName.parse(item.name)
                if name is not None and name not in self._refused:
                    with suppress(OSError):  # deleted meanwhile
                        if item.is_file():
                            stat = item.stat()
                            self.add(name, stat.st_size, stat.st_mtime_ns)
        for gone in self._names.keys() - found:
            self.forget(self._names[gone])
        self._refused = {name for name in self._refused if str(name) in found}

    def of_content(self, content: bytes) -> Set[FileName]:
        return self._by_content.get(content, frozenset())

    def refused_of_content(self, content: bytes) -> Set[FileName]:
        return {name for name in self._refused if name.content == content}

    def __contains__(self, name: FileName) -> bool:
        return name in self.files and (self.path / str(name)).exists()

    def add(self, name: FileName, num_bytes: int, used: int) -> None:
        self.forget(name)
        self._refused.discard(name)
        self.files[name] = File(num_bytes, used)
        self._names[str(name)] = name
        self._by_content.setdefault(name.content, set()).add(name)
        self.used_bytes += num_bytes

    def forget(self, name: FileName) -> None:
        file = self.files.pop(name, None)
        if file is None:
            return
        self.used_bytes -= file.num_bytes
        del self._names[str(name)]
        same = self._by_content[name.content]
        same.discard(name)
        if not same:
            del self._by_content[name.content]

    def refuse(self, name: FileName) -> None:
        """Leave the file alone from now on."""
        self.forget(name)
        self._refused.add(name)

    def touch(self, name: FileName) -> None:
        """The file was used just now."""
        now = time.time_ns()
        with suppress(OSError):  # read-only, or deleted meanwhile
            os.utime(self.path / str(name), ns=(now, now))
        if name in self.files:
            self.files[name].used = now

    # What goes

    def delete(self, name: FileName) -> None:
        try:
            (self.path / str(name)).unlink()
        except FileNotFoundError:
            pass
        except OSError as error:
            self.refuse(name)
            warnings.warn(f"{self.path / str(name)} could not be deleted: {error}", CacheWarning, stacklevel=3)
        self.forget(name)

    def delete_abandoned(self) -> None:
        """Delete what writers left behind that were killed."""
        with suppress(OSError), os.scandir(self.path) as items:
            for item in items:
                with suppress(OSError):
                    if item.name.endswith(TEMPORARY) and time.time() - item.stat().st_mtime > ABANDONED_SECONDS:
                        os.unlink(item)

    def make_room(self, num_bytes: int, warmed: bool, replaced: Iterable[FileName]) -> bool:
        """Evict until ``num_bytes`` fit once ``replaced`` are gone. False, and nothing is lost, if they cannot."""
        victims, excess = self._victims(num_bytes, warmed, set(replaced))
        if excess > 0:
            return False
        for victim in victims:
            self.delete(victim)
        return True

    def trim(self) -> None:
        """Evict down to ``max_bytes``, as far as pins allow."""
        for victim in self._victims(0, True, set())[0]:
            self.delete(victim)

    def _victims(self, num_bytes: int, warmed: bool, replaced: Set[FileName]) -> tuple[list[FileName], int]:
        """What is to go, and by how much that is too little. By-products first, the least recently used first."""
        victims: list[FileName] = []
        if self.max_bytes is None:
            return victims, 0
        excess = self.used_bytes + self.reserved_bytes + num_bytes - self.max_bytes
        excess -= sum(self.files[name].num_bytes for name in replaced)
        if excess <= 0:
            return victims, excess
        queue = [
            (name.warmed, file.used, str(name), name)
            for name, file in self.files.items()
            if not name.pinned and (warmed or not name.warmed) and name not in replaced
        ]
        heapq.heapify(queue)
        while queue and excess > 0:
            is_warmed, used, text, name = heapq.heappop(queue)
            if (last := self._last_use(name)) > used:  # by another process, after the folder was listed
                heapq.heappush(queue, (is_warmed, last, text, name))
                continue
            victims.append(name)
            excess -= self.files[name].num_bytes
        return victims, excess

    def _last_use(self, name: FileName) -> int:
        file = self.files[name]
        with suppress(OSError):
            file.used = max(file.used, (self.path / str(name)).stat().st_mtime_ns)
        return file.used
