"""What was found out about a model, and what follows for it.

Knows words and numbers; runs nothing. Filled by ``probe``; read by the engine, ``doctor`` and the docs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from enum import StrEnum


class Reuse(StrEnum):
    """Where stored KV may be used again."""

    ANY_POSITION = "any position"
    PREFIX_ONLY = "prefix only"
    NOTHING = "nothing"


class Rotary(StrEnum):
    """How a layer's keys carry their position."""

    HALF_SPLIT = "half-split"  # channels (i, i + width / 2) rotate together
    INTERLEAVED = "interleaved"  # channels (2i, 2i + 1) do
    NONE = "none"  # they do not: the layer sees order only through the other layers (NoPE)


@dataclass(frozen=True)
class RopeSwitch:
    """A rope whose frequencies depend on the length of the sequence: ``longrope`` or ``dynamic``.

    Up to ``limit`` tokens both are fixed. Beyond, longrope has a second fixed set; dynamic has one per length. KV
    computed under one set is never used under another.
    """

    kind: str
    limit: int

    def regime(self, num_tokens: int) -> int:
        """A number that tells the sets apart: 0 up to the limit."""
        if num_tokens <= self.limit:
            return 0
        return 1 if self.kind == "longrope" else num_tokens

    def lasting(self, num_tokens: int) -> bool:
        """Whether another prompt is likely to have the same set."""
        return num_tokens <= self.limit or self.kind == "longrope"


@dataclass(frozen=True)
class Layer:
    """One layer. ``rotary_dim``: channels that rotate. ``window``: positions a query sees, its own included."""

    rotary: Rotary
    rotary_dim: int
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


@dataclass(frozen=True)
class Capabilities:
    """The account of one model. ``planned``: fused forwards use this package's attention, else the model's own."""

    model_class: str
    model_type: str
    reuse: Reuse
    reason: str = ""
    layers: tuple[Layer, ...] = ()
    num_heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    rope_type: str = "default"
    switch: RopeSwitch | None = None
    planned: bool = True
    notes: tuple[str, ...] = ()

    @property
    def rotation(self) -> str:
        """Such as ``half-split, 8 of 32 channels; none in 1 of 4 layers``."""
        turning = [layer for layer in self.layers if layer.rotary is not Rotary.NONE]
        if not turning:
            return "none"
        text = f"{turning[0].rotary.value}, {turning[0].rotary_dim} of {self.head_dim} channels"
        still = len(self.layers) - len(turning)
        return text + (f"; none in {still} of {len(self.layers)} layers" if still else "")

    @property
    def attention(self) -> str:
        """Such as ``window 512 in 5 of 6 layers, soft cap 50``; ``full`` if there is nothing to say."""
        parts = _shares("window", (layer.window for layer in self.layers))
        parts += _shares("soft cap", (layer.softcap for layer in self.layers))
        parts += ["learned sinks"] if any(layer.sinks for layer in self.layers) else []
        return ", ".join(parts) or "full"

    @property
    def grouping(self) -> str:
        kind = "MHA" if self.kv_heads == self.num_heads else "MQA" if self.kv_heads == 1 else "GQA"
        return f"{kind} {self.num_heads}/{self.kv_heads}"

    def __str__(self) -> str:
        lines = [f"{self.model_class} ({self.model_type})", f"  reuse      {self.reuse.value}"]
        if self.reason:
            lines.append(f"  because    {self.reason}")
        if self.layers:
            lines += [
                f"  rotation   {self.rotation}; rope type {self.rope_type}",
                f"  attention  {self.attention}; {self.grouping}, {self.head_dim} channels a head, "
                + ("this package's in fused forwards" if self.planned else "the model's own everywhere"),
            ]
        if self.switch is not None:
            lines.append(
                f"  guarded    past {self.switch.limit} tokens the {self.switch.kind} rope changes; KV from one side "
                "is never used on the other"
            )
        return "\n".join([*lines, *(f"  note       {note}" for note in self.notes)])


def _shares(name: str, values: Iterable[Hashable]) -> list[str]:
    """``window 512 in 5 of 6 layers`` for each value there is."""
    counted = Counter(values)
    total = counted.total()
    return [
        f"{name} {value:g}" + (f" in {count} of {total} layers" if count < total else "")
        for value, count in counted.items()
        if isinstance(value, int | float)
    ]
