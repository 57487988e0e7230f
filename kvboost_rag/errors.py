"""Every exception and warning this package raises on purpose.

Knows only names and messages; imports nothing of the package.

    KVBoostError
    ├── OptionError (ValueError)            a wrong option: its name, its value, the choices
    ├── PromptTooLongError (ValueError)     does not fit the model's context; raised before any work
    ├── ClosedEngineError (RuntimeError)    the engine was closed
    ├── UnsupportedModelError (RuntimeError) the model cannot be served (paper, section 4.8)
    ├── ModelNotFoundError (OSError)        no model at that name or folder
    ├── MissingExtraError (ImportError)     an optional dependency is missing; names the pip command
    └── StreamClosedError (RuntimeError)    a stream was closed before its prompt was computed; never reaches callers
    BudgetWarning (UserWarning)             documents do not fit the byte budget; with the numbers
    CacheWarning (UserWarning)              a file of stored KV could not be written or trusted; names it
    QuantizationWarning (UserWarning)       a model does not bear its KV quantised; with the KL
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any


class KVBoostError(Exception):
    """Base of everything raised on purpose."""


class OptionError(KVBoostError, ValueError):
    """A wrong option. The message names the option, the value and the choices."""

    @classmethod
    def bad_value(cls, option: str, value: object, choices: str) -> OptionError:
        return cls(f"{option}={value!r} is not valid; {option} takes {choices}")

    @classmethod
    def unknown(cls, option: str, known: Iterable[str], where: str) -> OptionError:
        known = sorted(known)
        close = get_close_matches(option, known, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        return cls(f"unknown option {option!r} for {where}{hint}; it takes: {', '.join(known)}")


class PromptTooLongError(KVBoostError, ValueError):
    """Prompt and new tokens do not fit the model's context."""

    def __init__(self, num_prompt_tokens: int, max_new_tokens: int, context_tokens: int, what: str = "the prompt"):
        over = num_prompt_tokens + max_new_tokens - context_tokens
        super().__init__(
            f"{what} has {num_prompt_tokens} tokens and {max_new_tokens} new ones were asked for, but the model's "
            f"context holds {context_tokens}: {over} too many. Send fewer or shorter documents, or lower "
            "max_new_tokens."
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.max_new_tokens = max_new_tokens
        self.context_tokens = context_tokens
        self._what = what

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.num_prompt_tokens, self.max_new_tokens, self.context_tokens, self._what)


class ClosedEngineError(KVBoostError, RuntimeError):
    """The engine was closed; build a new one."""


class UnsupportedModelError(KVBoostError, RuntimeError):
    """The model cannot be served; the message says what was found."""


class ModelNotFoundError(KVBoostError, OSError):
    """No model could be loaded from that name or folder."""


class MissingExtraError(KVBoostError, ImportError):
    """An optional dependency is missing."""

    @classmethod
    def of(cls, package: str, extra: str) -> MissingExtraError:
        return cls(f'{package} is needed here and is not installed: pip install "kvboost-rag[{extra}]"')


class StreamClosedError(KVBoostError, RuntimeError):
    """Nobody waits for this prompt any more."""


class BudgetWarning(UserWarning):
    """Documents were asked for that do not fit the byte budget."""


class CacheWarning(UserWarning):
    """A file of stored KV could not be written, read or trusted. Answers stay right; something is computed again."""


class QuantizationWarning(UserWarning):
    """Quantised KV would change the next token too much; documents are kept wider than asked for."""
