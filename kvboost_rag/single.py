"""One prompt in one call: from what a caller passes to text, or to logits only.

Knows a prompt, options and an engine; knows nothing of frameworks. ``many.py`` is the same for several prompts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvboost_rag.engine.engine import Engine, Prefilled
from kvboost_rag.engine.generate import GenerationOptions, TextAssembler
from kvboost_rag.engine.types import Report, total_tokens
from kvboost_rag.errors import StreamClosedError
from kvboost_rag.options import ReuseOptions, call_options, reuse_part
from kvboost_rag.records import Records
from kvboost_rag.report import GenerationResult
from kvboost_rag.segmenting import PromptLike, Segmenter
from kvboost_rag.stream import Emit, Work
from kvboost_rag.tokens import Tokens


@dataclass(frozen=True)
class Single:
    """Runs prompts one by one, from any thread."""

    engine: Engine
    tokens: Tokens
    segmenter: Segmenter
    records: Records

    def work(self, prompt: PromptLike, options: dict[str, Any], defaults: ReuseOptions) -> Work:
        """Check everything now; return the function that does the work."""
        started = time.perf_counter()
        decoding, reuse = call_options(options, defaults, "generate")
        segments = self.segmenter.segments(prompt, reuse.auto_detect)
        self.engine.check_length(total_tokens(segments), decoding.max_new_tokens)

        def work(emit: Emit, cancelled: threading.Event) -> GenerationResult:
            with self.engine.lock:
                try:
                    prefilled = self.engine.prefill(
                        segments, reuse.strategy, reuse.mode, decoding.max_new_tokens, cancelled.is_set
                    )
                except StreamClosedError:
                    return GenerationResult("", "cancelled", Report(num_prompt_tokens=total_tokens(segments)))
                return self._decode(prefilled, decoding, emit, cancelled.is_set, started)

        return work

    def _decode(
        self,
        prefilled: Prefilled,
        decoding: GenerationOptions,
        emit: Emit,
        cancelled: Callable[[], bool],
        started: float,
    ) -> GenerationResult:
        assembler = TextAssembler(self.tokens.decode, decoding.stops, decoding.stop_ids)
        pieces: list[str] = []
        report = prefilled.report

        def give(piece: str) -> None:
            if piece:
                pieces.append(piece)
                emit(piece)

        def on_tokens(new: list[int]) -> bool:
            if not report.ttft_seconds:
                report.ttft_seconds = time.perf_counter() - started
            give(assembler.push(new))
            return assembler.stopped or cancelled()

        reason = self.engine.generate(prefilled, decoding, on_tokens)
        give(assembler.finish())
        self.engine.keep(prefilled)
        self.engine.model.recycle(prefilled.cache)
        if assembler.stopped:
            reason = "stop"
        elif cancelled():
            reason = "cancelled"
        result = GenerationResult("".join(pieces), reason, report, self.tokens.pieces)
        self.records.add(result)
        return result

    def prefill(
        self, prompt: PromptLike, options: dict[str, Any], defaults: ReuseOptions, where: str, room: int = 0
    ) -> Prefilled:
        """Complete the prompt's KV, with ``room`` for as many tokens more, and keep what is worth keeping."""
        started = time.perf_counter()
        reuse: ReuseOptions = defaults.override(reuse_part(dict(options), where))
        segments = self.segmenter.segments(prompt, reuse.auto_detect)
        with self.engine.lock:
            prefilled = self.engine.prefill(segments, reuse.strategy, reuse.mode, room)
            prefilled.report.ttft_seconds = time.perf_counter() - started
            self.engine.keep(prefilled)
        return prefilled
