"""How each layer's keys turn with their position, found out from one token alone at several positions.

Knows a configuration, the frequencies that lie in a model's modules, and the keys of one token; knows nothing of what
else a model must fulfil (`probe.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import DynamicCache

from kvboost_rag.engine import compat
from kvboost_rag.engine.capabilities import RopeSwitch, Rotary
from kvboost_rag.engine.rope import Rope, move
from kvboost_rag.engine.runner import Runner
from kvboost_rag.errors import UnsupportedModelError

POSITIONS = (1, 29)
# How far keys may be off, relative to the largest one.
KEY_TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}

Source = tuple[torch.nn.Module, str]  # a module and the name of its frequencies


def switch_of(config: Any) -> RopeSwitch | None:
    """Where the rope of ``config`` changes with the length of the sequence, if it does."""
    for parameters in compat.rope_parameters(config):
        if parameters["rope_type"] == "longrope":
            limit = parameters.get("original_max_position_embeddings") or config.original_max_position_embeddings
            return RopeSwitch("longrope", int(limit))
        if "dynamic" in parameters["rope_type"]:
            return RopeSwitch("dynamic", int(config.max_position_embeddings))
    return None


@torch.no_grad()
def keys_at(runner: Runner, token: int, position: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values (1, kv_heads, 1, head_dim) of every layer for ``token`` alone at ``position``."""
    cache = DynamicCache()
    runner(torch.tensor([token]), cache, torch.tensor([position]))
    return [(layer.keys, layer.values) for layer in cache.layers]


def rotations(
    runner: Runner, token: int, still: list[torch.Tensor], switch: RopeSwitch | None
) -> list[tuple[Rotary, Source | None]]:
    """How each layer's keys turn, the same at every position tried, past a switch too.

    ``still``: per layer the keys (1, kv_heads, 1, head_dim) of ``token`` at position 0. Raises UnsupportedModelError.
    """
    positions = [p for p in POSITIONS if switch is None or p < switch.limit] or [1]
    if switch is not None:
        positions.append(switch.limit + 5)
    chosen: list[tuple[Rotary, Source | None]] = []
    for position in positions:
        turned = [keys for keys, _ in keys_at(runner, token, position)]
        if not chosen:
            chosen = [_best(runner, n, *pair, positions[0]) for n, pair in enumerate(zip(still, turned, strict=True))]
        for number, (rotary, source) in enumerate(chosen):
            off = _off(still[number], turned[number], position, rotary, source)
            if off > KEY_TOLERANCE.get(runner.dtype, 3e-2):
                raise UnsupportedModelError(
                    f"the keys of layer {number} at position {position} are neither those of position 0 rotated by "
                    f"any frequencies the model has, nor unchanged (off by {off:.1%} of their size): positions enter "
                    "another way (learned, ALiBi, M-RoPE or latent attention)"
                )
    if all(rotary is Rotary.NONE for rotary, _ in chosen):
        raise UnsupportedModelError(
            "no layer rotates its keys: positions enter another way (learned, ALiBi) or not at all"
        )
    return chosen


def _best(
    runner: Runner, layer: int, still: torch.Tensor, turned: torch.Tensor, position: int
) -> tuple[Rotary, Source | None]:
    """The rotation that explains one layer's keys best; none, if that explains them well enough."""
    if _off(still, turned, position, Rotary.NONE, None) <= KEY_TOLERANCE.get(runner.dtype, 3e-2):
        return Rotary.NONE, None
    choices = [
        (rotary, source)
        for source in _frequencies(runner.module, still.shape[-1])
        for rotary in (Rotary.HALF_SPLIT, Rotary.INTERLEAVED)
    ]
    if not choices:
        raise UnsupportedModelError(
            f"the keys of layer {layer} change with their position, but it has no rotary frequencies (inv_freq): "
            "positions enter another way (learned embeddings)"
        )
    return min(choices, key=lambda choice: _off(still, turned, position, *choice))


def _off(still: torch.Tensor, turned: torch.Tensor, position: int, rotary: Rotary, source: Source | None) -> float:
    """How far ``still`` moved to ``position`` is from ``turned``, relative to the largest key."""
    if source is not None:
        rope = Rope(getattr(*source).detach().float().cpu(), rotary is Rotary.INTERLEAVED)
        still = move(still.float(), position, rope)
    largest = turned.float().abs().max().clamp_min(1e-30)
    return float((still.float() - turned.float()).abs().max() / largest)


def _frequencies(module: torch.nn.Module, head_dim: int) -> Iterator[Source]:
    """Every table of inverse frequencies in use, one of each value."""
    seen: list[torch.Tensor] = []
    for part in module.modules():
        for name, value in {**part.__dict__, **part._buffers}.items():
            if not name.endswith("inv_freq") or "original" in name or "long" in name:
                continue
            if not isinstance(value, torch.Tensor) or value.dim() != 1 or 2 * value.shape[0] > head_dim:
                continue
            if not any(value.shape == other.shape and torch.equal(value, other) for other in seen):
                seen.append(value)
                yield part, name
