"""The half of ``KVBoost`` that answers: prompts in, text, logits or comparisons out.

Knows prompts, options and an engine; knows nothing of how documents were read, or of frameworks.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from kvboost_rag.engine.engine import Prefilled
from kvboost_rag.engine.types import Segment, total_tokens
from kvboost_rag.errors import OptionError
from kvboost_rag.facade import Facade
from kvboost_rag.many import Many
from kvboost_rag.options import ReuseOptions, reuse_part
from kvboost_rag.prompt import INSTRUCTION, Prompt, rag
from kvboost_rag.records import Records
from kvboost_rag.report import GenerationResult, PrefillResult
from kvboost_rag.segmenting import PromptLike
from kvboost_rag.single import Single
from kvboost_rag.stream import AsyncTextStream, TextStream, Work, deferred
from kvboost_rag.tokens import Tokens
from kvboost_rag.verify import VerifyReport, compare


class Asking(Facade):
    """What a KVBoost can do with prompts."""

    tokens: Tokens
    _defaults: ReuseOptions
    _records: Records
    _single: Single
    _many: Many

    def prompt(
        self,
        documents: Sequence[str],
        question: str = "",
        system: str | None = None,
        instruction: str = INSTRUCTION,
    ) -> Prompt:
        """Documents in this order and a question, as a chat prompt. Blank documents are left out.

        ``system``: the system message, or the template's own; ``instruction``: what stands before the documents.
        """
        return rag(self.chat_format, documents, question, system, instruction)

    def segments(self, prompt: PromptLike, auto_detect: bool = True) -> list[Segment]:
        """The token segments the engine will see, warmed documents found."""
        return self._segmenter.segments(prompt, auto_detect)

    def count_tokens(self, prompt: PromptLike) -> int:
        return total_tokens(self.segments(prompt))

    def record(self) -> AbstractContextManager[list[GenerationResult]]:
        """Collect what this engine answers inside the context, whoever asks: the way to the results behind a chain or a
        query engine, which return text.

            with engine.record() as results:
                chain.invoke(question)
            results[-1].show()
        """
        self._check_open()
        return self._records.collected()

    # Questions

    def generate(self, prompt: PromptLike, **options: Any) -> GenerationResult:
        """Answer ``prompt``: a string (raw completion), chat messages, or what ``prompt()`` built.

        Decoding: ``max_new_tokens`` (256), ``temperature`` (0, greedy), ``top_p``, ``top_k``, ``repetition_penalty``,
        ``seed``, ``stop`` (a string or several; they end the text and never appear in it), ``stop_ids`` (tokens that
        do, besides the model's own end tokens). Reuse: ``repair``, ``recompute_ratio``, ``quality``, ``mode``,
        ``auto_detect``, as in ``from_pretrained``.

        Raises OptionError, PromptTooLongError (before any work, with the numbers), ValueError if the prompt is empty.
        """
        return self._work(prompt, options)(lambda piece: None, threading.Event())

    def generate_batch(self, prompts: Sequence[PromptLike], **options: Any) -> list[GenerationResult]:
        """Answer several prompts at once (the paper's ``generate_batch``): the longest prefix they share is loaded
        once, what is left of each runs in one call, and they are decoded together. Options as ``generate``; each
        result is that of its prompt alone. Models whose attention cannot be exchanged, other modes than ``"reuse"``
        and prompts past a rope switch run one after the other.
        """
        self._check_open()
        return self._many.batch(_listed(prompts), options, self._defaults)

    def generate_many(
        self, prompts: Sequence[PromptLike], *, max_batch_size: int = 8, progress: bool = True, **options: Any
    ) -> list[GenerationResult]:
        """Answer any number of prompts (the paper's ``generate_many``): those that share a prefix go together, in
        batches of at most ``max_batch_size``. Results come in the order of ``prompts``.
        """
        self._check_open()
        return self._many.groups(_listed(prompts), options, self._defaults, max_batch_size, progress)

    def stream(self, prompt: PromptLike, **options: Any) -> TextStream:
        """As ``generate``, text piece by piece; the pieces concatenate to the text. Close it to stop early."""
        return TextStream(self._work(prompt, options))

    async def agenerate(self, prompt: PromptLike, **options: Any) -> GenerationResult:
        """As ``generate`` without blocking the event loop. Ends at the next token when the task is cancelled."""
        async with self.astream(prompt, **options) as stream:
            async for _ in stream:
                pass
            return stream.result

    def astream(self, prompt: PromptLike, **options: Any) -> AsyncTextStream:
        """As ``stream`` for an event loop: iterate with ``async for``, ``async with`` closes it. Everything is done in
        another thread, so what ``generate`` raises at once is raised by the first step of the iteration.
        """
        return AsyncTextStream(deferred(lambda: self._work(prompt, options)))

    async def agenerate_batch(self, prompts: Sequence[PromptLike], **options: Any) -> list[GenerationResult]:
        """As ``generate_batch`` in another thread."""
        return await asyncio.to_thread(self.generate_batch, prompts, **options)

    async def agenerate_many(self, prompts: Sequence[PromptLike], **options: Any) -> list[GenerationResult]:
        """As ``generate_many`` in another thread."""
        return await asyncio.to_thread(self.generate_many, prompts, **options)

    def _work(self, prompt: PromptLike, options: dict[str, Any]) -> Work:
        self._check_open()
        return self._single.work(prompt, options, self._defaults)

    def prefill(self, prompt: PromptLike, **options: Any) -> PrefillResult:
        """Run the prompt only. ``.logits``: (vocab,) float32 of its last position. Options: the reuse ones."""
        prefilled = self._prefill(prompt, options, "prefill")
        return PrefillResult(prefilled.logits, prefilled.report, self.tokens.pieces)

    def verify(self, prompts: Sequence[PromptLike], num_tokens: int = 24, **options: Any) -> VerifyReport:
        """Compare reuse with full prefill on your own prompts: KL and same top token over the ``num_tokens`` tokens
        that full prefill generates, and TTFT. Warm the documents first; options: the reuse ones.
        """
        self._check_open()
        reuse: ReuseOptions = self._defaults.override(reuse_part(dict(options), "verify"))
        if isinstance(num_tokens, bool) or not isinstance(num_tokens, int) or num_tokens < 1:
            raise OptionError.bad_value("num_tokens", num_tokens, "a whole number of tokens, 1 or more")
        found = []
        for prompt in _listed(prompts):
            segments = self.segments(prompt, reuse.auto_detect)
            with self.engine.lock:
                found.append(compare(self.engine, segments, reuse.strategy, num_tokens))
        return VerifyReport(tuple(found), reuse.strategy.name)

    def score(self, prompt: PromptLike, continuation: str | Sequence[int], **options: Any) -> torch.Tensor:
        """Log-probabilities (num_tokens,) float32 of ``continuation`` behind ``prompt``, teacher-forced."""
        ids = self.tokens.encode(continuation) if isinstance(continuation, str) else tuple(continuation)
        if not ids:
            return torch.empty(0)
        log_probs = self.logits(prompt, ids, **options).log_softmax(dim=-1)
        return log_probs.gather(1, torch.tensor(ids, device=log_probs.device)[:, None])[:, 0]

    def logits(self, prompt: PromptLike, continuation: Sequence[int], **options: Any) -> torch.Tensor:
        """Teacher forcing: logits (num_tokens, vocab) float32 that predict each id of ``continuation``."""
        prefilled = self._prefill(prompt, options, "score", len(continuation))
        with self.engine.lock:
            return self.engine.extend(prefilled, continuation)

    def _prefill(self, prompt: PromptLike, options: dict[str, Any], where: str, room: int = 0) -> Prefilled:
        self._check_open()
        return self._single.prefill(prompt, options, self._defaults, where, room)


def _listed(prompts: Sequence[PromptLike]) -> list[PromptLike]:
    """Raises TypeError for a single prompt, which is a sequence too."""
    single = isinstance(prompts, str | Prompt) or (len(prompts) > 0 and isinstance(prompts[0], Mapping))
    if single:
        raise TypeError("a list of prompts is wanted, not a single prompt")
    return list(prompts)
