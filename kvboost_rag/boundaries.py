"""Where a text may be cut so that both sides read well: the SEMANTIC strategy (paper, section 4.1).

Knows characters, and of a tokenizer how many tokens a text takes and where they end; knows nothing of chunks, prompts
or KV. Cuts at paragraph ends, in a paragraph too long at sentence ends, in a sentence too long at line ends and then at
token ends. Pieces concatenate to the text. A cut lies right behind the punctuation: the space goes to the next word, as
most tokenizers have it; line breaks stay with what they end.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from tokenizers import Tokenizer

from kvboost_rag.errors import OptionError

Span = tuple[int, int]  # half-open, in characters

_NEWLINE = r"(?:\r\n|\r(?!\n)|\n)"
_CLOSERS = r"""["'”’»)\]}」』）】》〉*]"""
_SPACED_ENDS, _CJK_ENDS = ".!?…؟۔।॥", "。！？｡"
_LINE = re.compile(_NEWLINE)
_PARAGRAPH = re.compile(rf"{_NEWLINE}(?:[^\S\r\n]*{_NEWLINE})+")
_SENTENCE = re.compile(
    rf"(?:(?<![{_SPACED_ENDS}])(?P<mark>[{_SPACED_ENDS}]++){_CLOSERS}*+(?=\s|\Z)|[{_CJK_ENDS}]++{_CLOSERS}*+)"
    rf"(?:[^\S\r\n]*{_NEWLINE})?"
)
_BREAK = re.compile(rf"(?:[{_SPACED_ENDS}{_CJK_ENDS}]{_CLOSERS}*|\n)\Z")
_LAST_WORD = re.compile(r"[^\W_]+\Z")
_LONGEST_ABBREVIATION = 16
_LOOK_AHEAD = 12  # characters; few tokens are longer
_ABBREVIATION = re.compile(
    "al|approx|art|bzw|ca|capt|cf|ch|chap|co|col|corp|dept|dr|eds?|eqs?|est|etc|figs?|gen|gov|hon|inc|jr|lt|ltd|messrs|"
    "mrs?|ms|nos?|nr|op|pp|prof|resp|rev|sec|sgt|sr|st|str|tab|univ|usw|vgl|viz|vols?|vs|"
    "jan|feb|apr|aug|sept|oct|nov|dec"
)


class Offsets(Protocol):
    """The [start, end) in characters of each token of a text."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Span: ...


EncodeWithOffsets = Callable[[str], Offsets]


class Passage(NamedTuple):
    """Characters [start, end) of a document."""

    text: str
    start: int
    end: int


def semantic(text: str, encode_with_offsets: EncodeWithOffsets, max_tokens: int) -> list[Span]:
    """Spans of characters that partition ``text``, each of at most ``max_tokens`` tokens when encoded alone.

    Neighbours are packed together as long as they fit. Only a single character that takes more tokens than that makes
    a longer piece. An empty text has no pieces. Raises OptionError for fewer than one token.
    """
    if max_tokens < 1:
        raise OptionError.bad_value("max_tokens", max_tokens, "a whole number of tokens, 1 or more")
    return _Cutter(text, encode_with_offsets, max_tokens).split(0, len(text)) if text else []


def split_document(text: str, encode_with_offsets: EncodeWithOffsets, max_tokens: int) -> list[Passage]:
    """The pieces of ``semantic`` with their texts: a long document as several shorter ones."""
    return [Passage(text[start:end], start, end) for start, end in semantic(text, encode_with_offsets, max_tokens)]


def offsets_of(tokenizer: Any) -> EncodeWithOffsets:
    """How ``tokenizer`` encodes untrusted text, without added tokens; its own switches are left as they are.

    Fast tokenizers know their offsets (as with ``return_offsets_mapping=True``); slow ones are bisected.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        return bisected(lambda text: tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids)
    private = Tokenizer.from_str(backend.to_str())
    private.no_padding()
    private.no_truncation()
    private.encode_special_tokens = True

    def encode(text: str) -> list[Span]:
        offsets: list[Span] = private.encode(text, add_special_tokens=False).offsets
        return offsets

    return encode


def bisected(encode: Callable[[str], Sequence[int]]) -> EncodeWithOffsets:
    """Offsets from nothing but ``encode``: a token ends where a longer beginning of the text takes one more.

    Each offset costs about 2 log2(characters) + 24 encodings, and none is computed before it is asked for.
    """
    return lambda text: _Bisected(text, encode)


def break_ids(tokenizer: Any) -> frozenset[int]:
    """Ids of tokens that end a sentence, a closing quote or bracket behind it included, or a line.

    Decodes every token of the vocabulary by itself, so keep the result. Special tokens, and punctuation that takes
    several tokens, are not among them; a token does not tell the full stop of an abbreviation from others.
    """
    ids = sorted(set(tokenizer.get_vocab().values()))
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if isinstance(backend, Tokenizer):
        texts = backend.decode_batch([[token] for token in ids], skip_special_tokens=True)
    else:
        switches = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        texts = [tokenizer.decode([token], **switches) for token in ids]
    return frozenset(token for token, text in zip(ids, texts, strict=True) if _BREAK.search(text))


def _paragraph_ends(text: str) -> list[int]:
    return [match.end() for match in _PARAGRAPH.finditer(text)]


def _sentence_ends(text: str) -> list[int]:
    return [match.end() for match in _SENTENCE.finditer(text) if not _abbreviates(text, match)]


def _line_ends(text: str) -> list[int]:
    return [match.end() for match in _LINE.finditer(text)]


def _abbreviates(text: str, match: re.Match[str]) -> bool:
    """Whether a full stop belongs to what stands before it: 'Dr.', an initial, 'e.g.', the '3.' of a list or date."""
    if match["mark"] != ".":
        return False
    found = _LAST_WORD.search(text[max(0, match.start() - _LONGEST_ABBREVIATION) : match.start()])
    word = found[0].lower() if found else ""
    initial = len(word) == 1 and word != word.upper()
    return initial or word[-1:].isdigit() or bool(_ABBREVIATION.fullmatch(word))


def _inside_character(text: str, at: int) -> bool:
    """Whether a cut at ``at`` would part what is read as one: a base and its mark, a joined emoji, CR and LF."""
    before, behind = text[at - 1 : at], text[at : at + 1]
    if not before or not behind:
        return False
    mark = unicodedata.category(behind).startswith("M") or "\U0001f3fb" <= behind <= "\U0001f3ff"
    return mark or "\u200d" in (before, behind) or before + behind == "\r\n"


_LEVELS: tuple[Callable[[str], list[int]], ...] = (_paragraph_ends, _sentence_ends, _line_ends)


@dataclass
class _Cutter:
    """Cuts one text; remembers how many tokens its parts take."""

    text: str
    encode: EncodeWithOffsets
    max_tokens: int
    counts: dict[Span, int] = field(default_factory=dict)

    def fits(self, start: int, end: int) -> bool:
        return self.count((start, end)) <= self.max_tokens

    def count(self, span: Span) -> int:
        if span not in self.counts:
            self.counts[span] = len(self.encode(self.text[slice(*span)]))
        return self.counts[span]

    def split(self, start: int, end: int, level: int = 0) -> list[Span]:
        """[start, end) in pieces that fit, cut at ends of ``level`` and, where that is not enough, of the next."""
        if self.fits(start, end):
            return [(start, end)]
        if level == len(_LEVELS):
            return list(self.at_tokens(start, end))
        ends = {start + at for at in _LEVELS[level](self.text[start:end])}
        parts = pairwise(sorted({start, end} | ends))
        return self.packed([piece for part in parts for piece in self.split(*part, level + 1)])

    def packed(self, spans: Sequence[Span]) -> list[Span]:
        """Neighbours joined while their counts add up to no more than fits; joined ones are counted again."""
        joined: list[Span] = []
        first = 0
        while first < len(spans):
            last, total = first, self.count(spans[first])
            while last + 1 < len(spans) and total + self.count(spans[last + 1]) <= self.max_tokens:
                last += 1
                total += self.count(spans[last])
            while last > first and not self.fits(spans[first][0], spans[last][1]):
                last -= 1
            joined.append((spans[first][0], spans[last][1]))
            first = last + 1
        return joined

    def at_tokens(self, start: int, end: int) -> Iterator[Span]:
        """[start, end) cut at token ends, as late as fits; a character that is several tokens stays whole."""
        offsets = self.encode(self.text[start:end])
        at, token = start, 0
        while at < end:
            cut, token = self._next_cut(offsets, start, end, at, token)
            yield at, cut
            at = cut
            while token < len(offsets) and start + offsets[token][1] <= at:
                token += 1

    def _next_cut(self, offsets: Offsets, start: int, end: int, at: int, token: int) -> Span:
        """The cut behind ``at``, where ``token`` begins, and the first token that may lie behind it."""
        num_tokens = len(offsets)
        inside: Span | None = None
        for behind in range(min(token + self.max_tokens, num_tokens), min(token, num_tokens - 1), -1):
            cut = end if behind == num_tokens else start + offsets[behind - 1][1]
            if cut <= at:
                break
            if not self.fits(at, cut):
                continue
            if not _inside_character(self.text, cut):
                return cut, behind
            inside = inside or (cut, behind)
        return inside or (at + 1, token)


class _Bisected:
    """Offsets of a text by the number of tokens its beginnings take."""

    def __init__(self, text: str, encode: Callable[[str], Sequence[int]]):
        self._text, self._encode = text, encode
        self._num_tokens = len(encode(text))

    def __len__(self) -> int:
        return self._num_tokens

    def __getitem__(self, index: int, /) -> Span:
        if not 0 <= index < self._num_tokens:
            raise IndexError(index)
        return self._end(index), self._end(index + 1)

    def _end(self, num_tokens: int) -> int:
        """Characters of the longest beginning found that takes no more than ``num_tokens``.

        Nearly monotone: half a word can take more tokens than the whole, so a word's length is looked ahead.
        """
        num_characters = len(self._text)
        if num_tokens == self._num_tokens:
            return num_characters
        found = bisect_right(range(1, num_characters), num_tokens, key=self._taken)
        ahead = range(min(found + _LOOK_AHEAD, num_characters - 1), found, -1)
        return next((end for end in ahead if self._taken(end) <= num_tokens), found)

    def _taken(self, num_characters: int) -> int:
        return len(self._encode(self._text[:num_characters]))
