"""Decoding's edges: text is given out once it is certain, stop strings never, and options are checked."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from conftest import build_tokenizer
from tokenizers import Tokenizer, decoders, models

from kvboost_rag.engine.generate import GenerationOptions, TextAssembler
from kvboost_rag.errors import OptionError
from kvboost_rag.tokens import Tokens

TOKENS = Tokens(build_tokenizer())  # nearly every token is a byte
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

Decode = Callable[[Sequence[int]], str]


def one_by_one(text: str) -> list[tuple[int, ...]]:
    return [(token,) for token in TOKENS.encode(text)]


def assembled(pushes: Iterable[Sequence[int]], stop: Sequence[str] = (), decode: Decode = TOKENS.decode) -> list[str]:
    """All pieces, the last one from ``finish``."""
    assembler = TextAssembler(decode, stop)
    return [assembler.push(ids) for ids in pushes] + [assembler.finish()]


def brute_force(pushes: Iterable[Sequence[int]], stop: Sequence[str]) -> str:
    """Decode everything after each push; end as soon as any stop string is there, before the first of them."""
    pushes, ids = list(pushes), []
    for number, new in enumerate(pushes):
        ids += new
        text = TOKENS.decode(ids)
        if text.endswith(REPLACEMENT) and number < len(pushes) - 1:
            continue  # in the middle of a character
        found = [text.find(s) for s in stop if s in text]
        if found:
            return text[: min(found)]
    return TOKENS.decode(ids)


def test_without_stop_strings_every_character_comes_at_once():
    assert assembled(one_by_one("plain words")) == [*(TOKENS.decode(ids) for ids in one_by_one("plain words")), ""]


@pytest.mark.parametrize(
    "text, stop, expected",
    [
        ("The quick brown fox jumps", ["own fox"], "The quick br"),  # over several tokens
        ("one\ntwo", ["\n"], "one"),
        ("one\n", ["\n"], "one"),  # at the very end
        ("one", ["one"], ""),  # everything
        ("abcabd!", ["abd"], "abc"),  # a beginning that fails, then the stop
        ("aaab", ["aab"], "a"),  # overlaps its own beginning
        ("x END y", ["END", "ENDING"], "x "),  # prefixes of each other
        ("x ENDING y", ["ENDING", "END"], "x "),
        ("x ENDIN", ["ENDING"], "x ENDIN"),  # held back to the end, then given out
        ("x EN", ["END", "ENDING"], "x EN"),
        ("stop here", ["here", "stop"], ""),  # the first in the text, not in the list
        ("naïve 灯塔 🦦!", ["塔 🦦"], "naïve 灯"),
        ("nothing of it", ["absent", "zzz"], "nothing of it"),
        ("", ["x"], ""),
    ],
)
@pytest.mark.parametrize("at_once", [False, True])
def test_the_text_ends_before_the_first_stop_string(text: str, stop: list[str], expected: str, at_once: bool):
    pushes = [TOKENS.encode(text)] if at_once else one_by_one(text)
    assert "".join(assembled(pushes, stop)) == expected


def test_the_stop_string_that_is_complete_first_ends_the_text():
    assert "".join(assembled(one_by_one("abcd"), ["abcd", "bc"])) == "a"


def test_it_says_when_it_has_stopped_and_gives_nothing_more():
    assembler = TextAssembler(TOKENS.decode, ["!"])
    pieces = []
    for ids in one_by_one("ab!cd"):
        pieces.append(assembler.push(ids))
        assert assembler.stopped is (len(pieces) >= 3)
    assert pieces == ["a", "b", "", "", ""]
    assert assembler.finish() == ""


def test_a_stop_string_that_only_the_end_completes_stops_too():
    half = TOKENS.encode("€")[:1]
    assembler = TextAssembler(TOKENS.decode, ["!" + REPLACEMENT])
    assert assembler.push((*TOKENS.encode("a!"), *half)) == ""
    assert assembler.finish() == "a"
    assert assembler.stopped


def test_text_is_held_back_only_while_it_may_begin_a_stop_string():
    assembler = TextAssembler(TOKENS.decode, ["END"])
    given = [assembler.push(ids) for ids in one_by_one("a EEN? ")]
    assert given == ["a", " ", "", "E", "", "EN?", " "]


def test_what_was_held_back_is_given_out_at_the_end_once():
    assembler = TextAssembler(TOKENS.decode, ["END"])
    assert [assembler.push(ids) for ids in one_by_one("aEN")] == ["a", "", ""]
    assert not assembler.stopped
    assert [assembler.finish(), assembler.finish()] == ["EN", ""]


@pytest.mark.parametrize("character", ["é", "灯", "🦦", "👩🏽\u200d🚀"])
def test_a_character_over_several_tokens_comes_whole(character: str):
    pushes = one_by_one(f"a{character}b")
    assert len(pushes) > 3
    pieces = assembled(pushes)
    assert "".join(pieces) == f"a{character}b"
    assert not any(REPLACEMENT in piece for piece in pieces)


def test_half_a_character_at_the_end_is_given_out_as_what_it_decodes_to():
    pushes = one_by_one("a🦦")[:-1]
    pieces = assembled(pushes)
    assert pieces[:-1] == ["a", "", "", ""]
    assert "".join(pieces) == TOKENS.decode([token for ids in pushes for token in ids])


def test_special_tokens_leave_no_text():
    ids = TOKENS.encode_template("a<|im_end|>b</s>")
    assert "".join(assembled([(token,) for token in ids])) == "ab"


def spaces_between_words() -> tuple[dict[str, int], Decode]:
    """As SentencePiece tokenizers decode: a space before each word but the first."""
    vocab = {"▁salt": 0, "▁and": 1, "▁peat": 2, "y": 3, "<special>": 4}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="y"))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<special>"])
    return vocab, lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True)


@pytest.mark.parametrize(
    "words, text",
    [
        (["▁salt", "▁and", "▁peat", "y"], "salt and peaty"),
        (["▁salt", "<special>", "▁and", "▁peat"], "salt and peat"),
        (["<special>", "<special>", "▁salt", "y", "<special>", "<special>", "▁and"], "salty and"),
    ],
)
def test_spaces_between_words_survive_token_by_token(words: list[str], text: str):
    vocab, decode = spaces_between_words()
    assert decode([vocab[word] for word in words]) == text
    assert "".join(assembled([(vocab[word],) for word in words], decode=decode)) == text


@pytest.mark.parametrize("seed", range(60))
def test_the_pieces_are_the_text_brute_force_gives(seed: int):
    rng = random.Random(seed)
    text = "".join(rng.choice(["a", "b", "ab", "é", "€", "🦦", " ", "\n", "the", "12"]) for _ in range(40))
    ids = list(TOKENS.encode(text))
    ids = ids[: rng.randrange(len(ids) // 2, len(ids) + 1)]  # may end in the middle of a character
    stop = []
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(text))
        stop.append(text[at : at + rng.randint(2, 8)] + rng.choice(["", "", "b"]))
    pushes = []
    while ids:
        count = rng.randint(1, rng.choice([1, 1, 5]))
        pushes.append(ids[:count])
        ids = ids[count:]
    pieces = assembled(pushes, stop)
    assert "".join(pieces) == brute_force(pushes, stop)
    assert not any(s in "".join(pieces) for s in stop)


@pytest.mark.parametrize(
    "stop, expected", [(None, ()), ("x", ("x",)), (["x", "y"], ("x", "y")), (("x",), ("x",)), ([], ()), ((), ())]
)
def test_stop_strings_are_given_as_one_or_several(stop: Any, expected: tuple[str, ...]):
    assert GenerationOptions(stop=stop).stops == expected


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_new_tokens": 1, "temperature": 0, "top_p": 0, "top_k": 1, "seed": 0},
        {"temperature": 1.5, "top_p": 1, "repetition_penalty": 1.1, "seed": 7},
        {"top_p": None, "top_k": None, "repetition_penalty": None, "seed": None, "stop": None},
    ],
)
def test_good_options_are_taken_as_they_are(options: dict[str, Any]):
    taken = GenerationOptions(**options)
    assert {name: getattr(taken, name) for name in options} == options


@pytest.mark.parametrize(
    "option, value",
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", -1),
        ("max_new_tokens", 2.0),
        ("max_new_tokens", "5"),
        ("max_new_tokens", None),
        ("max_new_tokens", True),
        ("temperature", -0.1),
        ("temperature", None),
        ("temperature", "warm"),
        ("temperature", float("nan")),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("top_k", 0),
        ("top_k", 1.5),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", float("nan")),
        ("seed", -1),
        ("seed", 0.5),
        ("seed", True),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["a", None]),
        ("stop", b"bytes"),
        ("stop", 5),
        ("stop", 0),
        ("stop", {"a": 1}),
        ("stop", iter(["a"])),
    ],
)
def test_a_bad_value_is_refused_with_option_value_and_choices(option: str, value: Any):
    with pytest.raises(OptionError) as raised:
        GenerationOptions(**{option: value})
    assert str(raised.value).startswith(f"{option}={value!r} is not valid; {option} takes a ")


@pytest.mark.parametrize("ids", [[7, 8, 99, 9], [99], [7, 99, 99]])
def test_a_stop_id_ends_the_text_before_it(ids: list[int]) -> None:
    text = TextAssembler(lambda ids: "".join(chr(97 + each) for each in ids), stop_ids=[99, 100])
    at = ids.index(99)
    assert text.push(ids) == "".join(chr(97 + each) for each in ids[:at])
    assert text.stopped
    assert (text.push([7]), text.finish()) == ("", "")


@pytest.mark.parametrize("ids", [7, "7", [-1], [True], [1.5]])
def test_wrong_stop_ids_are_named(ids: object) -> None:
    with pytest.raises(OptionError, match="stop_ids"):
        GenerationOptions(stop_ids=ids)
