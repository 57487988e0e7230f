"""The options of KVBoostLLM, sorted out: which are given, what a call asks of the engine, how a model is loaded.

Knows names and values, as HuggingFaceLLM's users know them; knows nothing of LlamaIndex.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

from kvboost_rag.calls import CALL as SHARED
from kvboost_rag.calls import decoding
from kvboost_rag.errors import OptionError

CALL = (*SHARED, "stop")
TOKENIZER = ("revision", "local_files_only", "trust_remote_code", "token")


def given_options(
    kwargs: Mapping[str, Any], generate_kwargs: Mapping[str, Any] | None, known: Collection[str]
) -> dict[str, Any]:
    """The constructor's options, those in ``generate_kwargs`` too, by the names of fields.

    Raises OptionError for an option given twice with different values; of unknown ones as ``unknown`` does.
    """
    known = {*known, *CALL, "generate_kwargs"}
    for name in sorted(kwargs.keys() - known):
        unknown(name, known)
    for name in sorted((generate_kwargs or {}).keys() - set(CALL)):
        unknown(name, CALL, "generate_kwargs of KVBoostLLM")
    options = {name: value for name, value in kwargs.items() if value is not None}
    for name, value in (generate_kwargs or {}).items():
        if name not in CALL or value is None:
            continue
        if name in options and options[name] != value:
            raise OptionError(
                f"{name}={options[name]!r} and generate_kwargs[{name!r}]={value!r} are the same option; "
                "give one of them"
            )
        options[name] = value
    return decoding(options, None)


def unknown(name: str, known: Collection[str], where: str = "KVBoostLLM") -> None:
    """Raises OptionError for what looks like a slip; warns of the rest, which other models may well take."""
    if get_close_matches(name, known, n=1, cutoff=0.9):
        raise OptionError.unknown(name, known, where)
    warnings.warn(
        f"{where} ignores the unknown option {name!r}; it takes: {', '.join(sorted(known))}", UserWarning, stacklevel=4
    )


def check_call(options: dict[str, Any]) -> None:
    """Raises OptionError for a value the engine would refuse, before there is one."""
    from kvboost_rag.options import ReuseOptions
    from kvboost_rag.options import call_options as checked

    checked(options, ReuseOptions(), "KVBoostLLM")


def engine_from(engine: Any, model_name: str | None, **loading: Any) -> Any:
    """``engine``, or what ``loaded_engine`` makes of the rest. Raises OptionError if both are given."""
    from kvboost_rag.owner import engine_of

    given = [name for name, value in loading.items() if value is not None]
    if engine is not None and given:
        raise OptionError(f"engine= is loaded already; leave out {', '.join(given)}")
    return loaded_engine(model_name, **loading) if engine is None else engine_of(engine)


def loaded_engine(
    model_name: str | None,
    model: Any = None,
    tokenizer: Any = None,
    tokenizer_name: str | None = None,
    device_map: Any = None,
    model_kwargs: Mapping[str, Any] | None = None,
    tokenizer_kwargs: Mapping[str, Any] | None = None,
    engine_kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """A KVBoost over a model that is loaded by name, or given. Raises OptionError, and what
    ``KVBoost.from_pretrained`` raises."""
    from kvboost_rag import hub
    from kvboost_rag.kvboost import KVBoost

    if not model_name and model is None:
        raise OptionError(
            "KVBoostLLM needs engine= (a KVBoost), model_name= (a hub name or folder), or model= and tokenizer="
        )
    if isinstance(model, str):
        raise OptionError.bad_value("model", model, "a loaded model; a hub name or folder goes into model_name")
    options = dict(engine_kwargs or {})
    loading = {**options.pop("model_kwargs", {}), **(model_kwargs or {})}
    for name in ("torch_dtype", "dtype"):
        if name in loading:
            options.setdefault("dtype", loading.pop(name))
    if device_map is not None:
        options["device_map"] = device_map
    if tokenizer is None and (tokenizer_name or tokenizer_kwargs):
        for name in sorted((tokenizer_kwargs or {}).keys() - set(TOKENIZER)):
            unknown(name, TOKENIZER, "tokenizer_kwargs of KVBoostLLM")
        tokenizer = hub.load(
            tokenizer_name or model_name or "",
            need_model=False,
            **({} if tokenizer_name else loading),
            **(tokenizer_kwargs or {}),
        ).tokenizer
    return KVBoost.from_pretrained(model_name, model=model, tokenizer=tokenizer, model_kwargs=loading, **options)
