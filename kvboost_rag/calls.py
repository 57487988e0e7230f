"""What both integrations do the same way: the options of a call, names of policies, reading one text at a time.

Knows names, values and what an engine can be asked; knows nothing of frameworks. Importing it does not load torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from kvboost_rag.errors import OptionError

if TYPE_CHECKING:
    from kvboost_rag.report import WarmReport

SAMPLING = ("temperature", "top_p", "top_k", "seed", "repetition_penalty")
REUSE = ("repair", "recompute_ratio", "quality", "mode", "auto_detect")
CALL = (*SAMPLING, *REUSE, "max_new_tokens", "max_tokens", "do_sample")
ON_ERROR = ("warn", "raise")  # about documents that cannot be read
ORDERS = ("retrieval", "cache")  # of the documents that were found


def check_choice(option: str, value: object, choices: Sequence[str]) -> None:
    """Raises OptionError for a value that is not one of ``choices``."""
    if value not in choices:
        raise OptionError.bad_value(option, value, f"one of {', '.join(map(repr, choices))}")


def listed(stop: Any) -> list[str]:
    """Stop strings as a list. Raises OptionError if ``stop`` holds anything but strings."""
    strings = [stop] if isinstance(stop, str) else ([] if stop is None else stop)
    if not isinstance(strings, list | tuple) or not all(isinstance(each, str) for each in strings):
        raise OptionError.bad_value("stop", stop, "a string or a list of strings, none of them empty")
    return list(strings)


def one_limit(options: Mapping[str, Any]) -> None:
    """Raises OptionError if both names of the limit are given and differ."""
    one, other = options.get("max_tokens"), options.get("max_new_tokens")
    if one is not None and other is not None and one != other:
        raise OptionError(f"max_tokens={one!r} and max_new_tokens={other!r} are the same option; give one of them")


def decoding(options: Mapping[str, Any], temperature: float | None) -> dict[str, Any]:
    """``options`` with ``max_tokens`` and ``do_sample`` in the engine's words. ``temperature``: what sampling has
    unless they say. Raises OptionError."""
    one_limit(options)
    found = dict(options)
    limit = found.pop("max_tokens", None)
    if limit is not None:
        found["max_new_tokens"] = limit
    sample = found.pop("do_sample", None)
    if sample is not None and not isinstance(sample, bool):
        raise OptionError.bad_value("do_sample", sample, "True or False")
    if sample is not None:
        found["temperature"] = (found.get("temperature", temperature) or 1.0) if sample else 0.0
    return found


def merged(own: Mapping[str, Any], call: Mapping[str, Any], stops: Collection[str]) -> dict[str, Any]:
    """The engine's options of one call: ``own``, overridden by the call's, what is None left out of both, with
    ``stops``. A ratio belongs to the strategy it was given with. Raises OptionError."""
    call = {name: value for name, value in call.items() if value is not None}
    options = {name: value for name, value in own.items() if value is not None}
    if call.keys() & {"repair", "recompute_ratio"}:
        options.pop("quality", None)
    if "quality" in call:
        options.pop("repair", None)
    if call.keys() & {"repair", "quality"}:
        options.pop("recompute_ratio", None)
    options |= decoding(call, options.get("temperature"))
    if stops:
        options["stop"] = list(dict.fromkeys(stops))
    return options


def warm_each(
    engine: Any,
    texts: Sequence[str],
    chunkings: Sequence[str | None],
    options: Mapping[str, Any],
    refused: type[Exception],
    raised: tuple[type[Exception], ...] = (),
) -> tuple[WarmReport, list[tuple[int, Exception]]]:
    """Read one text at a time and leave out those that raise ``refused``, but not ``raised``: they count as
    ``num_rejected``, and come back with their positions. ``options``: those of ``KVBoost.warm``."""
    from kvboost_rag.report import WarmReport

    total, errors = WarmReport(), []
    for number, (text, chunking) in enumerate(zip(texts, chunkings, strict=True)):
        try:
            report = engine.warm(text, chunking=chunking, **options)
        except raised:
            raise
        except refused as error:
            errors.append((number, error))
            report = WarmReport(num_documents=1, num_rejected=1)
        for field in fields(total):
            setattr(total, field.name, getattr(total, field.name) + getattr(report, field.name))
    return total, errors
