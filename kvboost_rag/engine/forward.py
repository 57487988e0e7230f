"""Runs chosen positions of a prompt through the model, over a buffer that already holds the rest.

Knows a model, a buffer and positions; knows nothing of stores, hashes or why a position was chosen. Everything a
prompt needs computed, gaps, repaired tokens and question alike, goes through one call: each token at its own
position, seeing all positions up to its own, writing its keys and values into its own slot.
"""

from __future__ import annotations

import math

import torch

from kvboost_rag.engine.attention import Capture
from kvboost_rag.engine.cache import SlotCache
from kvboost_rag.engine.capabilities import Reuse
from kvboost_rag.engine.costs import Work
from kvboost_rag.engine.model import Model
from kvboost_rag.engine.repair.base import MEASURES

SCOUT_TOKENS = 256
SCOUT_LAYERS = 2 / 3  # saves a third of the pass; its effect on the choice: benchmarks/NOTES.md


def work_of(positions: torch.Tensor) -> Work:
    """What it is to compute ``positions`` (num_rows,), each of which sees all up to its own."""
    return Work(len(positions), float(positions.float().mean()) + 1 if len(positions) else 0.0)


def fused_forward(
    model: Model,
    ids: torch.Tensor,
    positions: torch.Tensor,
    cache: SlotCache,
    num_logits: int = 1,
    hidden: torch.Tensor | None = None,
    capture: Capture | None = None,
    slice_tokens: int | None = None,
) -> torch.Tensor:
    """Compute ``positions`` (ascending, int64) of the prompt ``ids`` (num_tokens,) in one call of the model.

    Every slot up to the last position must hold KV, be in ``positions`` or be ``hidden`` (num_tokens,) bool. With
    ``slice_tokens`` it takes as many calls as there are slices of that many positions: the same result, for memory
    that does not grow with their number. A rope that changes with length is never sliced.
    Returns the logits of the last ``num_logits`` positions, (num_logits, vocab) float32; fills their slots.
    """
    num_tokens = ids.shape[0]
    if slice_tokens and not model.regime(num_tokens):
        while len(positions) > slice_tokens + num_logits:
            fused_forward(model, ids, positions[:slice_tokens], cache)
            positions = positions[slice_tokens:]
    if model.capabilities.reuse is Reuse.PREFIX_ONLY:  # then these are the positions behind a filled prefix
        cache.set_length(int(positions[0]))
        return model.forward(ids[positions], cache, positions, num_logits)
    cache.set_length(num_tokens)
    return model.scattered(ids[positions], positions, cache, num_logits, hidden, capture)


def scout_rows(live: torch.Tensor, missing: torch.Tensor) -> torch.Tensor:
    """Which of the ``live`` positions (ascending) a scout pass runs: the last SCOUT_TOKENS of those outside documents
    that are ``missing`` (num_tokens,) bool. Such documents are no part of the question, and running them twice would
    cost more than a better choice is worth. A prompt that ends in one is taken to be all question."""
    rows = live[~missing[live]]
    return (rows if len(rows) and rows[-1] == live[-1] else live)[-SCOUT_TOKENS:]


def scout(model: Model, ids: torch.Tensor, live: torch.Tensor, missing: torch.Tensor, cache: SlotCache) -> torch.Tensor:
    """How much the question attends to each position of the prompt, (num_tokens,) float32.

    The question is the last run of ``scout_rows``. They are run over what ``cache`` holds; of the ``live`` positions
    the others are hidden. See ``Capture`` for what is counted.
    """
    num_tokens = ids.shape[0]
    rows = scout_rows(live, missing)
    breaks = (rows.diff() != 1).nonzero()
    question = int(breaks[-1]) + 1 if breaks.numel() else 0
    hidden = torch.zeros(num_tokens, dtype=torch.bool)
    hidden[live] = True
    hidden[rows] = False
    cache.zero_slots(hidden.nonzero()[:, 0])  # a probability of zero times a NaN left in memory is a NaN
    capture = Capture(num_tokens, first_query=question)
    with cache.stopping_at(math.ceil(SCOUT_LAYERS * model.num_layers)):
        fused_forward(model, ids, rows, cache, hidden=hidden.to(model.device), capture=capture)
    return capture.scores


def key_deviation(
    model: Model, ids: torch.Tensor, num_rows: int, cache: SlotCache, layer: int, measure: str
) -> torch.Tensor:
    """How far the keys that ``cache`` holds at ``layer`` are from fresh ones, (num_tokens,) float32, 0 from
    ``num_rows`` on.

    The first ``num_rows`` tokens are run through the layers before ``layer`` and up to its keys: ``layer`` / L of a
    prefill. What that writes into the earlier layers of the buffer is what a prefill has there.
    """
    layer = min(layer, model.num_layers - 1)
    if model.regime(ids.shape[0]):
        num_rows = ids.shape[0]  # fewer would be computed with the frequencies of a shorter prompt
    rows = torch.arange(num_rows)
    with cache.watching(layer):
        fused_forward(model, ids, rows, cache)
    assert cache.watched is not None
    fresh, held = (keys[0, :, :num_rows].transpose(0, 1).float() for keys in (cache.watched, cache.layers[layer].keys))
    cache.watched = None
    deviation = torch.zeros(ids.shape[0])
    deviation[:num_rows] = MEASURES[measure](held, fresh).cpu()
    return deviation
