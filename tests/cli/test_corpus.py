"""The store's folder: what is written is read again, and what is broken is named."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from conftest import build_tokenizer

from kvboost_rag.boundaries import offsets_of
from kvboost_rag.cli import corpus as module
from kvboost_rag.cli.corpus import PASSAGES, SETTINGS, VECTORS, Corpus, Settings, StoreError, write
from kvboost_rag.cli.loading import Text
from kvboost_rag.cli.passages import Passage, cut, digest_of, text_id


def passage(text: str, source: str = "a.md") -> Passage:
    return Passage(text_id(text), source, text, source, "d1")


@pytest.fixture
def kept(tmp_path: Path) -> Corpus:
    passages = [passage("one\u2028line"), passage("two"), passage("one\u2028line", "b.md")]
    corpus = Corpus(tmp_path / "kept", Settings(model="m", embedder="e", models={"ff": "m"}), passages)
    corpus.add_vectors([text_id("one\u2028line"), text_id("two")], np.array([[3.0, 4.0], [0.0, 2.0]], dtype=np.float32))
    corpus.save()
    return corpus


def test_what_was_saved_is_opened(kept: Corpus) -> None:
    again = Corpus.open(kept.folder)
    assert (again.settings, again.passages) == (kept.settings, kept.passages)
    assert {key: vector.tolist() for key, vector in again.vectors.items()} == {
        text_id("one\u2028line"): pytest.approx([0.6, 0.8]),
        text_id("two"): [0.0, 1.0],
    }
    assert sorted(path.name for path in kept.folder.iterdir()) == [PASSAGES, SETTINGS, VECTORS]


def test_the_nearest_come_first_and_each_text_once(kept: Corpus) -> None:
    found = kept.nearest(np.array([1.0, 0.0], dtype=np.float32), 5)
    assert [(each.text, each.source) for each in found] == [("one\u2028line", "a.md"), ("two", "a.md")]
    assert kept.nearest(np.array([0.0, 1.0], dtype=np.float32), 1)[0].text == "two"
    assert Corpus(kept.folder).nearest(np.array([1.0, 0.0], dtype=np.float32), 1) == []


def test_a_folder_without_a_store(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"there is no store in .*nothing: make one with kvboost-rag warm PATH"):
        Corpus.open(tmp_path / "nothing")


@pytest.mark.parametrize(
    "content, said",
    [
        ("{", "store.json is broken"),
        ("[]", "does not say that its format is"),
        ('{"format": "kvboost-rag store 99"}', "does not say that its format is"),
        (json.dumps({"format": module.FORMAT, "passage_tokens": "many"}), "passage_tokens is 'many'"),
    ],
)
def test_broken_settings_are_named(kept: Corpus, content: str, said: str) -> None:
    (kept.folder / SETTINGS).write_text(content)
    with pytest.raises(StoreError, match="kvboost-rag store clear") as caught:
        Corpus.open(kept.folder)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"id": "a"}', '{"id": 1, "source": "", "text": "", "file": "", "digest": ""}']
)
def test_a_broken_passage_is_named_with_its_line(kept: Corpus, line: str) -> None:
    path = kept.folder / PASSAGES
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(StoreError, match=r"passages\.jsonl is broken \(line 4: "):
        Corpus.open(kept.folder)


def test_vectors_that_cannot_be_read_are_made_again(kept: Corpus) -> None:
    whole = (kept.folder / VECTORS).read_bytes()
    for data in (b"", whole[:-1], b"nonsense"):
        (kept.folder / VECTORS).write_bytes(data)
        assert len(Corpus.open(kept.folder).without_vector()) == 2


def test_an_interrupted_write_leaves_what_was_there(kept: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(source: object, target: object) -> None:
        raise KeyboardInterrupt

    path = kept.folder / SETTINGS
    before = path.read_bytes()
    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(path, b"half of it")
    assert path.read_bytes() == before
    assert len(list(kept.folder.iterdir())) == 3


def test_files_are_named_from_the_folder_that_holds_the_store(kept: Corpus, tmp_path: Path) -> None:
    inside, outside = tmp_path / "docs" / "a.md", tmp_path.parent / "b.md"
    assert kept.name_of(inside) == "docs/a.md"
    assert kept.name_of(outside) == outside.resolve().as_posix()
    for path in (inside, outside):
        assert kept.path_of(kept.name_of(path)) == path.resolve()


def test_texts_are_cut_where_sentences_end() -> None:
    encode = offsets_of(build_tokenizer())
    text = Text("First sentence here. Second one here.\n\nA paragraph of its own.")
    found = cut([text, Text("a line", "", 3), Text("another", "wiki")], "f.md", "d", encode, 24)
    assert [(each.source, each.text) for each in found] == [
        ("f.md", "First sentence here."),
        ("f.md", "Second one here."),
        ("f.md", "A paragraph of its own."),
        ("f.md:3", "a line"),
        ("wiki", "another"),
    ]
    assert {each.file for each in found} == {"f.md"}
    assert cut([text, text], "f.md", "d", encode, 24) == found[:3]
    assert digest_of(b"x", 24) != digest_of(b"x", 25) != digest_of(b"y", 25)
