"""KIVI's quantisation: keys per channel, values per token (paper, section 4.5; Liu et al. 2024, arXiv 2402.02750).

Knows groups, scales and codes; knows nothing of how many bits a code has on disk, of rotation or of what the KV is for.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvboost_rag.engine.codecs.base import Codec
from kvboost_rag.engine.types import KV

MIN_GROUP = 64  # numbers that share a scale and a minimum: never fewer, unless there are fewer
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BLOCK = 2**20  # numbers decoded at once: one pass over everything takes half as long again on a CPU
HALF = torch.finfo(torch.float16)
Shape = tuple[int, int, int]  # (outer, n, inner): groups are taken along n


@dataclass(frozen=True)
class Codes:
    """A tensor (outer, n, inner) as whole numbers: element = minimum + code * scale of its group.

    ``codes``: one row of bytes. ``scale`` and ``minimum``: (outer, groups, inner), float16 or float32.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes + self.minimum.nbytes


@dataclass(frozen=True)
class QuantisedKV:
    """KV with ``num_tokens`` tokens, the first few as they were and the others as codes.

    ``raw_keys`` and ``raw_values``: (layers, kv_heads, raw tokens, head_dim). ``keys`` hold (layers * kv_heads, other
    tokens, head_dim), ``values`` hold (layers * other tokens, kv_heads * head_dim, 1). ``dtype``: what decoding gives.
    """

    codec: str
    dtype: torch.dtype
    num_tokens: int
    raw_keys: torch.Tensor
    raw_values: torch.Tensor
    keys: Codes
    values: Codes

    @property
    def num_bytes(self) -> int:
        return self.raw_keys.nbytes + self.raw_values.nbytes + self.keys.num_bytes + self.values.num_bytes


def num_groups(n: int) -> int:
    return max(1, n // MIN_GROUP) if n else 0


def split(x: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Views (outer, some groups, length, inner) of ``x`` (outer, n, inner), each with the groups it holds.

    All groups have the same length, but for the last one, which takes the rest: at most two views.
    """
    n = x.shape[1]
    groups = num_groups(n)
    length = n // groups if groups else 0
    equal = groups if groups * length == n else groups - 1
    if equal:
        yield slice(0, equal), x[:, : equal * length].view(x.shape[0], equal, length, x.shape[2])
    if equal < groups:
        yield slice(equal, groups), x[:, equal * length :].unsqueeze(1)


def stored_range(low: torch.Tensor, high: torch.Tensor, levels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, minimum) as they are kept, both float16, or float32 where float16 can't hold them.

    ``low`` and ``high``: float32. Every number between them is within half a stored step of a code: the minimum is
    rounded down, and the scale up if the codes would end too early. In float16 that widens a step by no more than
    2 ** -10 of the minimum spread over all levels, less than float16 would have cost the numbers themselves.
    Raises ValueError if a code could stand for something infinite.
    """
    tiny, step = HALF.smallest_normal * HALF.eps, (high - low) / levels
    minimum = low.half()
    minimum = torch.where(minimum.float() > low, (low - low.abs() * HALF.eps - tiny).half(), minimum)
    span = high - minimum.float()
    scale = (span / levels).half()
    scale = torch.where(scale.float() * (levels + 0.5) < span, (span / levels * (1 + HALF.eps) + tiny).half(), scale)
    top = minimum.float() + levels * scale.float()
    if bool(((top.abs() <= HALF.max) & minimum.isfinite() & ((step == 0) | (step >= tiny))).all()):
        return scale, minimum
    if not bool((low + levels * step).isfinite().all()):
        raise ValueError("numbers that share a scale are too far apart for float32: not quantised")
    return step, low


def quantise(x: torch.Tensor, levels: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes, scale, minimum) of ``x`` (outer, n, inner), float32. Codes: uint8, 0 to ``levels``, shaped as ``x``."""
    parts = list(split(x))
    low, high = (
        torch.cat([f(part, 2) for _, part in parts], 1) if parts else x.clone() for f in (torch.amin, torch.amax)
    )
    scale, minimum = stored_range(low, high, levels)
    start, step = minimum.float().unsqueeze(2), scale.float().unsqueeze(2)
    step = torch.where(step > 0, step, 1.0)
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    for (groups, part), (_, target) in zip(parts, split(codes), strict=True):
        target.copy_(((part - start[:, groups]) / step[:, groups]).round_().clamp_(0, levels))
    return codes, scale, minimum


def dequantise(codes: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor) -> torch.Tensor:
    """``codes`` (outer, n, inner) as float32 numbers."""
    out = codes.float()
    start, step = minimum.float().unsqueeze(2), scale.float().unsqueeze(2)
    for groups, part in split(out):
        part.mul_(step[:, groups]).add_(start[:, groups])
    return out


def as_sixteen_bits(x: torch.Tensor) -> torch.Tensor:
    """A copy of ``x``: 16-bit numbers bit for bit, float32 as float16 if none is too big for that."""
    half = x.to(torch.float16)
    fits = x.dtype == torch.float32 and bool(half.isfinite().all())
    return half.contiguous() if fits else x.clone(memory_format=torch.contiguous_format)


def inner_shapes(layers: int, heads: int, others: int, key_dim: int, value_dim: int) -> dict[str, Shape]:
    """How ``others`` tokens are laid out for groups along tokens (keys) and along channels of all heads (values)."""
    return {"keys": (layers * heads, others, key_dim), "values": (layers * others, heads * value_dim, 1)}


def shapes_of(packed: QuantisedKV) -> dict[str, Shape]:
    layers, heads, num_raw, key_dim = packed.raw_keys.shape
    return inner_shapes(layers, heads, packed.num_tokens - num_raw, key_dim, packed.raw_values.shape[-1])


@dataclass(frozen=True)
class KiviCodec(Codec):
    """Keys per channel and values per token, asymmetric, rounded to nearest (paper, section 4.5).

    The first ``num_raw_tokens`` tokens are kept as they are: they are where attention sinks lie, whose outliers would
    widen every group they are in. Takes keys without rotation, where channels are quietest.
    """

    bits: ClassVar[int]
    position_free: ClassVar[bool] = True
    num_raw_tokens: int = 4

    def __post_init__(self) -> None:
        if self.num_raw_tokens < 0:
            raise ValueError(f"num_raw_tokens={self.num_raw_tokens} must be 0 or more")

    @abstractmethod
    def pack(self, codes: torch.Tensor) -> torch.Tensor:
        """One row of codes, uint8 with ``bits`` used, as one row of ``packed_size`` bytes."""

    @abstractmethod
    def unpack(self, packed: torch.Tensor, count: int, first: int = 0) -> torch.Tensor:
        """Of the codes that ``pack`` got, ``count`` from ``first`` on."""

    def packed_size(self, count: int) -> int:
        return (count * self.bits + 7) // 8

    def encode(self, kv: KV) -> QuantisedKV:
        """Raises ValueError for keys with a rotation, another dtype than ``DTYPES``, NaN or infinity."""
        self._check(kv)
        layers, heads, num_tokens, key_dim = kv.keys.shape
        num_raw = min(self.num_raw_tokens, num_tokens)
        shapes = inner_shapes(layers, heads, num_tokens - num_raw, key_dim, kv.values.shape[-1])
        keys = kv.keys[:, :, num_raw:].reshape(shapes["keys"])
        values = kv.values[:, :, num_raw:].transpose(1, 2).reshape(shapes["values"])
        return QuantisedKV(
            self.name,
            kv.keys.dtype,
            num_tokens,
            as_sixteen_bits(kv.keys[:, :, :num_raw]),
            as_sixteen_bits(kv.values[:, :, :num_raw]),
            self._encode(keys),
            self._encode(values),
        )

    def decode(self, packed: QuantisedKV, first: int = 0, last: int | None = None) -> KV:
        """KV in the dtype and on the device it came from, keys without rotation."""
        raws = packed.raw_keys[first:last], packed.raw_values[first:last]
        layers, _, num_raw, _ = packed.raw_keys.shape
        shapes = shapes_of(packed)
        keys, values = (
            torch.empty(*raw.shape[:2], packed.num_tokens, raw.shape[3], dtype=packed.dtype, device=raw.device)
            for raw in raws
        )
        keys[:, :, :num_raw], values[:, :, :num_raw] = raws
        self._decode(packed.keys, shapes["keys"], layers, first, keys[:, :, num_raw:])
        self._decode(packed.values, shapes["values"], layers, first, values[:, :, num_raw:].transpose(1, 2))
        return KV(keys, values, None)

    def dump(self, packed: QuantisedKV) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        tensors = {"raw_keys": packed.raw_keys, "raw_values": packed.raw_values}
        for part, codes in (("keys", packed.keys), ("values", packed.values)):
            tensors |= {f"{part}_codes": codes.codes, f"{part}_scale": codes.scale, f"{part}_minimum": codes.minimum}
        facts = {"bits": str(self.bits), "num_tokens": str(packed.num_tokens), "dtype": str(packed.dtype).split(".")[1]}
        return {name: tensor.contiguous() for name, tensor in tensors.items()}, facts

    def load(self, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, str]) -> QuantisedKV:
        if int(facts["bits"]) != self.bits:
            raise ValueError(f"codes of {facts['bits']} bits are not {self.name}'s")
        keys, values = (
            Codes(*(tensors[f"{part}_{name}"] for name in ("codes", "scale", "minimum"))) for part in ("keys", "values")
        )
        packed = QuantisedKV(
            self.name,
            DTYPES[facts["dtype"]],
            int(facts["num_tokens"]),
            tensors["raw_keys"],
            tensors["raw_values"],
            keys,
            values,
        )
        check_raw(packed)
        for name, codes in (("keys", keys), ("values", values)):
            self._check_codes(name, codes, shapes_of(packed)[name])
        return packed

    def _encode(self, x: torch.Tensor) -> Codes:
        codes, scale, minimum = quantise(x.float(), 2**self.bits - 1)
        return Codes(self.pack(codes.flatten()), scale, minimum)

    def _decode(self, codes: Codes, shape: Shape, layers: int, first: int, out: torch.Tensor) -> None:
        """Fills ``out`` with the codes of as many of the ``layers``, from ``first`` on, in the order of the codes; so
        many at a time as stay in a CPU's cache."""
        outer, n, inner = shape
        rows = outer // max(1, layers)  # of each layer
        at_once = max(1, BLOCK // max(1, rows * n * inner))
        for start in range(0, out.shape[0], at_once):
            target = out[start : start + at_once]
            begin, num_rows = (first + start) * rows, target.shape[0] * rows
            part = slice(begin, begin + num_rows)
            numbers = self.unpack(codes.codes, num_rows * n * inner, begin * n * inner).view(num_rows, n, inner)
            target.copy_(dequantise(numbers, codes.scale[part], codes.minimum[part]).view(target.shape))

    def _check(self, kv: KV) -> None:
        if kv.position is not None:
            raise ValueError(f"{self.name} takes keys without rotation: position must be None, not {kv.position}")
        if kv.keys.dtype not in DTYPES.values() or kv.values.dtype != kv.keys.dtype:
            raise ValueError(
                f"{self.name} takes {', '.join(DTYPES)}, not {kv.keys.dtype} keys, {kv.values.dtype} values"
            )
        if kv.keys.dim() != 4 or kv.values.dim() != 4 or kv.keys.shape[:3] != kv.values.shape[:3]:
            raise ValueError(f"keys {tuple(kv.keys.shape)} and values {tuple(kv.values.shape)} do not belong together")
        if not bool(kv.keys.isfinite().all() & kv.values.isfinite().all()):
            raise ValueError(f"keys or values hold NaN or infinity: {self.name} can't keep them")

    def _check_codes(self, name: str, codes: Codes, shape: Shape) -> None:
        outer, n, inner = shape
        size, groups = self.packed_size(outer * n * inner), (outer, num_groups(n), inner)
        if codes.codes.shape != (size,) or codes.codes.dtype != torch.uint8:
            raise ValueError(
                f"{name}: {size} bytes of codes expected, not {tuple(codes.codes.shape)} {codes.codes.dtype}"
            )
        if codes.scale.shape != groups or codes.minimum.shape != groups:
            found = f"{tuple(codes.scale.shape)} and {tuple(codes.minimum.shape)}"
            raise ValueError(f"{name}: scales and minimums {groups} expected, not {found}")
        if codes.scale.dtype not in (torch.float16, torch.float32) or codes.minimum.dtype != codes.scale.dtype:
            raise ValueError(f"{name}: scales are {codes.scale.dtype}, minimums {codes.minimum.dtype}")


def check_raw(packed: QuantisedKV) -> None:
    """Raises ValueError if the raw tokens can't be the first of ``num_tokens`` that decode to ``dtype``."""
    keys, values = packed.raw_keys, packed.raw_values
    if keys.dim() != 4 or values.dim() != 4 or keys.shape[:3] != values.shape[:3]:
        raise ValueError(f"raw keys {tuple(keys.shape)} and values {tuple(values.shape)} do not belong together")
    if keys.shape[2] > packed.num_tokens:
        raise ValueError(f"{keys.shape[2]} raw tokens of {packed.num_tokens}")
    kept = {packed.dtype} | ({torch.float16} if packed.dtype == torch.float32 else set())
    if not {keys.dtype, values.dtype} <= kept:
        raise ValueError(f"raw tokens are {keys.dtype} and {values.dtype}, but decode to {packed.dtype}")
