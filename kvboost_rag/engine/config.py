"""The engine's options, checked once.

Knows names, values and choices; knows nothing of what they do.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from kvboost_rag.errors import OptionError

KV_DTYPES = ("auto", "int8", "int4")
EVICTION_NAMES = ("lru", "importance", "gdsf")  # of engine/store/eviction.py
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(value: int | str, option: str = "max_cache_bytes") -> int:
    """``2_000_000_000``, ``"2GB"``, ``"512 MiB"`` -> bytes. Raises OptionError."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if match and match[2].upper() in _UNITS:
            return int(float(match[1]) * _UNITS[match[2].upper()])
    raise OptionError.bad_value(option, value, "bytes as a whole number, or a string such as '2GB' or '512MiB'")


@dataclass(frozen=True)
class EngineConfig:
    """How the engine cuts and keeps.

    ``chunk_size``: tokens per FIXED chunk (the paper's C); ``boundary_window`` (w): how far a cut moves to the next end
    of a sentence; ``sink_tokens`` (s): first tokens of a prompt that are always computed fresh;
    ``max_document_tokens``: documents of more are kept in parts, cut where the text allows it; ``overlap_tokens`` (k):
    read each part behind that many tokens of the one before it, instead of all of the document before it.
    ``prefill_chunk_tokens``: at most that many tokens go through the model at once, so that long documents fit.

    ``max_cache_bytes``: the byte budget of all kept KV, of which warmed documents may hold ``warmed_share``;
    ``eviction``: which of them go first. ``kv_dtype``: how the KV of documents is kept, ``"auto"`` as computed; where
    quantisation changes the next token by more than ``max_quantization_kl`` (nats a token) a document is kept wider.
    ``cache_dir``: a folder in which documents are kept too, up to ``max_disk_bytes``, for later processes.
    ``tenant``: a salt; engines of different tenants never share KV. ``break_even``: compute what costs less to compute
    than to reuse, as measured while the engine runs; without it what is reused does not depend on timing.
    ``max_packed_bytes``: how much memory may go into copies of the weights that a CPU multiplies faster with (float32;
    none are made where they do not help).
    """

    chunk_size: int = 128
    boundary_window: int = 0
    sink_tokens: int = 0
    max_document_tokens: int = 2048
    overlap_tokens: int | None = None
    prefill_chunk_tokens: int = 2048
    max_cache_bytes: int = 2_000_000_000
    warmed_share: float = 0.9
    tenant: str = ""
    break_even: bool = True
    max_packed_bytes: int = 1_000_000_000
    eviction: str = "gdsf"
    kv_dtype: str = "auto"
    max_quantization_kl: float = 0.05
    cache_dir: str | os.PathLike[str] | None = None
    max_disk_bytes: int | None = None

    @property
    def codec(self) -> str:
        """The name of the codec that keeps documents."""
        return "raw" if self.kv_dtype == "auto" else self.kv_dtype

    def __post_init__(self) -> None:
        if not isinstance(self.chunk_size, int) or self.chunk_size < 1:
            raise OptionError.bad_value("chunk_size", self.chunk_size, "a whole number of tokens, 1 or more")
        for option in ("boundary_window", "sink_tokens"):
            value = getattr(self, option)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise OptionError.bad_value(option, value, "a whole number of tokens, 0 or more")
        for option in ("max_document_tokens", "prefill_chunk_tokens"):
            value = getattr(self, option)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise OptionError.bad_value(option, value, "a whole number of tokens, 1 or more")
        overlap = self.overlap_tokens
        if overlap is not None and (isinstance(overlap, bool) or not isinstance(overlap, int) or overlap < 0):
            choices = "a whole number of tokens, 0 or more, or None for all of the document"
            raise OptionError.bad_value("overlap_tokens", overlap, choices)
        if 2 * self.boundary_window >= max(self.chunk_size, 1):
            raise OptionError.bad_value(
                "boundary_window", self.boundary_window, f"less than half of chunk_size={self.chunk_size}"
            )
        for option, names in (("eviction", EVICTION_NAMES), ("kv_dtype", KV_DTYPES)):
            if getattr(self, option) not in names:
                raise OptionError.bad_value(option, getattr(self, option), f"one of {', '.join(map(repr, names))}")
        if self.max_disk_bytes is not None and (not isinstance(self.max_disk_bytes, int) or self.max_disk_bytes < 0):
            raise OptionError.bad_value("max_disk_bytes", self.max_disk_bytes, "bytes, or None for no limit")
        if self.max_disk_bytes is not None and self.cache_dir is None:
            raise OptionError("max_disk_bytes limits the folder cache_dir, which is not given")
        if not self.max_quantization_kl >= 0:
            raise OptionError.bad_value("max_quantization_kl", self.max_quantization_kl, "a number of nats, 0 or more")
        if not isinstance(self.break_even, bool):
            raise OptionError.bad_value("break_even", self.break_even, "True or False")
        if not 0 < self.warmed_share <= 1:
            raise OptionError.bad_value("warmed_share", self.warmed_share, "a number above 0, up to 1")
