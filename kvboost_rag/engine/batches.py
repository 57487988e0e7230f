"""Which prompts run together, and what they share (paper, section 4.7: ``generate_batch`` and ``generate_many``).

Knows segments and an engine; knows nothing of text. Prompts are put into the order of a radix tree's leaves, so that
neighbours share the longest prefixes, and cut into batches; each batch stitches its common prefix once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from kvboost_rag.engine.account import computed_after_all, fill
from kvboost_rag.engine.assemble import Assembled, assemble
from kvboost_rag.engine.batch import Layout, Row, RowsCache, RowsPlan, run
from kvboost_rag.engine.cache import SlotCache
from kvboost_rag.engine.capabilities import Reuse
from kvboost_rag.engine.engine import Engine
from kvboost_rag.engine.exchange import planned
from kvboost_rag.engine.generate import GenerationOptions, OnTokens, decode
from kvboost_rag.engine.repair import Repair
from kvboost_rag.engine.stitch import stitch
from kvboost_rag.engine.types import KV, Report, Segment, total_tokens

Prompt = Sequence[Segment]


@dataclass
class PrefilledBatch:
    """Prompts whose KV is complete. ``logits``: (rows, vocab) float32; ``num_shared_tokens``: of the prefix that is
    there once."""

    ids: list[torch.Tensor]
    logits: torch.Tensor
    reports: list[Report]
    num_shared_tokens: int
    cache: Any
    plan: RowsPlan


def can_share(engine: Engine, prompts: Sequence[Prompt], mode: str) -> bool:
    """Whether these prompts can run as one batch; else one after the other."""
    model = engine.model
    return (
        mode == "reuse"
        and len(prompts) > 1
        and model.capabilities.planned
        and model.capabilities.reuse is Reuse.ANY_POSITION
        and not any(model.regime(total_tokens(prompt)) for prompt in prompts)
    )


def prefill_batch(engine: Engine, prompts: Sequence[Prompt], repair: Repair, room: int) -> PrefilledBatch:
    """Complete all ``prompts``, with ``room`` for new tokens each. The caller holds the engine's lock, has checked the
    lengths, and ``can_share``."""
    started = time.perf_counter()
    rows = _lookup(engine, prompts)
    num_shared, num_fresh = common_prefix(rows), 0
    if any(p.entry is None for p in rows[0].placements if p.chunk.end <= num_shared):
        # what all would compute is computed once, and kept if it is worth keeping
        front = engine.prefill(_front(prompts[0], num_shared), repair)
        engine.keep(front, followed=True)
        num_fresh = front.report.num_stored_tokens
        rows = _lookup(engine, prompts)
        num_shared = common_prefix(rows)
    longest = max(row.num_tokens for row in rows)
    shared = engine.model.new_cache(longest)
    reports, parts = [], []
    for number, assembled in enumerate(rows):
        report = Report(repair=repair.name, num_prompt_tokens=assembled.num_tokens)
        rope = engine.model.rope(assembled.num_tokens)
        report.moved_bytes = stitch(assembled, shared, rope, first=num_shared if number else 0)
        live = assembled.live_positions()
        shared.zero_slots(live)  # hidden from rows, but a probability of zero times a NaN left in memory is a NaN
        choice = engine.choose(assembled, live, shared, repair)
        parts.append(_row(assembled, choice.computed(live), num_shared, shared))
        fill(report, assembled, live, choice, engine.store.tier_of)
        report.full_prefill_seconds = engine.costs.full_prefill(assembled.num_tokens)
        reports.append(report)
    shared.set_length(longest)
    logits, cache, plan, places = run(engine.model, shared, num_shared, parts, room)
    for number, (assembled, report) in enumerate(zip(rows, reports, strict=True)):
        copy_out = partial(_copy_out, cache, places, number)
        report.num_stored_tokens = engine.keeper.by_products(assembled, copy_out, first=num_shared)
    computed_after_all(reports[0], num_fresh)  # the front was computed for it; the others have read it
    for report in reports:
        report.seconds["prefill"] = time.perf_counter() - started
    return PrefilledBatch([row.ids for row in parts], logits, reports, num_shared, cache, plan)


def _copy_out(cache: RowsCache, places: Layout, row: int, start: int, end: int) -> KV:
    return cache.copy_out(row, places.slots_of(row, torch.arange(start, end)), start)


def _lookup(engine: Engine, prompts: Sequence[Prompt]) -> list[Assembled]:
    return [assemble(prompt, engine.store, engine.model.fingerprint(), engine.cutting) for prompt in prompts]


def common_prefix(rows: Sequence[Assembled]) -> int:
    """Tokens of the longest run of chunks that all ``rows`` begin with and find in the same state."""
    num_tokens = 0
    for column in zip(*(row.placements for row in rows), strict=False):
        first = column[0]
        if any(p.chunk != first.chunk or p.fidelity is not first.fidelity for p in column):
            break
        num_tokens = first.chunk.end
    return num_tokens


def _front(prompt: Prompt, num_tokens: int) -> list[Segment]:
    """The segments of ``prompt`` up to ``num_tokens``, the last one cut."""
    front, left = [], num_tokens
    for segment in prompt:
        if left > 0:
            front.append(replace(segment, ids=segment.ids[:left]))
            left -= len(segment.ids)
    return front


def _row(assembled: Assembled, computed: torch.Tensor, num_shared: int, shared: SlotCache) -> Row:
    """What one prompt needs of its own; copies its reused KV behind the prefix out of the buffer."""
    behind = torch.arange(num_shared, assembled.num_tokens)
    tail = behind[~torch.isin(behind, computed)]
    parts = [(layer.buffer_keys[:, :, tail], layer.buffer_values[:, :, tail]) for layer in shared.layers]
    return Row(assembled.ids, computed, tail, parts)


def generate_batch(engine: Engine, batch: PrefilledBatch, options: GenerationOptions, on_tokens: OnTokens) -> list[str]:
    """Decode behind a prefilled batch; ``on_tokens`` gets a row and its new ids. Returns why each row ended."""

    def step(row: int, new: list[int]) -> bool:
        batch.reports[row].num_new_tokens += len(new)
        done = on_tokens(row, new)
        if not done:
            engine.lock.pass_on()  # as often as the prompt alone would
        return done

    width = batch.cache.get_seq_length()
    with planned(batch.plan):
        return decode(engine.model, batch.ids, batch.cache, batch.logits, options, step, width)


def in_groups(prompts: Sequence[Prompt], max_rows: int) -> list[list[int]]:
    """Indices of ``prompts`` in batches of at most ``max_rows``, neighbours in a radix tree together.

    Sorted by their segments, prompts with a common prefix stand next to each other, as leaves of the tree do.
    """
    order = sorted(range(len(prompts)), key=lambda n: [segment.ids for segment in prompts[n]])
    return [order[at : at + max_rows] for at in range(0, len(order), max_rows)]
