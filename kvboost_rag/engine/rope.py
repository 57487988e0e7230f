"""Moves keys along rope. Knows nothing of models or caches.

Rotary keys carry their position as a rotation (paper, section 3.2, equation 3): R^t k. Rotations add up, so a key
computed at position p becomes the key of position p + d by one more rotation by d. All tokens of a chunk move by the
same distance, hence by the same angle per frequency: one cosine and one sine per channel pair serve the whole chunk.
The paper leaves keys where they were computed; this is the first thing to mend (measured: nothing else helps without).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

Angles = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Rope:
    """The rotation of one model.

    ``inv_freq``: (rotary_dim / 2,) float32 angles per position, or (layers, rotary_dim / 2) where layers differ (local
    and global bases; a layer without rotation has zeros). Channels [0, rotary_dim) rotate in pairs: (i, i +
    rotary_dim / 2), or (2i, 2i + 1) if ``interleaved``; channels behind them do not. A length factor baked into cached
    keys (yarn) stays theirs: a rotation has length one.
    """

    inv_freq: torch.Tensor
    interleaved: bool = False
    _latest: list[tuple[range, torch.device, Angles]] = field(
        default_factory=list, repr=False, compare=False
    )  # a chunk asks once per few layers

    @property
    def rotary_dim(self) -> int:
        return 2 * self.inv_freq.shape[-1]

    def of_layers(self, first: int, last: int) -> Rope:
        """The same for layers [first, last) only."""
        if self.inv_freq.dim() == 1:
            return self
        return Rope(self.inv_freq[first:last], self.interleaved)

    def angles(self, distances: range, device: torch.device) -> Angles:
        """Cosine and sine of moves by ``distances`` (tokens), float32, for (layers, kv_heads, tokens, pairs), and the
        cosine again for every channel of a pair, (layers, kv_heads, tokens, rotary_dim)."""
        for asked, place, known in tuple(self._latest):
            if (asked, place) == (distances, device):
                return known
        # float64 keeps long distances exact: at 100,000 tokens a float32 angle is off by 0.004.
        steps = torch.arange(distances.start, distances.stop, distances.step, dtype=torch.float64)
        angle = steps[:, None] * self.inv_freq.double()[..., None, :]
        if angle.dim() == 3:
            angle = angle[:, None]
        cos, sin = angle.cos().float(), angle.sin().float()
        wide = cos.repeat_interleave(2, -1) if self.interleaved else torch.cat([cos, cos], -1)
        found = cos.to(device), sin.to(device), wide.to(device)
        if self.inv_freq.dim() == 1:  # else each few layers have a rope of their own, and all at once is much to keep
            self._latest[:] = [(distances, device, found)]
        return found

    def let_go(self) -> None:
        """Keep no angles any longer."""
        self._latest.clear()

    def pairs(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the first and the second channel of every pair, (..., rotary_dim / 2) each."""
        if self.interleaved:
            return keys[..., 0 : self.rotary_dim : 2], keys[..., 1 : self.rotary_dim : 2]
        half = self.rotary_dim // 2
        return keys[..., :half], keys[..., half : 2 * half]


def move(keys: torch.Tensor, distance: int, rope: Rope, out: torch.Tensor | None = None) -> torch.Tensor:
    """Keys of the same tokens ``distance`` positions later (earlier if negative).

    ``keys``: (layers, kv_heads, tokens, head_dim), any float dtype; computed in float32. ``out`` receives the result
    and is returned, else a new tensor. A distance of zero copies the bits.
    """
    if distance == 0:
        return (torch.empty_like(keys) if out is None else out).copy_(keys)
    return _turn(keys, range(distance, distance + 1), rope, out)


def place(keys: torch.Tensor, position: int, rope: Rope, out: torch.Tensor | None = None) -> torch.Tensor:
    """Keys without rotation, given that of ``[position, position + tokens)``. As ``move`` otherwise."""
    return _turn(keys, range(position, position + keys.shape[-2]), rope, out)


def displace(keys: torch.Tensor, position: int, rope: Rope) -> torch.Tensor:
    """Undo ``place``: keys at ``[position, position + tokens)`` without their rotation."""
    return _turn(keys, range(-position, -position - keys.shape[-2], -1), rope, None)


def _turn(keys: torch.Tensor, distances: range, rope: Rope, out: torch.Tensor | None) -> torch.Tensor:
    if out is None:
        out = torch.empty_like(keys)
    cos, sin, wide = rope.angles(distances, keys.device)
    first, second = (half.float() for half in rope.pairs(keys))
    first_out, second_out = rope.pairs(out)
    if out.dtype == torch.float32:
        torch.mul(keys[..., : rope.rotary_dim], wide, out=out[..., : rope.rotary_dim])  # all channels in one pass
        first_out.addcmul_(second, sin, value=-1)
        second_out.addcmul_(first, sin)
    else:
        turned = (first * cos).addcmul_(second, sin, value=-1)
        first_out.copy_(turned)
        second_out.copy_(torch.mul(second, cos, out=turned).addcmul_(first, sin))
    if rope.rotary_dim < keys.shape[-1]:
        out[..., rope.rotary_dim :] = keys[..., rope.rotary_dim :]
    return out
