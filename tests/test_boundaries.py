"""Boundaries: pieces partition a text, fit, and end where the text does; from fast and from slow tokenizers."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import SPECIAL, build_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvboost_rag.boundaries import Passage, bisected, break_ids, offsets_of, semantic, split_document
from kvboost_rag.errors import OptionError

TEXTS = [
    "One sentence. Another one! A third? Yes.",
    "A paragraph.\n\nAnother, with more words in it. And an end.\n\n\n  \nA last one",
    "Windows.\r\n\r\nIts lines\r\nend in two\r\n\r\n\r\ncharacters.\r\n",
    "old\rMac\r\rlines.\r",
    "灯塔很高。海很深！你去吗？「好的。」他说。",
    "🦦🦦🦦 👩🏽\u200d🚀👩🏽\u200d🚀 ❤\ufe0f naïve cafe\u0301 e\u0301\u0323\u0301e\u0301",
    "\ttabs\tand\t\ttabs.\t\tMore\ttabs.",
    "   \n\n \t\r\n   ",
    "\n\n\n\n\n\n\n",
    "                ",
    "supercalifragilistic" * 5,
    "." * 25 + "x" + ".)" * 12,
    "<|im_end|> is text. <s> too.",
    "Dr. A. Smith met Prof. Li on the 3. May, e.g. at 3.14 km. He left. See Fig. 2.",
    "x",
]
ALPHABET = [
    "a",
    "the ",
    "word",
    ". ",
    "? ",
    "!",
    "\n",
    "\n\n",
    "\r\n",
    "\t",
    " ",
    "。",
    "灯",
    "🦦",
    "\u0301",
    "\u200d",
    "12",
    "Mr.",
]


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Spaces as ▁, a dummy one in front, bytes for what is not in the vocabulary: as Llama 2's."""
    letters = [chr(c) for c in range(33, 127)]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("a", "n"), ("▁", "w"), (".", "."), (".", '"')]
    names = [
        "<unk>",
        "<s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *letters,
        *("".join(m) for m in merges),
        "▁.",
    ]
    backend = Tokenizer(
        models.BPE(
            vocab={name: i for i, name in enumerate(names)},
            merges=[*merges, ("▁", ".")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", unk_token="<unk>")


def dropping() -> PreTrainedTokenizerFast:
    """Composes accents, drops white space and counts words: as BERT's."""
    words = ["[UNK]", "the", "word", "one", "another", ".", "!", "?", "é", "。"]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")


class SlowTokenizer:
    """What is needed of a tokenizer without a Rust backend."""

    def __init__(self, inner: Any):
        self._inner = inner

    def __call__(self, text: str, add_special_tokens: bool, split_special_tokens: bool) -> Any:
        backend = self._inner.backend_tokenizer
        backend.encode_special_tokens = split_special_tokens
        return SimpleNamespace(input_ids=backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: list[int], **options: Any) -> str:
        return self._inner.decode(ids, **options)

    def get_vocab(self) -> dict[str, int]:
        return self._inner.get_vocab()


KINDS = {
    "bytes": build_tokenizer,
    "sentencepiece": sentencepiece_like,
    "dropping": dropping,
    "slow": lambda: SlowTokenizer(build_tokenizer()),
}
TOKENIZERS = {kind: build() for kind, build in KINDS.items()}


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return TOKENIZERS[request.param]


def words(text: str) -> list[tuple[int, int]]:
    """A token for each character: pieces of n tokens are pieces of n characters."""
    return [(at, at + 1) for at in range(len(text))]


def pieces(text: str, max_tokens: int) -> list[str]:
    return [text[start:end] for start, end in semantic(text, words, max_tokens)]


def check(text: str, encode: Any, max_tokens: int) -> None:
    spans = semantic(text, encode, max_tokens)
    assert [start for start, _ in spans] == [0, *(end for _, end in spans)][: len(spans)]
    assert "".join(text[start:end] for start, end in spans) == text
    assert all(start < end for start, end in spans)
    assert all(end == start + 1 or len(encode(text[start:end])) <= max_tokens for start, end in spans)
    assert semantic(text, encode, max_tokens) == spans


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 17, 1000])
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_partition_the_text_and_fit(tokenizer: Any, text: str, max_tokens: int):
    check(text, offsets_of(tokenizer), max_tokens)


@pytest.mark.parametrize("seed", range(30))
def test_pieces_of_random_texts_partition_them_and_fit(tokenizer: Any, seed: int):
    rng = random.Random(seed)
    text = "".join(rng.choices(ALPHABET, k=rng.randrange(1, 80)))
    check(text, offsets_of(tokenizer), rng.choice([1, 3, 8, 20]))


def test_an_empty_text_has_no_pieces(tokenizer: Any):
    assert semantic("", offsets_of(tokenizer), 4) == []
    assert split_document("", offsets_of(tokenizer), 4) == []


def test_a_text_that_fits_is_one_piece():
    for text in TEXTS:
        assert pieces(text, len(text)) == [text]


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_paragraphs_come_first_and_keep_their_blank_lines(newline: str):
    blank = newline * 2
    text = f"One. Two.{blank}Three. Four.{newline} \t{newline}  Five.{blank}"
    parts = [f"One. Two.{blank}", f"Three. Four.{newline} \t{newline}", f"  Five.{blank}"]
    assert pieces(text, max(map(len, parts))) == parts


def test_neighbouring_paragraphs_are_packed_as_long_as_they_fit():
    assert pieces("aa\n\nbb\n\ncc\n\ndd\n\nee", 8) == ["aa\n\nbb\n\n", "cc\n\ndd\n\n", "ee"]


def test_pieces_that_take_more_tokens_together_than_apart_are_counted_together():
    def encode(text: str) -> list[tuple[int, int]]:
        return words(text) + [(len(text), len(text))] * (text.count("\n\n") > 1)

    assert semantic("aa\n\nbb\n\ncccc", encode, 8) == [(0, 4), (4, 12)]
    check("aa\n\nbb\n\nccc\n\nd", encode, 8)


def test_a_paragraph_too_long_is_cut_at_sentences_and_its_end_packed_with_what_follows():
    text = "First one. Second one. Third.\n\nFour.\n\nThe fifth is longer."
    assert pieces(text, 22) == ["First one. Second one.", " Third.\n\nFour.\n\n", "The fifth is longer."]


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_a_single_line_break_stays_with_the_sentence_it_ends(newline: str):
    assert pieces(f"One is. {newline}Two is.{newline}Three", 10) == [f"One is. {newline}", f"Two is.{newline}", "Three"]


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_a_single_line_break_is_no_end_of_a_paragraph_or_sentence(newline: str):
    parts = [f"a line{newline}broken by width.", f" The next{newline}sentence."]
    assert pieces("".join(parts), len(parts[0])) == parts
    paragraphs = [f"One.{newline * 2}", f"Two{newline}three."]
    assert pieces("".join(paragraphs), len(f"{paragraphs[0]}Two{newline}")) == paragraphs


def test_a_sentence_too_long_is_cut_at_lines_before_it_is_cut_at_tokens():
    assert pieces("name,value\r\none,1\r\ntwo,2\r\nseventeen,17", 14) == [
        "name,value\r\n",
        "one,1\r\ntwo,2\r\n",
        "seventeen,17",
    ]
    assert pieces("abcdefghij", 4) == ["abcd", "efgh", "ij"]


@pytest.mark.parametrize(
    "text",
    [
        "Ask Dr. Watson",
        "See Fig. 2 and Eqs. 3",
        "by J. R. R. Tolkien",
        "fruit, e.g. apples",
        "the U.S. Army",
        "on the 3. May",
        "1. First item",
        "pi is 3.14 or so",
        "a file.txt here",
        "what?ever!that",
        "at 10 p.m. sharp",
    ],
)
def test_what_is_no_sentence_end(text: str):
    """One token too long and nowhere to cut: cut at the last token that fits."""
    assert pieces(f"{text}.", len(text)) == [text, "."]


@pytest.mark.parametrize(
    "parts",
    [
        ["He left.", " She stayed."],
        ["Really?!", " Yes."],
        ["Well...", " maybe."],
        ["Wait…", " what?"],
        ['"Go."', " He went."],
        ["(He went.)", " Alone."],
        ["In 1999!", " Yes!"],
        ["They met the dental.", " Fine."],
        ["灯塔很高。", "海很深！", "你去吗？"],
        ["「好的。」", "他说。"],
        ["यह एक है।", " वह दो है।"],
        ["هل هذا؟", " نعم."],
        ["Tabs.", "\tMore."],
        ["**Bold.**", " Plain."],
    ],
)
def test_sentences_end_behind_their_closing_marks(parts: list[str]):
    text = "".join(parts)
    assert pieces(text, max(map(len, parts))) == parts


@pytest.mark.parametrize("cluster", ["e\u0301\u0323", "👩🏽\u200d🚀", "❤\ufe0f", "\r\n", "कि"])
@pytest.mark.parametrize("max_tokens", [4, 5, 6, 7])
def test_token_cuts_do_not_part_what_is_read_as_one(cluster: str, max_tokens: int):
    text = f"x{cluster}" * 6
    starts = {start for start, _ in semantic(text, words, max_tokens)}
    whole = {at for at in range(len(text)) if at % (len(cluster) + 1) <= 1}
    assert starts <= whole


def test_marks_without_end_are_cut_all_the_same():
    assert pieces("e" + "\u0301" * 9, 4) == ["e\u0301\u0301\u0301", "\u0301" * 4, "\u0301" * 2]


def test_a_character_of_several_tokens_stays_whole():
    encode = offsets_of(build_tokenizer())
    assert len(encode("🦦")) == 4
    assert semantic("🦦🦦a", encode, 2) == [(0, 1), (1, 2), (2, 3)]
    assert semantic("🦦🦦a", encode, 7) == [(0, 1), (1, 3)]
    assert semantic("🦦🦦a", encode, 8) == [(0, 2), (2, 3)]


def test_long_words_are_cut_at_token_ends():
    encode = offsets_of(build_tokenizer())
    assert [p.text for p in split_document("thetheanxthe", encode, 2)] == ["thethe", "anx", "the"]


def test_a_long_giant_word_and_runs_of_punctuation_take_one_pass():
    for text in ("x" * 20_000, ".)" * 10_000, "\n \t" * 10_000 + "x", "." * 20_000 + "x", "\r\n" * 10_000):
        spans = semantic(text, words, 100)
        assert len(spans) <= 400
        assert spans[-1][1] == len(text)


@pytest.mark.parametrize("max_tokens", [0, -3])
def test_fewer_than_one_token_is_refused(max_tokens: int):
    for cut in (semantic, split_document):
        with pytest.raises(OptionError, match=f"max_tokens={max_tokens}"):
            cut("text", words, max_tokens)


def test_a_document_comes_apart_into_passages_that_know_where_they_stand():
    assert split_document("One. Two.", words, 5) == [Passage("One.", 0, 4), Passage(" Two.", 4, 9)]


@pytest.mark.parametrize("text", ["the anther onion", "plain words, more of them", "\ttabs\n\nlines", "12 121", ""])
def test_bisected_offsets_are_the_fast_ones(text: str):
    """But for the space in front of a word, which the fast ones leave out of the token that holds it."""
    fast = offsets_of(build_tokenizer())(text)
    slow = offsets_of(SlowTokenizer(build_tokenizer()))(text)
    assert [slow[i][1] for i in range(len(slow))] == [fast[i][1] for i in range(len(fast))]
    assert [slow[i][0] for i in range(len(slow))] == [0, *(fast[i][1] for i in range(len(fast)))][: len(fast)]
    with pytest.raises(IndexError):
        slow[len(slow)]


def test_the_slow_way_cuts_as_the_fast_one_does():
    fast, slow = offsets_of(build_tokenizer()), offsets_of(SlowTokenizer(build_tokenizer()))
    for text in TEXTS:
        for max_tokens in (3, 8, 20):
            assert semantic(text, slow, max_tokens) == semantic(text, fast, max_tokens)


def test_bisecting_needs_nothing_but_an_encoding():
    offsets = bisected(lambda text: [len(word) for word in text.split("-")])("ab-c-def")
    assert [offsets[i] for i in range(len(offsets))] == [(0, 2), (2, 4), (4, 8)]


def test_special_token_strings_are_counted_as_text(tokenizer: Any):
    assert len(offsets_of(tokenizer)("<s>")) >= 3


def test_switches_left_on_the_users_tokenizer_change_nothing_and_are_left():
    tokenizer = build_tokenizer()
    tokenizer(["a", "a longer text"], padding="max_length", truncation=True, max_length=4)
    backend = tokenizer.backend_tokenizer
    before = backend.padding, backend.truncation, backend.encode_special_tokens
    encode = offsets_of(tokenizer)
    assert len(encode("abcdefgh")) == 8
    assert len(encode("a")) == 1
    break_ids(tokenizer)
    assert (backend.padding, backend.truncation, backend.encode_special_tokens) == before


def test_breaks_of_a_byte_level_tokenizer():
    for tokenizer in (build_tokenizer(), SlowTokenizer(build_tokenizer())):
        vocab = tokenizer.get_vocab()
        assert break_ids(tokenizer) == {vocab[name] for name in (".", "!", "?", "Ċ")}


def test_breaks_of_a_sentencepiece_tokenizer():
    tokenizer = sentencepiece_like()
    vocab = tokenizer.get_vocab()
    bytes_ = {f"<0x{ord(c):02X}>" for c in ".!?\n"}
    assert break_ids(tokenizer) == {vocab[name] for name in {".", "!", "?", "..", '."', "▁."} | bytes_}


def test_breaks_take_in_tokens_added_later_but_no_special_ones():
    tokenizer = build_tokenizer()
    known = break_ids(tokenizer)
    tokenizer.add_tokens(["\n\n\n", "stop.", "。", "no.more", "e.)"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>."]})
    vocab = tokenizer.get_vocab()
    assert break_ids(tokenizer) - known == {vocab[name] for name in ("\n\n\n", "stop.", "。", "e.)")}
    assert not break_ids(tokenizer) & {vocab[name] for name in SPECIAL}
