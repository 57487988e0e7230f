"""What ChatKVBoost and KVBoostLLM share: whose engine they use, their options, and what they tell of a result.

Knows LangChain's ways with options; knows nothing of messages or prompts.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, Field, PrivateAttr, model_validator

from kvboost_rag._version import __version__
from kvboost_rag.calls import CALL, REUSE, SAMPLING, listed, merged, one_limit
from kvboost_rag.errors import OptionError

# Fields that LangChain's own tests and tools pass to any model; they mean nothing for a local one.
REMOTE = ("api_key", "base_url", "timeout", "max_retries")


class OverEngine(BaseModel):
    """``engine``: a ``kvboost_rag.KVBoost``, or an object that has one, shared with retrievers, vector stores and other
    models (``model`` is then the name it goes by); or ``model``: a hub name or folder, loaded with ``engine_kwargs``
    on construction. Options left at None are the engine's own. ``max_new_tokens`` is another name of ``max_tokens``.

    Raises pydantic's ValidationError, a ValueError, which names the option, before a model is loaded; warns, by name,
    of constructor options that nothing takes.
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

    def model_post_init(self, context: Any, /) -> None:
        super().model_post_init(context)  # LangChain's: private attributes would hide it

    @model_validator(mode="before")
    @classmethod
    def _names(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = dict(values)
        one_limit(values)
        for other, name in (("max_new_tokens", "max_tokens"), ("model_name", "model"), ("model_id", "model")):
            given = values.pop(other, None)
            if given is not None and values.get(name) is None:
                values[name] = given
        known = {*cls.model_fields, *(field.alias for field in cls.model_fields.values()), *REMOTE}
        for name in sorted(values.keys() - known):
            _warn(cls.__name__, name, sorted(cls.model_fields))
        return values

    @model_validator(mode="after")
    def _load(self) -> Any:
        from kvboost_rag.kvboost import KVBoost
        from kvboost_rag.options import ReuseOptions, call_options
        from kvboost_rag.owner import engine_of

        call_options(self._options(None, {}), ReuseOptions(), type(self).__name__)  # before a model is loaded
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
        """What the text depends on, as plain data: LangChain's caches file answers under it."""
        options = {name: getattr(self, name) for name in (*SAMPLING, *REUSE, "max_tokens")}
        if not isinstance(self.repair, str | None):
            options["repair"] = repr(self.repair)  # a strategy object
        return {
            "model": self.model,
            "fingerprint": self.engine.engine.model.fingerprint().hex()[:16],  # other weights may have the same name
            "stop_strings": listed(self.stop),  # LangChain overwrites "stop" with the call's
            **options,
        }

    def get_token_ids(self, text: str) -> list[int]:
        """By ``custom_get_token_ids`` if that is set, else the model's own tokenizer, special-token strings as text."""
        custom = getattr(self, "custom_get_token_ids", None)
        return list(self.engine.tokens.encode(text)) if custom is None else custom(text)

    def _options(self, stop: Sequence[str] | None, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The engine's options of one call: this model's fields, overridden by the call's."""
        for name in kwargs:
            if name not in CALL and name not in self._warned and not name.startswith("ls_"):
                self._warned.add(name)
                _warn(type(self).__name__, name, CALL)
        own = {name: getattr(self, name) for name in (*SAMPLING, *REUSE)} | {"max_new_tokens": self.max_tokens}
        call = {name: value for name, value in kwargs.items() if name in CALL}
        return merged(own, call, [*listed(self.stop), *listed(stop)])

    def _metadata(self, result: Any) -> dict[str, Any]:
        return {"model_name": self.model, "finish_reason": result.finish_reason, "kvboost": result.report.to_dict()}


def _warn(owner: str, name: str, known: Collection[str]) -> None:
    warnings.warn(
        f"{owner} ignores the unknown option {name!r}; it takes: {', '.join(known)}", UserWarning, stacklevel=4
    )
