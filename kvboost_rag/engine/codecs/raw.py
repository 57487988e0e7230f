"""Keeps KV as it was computed, bit for bit."""

from __future__ import annotations

from typing import ClassVar

from kvboost_rag.engine.codecs.base import Codec, Packed
from kvboost_rag.engine.types import KV


class RawCodec(Codec):
    """The codec that does nothing. Keys keep the rotation of the position they were computed at."""

    name: ClassVar[str] = "raw"
    bits: ClassVar[int | None] = None

    def encode(self, kv: KV) -> KV:
        return kv

    def decode(self, packed: Packed) -> KV:
        assert isinstance(packed, KV)
        return packed
