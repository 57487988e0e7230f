"""What ChatKVBoost and KVBoostLLM share: whose engine they use, their options, and what they tell of a result.

Knows LangChain's ways with options; knows nothing of messages or prompts.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, Field, PrivateAttr, model_validator

from kvboost_rag._version import __version__
from kvboost_rag.errors import OptionError

SAMPLING = ("temperature", "top_p", "top_k", "seed", "repetition_penalty")
REUSE = ("repair", "recompute_ratio", "quality", "mode", "auto_detect")
CALL = (*SAMPLING, *REUSE, "max_new_tokens", "max_tokens", "do_sample", "stop")
# Fields that LangChain's own tests and tools pass to any model; they mean nothing for a local one.
REMOTE = ("api_key", "base_url", "timeout", "max_retries")


class OverEngine(BaseModel):
    """``engine``: a ``kvboost_rag.KVBoost``, or an object that has one, shared with retrievers, vector stores and other
    models; or ``model``: a hub name or folder, loaded with ``engine_kwargs`` on construction. Options left at None are
    the engine's own. ``max_new_tokens`` is another name of ``max_tokens``.

    Raises OptionError; warns, by name, of constructor options that nothing takes.
    """

    engine: Any = Field(default=None, exclude=True, repr=False)
    model: str = ""
    engine_kwargs: dict[str, Any] = Field(default_factory=dict, repr=False)
    temperature: float = 0.0
    max_tokens: int = 256
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    stop: list[str] | str | None = None
    repair: Any = None
    recompute_ratio: float | None = None
    quality: str | float | None = None
    mode: str | None = None
    auto_detect: bool | None = None
    _warned: set[str] = PrivateAttr(default_factory=set)

    @model_validator(mode="before")
    @classmethod
    def _names(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = dict(values)
        for other, name in (("max_new_tokens", "max_tokens"), ("model_name", "model"), ("model_id", "model")):
            if values.get(other) is not None and values.get(name) is None:
                values[name] = values[other]
            values.pop(other, None)
        known = {*cls.model_fields, *(field.alias for field in cls.model_fields.values()), *REMOTE}
        for name in values.keys() - known:
            _warn(cls.__name__, name, sorted(cls.model_fields))
        return values

    @model_validator(mode="after")
    def _load(self) -> Any:
        from kvboost_rag.kvboost import KVBoost
        from kvboost_rag.owner import engine_of

        if self.engine is None:
            if not self.model:
                raise OptionError(f"{type(self).__name__} needs engine= (a KVBoost) or model= (a hub name or folder)")
            self.engine = KVBoost.from_pretrained(self.model, **self.engine_kwargs)
        self.engine = engine_of(self.engine)
        self.model = self.model or self.engine.name
        add_version = getattr(self, "_add_version", None)
        if add_version is not None:  # newer releases of langchain-core trace the versions of integrations
            add_version("kvboost-rag", __version__)
        return self

    @property
    def _llm_type(self) -> str:
        return "kvboost"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        options = {name: getattr(self, name) for name in (*SAMPLING, *REUSE, "max_tokens", "stop")}
        if not isinstance(self.repair, str | None):
            options["repair"] = repr(self.repair)  # a strategy object; what identifies must be plain data
        return {"model": self.model, **options}

    def get_token_ids(self, text: str) -> list[int]:
        """By the model's own tokenizer, special-token strings as text."""
        return list(self.engine.tokens.encode(text))

    def _options(self, stop: Sequence[str] | None, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The engine's options of one call: this model's fields, overridden by the call's."""
        call = {name: value for name, value in kwargs.items() if name in CALL and value is not None}
        for name in kwargs:
            if name not in CALL and name not in self._warned and not name.startswith("ls_"):
                self._warned.add(name)
                _warn(type(self).__name__, name, CALL)
        options = {name: getattr(self, name) for name in (*SAMPLING, *REUSE) if getattr(self, name) is not None}
        if call.keys() & {"repair", "recompute_ratio"}:
            options.pop("quality", None)
        if "quality" in call:
            options.pop("repair", None)
        if call.keys() & {"repair", "quality"}:
            options.pop("recompute_ratio", None)  # a ratio belongs to the strategy it was given with
        limit = call.pop("max_tokens", None)
        options["max_new_tokens"] = call.pop("max_new_tokens", self.max_tokens if limit is None else limit)
        sample = call.pop("do_sample", None)
        stops = [*_listed(self.stop), *_listed(call.pop("stop", None)), *_listed(stop)]
        options |= call
        if sample is not None:
            options["temperature"] = (options["temperature"] or 1.0) if sample else 0.0
        if stops:
            options["stop"] = list(dict.fromkeys(stops))
        return options

    def _metadata(self, result: Any) -> dict[str, Any]:
        return {"model_name": self.model, "finish_reason": result.finish_reason, "kvboost": result.report.to_dict()}


def _listed(stop: Sequence[str] | str | None) -> list[str]:
    return [stop] if isinstance(stop, str) else list(stop or ())


def _warn(owner: str, name: str, known: Sequence[str]) -> None:
    warnings.warn(
        f"{owner} ignores the unknown option {name!r}; it takes: {', '.join(known)}", UserWarning, stacklevel=4
    )
