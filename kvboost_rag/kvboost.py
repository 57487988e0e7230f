"""KVBoost: text in, text out, over an engine that keeps what it has read.

The facade: puts the parts together and takes them apart; ``reading.py`` and ``asking.py`` hold what it does. Knows
nothing of frameworks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

from kvboost_rag import hub
from kvboost_rag.asking import Asking
from kvboost_rag.boundaries import break_ids
from kvboost_rag.documents import DocumentCutter
from kvboost_rag.engine.engine import Engine
from kvboost_rag.engine.model import Model
from kvboost_rag.engine.store.make import make_store
from kvboost_rag.errors import OptionError
from kvboost_rag.many import Many
from kvboost_rag.options import engine_options
from kvboost_rag.prompt import ChatFormat
from kvboost_rag.reading import Reading
from kvboost_rag.records import Records
from kvboost_rag.segmenting import Segmenter
from kvboost_rag.single import Single
from kvboost_rag.tokens import Tokens
from kvboost_rag.warming import Warmer


class KVBoost(Reading, Asking):
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
        served = Model(model, salt, max_packed_bytes=config.max_packed_bytes)
        try:
            breaks = break_ids(tokenizer) if config.boundary_window else frozenset()
            self.engine = Engine(served, make_store(config, served.fingerprint()), config, breaks)
        except BaseException:
            served.close()
            raise
        self._cutter = DocumentCutter(self.tokens, config.chunk_size, config.max_document_tokens)
        self._segmenter = Segmenter(self.tokens, self.chat_format, self._cutter, self.engine.store.texts)
        self._records = Records()
        self._single = Single(self.engine, self.tokens, self._segmenter, self._records)
        self._many = Many(self.engine, self.tokens, self._segmenter, self._records, self.generate)
        self._warmer = Warmer(self.engine, self.tokens, self._cutter)
        self._promoter = ThreadPoolExecutor(1, "kvboost-promoter")

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
        compute than to reuse), ``max_packed_bytes`` (``"1GB"``: copies of the weights for faster products on the CPU, 0
        for none), ``tenant`` ("").

        Raises ModelNotFoundError, UnsupportedModelError, OptionError.
        """
        engine_options(options)  # before a model is loaded for nothing
        loading = dict(model_kwargs or {})
        for option, value, usual in (("dtype", dtype, "auto"), ("device_map", device_map, None)):
            if option in loading and value is not usual and value != loading[option]:
                raise OptionError(f"{option}={value!r} and model_kwargs say {loading[option]!r}: give it once")
            loading.setdefault(option, value)
        if model is None or tokenizer is None:
            if model_name is None:
                raise OptionError("from_pretrained needs a model name or folder, or both model= and tokenizer=")
            loaded = hub.load(model_name, need_model=model is None, need_tokenizer=tokenizer is None, **loading)
            model, tokenizer = model or loaded.model, tokenizer or loaded.tokenizer
        if device is not None:
            model = model.to(device)
        return cls(model, tokenizer, **options)

    # Life

    def close(self) -> None:
        """Drop what is in memory and give the model its own attention back. Safe to call twice.

        What lies in ``cache_dir`` stays there.
        """
        if not self._closed:
            self._closed = True
            self._promoter.shutdown(cancel_futures=True)
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
