"""The exceptions: the tree its module draws, and messages a user can act on."""

from __future__ import annotations

import builtins
import pickle
import re

import pytest

from kvboost_rag import errors
from kvboost_rag.errors import (
    BudgetWarning,
    KVBoostError,
    MissingExtraError,
    ModelNotFoundError,
    OptionError,
    PromptTooLongError,
)

DRAWN = dict(re.findall(r"── (\w+) \((\w+)\)", errors.__doc__ or ""))


@pytest.mark.parametrize("name, builtin", DRAWN.items())
def test_each_error_is_ours_and_the_builtin_one_the_tree_says(name: str, builtin: str):
    assert {KVBoostError, getattr(builtins, builtin)} <= set(getattr(errors, name).__mro__)


def test_the_tree_draws_every_class_there_is():
    defined = {
        name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__
    }
    assert defined == {*DRAWN, "KVBoostError", "BudgetWarning", "CacheWarning", "QuantizationWarning"}


def test_the_warning_is_a_warning_and_no_error():
    assert issubclass(BudgetWarning, UserWarning)
    assert not issubclass(BudgetWarning, KVBoostError)


@pytest.mark.parametrize("value", ["sometimes", 0, None, ["a"]])
def test_a_bad_value_names_the_option_the_value_and_the_choices(value: object):
    error = OptionError.bad_value("mode", value, "'reuse' or 'baseline'")
    assert isinstance(error, OptionError)
    for said in ("mode", repr(value), "'reuse' or 'baseline'"):
        assert said in str(error)


def test_an_unknown_option_names_the_option_the_place_and_every_choice():
    message = str(OptionError.unknown("zzz", ["top_p", "max_new_tokens"], "generate"))
    assert "'zzz'" in message and "generate" in message
    assert "max_new_tokens, top_p" in message
    assert "did you mean" not in message


@pytest.mark.parametrize(
    "option, meant", [("max_tokens", "max_new_tokens"), ("topp", "top_p"), ("temprature", "temperature")]
)
def test_an_unknown_option_that_is_nearly_right_gets_a_hint(option: str, meant: str):
    message = str(OptionError.unknown(option, iter(["temperature", "top_p", "max_new_tokens"]), "generate"))
    assert f"did you mean {meant!r}?" in message
    assert "max_new_tokens, temperature, top_p" in message


def test_a_prompt_too_long_says_by_how_much():
    error = PromptTooLongError(1000, 50, 1024, "the document")
    assert (error.num_prompt_tokens, error.max_new_tokens, error.context_tokens) == (1000, 50, 1024)
    assert str(error).startswith("the document has 1000 tokens and 50 new ones")
    assert "1024: 26 too many" in str(error)


def test_a_missing_extra_names_the_package_and_the_command():
    message = str(MissingExtraError.of("langchain-core", "langchain"))
    assert "langchain-core" in message
    assert 'pip install "kvboost-rag[langchain]"' in message


@pytest.mark.parametrize(
    "error",
    [
        OptionError.bad_value("mode", 1, "a string"),
        PromptTooLongError(1000, 50, 1024),
        ModelNotFoundError("no such model"),
        MissingExtraError.of("a", "b"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_travel_between_processes(error: KVBoostError):
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy)) == (type(error), str(error))
    assert vars(copy) == vars(error)
