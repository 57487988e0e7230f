"""Finds the engine behind whatever object of an integration a user hands over.

Knows that such objects have an ``engine``; knows nothing of frameworks.
"""

from __future__ import annotations

from typing import Any

from kvboost_rag.errors import OptionError
from kvboost_rag.kvboost import KVBoost


def engine_of(owner: Any) -> KVBoost:
    """The KVBoost that ``owner`` is or has (LLM objects of the integrations). Raises OptionError."""
    for candidate in (owner, getattr(owner, "engine", None)):
        if isinstance(candidate, KVBoost):
            return candidate
    raise OptionError.bad_value("engine", owner, "a KVBoost, or an LLM object that has one")
