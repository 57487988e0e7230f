"""Many prompts in one call: which run together, and their results in the order they came in.

Knows prompts, options and an engine; knows nothing of frameworks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm.auto import tqdm

from kvboost_rag.engine.batches import can_share, generate_batch, in_groups, prefill_batch
from kvboost_rag.engine.engine import Engine
from kvboost_rag.engine.generate import GenerationOptions, TextAssembler
from kvboost_rag.engine.repair import Repair
from kvboost_rag.engine.types import Segment, total_tokens
from kvboost_rag.errors import OptionError
from kvboost_rag.options import ReuseOptions, call_options
from kvboost_rag.records import Records
from kvboost_rag.report import GenerationResult
from kvboost_rag.segmenting import PromptLike, Segmenter
from kvboost_rag.tokens import Tokens


@dataclass(frozen=True)
class Many:
    """Runs prompts together. ``single``: what answers one of them alone, the same."""

    engine: Engine
    tokens: Tokens
    segmenter: Segmenter
    records: Records
    single: Callable[..., GenerationResult]

    def batch(
        self, prompts: Sequence[PromptLike], options: dict[str, Any], defaults: ReuseOptions
    ) -> list[GenerationResult]:
        """Answer ``prompts`` in one batch; each result is what ``single`` gives for that prompt."""
        decoding, reuse = call_options(options, defaults, "generate_batch")
        segments = [self.segmenter.segments(prompt, reuse.auto_detect) for prompt in prompts]
        for each in segments:
            self.engine.check_length(total_tokens(each), decoding.max_new_tokens)
            if not total_tokens(each):
                raise ValueError("one of the prompts is empty: there is no token to run the model on")
        if not can_share(self.engine, segments, reuse.mode):
            return [self.single(prompt, **options) for prompt in prompts]
        with self.engine.lock:
            return self._run(segments, reuse.strategy, decoding)

    def _run(
        self, segments: Sequence[Sequence[Segment]], strategy: Repair, decoding: GenerationOptions
    ) -> list[GenerationResult]:
        started = time.perf_counter()
        batch = prefill_batch(self.engine, segments, strategy, decoding.max_new_tokens)
        assemblers = [TextAssembler(self.tokens.decode, decoding.stops, decoding.stop_ids) for _ in segments]
        pieces: list[list[str]] = [[] for _ in segments]

        def on_tokens(row: int, new: list[int]) -> bool:
            report = batch.reports[row]
            if not report.ttft_seconds:
                report.ttft_seconds = time.perf_counter() - started
            pieces[row].append(assemblers[row].push(new))
            return assemblers[row].stopped

        reasons = generate_batch(self.engine, batch, decoding, on_tokens)
        results = []
        for row, assembler in enumerate(assemblers):
            text = "".join(pieces[row]) + assembler.finish()
            reason = "stop" if assembler.stopped else reasons[row]
            results.append(GenerationResult(text, reason, batch.reports[row], self.tokens.pieces))
            self.records.add(results[-1])
        return results

    def groups(
        self,
        prompts: Sequence[PromptLike],
        options: dict[str, Any],
        defaults: ReuseOptions,
        max_batch_size: int,
        progress: bool,
    ) -> list[GenerationResult]:
        """Answer ``prompts`` in batches of neighbours; results in the order of ``prompts``."""
        if isinstance(max_batch_size, bool) or not isinstance(max_batch_size, int) or max_batch_size < 1:
            raise OptionError.bad_value("max_batch_size", max_batch_size, "a whole number of prompts, 1 or more")
        _, reuse = call_options(options, defaults, "generate_many")
        segments = [self.segmenter.segments(prompt, reuse.auto_detect) for prompt in prompts]
        results: dict[int, GenerationResult] = {}
        off = not progress or len(prompts) < 2
        with tqdm(total=len(prompts), desc="generating", unit="prompt", disable=off) as bar:
            for group in in_groups(segments, max_batch_size):
                answers = self.batch([prompts[n] for n in group], options, defaults)
                results.update(zip(group, answers, strict=True))
                bar.update(len(group))
        return [results[n] for n in range(len(prompts))]
