"""The records of a long run, kept line by line, so that a run that was stopped can go on.

Knows JSON lines; knows nothing of what they say but the document a record belongs to. A document of which questions are
missing is asked about again from its first one: in the middle of it the caches of a new process would be cold.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Journal:
    """A head and records. Without a ``path`` nothing is written."""

    def __init__(self, path: Path | None):
        self.path = path
        self.head: dict[str, Any] = {}
        self.records: list[dict[str, Any]] = []
        self.num_resumed = 0

    @property
    def exists(self) -> bool:
        return self.path is not None and self.path.exists()

    def open(self, head: dict[str, Any], resume: bool) -> None:
        """Begin with ``head``, or go on with what is there if its settings are the same. Exits if they are not."""
        self.head = head
        if not self.exists:
            self._write()
            return
        if not resume:
            raise SystemExit(f"{self.path} holds an unfinished run: --resume goes on with it, or delete it")
        found, *self.records = self._read()
        for name, value in head["settings"].items():
            if found["settings"].get(name) != value:
                was = found["settings"].get(name)
                raise SystemExit(f"{self.path} was begun with {name} = {was!r}, now it is {value!r}")
        self.head, self.num_resumed = found, len(self.records)

    def complete_groups(self, sizes: Mapping[int, int]) -> set[int]:
        """Groups with all ``sizes[group]`` records; records of others are dropped."""
        counts = Counter(record["group"] for record in self.records)
        complete = {group for group, count in counts.items() if count == sizes.get(group)}
        self.records = [record for record in self.records if record["group"] in complete]
        self.num_resumed = len(self.records)
        self._write()
        return complete

    def add(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(record) + "\n")

    def remove(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _read(self) -> list[dict[str, Any]]:
        """All lines but one that was cut off while it was written."""
        assert self.path is not None
        *whole, _ = self.path.read_text(encoding="utf-8").split("\n")
        return [json.loads(line) for line in whole]

    def _write(self) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text("".join(json.dumps(line) + "\n" for line in [self.head, *self.records]), encoding="utf-8")
        part.replace(self.path)
