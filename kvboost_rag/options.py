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
from kvboost_rag.engine.repair import FullRepair, QueryRepair, Repair, resolve_repair
from kvboost_rag.errors import OptionError

# What each asks for, fastest last; measured in benchmarks/NOTES.md
QUALITIES: dict[str, Repair] = {
    "exact": FullRepair(),
    "high": QueryRepair(recompute_ratio=0.15),
    "fast": QueryRepair(),
}


@dataclass(frozen=True)
class ReuseOptions:
    """What a call reuses and repairs. ``recompute_ratio``: share of reused tokens recomputed, 0 to 1, or the
    strategy's own. ``auto_detect``: look for warmed documents in the prompt's text. ``quality`` instead of ``repair``:
    one of QUALITIES, or the share of reused tokens to recompute (0 is the fastest, 1 exact)."""

    repair: str | Repair = "query"
    recompute_ratio: float | None = None
    mode: str = "reuse"
    auto_detect: bool = True
    quality: str | float | None = None

    def __post_init__(self) -> None:
        _ = self.strategy
        if self.mode not in MODES:
            raise OptionError.bad_value("mode", self.mode, f"one of {', '.join(map(repr, MODES))}")
        if not isinstance(self.auto_detect, bool):
            raise OptionError.bad_value("auto_detect", self.auto_detect, "True or False")

    @property
    def strategy(self) -> Repair:
        if self.quality is None:
            return resolve_repair(self.repair, self.recompute_ratio)
        if isinstance(self.quality, str) and self.quality in QUALITIES:
            return QUALITIES[self.quality]
        if isinstance(self.quality, int | float) and not isinstance(self.quality, bool) and 0 <= self.quality <= 1:
            return resolve_repair("query", float(self.quality))
        raise OptionError.bad_value(
            "quality", self.quality, f"one of {', '.join(map(repr, QUALITIES))}, a number from 0 to 1, or None"
        )

    def override(self, call: Mapping[str, Any]) -> ReuseOptions:
        """These options with a call's own over them. A ratio belongs to the strategy it was given with.

        Raises OptionError for ``quality`` together with ``repair`` or ``recompute_ratio``.
        """
        named = [name for name in ("repair", "recompute_ratio") if name in call]
        if call.get("quality") is not None and named:
            raise OptionError(f"quality={call['quality']!r} picks the repair itself; leave out {' and '.join(named)}")
        if named:
            call = {**call, "quality": None}
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
    reuse = ReuseOptions().override(reuse_part(options, "KVBoost", EngineConfig))
    for option in ("max_cache_bytes", "max_disk_bytes", "max_packed_bytes"):
        unlimited = option == "max_disk_bytes" and options.get(option) is None
        if option in options and not unlimited:
            options[option] = parse_bytes(options[option], option)
    return EngineConfig(**options), reuse


def call_options(options: dict[str, Any], defaults: ReuseOptions, where: str) -> tuple[GenerationOptions, ReuseOptions]:
    """The options of a call that generates."""
    options = dict(options)
    reuse = defaults.override(reuse_part(options, where, GenerationOptions))
    return GenerationOptions(**options), reuse
