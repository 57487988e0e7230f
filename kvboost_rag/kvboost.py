"""KVBoost: text in, text out, over an engine that keeps what it has read.

The facade: builds prompts, finds warmed documents in them, hands ids to the engine. Knows nothing of frameworks.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch

from kvboost_rag import hub
from kvboost_rag.boundaries import break_ids
from kvboost_rag.documents import DocumentCutter
from kvboost_rag.engine.engine import Engine, Prefilled
from kvboost_rag.engine.model import Model
from kvboost_rag.engine.store import StoreStats
from kvboost_rag.engine.store.make import make_store
from kvboost_rag.engine.types import Segment, total_tokens
from kvboost_rag.errors import ClosedEngineError, OptionError
from kvboost_rag.many import Many
from kvboost_rag.options import ReuseOptions, engine_options, reuse_part
from kvboost_rag.prompt import INSTRUCTION, ChatFormat, Piece, Prompt, rag
from kvboost_rag.report import Estimate, GenerationResult, PrefillResult, WarmReport
from kvboost_rag.segmenting import PromptLike, Segmenter
from kvboost_rag.single import Single
from kvboost_rag.stream import TextStream, Work
from kvboost_rag.tokens import Tokens
from kvboost_rag.verify import VerifyReport, compare
from kvboost_rag.warming import Warmer, check_texts


class KVBoost:
    """A local language model that has read your documents.

    One object may serve many threads and both frameworks. Build it with ``from_pretrained``.
    """

    def __init__(self, model: Any, tokenizer: Any, **options: Any):
        """``model``, ``tokenizer``: loaded ``transformers`` objects. Options: see ``from_pretrained``.

        The model is put into evaluation mode and gets a planned attention on top of its own until ``close()``.
        Raises OptionError, UnsupportedModelError.
        """
        config, self._defaults = engine_options(options)  # wrong values are refused before the model is touched
        self.tokenizer = tokenizer
        self.tokens = Tokens(tokenizer)
        self.chat_format = ChatFormat(tokenizer)
        salt = self.tokens.fingerprint + config.tenant.encode()
        served = Model(model, salt)
        try:
            breaks = break_ids(tokenizer) if config.boundary_window else frozenset()
            self.engine = Engine(served, make_store(config, served.fingerprint()), config, breaks)
        except BaseException:
            served.close()
            raise
        self._cutter = DocumentCutter(self.tokens, config.chunk_size, config.max_document_tokens)
        self._segmenter = Segmenter(self.tokens, self.chat_format, self._cutter, self.engine.store.texts)
        self._single = Single(self.engine, self.tokens, self._segmenter)
        self._many = Many(self.engine, self.tokens, self._segmenter, self.generate)
        self._warmer = Warmer(self.engine, self.tokens, self._cutter)
        self._closed = False
        self.store_id = uuid.uuid4().hex  # of this store's contents; a new store is a new id

    @property
    def name(self) -> str:
        """The model's hub name or folder, as it was loaded."""
        return str(getattr(self.engine.model.module, "name_or_path", "") or self.engine.model.module.config.model_type)

    @property
    def context_tokens(self) -> int:
        """How many tokens a prompt and its answer may have together."""
        return self.engine.model.context_tokens

    @classmethod
    def from_pretrained(
        cls,
        model_name: str | os.PathLike[str] | None = None,
        *,
        model: Any = None,
        tokenizer: Any = None,
        dtype: Any = "auto",
        device: Any = None,
        device_map: Any = None,
        model_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> KVBoost:
        """Load a model by hub name or folder (or take ``model=`` and ``tokenizer=`` as they are).

        ``dtype``, ``device_map``: as in transformers; ``device``: where to move the model; ``model_kwargs``: anything
        else for ``AutoModelForCausalLM.from_pretrained`` (``revision``, ``local_files_only``, ``trust_remote_code``).
        Options that calls may override: ``repair`` (``"query"``), ``recompute_ratio`` (share of reused tokens
        recomputed, 0 to 1), ``quality`` instead of both (``"exact"``, ``"high"``, ``"fast"``, or a ratio), ``mode``
        (``"reuse"``, ``"prefix"``, ``"baseline"``), ``auto_detect`` (True). Options of the engine:
        ``max_cache_bytes`` (``"2GB"``), ``cache_dir`` (a folder in which documents outlive the process, up to
        ``max_disk_bytes``), ``kv_dtype`` (``"auto"``, ``"int8"``, ``"int4"``: how documents are kept; where that
        changes the next token by more than ``max_quantization_kl`` (0.05) nats, wider), ``eviction`` (``"gdsf"``,
        ``"lru"``, ``"importance"``), ``chunk_size`` (128), ``boundary_window`` (0), ``sink_tokens`` (0),
        ``max_document_tokens`` (2048: longer documents are kept in parts), ``overlap_tokens`` (None),
        ``prefill_chunk_tokens`` (2048), ``warmed_share`` (0.9), ``break_even`` (True: compute what costs less to
        compute than to reuse), ``tenant`` ("").

        Raises ModelNotFoundError, UnsupportedModelError, OptionError.
        """
        engine_options(options)  # before a model is loaded for nothing
        if model is None or tokenizer is None:
            if model_name is None:
                raise OptionError("from_pretrained needs a model name or folder, or both model= and tokenizer=")
            loaded = hub.load(
                model_name,
                dtype=dtype,
                device_map=device_map,
                need_model=model is None,
                **dict(model_kwargs or {}),
            )
            model, tokenizer = model or loaded.model, tokenizer or loaded.tokenizer
        if device is not None:
            model = model.to(device)
        return cls(model, tokenizer, **options)

    # Ingestion

    def estimate(self, texts: str | Iterable[str]) -> Estimate:
        """Tokens and bytes that warming ``texts`` would take, and how many fit the budget. Does no work."""
        return self._warmer.estimate(self._warmer.documents(check_texts(texts)))

    def warm(
        self,
        texts: str | Iterable[str],
        primer: str | None = "auto",
        header: str | None = None,
        progress: bool = True,
        pinned: bool = False,
        chunking: str = "document",
    ) -> WarmReport:
        """Read documents once, so that prompts find them already read (the paper's ``warm``).

        ``primer``: what stands in front while a document is read: ``"auto"`` (what was read before: a document that
        shares text with it, else the last one), ``"bundled"``, any text, or None. ``header``: the system text the
        prompts will have, if it is known; documents are read behind the opening that ``prompt(system=header)`` writes.
        A document read straight behind its header (``primer=None``) is exact whenever it comes first.
        ``pinned`` documents are never evicted. Documents already warm are left as they are.

        ``chunking``: how each text is kept. ``"document"``: whole, however long (past ``max_document_tokens`` in parts,
        which are one document all the same); ``"semantic"``: in parts of at most ``chunk_size`` tokens, cut at ends of
        paragraphs and sentences; ``"fixed"``: for a system prompt, cut every ``chunk_size`` tokens and read where a
        system message stands, without a primer: exact in every prompt that begins with it.

        Raises TypeError on a document that is no string, OptionError, PromptTooLongError; all before any work.
        Warns with BudgetWarning, also before any work, if not everything will fit.
        """
        self._check_open()
        given = check_texts(texts)
        documents = self._warmer.documents(given, chunking)
        report = WarmReport(num_documents=len(given), num_blank=sum(not text for text in given))
        try:
            opening = self._opening(header) if chunking != "fixed" else self._beginning()
            primer = None if chunking == "fixed" and primer == "auto" else primer
            self._warmer.warm(documents, report, opening, primer, pinned, progress)
        finally:  # interrupted in the middle, what was read so far is found all the same
            for document in documents:
                if self._warmer.is_warm(document):
                    self._segmenter.file(document.text, len(document.ids))
        return report

    def _opening(self, header: str | None) -> list[Segment]:
        """What documents are read behind: a prompt's beginning up to its first document."""
        prompt = rag(self.chat_format, ["x"], system=header)
        return self._segmenter.segments(Prompt(prompt.header(), prompt.opening), detect=False)

    def _beginning(self) -> list[Segment]:
        """What stands in a prompt before its system message."""
        content = [Piece("x", "document")]
        prompt = self.chat_format.render([{"role": "system", "content": content}, {"role": "user", "content": "x"}])
        return self._segmenter.segments(Prompt(prompt.header(), prompt.opening), detect=False)

    def is_warm(self, text: str) -> bool:
        """Whether the KV of this document is there now."""
        self._segmenter.recall()
        documents = self._warmer.documents(check_texts(text))
        return bool(documents) and self._warmer.is_warm(documents[0])

    def forget(self, texts: str | Iterable[str]) -> int:
        """Drop documents from the store. Returns how many were there."""
        self._segmenter.recall()
        num_gone = 0
        for document in self._warmer.documents(check_texts(texts)):
            self._segmenter.index.discard(document.text)
            num_gone += sum(self.engine.store.remove(content) for content in document.contents) > 0
        return num_gone

    def clear(self) -> None:
        """Drop everything that is kept, in ``cache_dir`` too."""
        self.engine.store.clear()
        self._segmenter.index.clear()
        self._warmer.clear()
        self._cutter.clear()

    def stats(self) -> StoreStats:
        return self.engine.store.stats()

    # Prompts

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

    # Questions

    def generate(self, prompt: PromptLike, **options: Any) -> GenerationResult:
        """Answer ``prompt``: a string (raw completion), chat messages, or what ``prompt()`` built.

        Decoding: ``max_new_tokens`` (256), ``temperature`` (0, greedy), ``top_p``, ``top_k``, ``repetition_penalty``,
        ``seed``, ``stop`` (a string or several; they end the text and never appear in it). Reuse: ``repair``,
        ``recompute_ratio``, ``mode``, ``auto_detect``, as in ``from_pretrained``.

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

    def _work(self, prompt: PromptLike, options: dict[str, Any]) -> Work:
        self._check_open()
        return self._single.work(prompt, options, self._defaults)

    def prefill(self, prompt: PromptLike, **options: Any) -> PrefillResult:
        """Run the prompt only. ``.logits``: (vocab,) float32 of its last position. Options: the reuse ones."""
        prefilled = self._prefill(prompt, options, "prefill")
        return PrefillResult(prefilled.logits, prefilled.report)

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

    # Life

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedEngineError("this engine was closed; build a new one with KVBoost.from_pretrained")

    def close(self) -> None:
        """Drop what is in memory and give the model its own attention back. Safe to call twice.

        What lies in ``cache_dir`` stays there.
        """
        if not self._closed:
            self._closed = True
            with self.engine.lock:
                self.engine.store.close()
                self._segmenter.index.clear()
                self._warmer.clear()
                self.engine.model.close()

    def __enter__(self) -> KVBoost:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _listed(prompts: Sequence[PromptLike]) -> list[PromptLike]:
    """Raises TypeError for a single prompt, which is a sequence too."""
    single = isinstance(prompts, str | Prompt) or (len(prompts) > 0 and isinstance(prompts[0], Mapping))
    if single:
        raise TypeError("a list of prompts is wanted, not a single prompt")
    return list(prompts)
