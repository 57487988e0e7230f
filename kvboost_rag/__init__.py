"""kvboost-rag: RAG with a local language model that has already read every document.

The public names, each loaded on first use: importing this package loads neither torch nor a framework.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvboost_rag._version import __version__

if TYPE_CHECKING:
    from kvboost_rag.diagnosis import doctor
    from kvboost_rag.engine.repair import REPAIRS
    from kvboost_rag.engine.types import Fidelity, Report
    from kvboost_rag.errors import (
        BudgetWarning,
        KVBoostError,
        OptionError,
        PromptTooLongError,
        UnsupportedModelError,
    )
    from kvboost_rag.kvboost import KVBoost
    from kvboost_rag.prompt import Piece, Prompt
    from kvboost_rag.report import Estimate, GenerationResult, WarmReport
    from kvboost_rag.stream import TextStream

_HOMES = {
    "REPAIRS": "engine.repair",
    "BudgetWarning": "errors",
    "Estimate": "report",
    "Fidelity": "engine.types",
    "GenerationResult": "report",
    "KVBoost": "kvboost",
    "KVBoostError": "errors",
    "OptionError": "errors",
    "Piece": "prompt",
    "Prompt": "prompt",
    "PromptTooLongError": "errors",
    "Report": "engine.types",
    "TextStream": "stream",
    "UnsupportedModelError": "errors",
    "WarmReport": "report",
    "doctor": "diagnosis",
}

__all__ = [
    "REPAIRS",
    "BudgetWarning",
    "Estimate",
    "Fidelity",
    "GenerationResult",
    "KVBoost",
    "KVBoostError",
    "OptionError",
    "Piece",
    "Prompt",
    "PromptTooLongError",
    "Report",
    "TextStream",
    "UnsupportedModelError",
    "WarmReport",
    "__version__",
    "doctor",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
