"""KVBoost: text in, text out, over an engine that keeps what it has read.

The facade: builds prompts, finds warmed documents in them, hands ids to the engine. Knows nothing of frameworks.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from types import TracebackType
from typing import Any

import torch

from kvboost_rag import hub
from kvboost_rag.detect import DocumentIndex
from kvboost_rag.engine.config import EngineConfig, checked, parse_bytes
from kvboost_rag.engine.engine import Engine, Prefilled
from kvboost_rag.engine.generate import GenerationOptions, TextAssembler
from kvboost_rag.engine.model import Model
from kvboost_rag.engine.repair import Repair, resolve_repair
from kvboost_rag.engine.store import MemoryStore, StoreStats
from kvboost_rag.engine.types import Segment
from kvboost_rag.errors import ClosedEngineError, OptionError
from kvboost_rag.prompt import ChatFormat, Piece, Prompt, completion, rag
from kvboost_rag.report import Estimate, GenerationResult, PrefillResult, WarmReport
from kvboost_rag.stream import Emit, TextStream, Work
from kvboost_rag.tokens import Tokens
from kvboost_rag.warming import Warmer, check_texts

MIN_DETECTED_TOKENS = 32

PromptLike = str | Prompt | Sequence[Mapping[str, Any]]
_CALL_OPTIONS = ("mode", "repair", "recompute_ratio", "auto_detect")


class KVBoost:
    """A local language model that has read your documents.

    One object may serve many threads and both frameworks. Build it with ``from_pretrained``.
    """

    def __init__(self, model: Any, tokenizer: Any, **options: Any):
        """``model``, ``tokenizer``: loaded ``transformers`` objects. Options: see ``from_pretrained``.

        The model is put into evaluation mode and gets a planned attention on top of its own until ``close()``.
        Raises OptionError, UnsupportedModelError.
        """
        self._defaults = {name: options.pop(name) for name in _CALL_OPTIONS if name in options}
        self._plan(dict(self._defaults))  # wrong values are refused now, not at the first question
        if "max_cache_bytes" in options:
            options["max_cache_bytes"] = parse_bytes(options["max_cache_bytes"])
        known = [f.name for f in fields(EngineConfig)] + list(_CALL_OPTIONS)
        for name in options:
            if name not in known:
                raise OptionError.unknown(name, known, "KVBoost")
        config: EngineConfig = checked(EngineConfig, options, "KVBoost")
        self.tokenizer = tokenizer
        self.tokens = Tokens(tokenizer)
        self.chat_format = ChatFormat(tokenizer)
        salt = self.tokens.fingerprint + config.tenant.encode()
        self.engine = Engine(Model(model, salt), MemoryStore(config.max_cache_bytes, config.warmed_share), config)
        self._index = DocumentIndex()
        self._warmer = Warmer(self.engine, self.tokens)
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
        Options, all of which calls may override except the last four:
        ``repair`` (``"query"``), ``recompute_ratio`` (share of reused tokens recomputed, 0 to 1), ``mode``
        (``"reuse"``, ``"prefix"``, ``"baseline"``), ``auto_detect`` (True), ``max_cache_bytes`` (``"2GB"``),
        ``chunk_size`` (128), ``warmed_share`` (0.9), ``tenant`` ("").

        Raises ModelNotFoundError, UnsupportedModelError, OptionError.
        """
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
    ) -> WarmReport:
        """Read documents once, so that prompts find them already read (the paper's ``warm``).

        ``primer``: what stands in front while a document is read: ``"auto"`` (a document read before that shares text
        with it, else about 320 tokens of another one), ``"bundled"``, any text, or None. ``header``: the system text
        the prompts will have, if it is known; documents are read behind the opening that ``prompt(system=header)``
        writes. A document read straight behind its header (``primer=None``) is exact whenever it comes first.
        ``pinned`` documents are never evicted. Documents already warm are left as they are.

        Raises TypeError on a document that is no string, OptionError, PromptTooLongError; all before any work.
        Warns with BudgetWarning, also before any work, if not everything will fit.
        """
        self._check_open()
        given = check_texts(texts)
        documents = self._warmer.documents(given)
        report = WarmReport(num_documents=len(given), num_blank=sum(not text for text in given))
        self._warmer.warm(documents, report, self._opening(header), primer, pinned, progress)
        for document in documents:
            if len(document.ids) >= MIN_DETECTED_TOKENS and self._warmer.is_warm(document):
                self._index.add(document.text)
        return report

    def _opening(self, header: str | None) -> list[Segment]:
        """What documents are read behind: a prompt's beginning up to its first document."""
        prompt = rag(self.chat_format, ["x"], system=header)
        return self._segments(Prompt(prompt.header(), prompt.opening), detect=False)

    def is_warm(self, text: str) -> bool:
        """Whether the KV of this document is there now."""
        documents = self._warmer.documents(check_texts(text))
        return bool(documents) and self._warmer.is_warm(documents[0])

    def forget(self, texts: str | Iterable[str]) -> int:
        """Drop documents from the store. Returns how many were there."""
        num_gone = 0
        for document in self._warmer.documents(check_texts(texts)):
            self._index.discard(document.text)
            num_gone += self.engine.store.remove(document.content) > 0
        return num_gone

    def clear(self) -> None:
        """Drop everything that is kept."""
        self.engine.store.clear()
        self._index.clear()
        self._warmer.clear()

    def stats(self) -> StoreStats:
        return self.engine.store.stats()

    # Prompts

    def prompt(self, documents: Sequence[str], question: str = "", system: str | None = None, **options: Any) -> Prompt:
        """Documents in this order and a question, as a chat prompt. Blank documents are left out."""
        for name in options:
            if name != "instruction":
                raise OptionError.unknown(name, ["documents", "question", "system", "instruction"], "prompt")
        return rag(self.chat_format, documents, question, system, **options)

    def count_tokens(self, prompt: PromptLike) -> int:
        return sum(len(segment.ids) for segment in self._segments(self._as_prompt(prompt)))

    def segments(self, prompt: PromptLike) -> list[Segment]:
        """The token segments the engine will see, warmed documents found."""
        return self._segments(self._as_prompt(prompt))

    def _as_prompt(self, prompt: PromptLike) -> Prompt:
        if isinstance(prompt, Prompt):
            return prompt
        if isinstance(prompt, str):
            return completion(prompt)
        if isinstance(prompt, list | tuple):
            return self.chat_format.render(prompt)
        raise TypeError(f"a prompt is a string, a list of chat messages or a Prompt, not {type(prompt).__name__}")

    def _segments(self, prompt: Prompt, detect: bool = True) -> list[Segment]:
        segments = []
        if prompt.opening and not (prompt.pieces and self.tokens.starts_with_opening(prompt.pieces[0].text)):
            segments.append(Segment(self.tokens.opening_ids))
        for piece in prompt.pieces:
            for part in self._detected(piece) if detect else (piece,):
                encode = self.tokens.encode_template if part.kind == "template" else self.tokens.encode
                segments.append(Segment(encode(part.text), document=part.kind == "document"))
        return segments

    def _detected(self, piece: Piece) -> list[Piece]:
        """``piece`` cut around the warmed documents that stand in it."""
        if piece.kind == "document":
            return [piece]
        parts, at = [], 0
        for start, end in self._index.find(piece.text):
            parts += [Piece(piece.text[at:start], piece.kind), Piece(piece.text[start:end], "document")]
            at = end
        parts.append(Piece(piece.text[at:], piece.kind))
        return [part for part in parts if part.text]

    # Questions

    def generate(self, prompt: PromptLike, **options: Any) -> GenerationResult:
        """Answer ``prompt``: a string (raw completion), chat messages, or what ``prompt()`` built.

        Decoding: ``max_new_tokens`` (256), ``temperature`` (0, greedy), ``top_p``, ``top_k``, ``repetition_penalty``,
        ``seed``, ``stop`` (a string or several; they end the text and never appear in it). Reuse: ``repair``,
        ``recompute_ratio``, ``mode``, ``auto_detect``, as in ``from_pretrained``.

        Raises OptionError, PromptTooLongError (before any work, with the numbers), ValueError if the prompt is empty.
        """
        return self._work(prompt, options)(lambda piece: None, threading.Event())

    def stream(self, prompt: PromptLike, **options: Any) -> TextStream:
        """As ``generate``, text piece by piece; the pieces concatenate to the text. Close it to stop early."""
        return TextStream(self._work(prompt, options))

    def _work(self, prompt: PromptLike, options: dict[str, Any]) -> Work:
        """Check everything now; return the function that does the work."""
        started = time.perf_counter()
        self._check_open()
        call = {name: options.pop(name) for name in _CALL_OPTIONS if name in options}
        known = [f.name for f in fields(GenerationOptions)] + list(_CALL_OPTIONS)
        for name in options:
            if name not in known:
                raise OptionError.unknown(name, known, "generate")
        decoding: GenerationOptions = checked(GenerationOptions, options, "generate")
        repair, mode, detect = self._plan(call)
        segments = self._segments(self._as_prompt(prompt), detect)
        self.engine.check_length(sum(len(s.ids) for s in segments), decoding.max_new_tokens)

        def work(emit: Emit, cancelled: threading.Event) -> GenerationResult:
            with self.engine.lock:
                prefilled = self.engine.prefill(segments, repair, mode, decoding.max_new_tokens)
                return self._decode(prefilled, decoding, emit, cancelled, started)

        return work

    def _decode(
        self,
        prefilled: Prefilled,
        decoding: GenerationOptions,
        emit: Emit,
        cancelled: threading.Event,
        started: float,
    ) -> GenerationResult:
        assembler = TextAssembler(self.tokens.decode, decoding.stops)
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
            return assembler.stopped or cancelled.is_set()

        reason = self.engine.generate(prefilled, decoding, on_tokens)
        give(assembler.finish())
        self.engine.keep(prefilled)
        if assembler.stopped:
            reason = "stop"
        elif cancelled.is_set():
            reason = "cancelled"
        return GenerationResult("".join(pieces), reason, report)

    def prefill(self, prompt: PromptLike, **options: Any) -> PrefillResult:
        """Run the prompt only. ``.logits``: (vocab,) float32 of its last position. Options: the reuse ones."""
        prefilled = self._prefill(prompt, options, "prefill")
        return PrefillResult(prefilled.logits, prefilled.report)

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
        started = time.perf_counter()
        self._check_open()
        for name in options:
            if name not in _CALL_OPTIONS:
                raise OptionError.unknown(name, _CALL_OPTIONS, where)
        repair, mode, detect = self._plan(options)
        segments = self._segments(self._as_prompt(prompt), detect)
        with self.engine.lock:
            prefilled = self.engine.prefill(segments, repair, mode, room)
            prefilled.report.ttft_seconds = time.perf_counter() - started
            self.engine.keep(prefilled)
        return prefilled

    def _plan(self, call: Mapping[str, Any]) -> tuple[Repair, str, bool]:
        """Repair, mode and detection of a call: its own options over the engine's. Raises OptionError."""
        ratio = call.get("recompute_ratio", None if "repair" in call else self._defaults.get("recompute_ratio"))
        repair = resolve_repair(call.get("repair", self._defaults.get("repair", "query")), ratio)
        mode = call.get("mode", self._defaults.get("mode", "reuse"))
        if mode not in ("baseline", "prefix", "reuse"):
            raise OptionError.bad_value("mode", mode, "'baseline', 'prefix' or 'reuse'")
        detect = call.get("auto_detect", self._defaults.get("auto_detect", True))
        if not isinstance(detect, bool):
            raise OptionError.bad_value("auto_detect", detect, "True or False")
        return repair, mode, detect

    # Life

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedEngineError("this engine was closed; build a new one with KVBoost.from_pretrained")

    def close(self) -> None:
        """Drop the store and give the model its own attention back. Safe to call twice."""
        if not self._closed:
            self._closed = True
            with self.engine.lock:
                self.clear()
                self.engine.model.close()

    def __enter__(self) -> KVBoost:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def engine_of(owner: Any) -> KVBoost:
    """The KVBoost that ``owner`` is or has (LLM objects of the integrations). Raises OptionError."""
    for candidate in (owner, getattr(owner, "engine", None)):
        if isinstance(candidate, KVBoost):
            return candidate
    raise OptionError.bad_value("engine", owner, "a KVBoost, or an LLM object that has one")
