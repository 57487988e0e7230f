"""Keeps KV as it was computed, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch

from kvboost_rag.engine.codecs.base import Codec
from kvboost_rag.engine.types import KV


class RawCodec(Codec):
    """The codec that does nothing. Keys keep the rotation of the position they were computed at."""

    name: ClassVar[str] = "raw"
    bits: ClassVar[int | None] = None

    def encode(self, kv: KV) -> KV:
        return kv

    def decode(self, packed: KV, first: int = 0, last: int | None = None) -> KV:
        return replace(packed, keys=packed.keys[first:last], values=packed.values[first:last])

    def dump(self, packed: KV) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        position = "" if packed.position is None else str(packed.position)
        return {"keys": packed.keys.contiguous(), "values": packed.values.contiguous()}, {"position": position}

    def load(self, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, str]) -> KV:
        keys, values = tensors["keys"], tensors["values"]
        if keys.dim() != 4 or keys.shape[:3] != values.shape[:3] or keys.dtype != values.dtype:
            raise ValueError(f"keys {tuple(keys.shape)} and values {tuple(values.shape)} do not belong together")
        return KV(keys, values, int(facts["position"]) if facts["position"] else None)
