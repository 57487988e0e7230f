"""Moves keys along rope. Knows nothing of models or caches.

Rotary keys carry their position as a rotation (paper, section 3.2, equation 3): R^t k. Rotations add up, so a key
computed at position p becomes the key of position p + d by one more rotation by d. All tokens of a chunk move by the
same distance, hence by the same angle per frequency: one cosine and one sine per channel pair serve the whole chunk.
The paper leaves keys where they were computed; this is the first thing to mend (measured: nothing else helps without).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rope:
    """The rotation of one model.

    ``inv_freq``: (rotary_dim / 2,) float32 angles per position. Channels [0, rotary_dim) rotate in half-split pairs
    (i, i + rotary_dim / 2); channels behind them do not. A length factor baked into cached keys (yarn) stays theirs:
    a rotation has length one.
    """

    inv_freq: torch.Tensor

    @property
    def rotary_dim(self) -> int:
        return 2 * self.inv_freq.shape[0]

    def angles(self, distance: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of a move by ``distance`` tokens, each (rotary_dim / 2,) float32."""
        # float64 keeps long distances exact: at 100,000 tokens a float32 angle is off by 0.004.
        angle = self.inv_freq.double() * distance
        return angle.cos().float().to(device), angle.sin().float().to(device)


def move(keys: torch.Tensor, distance: int, rope: Rope, out: torch.Tensor | None = None) -> torch.Tensor:
    """Keys of the same tokens ``distance`` positions later (earlier if negative).

    ``keys``: (..., tokens, head_dim), any float dtype; computed in float32. ``out`` receives the result and is
    returned, else a new tensor. A distance of zero copies the bits.
    """
    if out is None:
        out = torch.empty_like(keys)
    if distance == 0:
        return out.copy_(keys)
    half = rope.rotary_dim // 2
    cos, sin = rope.angles(distance, keys.device)
    first, second = keys[..., :half].float(), keys[..., half : 2 * half].float()
    if out.dtype == torch.float32:
        torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
        torch.mul(second, cos, out=out[..., half : 2 * half]).addcmul_(first, sin)
    else:
        out[..., :half] = first * cos - second * sin
        out[..., half : 2 * half] = second * cos + first * sin
    if 2 * half < keys.shape[-1]:
        out[..., 2 * half :] = keys[..., 2 * half :]
    return out
