"""DocumentIndex: warmed documents are found in plain text, exactly, whole, and at a cost that ignores the corpus."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import document

from kvboost_rag.detect import ANCHOR_LENGTHS, DocumentIndex


def index_of(texts: Iterable[str]) -> DocumentIndex:
    index = DocumentIndex()
    for text in texts:
        index.add(text)
    return index


def found(index: DocumentIndex, prompt: str) -> list[str]:
    return [prompt[start:end] for start, end in index.find(prompt)]


def brute_force(texts: Iterable[str], prompt: str) -> list[tuple[int, int]]:
    """All occurrences, the longest first, then the earliest; what overlaps a chosen one is out."""
    filed = {text.strip() for text in texts if len(text.strip()) >= min(ANCHOR_LENGTHS)}
    matches = [(at, at + len(t)) for t in filed for at in range(len(prompt)) if prompt.startswith(t, at)]
    chosen: list[tuple[int, int]] = []
    for start, end in sorted(matches, key=lambda m: (m[0] - m[1], m[0])):
        if all(end <= s or start >= e for s, e in chosen):
            chosen.append((start, end))
    return sorted(chosen)


class Counted(str):
    """A prompt that counts how often it is looked at."""

    looks = 0

    def startswith(self, *args: object) -> bool:
        Counted.looks += 1
        return super().startswith(*args)

    def __getitem__(self, key: object) -> str:
        Counted.looks += 1
        return super().__getitem__(key)


def looks(index: DocumentIndex, prompt: str) -> int:
    Counted.looks = 0
    index.find(Counted(prompt))
    return Counted.looks


def test_a_document_is_found_exactly_where_it_stands():
    index, text = index_of([document(1)]), document(1)
    assert index.find(f"Context: {text}?") == [(9, 9 + len(text))]
    assert index.find(text) == [(0, len(text))]
    assert index.find("nothing of it") == index.find("") == []


def test_an_empty_index_finds_nothing():
    assert DocumentIndex().find(document(1)) == []


@pytest.mark.parametrize("before, after", [("  ", "\n"), ("\n\n", ""), ("", "\t "), ("\u3000", "\u00a0")])
def test_white_space_at_the_ends_is_no_part_of_a_document(before: str, after: str):
    index = index_of([before + document(1) + after])
    assert found(index, f"a{document(1)}b") == [document(1)]
    assert found(index, f"a{before}{document(1)}{after}b") == [document(1)]


def test_several_documents_are_found_in_order():
    texts = [document(i) for i in range(5)]
    index = index_of(texts)
    order = [3, 0, 4, 1]
    assert found(index, "Read:\n" + "\n\n".join(texts[i] for i in order) + "\nWhat?") == [texts[i] for i in order]
    assert found(index, "".join(texts[i] for i in order)) == [texts[i] for i in order]


def test_the_same_document_is_found_each_time_it_stands_there():
    text = document(1)
    assert index_of([text]).find(f"{text}\n{text}") == [(0, len(text)), (len(text) + 1, 2 * len(text) + 1)]


def test_an_outer_document_wins_over_one_inside_it():
    inner = document(1)
    outer = f"{document(2)}\n{inner}\n{document(3)}"
    index = index_of([inner, outer])
    assert found(index, f"{inner} | {outer} | {inner}") == [inner, outer, inner]


def test_a_document_that_begins_with_another_one_wins():
    short, long = document(1), document(1) + " and more"
    index = index_of([short, long])
    assert found(index, f"{long}; {short}; {long}") == [long, short, long]
    assert found(index, f"{short} and mor") == [short]


def test_of_overlapping_documents_the_longer_one_wins_then_the_earlier():
    left, shared, right = document(1, 6), document(2, 6), document(3, 7)
    assert found(index_of([left + shared, shared + right]), left + shared + right) == [shared + right]
    middle = "x" * 40
    first, second = "a" * 20 + middle, middle + "b" * 20
    assert found(index_of([first, second]), "a" * 20 + middle + "b" * 20) == [first]


def test_a_shorter_document_counts_where_a_longer_one_at_the_same_place_lost():
    short = document(1, 5)
    long = short + " " + document(2, 5)
    longest = document(2, 5) + " " + document(3, 20)  # overlaps `long`, not `short`
    prompt = short + " " + longest
    assert found(index_of([short, long, longest]), prompt) == [short, longest]


def _changed(text: str, at: int) -> str:
    return text[:at] + ("#" if text[at] != "#" else "+") + text[at + 1 :]


EDITS: dict[str, Callable[[str], str]] = {
    "first character": lambda t: _changed(t, 0),
    "behind the anchor": lambda t: _changed(t, ANCHOR_LENGTHS[0]),
    "middle": lambda t: _changed(t, len(t) // 2),
    "last character": lambda t: _changed(t, len(t) - 1),
    "one missing at the end": lambda t: t[:-1],
    "one missing in the middle": lambda t: t[: len(t) // 2] + t[len(t) // 2 + 1 :],
    "case": lambda t: t[:-1] + t[-1].swapcase() if t[-1].isalpha() else t.replace("word", "Word", 1),
    "doubled space": lambda t: t.replace(" ", "  ", 1),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_a_near_duplicate_never_matches(edit: Callable[[str], str]):
    text = document(1)
    other = edit(text)
    assert other != text
    assert index_of([text]).find(f"Context: {other}\nQuestion") == []
    both = index_of([text, other])
    assert found(both, f"{other}\n{text}\n{other}") == [other, text, other]


@pytest.mark.parametrize("head", [32, 64, 500])
def test_hundreds_of_documents_with_one_beginning_are_told_apart(head: int):
    beginning = document(9999, 80)[:head]
    texts = [f"{beginning}{i:03d} {document(i, 3)}" for i in range(300)]
    texts += [f"{beginning}{i:03d}" for i in range(300)]  # each is the beginning of another one
    index = index_of(texts)
    order = random.Random(head).sample(texts, 300)
    assert found(index, "\n".join(order)) == order
    assert index.find(f"{beginning}xyz {document(1, 3)}") == []


@pytest.mark.parametrize("length, filed", [(7, False), (8, True), (9, True), (31, True), (32, True), (33, True)])
def test_short_texts_are_filed_from_eight_characters_on(length: int, filed: bool):
    text = document(1)[:length].replace(" ", "_")
    assert found(index_of([text]), f"so: {text}.") == ([text] if filed else [])


@pytest.mark.parametrize("text", ["", "   ", "\n", "short", "  short  \n"])
def test_blank_and_very_short_texts_are_ignored(text: str):
    index = index_of([text])
    index.discard(text)
    assert index.find("a short text   \n") == []


def test_a_short_and_a_long_document_that_begin_alike_are_both_found():
    short, long = document(1)[:20].strip(), document(1)
    index = index_of([short, long])
    assert found(index, f"{short}! {long}") == [short, long]


def test_discard_forgets_one_document_and_no_other():
    beginning = "letterhead of the office " * 3
    texts = [f"{beginning}{i:03d} {document(i, 3)}" for i in range(30)] + [document(1)]
    index = index_of(texts)
    index.discard(f"  {texts[5]}\n")
    index.discard(beginning + "never filed")
    index.discard("never filed, nothing like it")
    assert found(index, "\n".join(texts)) == [t for t in texts if t != texts[5]]
    index.add(texts[5])
    assert found(index, texts[5]) == [texts[5]]


def test_discarding_everything_leaves_nothing_behind():
    texts = [f"{'the same beginning of a text ' * 5}{i:03d}" for i in range(50)] + ["shortish"]
    index = index_of(texts)
    for text in texts:
        index.discard(text)
    assert index.find("\n".join(texts)) == []
    assert not any(index._anchors.values())


def test_a_document_filed_twice_is_gone_after_one_discard():
    index = index_of([document(1), document(1)])
    index.discard(document(1))
    assert index.find(document(1)) == []


def test_clear_forgets_everything_and_the_index_goes_on():
    index = index_of([document(1), "shortish"])
    index.clear()
    assert index.find(f"{document(1)} shortish") == []
    index.add(document(1))
    assert found(index, document(1)) == [document(1)]


def test_line_endings_are_part_of_the_text():
    lf = "\n".join(document(i, 5) for i in range(3))
    crlf = lf.replace("\n", "\r\n")
    assert index_of([lf]).find(crlf) == index_of([crlf]).find(lf) == []
    assert found(index_of([lf, crlf]), f"{crlf}\r\n{lf}") == [crlf, lf]


def test_a_byte_order_mark_is_part_of_the_text():
    marked = "\ufeff" + document(1)
    assert index_of([marked]).find(document(1)) == []
    assert found(index_of([document(1)]), marked) == [document(1)]


@pytest.mark.parametrize(
    "text",
    [
        "灯塔守护人每晚点亮三盏灯。",
        "🦦🪨🌊 otters of the Marigold 👩🏽\u200d🚀",
        "Ünïcödé straße ﬁn",
        "نص عربي قصير هنا",
    ],
)
def test_texts_of_any_script_are_found(text: str):
    index = index_of([text, document(1)])
    assert found(index, f"前{text}後 {document(1)}") == [text, document(1)]


def test_composed_and_decomposed_characters_are_different_texts():
    composed, decomposed = "caf\u00e9 by the harbour", "cafe\u0301 by the harbour"
    assert index_of([composed]).find(decomposed) == []


@pytest.mark.parametrize("seed", range(40))
def test_find_equals_brute_force(seed: int):
    rng = random.Random(seed)
    base = "".join(rng.choice("ab ") for _ in range(160))

    def cut() -> str:
        at = rng.randrange(len(base) - 8)
        return base[at : at + rng.randint(8, 90)]

    texts = [cut() for _ in range(rng.choice([3, 12, 60]))]
    index = index_of(texts)
    for text in rng.sample(texts, len(texts) // 4):
        index.discard(text)
        texts = [t for t in texts if t.strip() != text.strip()]
    prompt = "".join(rng.choice([cut(), cut(), base, rng.choice("ab "), "\n"]) for _ in range(8))
    assert index.find(prompt) == brute_force(texts, prompt)


@pytest.mark.parametrize("shared, words", [(0, 30), (32, 30), (64, 30), (500, 30), (600, 6)])
def test_the_cost_of_a_prompt_does_not_grow_with_the_corpus(shared: int, words: int):
    beginning = document(9999, 80)[:shared]
    texts = [beginning + document(i, words) for i in range(2000)]
    prompt = "Read this.\n\n" + "\n\n".join(texts[:3]) + "\n\nWhat is it?"
    few, many = index_of(texts[:10]), index_of(texts)
    assert found(few, prompt) == found(many, prompt) == texts[:3]
    assert 0 < looks(many, prompt) <= looks(few, prompt) + 8 * 3


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns as often as the interpreter lets them."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_adding_and_finding_at_once_loses_nothing(restless: None):
    steady = [document(i) for i in range(5)]
    added = [f"{document(5)} {i} {document(i, 4)}" for i in range(200)]
    index = index_of(steady)
    lookalike = f"{document(5)} never filed"  # leads to where the others are filed
    prompt = "\n".join(steady + [lookalike] * 50)

    def add(part: int) -> None:
        for change in [index.add, index.discard] * 10 + [index.add]:
            for text in added[part::4]:
                change(text)

    def find(_: int) -> list[list[str]]:
        return [found(index, prompt) for _ in range(20)]

    with ThreadPoolExecutor(8) as pool:
        adders = [pool.submit(add, part) for part in range(4)]
        finders = [pool.submit(find, part) for part in range(4)]
        assert all(seen == steady for finder in finders for seen in finder.result())
        for adder in adders:
            adder.result()
    assert found(index, "\n".join(added)) == added
