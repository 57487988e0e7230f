"""One entry, one safetensors file: its name, its bytes, and how far to trust them.

Knows entries, tensors and headers; knows nothing of folders, budgets or other files. The name alone says what an entry
is (content, prefix, warmed or by-product, exact or approximate, pinned, second version), so a folder is read without
opening a file; the header repeats it, so a file under another's name is found out. Where the paper keeps fixed slots
and a JSON index (section 4.4), a file is as large as its document and there is no index to corrupt.

Two CRC-32 sums cover the header and the tensors: they find every flipped bit, and cost less than half of what SHA-256
does. They guard against accidents, not against someone who may write to the folder.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save

from kvboost_rag.engine.codecs import CODECS
from kvboost_rag.engine.store.base import Entry
from kvboost_rag.engine.types import ChunkKeys

FORMAT = "kvboost-rag 1"
SUFFIX = ".safetensors"
_NAME = re.compile(r"((?:[0-9a-f]{2})+)-((?:[0-9a-f]{2})+)-([wb])([ea])(p?)(v?)\.safetensors")
_IDS = "token_ids"


class BrokenFileError(Exception):
    """The file is not what its name says; reading it again will not help."""


@dataclass(frozen=True)
class FileName:
    """What the name of an entry's file says."""

    content: bytes
    prefix: bytes
    warmed: bool
    exact: bool
    pinned: bool
    anchored: bool = False

    @classmethod
    def of(cls, entry: Entry) -> FileName:
        keys = entry.keys
        return cls(keys.content, keys.prefix, entry.warmed, entry.exact, entry.pinned, entry.anchored)

    @classmethod
    def parse(cls, name: str) -> FileName | None:
        """None if it is not the name of an entry's file."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        content, prefix, kind, fidelity, pin, version = match.groups()
        flags = (kind == "w", fidelity == "e", pin == "p", version == "v")
        return cls(bytes.fromhex(content), bytes.fromhex(prefix), *flags)

    @property
    def bound(self) -> bool:
        """As an entry's."""
        return self.exact and (self.anchored or not self.warmed)

    def __str__(self) -> str:
        flags = ("w" if self.warmed else "b") + ("e" if self.exact else "a")
        flags += ("p" if self.pinned else "") + ("v" if self.anchored else "")
        return f"{self.content.hex()}-{self.prefix.hex()}-{flags}{SUFFIX}"


@dataclass(frozen=True)
class OnDisk:
    """Stands for KV that was not read: ``num_bytes`` of the file, ``num_tokens`` of the entry."""

    codec: str
    num_bytes: int
    num_tokens: int


def dump(entry: Entry) -> bytes:
    """The file of ``entry``. Its codec's tensors, its token ids, and everything else as strings in the header."""
    tensors, facts = CODECS[entry.packed.codec].dump(entry.packed)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    tensors[_IDS] = torch.from_numpy(np.array(entry.ids, dtype=np.int64))
    header = {
        "format": FORMAT,
        "name": str(FileName.of(entry)),
        "codec": entry.packed.codec,
        "facts": json.dumps(dict(facts)),
        "num_tokens": str(entry.num_tokens),
        "importance": repr(float(entry.importance)),
        "text": json.dumps(entry.text),  # escaped: a text may hold what UTF-8 cannot
        "chunking": entry.chunking,
        "tensors_checksum": _tensors_checksum(tensors),
    }
    return save(tensors, {**header, "checksum": _header_checksum(header)})


def read(path: Path) -> Entry:
    """The entry of the file at ``path``, verified; its tensors are copies and outlive the file.

    Raises FileNotFoundError, another OSError if the file cannot be read now, and BrokenFileError.
    """
    with _opened(path) as (name, header, file):
        tensors: dict[str, torch.Tensor] = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
        if _tensors_checksum(tensors) != header["tensors_checksum"]:
            raise BrokenFileError("its bytes were altered")
        ids = tensors.pop(_IDS).numpy()
        if ids.ndim != 1 or ids.dtype != np.int64 or len(ids) != int(header["num_tokens"]):
            raise BrokenFileError("it does not hold as many token ids as it says")
        packed = CODECS[header["codec"]].load(tensors, json.loads(header["facts"]))
    return _entry(name, header, ids, packed)


def read_header(path: Path) -> Entry:
    """As ``read``, but no tensor is read: no token ids, and ``OnDisk`` instead of KV. Only the header is verified."""
    with _opened(path) as (name, header, _):
        packed = OnDisk(header["codec"], path.stat().st_size, int(header["num_tokens"]))
    return _entry(name, header, np.empty(0, dtype=np.int64), packed)


def _entry(name: FileName, header: Mapping[str, str], ids: np.ndarray[Any, np.dtype[np.int64]], packed: Any) -> Entry:
    return Entry(
        keys=ChunkKeys(prefix=name.prefix, content=name.content),
        ids=ids,
        packed=packed,
        exact=name.exact,
        warmed=name.warmed,
        pinned=name.pinned,
        anchored=name.anchored,
        importance=float(header["importance"]),
        text=json.loads(header["text"]),
        chunking=header.get("chunking", "document"),
    )


@contextmanager
def _opened(path: Path) -> Iterator[tuple[FileName, dict[str, str], Any]]:
    """Name, verified header and open file. Whatever goes wrong inside is a BrokenFileError, if it is not the system's.

    The file is memory-mapped: only what is asked for is read.
    """
    try:
        with safe_open(path, framework="pt") as file:
            header = dict(file.metadata() or {})
            if header.get("format") != FORMAT:
                raise BrokenFileError(f"its format is {header.get('format')!r}, not {FORMAT!r}")
            name = FileName.parse(path.name)
            if name is None or header.get("name") != path.name:
                raise BrokenFileError("it was written under another name")
            if header.pop("checksum", None) != _header_checksum(header):
                raise BrokenFileError("its header was altered")
            if header["codec"] not in CODECS:
                raise BrokenFileError(f"it needs the codec {header['codec']!r}")
            yield name, header, file
    except (OSError, MemoryError, BrokenFileError):
        raise
    except Exception as error:  # SafetensorError, and whatever a codec makes of tensors that are not its own
        if not path.exists():  # safetensors opens a file twice; in between another process took it
            raise FileNotFoundError(path) from error
        raise BrokenFileError(str(error) or type(error).__name__) from error


def _header_checksum(header: Mapping[str, str]) -> str:
    return f"{zlib.crc32(json.dumps(header, sort_keys=True).encode()):08x}"


def _tensors_checksum(tensors: Mapping[str, torch.Tensor]) -> str:
    """Of names, types, shapes and bytes, in the order of the names."""
    checksum = 0
    for name, tensor in sorted(tensors.items()):
        checksum = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), checksum)
        checksum = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, checksum)
    return f"{checksum:08x}"
