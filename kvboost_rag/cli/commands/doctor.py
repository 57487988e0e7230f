"""``kvboost-rag doctor``: whether a model can be served here, and what this machine has.

Knows what to ask; the findings are ``diagnosis``'s and ``environment``'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvboost_rag.cli import printing
from kvboost_rag.cli.choices import location
from kvboost_rag.cli.environment import Environment, advice, environment
from kvboost_rag.cli.session import quiet
from kvboost_rag.diagnosis import Diagnosis, doctor


@dataclass(frozen=True)
class Account:
    """``diagnosis``: None where no model was asked about."""

    environment: Environment
    diagnosis: Diagnosis | None

    @property
    def served(self) -> bool:
        return self.diagnosis is None or self.diagnosis.served

    @property
    def advice(self) -> list[str]:
        return advice(self.environment, self.diagnosis)

    def to_dict(self) -> dict[str, Any]:
        model = None if self.diagnosis is None else self.diagnosis.to_dict()
        return {"model": model, "environment": self.environment.to_dict(), "advice": self.advice}

    def __str__(self) -> str:
        parts = [str(self.diagnosis), ""] if self.diagnosis is not None else []
        return "\n".join([*parts, str(self.environment), "", "What to do", *(f"  {line}" for line in self.advice)])


def run(model: str | None, dtype: str | None) -> Account:
    """Look at this machine, then at the model. Raises ModelNotFoundError."""
    found = environment()  # before a model takes memory
    if model is None:
        return Account(found, None)
    printing.note(f"loading {model}")
    quiet()
    return Account(found, doctor(location(model), dtype=dtype or "auto"))
