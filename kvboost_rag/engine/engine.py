"""The engine: token segments in, logits and tokens out, KV kept for the next time (paper, section 4.7).

Wires the parts together in the order of a request: assemble, stitch, repair, forward, generate, store. Knows ids;
knows nothing of text, documents as users see them, or frameworks.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from kvboost_rag.engine.account import Choice, all_live, fill
from kvboost_rag.engine.assemble import MODES, Assembled, Placement, assemble
from kvboost_rag.engine.cache import SlotCache, never
from kvboost_rag.engine.capabilities import Reuse
from kvboost_rag.engine.chunking import Cutting
from kvboost_rag.engine.codecs import CODECS
from kvboost_rag.engine.config import EngineConfig
from kvboost_rag.engine.costs import Costs, Work
from kvboost_rag.engine.forward import SCOUT_LAYERS, fused_forward, key_deviation, scout, scout_rows, work_of
from kvboost_rag.engine.generate import GenerationOptions, decode
from kvboost_rag.engine.keeping import Keeper
from kvboost_rag.engine.keys import chunk_keys, content_hash
from kvboost_rag.engine.lock import FairLock
from kvboost_rag.engine.model import Model
from kvboost_rag.engine.repair import BoundaryRepair, DeviationProbe, Repair, RepairView, Reused
from kvboost_rag.engine.stitch import stitch
from kvboost_rag.engine.store import Put, Store
from kvboost_rag.engine.types import Fidelity, Report, Segment, total_tokens
from kvboost_rag.errors import OptionError, PromptTooLongError


@dataclass
class Prefilled:
    """A prompt whose KV is complete. ``logits``: (vocab,) float32 of its last position."""

    ids: torch.Tensor
    cache: Any
    logits: torch.Tensor
    report: Report
    assembled: Assembled | None = None  # None after a baseline prefill


class Engine:
    """Reuses KV for one model. Safe from many threads: one forward at a time, decode steps taken in turn."""

    def __init__(self, model: Model, store: Store, config: EngineConfig, breaks: frozenset[int] = frozenset()):
        """``breaks``: ids behind which text reads well when it is cut there; for ``boundary_window``."""
        self.model, self.store, self.config = model, store, config
        together = config.overlap_tokens is None
        self.cutting = Cutting(config.chunk_size, config.boundary_window, breaks, config.sink_tokens, together)
        self.costs = Costs(model.balanced_keys, model.settle)
        self.keeper = Keeper(model, store, self.cutting, config, self.costs)
        self.lock = FairLock()

    def check_length(self, num_tokens: int, max_new_tokens: int, what: str = "the prompt") -> None:
        """Raises PromptTooLongError before any work."""
        if num_tokens + max_new_tokens > self.model.context_tokens:
            raise PromptTooLongError(num_tokens, max_new_tokens, self.model.context_tokens, what)

    def prefill(
        self,
        segments: Sequence[Segment],
        repair: Repair,
        mode: str = "reuse",
        max_new_tokens: int = 0,
        cancelled: Callable[[], bool] = never,
    ) -> Prefilled:
        """Complete the prompt's KV, reusing what ``mode`` allows and repairing what ``repair`` chooses.

        The caller holds ``lock``. Raises OptionError for an unknown mode, PromptTooLongError, ValueError if empty,
        and StreamClosedError at the next layer once ``cancelled`` returns True.
        """
        if mode not in MODES:
            raise OptionError.bad_value("mode", mode, f"one of {', '.join(map(repr, MODES))}")
        num_tokens = total_tokens(segments)
        if num_tokens == 0:
            raise ValueError("the prompt is empty: there is no token to run the model on")
        self.check_length(num_tokens, max_new_tokens)
        if mode == "baseline":
            return self._baseline(segments)
        report = Report(mode=mode, repair=repair.name, num_prompt_tokens=num_tokens)
        mode, repair = self.allowed(mode, repair, report)
        with _timed(report, "lookup"):
            fingerprint = self.model.fingerprint(num_tokens)
            assembled = assemble(segments, self.store, fingerprint, self.cutting, mode)
            assembled = self._worthwhile(assembled, repair, report)
        with _timed(report, "stitch"):
            cache = self.model.new_cache(num_tokens + max_new_tokens)
            cache.cancel_when(cancelled)
            with self.costs.loading(self._bytes_by_tier(assembled.placements)):
                report.moved_bytes = stitch(assembled, cache, self.model.rope(num_tokens))
        live = assembled.live_positions()
        with _timed(report, "repair"):
            choice = self.choose(assembled, live, cache, repair)
        with _timed(report, "forward"):
            positions = choice.computed(live)
            size = self.config.prefill_chunk_tokens
            with self.costs.forward(work_of(positions)):
                logits = fused_forward(self.model, assembled.ids, positions, cache, slice_tokens=size)[-1]
        cache.cancel_when(never)  # decoding ends between tokens
        fill(report, assembled, live, choice, self.store.tier_of)
        report.full_prefill_seconds = self.costs.full_prefill(num_tokens)
        return Prefilled(assembled.ids, cache, logits, report, assembled)

    def allowed(self, mode: str, repair: Repair, report: Report) -> tuple[str, Repair]:
        """What the model allows of ``mode`` and ``repair``; ``report`` says so where it is less."""
        capabilities, num_tokens = self.model.capabilities, report.num_prompt_tokens
        if mode == "reuse" and capabilities.reuse is Reuse.PREFIX_ONLY:
            report.mode = mode = "prefix"
            report.notes.append(f"only prefixes are reused: {capabilities.reason}")
        if repair.needs_attention and not capabilities.planned:
            repair = BoundaryRepair()
            report.repair = repair.name
            report.notes.append("this model's own attention does not say what it looks at: repaired by 'boundary'")
        if capabilities.switch is not None and self.model.regime(num_tokens):
            report.notes.append(
                f"past {capabilities.switch.limit} tokens this model's {capabilities.switch.kind} rope changes: KV of "
                "shorter prompts is not reused here"
            )
        return mode, repair

    def _worthwhile(self, assembled: Assembled, repair: Repair, report: Report) -> Assembled:
        """``assembled``, without its approximate hits where computing them costs less than reusing them."""
        spans = assembled.approximate_spans()
        if not spans or repair.wanted or not self.config.break_even:
            return assembled
        computed = assembled.without_approximate()
        live, num_tokens = assembled.live_positions(), assembled.num_tokens
        passes = [Work(len(live) + repair.num_selected(spans), num_tokens)]
        if repair.needs_attention:
            passes.append(Work(len(scout_rows(live, assembled.missing())), num_tokens, SCOUT_LAYERS))
        if repair.probe is not None:
            passes.append(
                replace(work_of(torch.arange(spans[-1].end)), share=repair.probe.layer / self.model.num_layers)
            )
        loaded = [p for p in assembled.placements if p.fidelity is Fidelity.APPROXIMATE]
        verdict = self.costs.judge(passes, self._bytes_by_tier(loaded), work_of(computed.live_positions()))
        if verdict is None or verdict.pays:
            return assembled
        report.notes.append(
            f"{len(loaded)} chunks were found and computed all the same: reusing and repairing them would take "
            f"{verdict.reuse_seconds * 1e3:.0f} ms, computing them {verdict.full_seconds * 1e3:.0f} ms"
        )
        return computed

    def _bytes_by_tier(self, placements: Sequence[Placement]) -> Counter[str]:
        found: Counter[str] = Counter()
        for placement in placements:
            if placement.entry is not None:
                found[self.store.tier_of(placement.entry)] += placement.entry.packed.num_bytes
        return found

    def _baseline(self, segments: Sequence[Segment]) -> Prefilled:
        ids = torch.tensor([token for segment in segments for token in segment.ids], dtype=torch.int64)
        report = Report(mode="baseline", num_prompt_tokens=len(ids), num_live_tokens=len(ids))
        report.trace = all_live(ids)
        cache = DynamicCache()  # without a config: sliding layers keep everything, as our own buffer does
        with _timed(report, "forward"):
            logits = self.model.forward(ids, cache)[-1]
            self.model.settle()
        return Prefilled(ids, cache, logits, report)

    def choose(self, assembled: Assembled, live: torch.Tensor, cache: SlotCache, repair: Repair) -> Choice:
        """What ``repair`` recomputes.

        A scout pass needs the opening in place: attention rests on the first tokens. Where it is not cached yet, this
        one time, it is computed first, so that the choice does not depend on what happened to be cached.
        """
        spans = assembled.approximate_spans()
        if not spans:
            return Choice(torch.empty(0, dtype=torch.int64))
        if repair.probe is not None:
            deviation = self._deviation(assembled, spans, cache, repair.probe)
            return Choice(repair.select(RepairView(spans, deviation=deviation)))
        if not repair.needs_attention:
            return Choice(repair.select(RepairView(spans)))
        num_opening = int((live == torch.arange(len(live))).sum())
        if self.model.regime(assembled.num_tokens):
            num_opening = 0  # alone, it would be computed with the frequencies of a short prompt
        if num_opening:
            fused_forward(self.model, assembled.ids, live[:num_opening], cache)
        attention = scout(self.model, assembled.ids, live[num_opening:], assembled.missing(), cache)
        return Choice(repair.select(RepairView(spans, attention)), num_opening, attention)

    def _deviation(
        self, assembled: Assembled, spans: Sequence[Reused], cache: SlotCache, probe: DeviationProbe
    ) -> torch.Tensor | None:
        if sum(map(len, spans)) < probe.min_hit_ratio * assembled.num_tokens:
            return None
        return key_deviation(self.model, assembled.ids, spans[-1].end, cache, probe.layer, probe.measure)

    def keep(self, prefilled: Prefilled, followed: bool = False) -> None:
        """Store what this prompt computed and a later one may reuse; see ``Keeper``. The caller holds ``lock``."""
        if prefilled.assembled is not None:
            stored = self.keeper.by_products(prefilled.assembled, prefilled.cache.copy_out, followed=followed)
            prefilled.report.num_stored_tokens += stored

    def warm(
        self,
        context: Sequence[Segment],
        document: Segment | Sequence[Segment],
        pinned: bool = False,
        text: str = "",
        chunking: str = "document",
        anchored: bool = False,
    ) -> Put:
        """Read ``document``, in one part or several, behind ``context`` and keep its KV; see ``Keeper.read``.

        The caller holds ``lock``. Raises PromptTooLongError before any work.
        """
        parts = [document] if isinstance(document, Segment) else document
        self.check_length(total_tokens(context) + total_tokens(parts), 0, "a document (with its primer)")
        return self.keeper.read(context, parts, pinned, text, chunking, anchored)

    def holds(self, context: Sequence[Segment], parts: Sequence[Segment]) -> bool:
        """Whether a document's exact KV behind ``context`` is kept. Marks nothing as used."""
        segments = [*context, *parts]
        chunks = self.cutting.chunks(segments)
        keys = chunk_keys(chunks, self.model.fingerprint(total_tokens(segments)))
        return all(self.store.holds(each) for each in keys[-len(parts) :])

    def promote(self, parts: Sequence[Segment]) -> bool:
        """Bring a document's KV to the fastest tier. Returns whether any of it came from a slower one."""
        num_tokens = total_tokens(parts)
        brought = [
            self.store.promote(self.content_key(part.ids, num_tokens), np.asarray(part.ids, dtype=np.int64))
            for part in parts
        ]
        return any(brought)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token of a document will take in the store; a good estimate where it is quantised."""
        bits = CODECS[self.config.codec].bits
        numbers = self.model.bytes_per_token // self.model.dtype.itemsize
        return self.model.bytes_per_token if bits is None else round(numbers * (bits / 8 + 1 / 16))

    def content_key(self, ids: Sequence[int], num_tokens: int = 0) -> bytes:
        """Under which ``ids`` are kept, whatever stands before them: a document, or a part of one of ``num_tokens``."""
        return content_hash(ids, self.model.fingerprint(num_tokens or len(ids)))

    def extend(self, prefilled: Prefilled, ids: Sequence[int]) -> torch.Tensor:
        """Teacher forcing: logits (len(ids), vocab) float32 that predict each of ``ids`` behind the prompt.

        The caller holds ``lock``. Advances ``prefilled.cache`` by all but the last of ``ids``.
        """
        rows = [prefilled.logits[None]]
        if len(ids) > 1:
            rows.append(self.model.forward(torch.tensor(ids[:-1]), prefilled.cache, num_logits=len(ids) - 1))
        return torch.cat(rows)

    def generate(self, prefilled: Prefilled, options: GenerationOptions, on_tokens: Callable[[list[int]], bool]) -> str:
        """Decode behind a prefilled prompt; between two tokens other threads get their turn. See ``decode``."""

        def step(row: int, new: list[int]) -> bool:
            prefilled.report.num_new_tokens += len(new)
            done = on_tokens(new)
            if not done:
                self.lock.pass_on()
            return done

        (reason,) = decode(self.model, [prefilled.ids], prefilled.cache, prefilled.logits[None], options, step)
        return reason


@contextmanager
def _timed(report: Report, step: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    report.seconds[step] = time.perf_counter() - started
