"""The options of an engine and of its calls, sorted out and checked.

Knows names, values and choices; knows nothing of what they do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from kvboost_rag.engine.assemble import MODES
from kvboost_rag.engine.config import EngineConfig, parse_bytes
from kvboost_rag.engine.generate import GenerationOptions
from kvboost_rag.engine.repair import Repair, resolve_repair
from kvboost_rag.errors import OptionError


@dataclass(frozen=True)
class ReuseOptions:
    """What a call reuses and repairs. ``recompute_ratio``: share of reused tokens recomputed, 0 to 1, or the
    strategy's own. ``auto_detect``: look for warmed documents in the prompt's text."""

    repair: str | Repair = "query"
    recompute_ratio: float | None = None
    mode: str = "reuse"
    auto_detect: bool = True

    def __post_init__(self) -> None:
        _ = self.strategy
        if self.mode not in MODES:
            raise OptionError.bad_value("mode", self.mode, f"one of {', '.join(map(repr, MODES))}")
        if not isinstance(self.auto_detect, bool):
            raise OptionError.bad_value("auto_detect", self.auto_detect, "True or False")

    @property
    def strategy(self) -> Repair:
        return resolve_repair(self.repair, self.recompute_ratio)

    def override(self, call: Mapping[str, Any]) -> ReuseOptions:
        """These options with a call's own over them. A ratio belongs to the strategy it was given with."""
        if "repair" in call and "recompute_ratio" not in call:
            call = {**call, "recompute_ratio": None}
        return replace(self, **call)


def _names(cls: type[Any]) -> list[str]:
    return [field.name for field in fields(cls)]


def reuse_part(options: dict[str, Any], where: str, *others: type[Any]) -> dict[str, Any]:
    """Take the reuse options out of ``options``. Raises OptionError if a name is neither theirs nor of ``others``."""
    known = [name for cls in (*others, ReuseOptions) for name in _names(cls)]
    for name in options:
        if name not in known:
            raise OptionError.unknown(name, known, where)
    return {name: options.pop(name) for name in _names(ReuseOptions) if name in options}


def engine_options(options: dict[str, Any]) -> tuple[EngineConfig, ReuseOptions]:
    """The options of an engine: how it cuts and keeps, and what its calls do unless they say otherwise."""
    options = dict(options)
    reuse = ReuseOptions(**reuse_part(options, "KVBoost", EngineConfig))
    if "max_cache_bytes" in options:
        options["max_cache_bytes"] = parse_bytes(options["max_cache_bytes"])
    return EngineConfig(**options), reuse


def call_options(options: dict[str, Any], defaults: ReuseOptions, where: str) -> tuple[GenerationOptions, ReuseOptions]:
    """The options of a call that generates."""
    options = dict(options)
    reuse = defaults.override(reuse_part(options, where, GenerationOptions))
    return GenerationOptions(**options), reuse
