"""Long documents are kept in parts and stay one document; system prompts are warmed where they stand."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from conftest import build_model, build_tokenizer, document

from kvboost_rag import KVBoost, OptionError
from kvboost_rag.documents import CHUNKINGS, DocumentCutter
from kvboost_rag.engine.repair import BoundaryRepair
from kvboost_rag.engine.types import Fidelity, Segment
from kvboost_rag.tokens import Tokens


def sentences(text: str) -> str:
    words = text.split()
    return " ".join(f"{' '.join(words[at : at + 4])} so." for at in range(0, len(words), 4))


LONG = "\n\n".join(f"Paragraph {n}. {sentences(document(n))}" for n in range(4))
PARTS = {"max_document_tokens": 150, "chunk_size": 60}


def opened(**options: object) -> KVBoost:
    return KVBoost(build_model(), build_tokenizer(), **{**PARTS, **options})


def prompt(boost: KVBoost, *documents: str) -> object:
    return boost.prompt(documents, "What is it?")


@pytest.mark.parametrize("chunking", CHUNKINGS)
def test_parts_are_the_text(chunking: str) -> None:
    tokens = Tokens(build_tokenizer())
    cutter = DocumentCutter(tokens, chunk_size=60, max_document_tokens=150)
    cutter.note(LONG, chunking)
    parts = cutter.cut(LONG)
    size = 150 if chunking == "document" else 60
    assert len(parts) > 2
    assert all(0 < len(part.ids) <= size for part in parts)
    assert [part.part for part in parts] == list(range(len(parts)))
    assert "".join(tokens.decode(part.ids) for part in parts) == LONG
    assert cutter.cut("") == ()


def test_a_short_document_is_whole_and_a_long_one_is_cut_behind_paragraphs_and_sentences() -> None:
    tokens = Tokens(build_tokenizer())
    cutter = DocumentCutter(tokens, chunk_size=60, max_document_tokens=150)
    assert len(cutter.cut(document(1)[:100])) == 1
    assert all(tokens.decode(part.ids)[-1] in ".\n" for part in cutter.cut(LONG)[:-1])


def test_fixed_parts_of_texts_that_begin_alike_are_the_same() -> None:
    cutter = DocumentCutter(Tokens(build_tokenizer()), chunk_size=60)
    one, other = LONG, LONG[:400] + "another end"
    for text in (one, other):
        cutter.note(text, "fixed")
    assert cutter.cut(one)[:4] == cutter.cut(other)[:4]


@pytest.mark.parametrize("chunking", CHUNKINGS)
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_a_document_in_parts_is_one_document(chunking: str, kv_dtype: str) -> None:
    with opened(kv_dtype=kv_dtype, max_quantization_kl=9.0) as boost:
        report = boost.warm([LONG, document(7)], chunking=chunking, progress=False)
        assert (report.num_documents, report.num_warmed) == (2, 2)
        assert boost.is_warm(LONG)
        assert boost.stats().num_warmed > 3
        found = boost.prefill(prompt(boost, document(7), LONG), repair="none").report
        assert [d.num_tokens for d in found.documents] == [len(boost.tokens.encode(t)) for t in (document(7), LONG)]
        assert found.num_document_hits == 2
        assert boost.warm(LONG, chunking=chunking, progress=False).num_already_warm == 1
        assert boost.forget(LONG) == 1
        assert not boost.is_warm(LONG)
        assert boost.is_warm(document(7))


@pytest.mark.parametrize("chunking", CHUNKINGS)
def test_parts_are_read_together(chunking: str) -> None:
    """So the first of all documents, in parts or not, straight behind its header, is what a prefill computes."""
    with opened() as boost:
        boost.warm(LONG, primer=None, chunking="document", progress=False)
        reused = boost.prefill(prompt(boost, LONG))
        cold = boost.prefill(prompt(boost, LONG), mode="baseline")
        assert [d.fidelity for d in reused.report.documents] == [Fidelity.EXACT]
        torch.testing.assert_close(reused.logits, cold.logits, atol=1e-4, rtol=0)


def test_full_repair_of_parts_anywhere_is_a_prefill() -> None:
    with opened() as boost:
        boost.warm([LONG, document(7)], progress=False)
        asked = prompt(boost, document(7), LONG)
        full = boost.prefill(asked, repair="full")
        cold = boost.prefill(asked, mode="baseline")
        torch.testing.assert_close(full.logits, cold.logits, atol=1e-4, rtol=0)


def test_a_lost_part_is_computed_and_the_rest_reused() -> None:
    with opened() as boost:
        boost.warm(LONG, progress=False)
        parts = boost.segments(LONG)
        (second,) = [part for part in parts if part.part == 1]
        boost.engine.store.remove(boost.engine.content_key(second.ids))
        assert not boost.is_warm(LONG)
        report = boost.prefill(LONG, repair="none").report
        assert [d.fidelity for d in report.documents] == [Fidelity.MISS]
        assert len(second.ids) <= report.num_live_tokens <= len(second.ids) + 2  # BOS, and the last token
        assert boost.warm(LONG, progress=False).num_warmed == 1


def test_overlap_reads_each_part_behind_the_end_of_the_one_before() -> None:
    kept = {}
    for overlap in (None, 0, 10, 10_000):
        with opened(overlap_tokens=overlap) as boost:
            boost.warm(LONG, primer=None, progress=False)
            part = boost.segments(LONG)[3]
            assert part.part == 2
            kept[overlap] = boost.engine.store.peek(boost.engine.content_key(part.ids)).packed.values
            assert boost.prefill(LONG).report.num_document_hits == 1
    torch.testing.assert_close(kept[10_000], kept[None], atol=1e-4, rtol=0)
    error = {k: float((kept[k] - kept[None]).norm()) for k in (0, 10)}
    assert error[0] > 1e-2
    assert error[10] > 1e-2
    assert error[0] != error[10]


def test_parts_and_their_cuts_outlive_the_process(tmp_path: Path) -> None:
    with opened(cache_dir=tmp_path) as first:
        first.warm(LONG, progress=False)
        first.warm(document(8), chunking="fixed", progress=False)
    with opened(cache_dir=tmp_path) as second:
        assert second.is_warm(LONG)
        assert second.is_warm(document(8))
        report = second.prefill(f"Read: {LONG}\n\n{document(8)} Now?").report
        assert [d.tier for d in report.documents] == ["disk", "disk"]
        assert report.num_document_hits == 2


def test_a_warmed_system_prompt_is_exact_wherever_it_opens_a_prompt() -> None:
    system = document(9)
    with opened() as boost:
        boost.warm(system, chunking="fixed", progress=False)
        for question in ("One?", "Two?"):
            asked = boost.prompt([], question, system=system)
            reused = boost.prefill(asked)
            cold = boost.prefill(asked, mode="baseline")
            assert [d.fidelity for d in reused.report.documents] == [Fidelity.EXACT]
            assert reused.report.num_repaired_tokens == 0
            torch.testing.assert_close(reused.logits, cold.logits, atol=1e-4, rtol=0)


def test_batches_have_parts_too() -> None:
    with opened() as boost:
        boost.warm([LONG, document(7)], progress=False)
        prompts = [boost.prompt([LONG, document(7)], q) for q in ("What?", "Who is it?")]
        singles = [boost.generate(p, max_new_tokens=4) for p in prompts]
        together = boost.generate_batch(prompts, max_new_tokens=4)
        assert [r.text for r in together] == [r.text for r in singles]
        assert [[d.num_tokens for d in r.report.documents] for r in together] == [
            [d.num_tokens for d in r.report.documents] for r in singles
        ]


@pytest.mark.parametrize(
    ("options", "call"),
    [
        ({"max_document_tokens": 0}, {}),
        ({"overlap_tokens": -1}, {}),
        ({"overlap_tokens": True}, {}),
        ({}, {"chunking": "sentences"}),
    ],
)
def test_wrong_values_are_named(options: dict[str, object], call: dict[str, object]) -> None:
    (name,) = {**options, **call}
    with pytest.raises(OptionError, match=name), opened(**options) as boost:
        boost.warm(LONG, **call)


def test_a_text_made_of_pieces_is_found_as_a_whole_and_in_pieces(tmp_path: Path) -> None:
    """The metadata lines of a node and its text: whoever has read the text alone finds it, and the other way round."""
    text = document(5)
    node = f"file: somewhere.md\npage: 4\n\n{text}"
    chunking = f"at:{len(node) - len(text)}"
    with ExitStack() as stack:
        boost = stack.enter_context(opened(cache_dir=tmp_path))
        boost.warm([node, document(6)], chunking=[chunking, "document"], progress=False)
        reopened = stack.enter_context(opened(cache_dir=tmp_path))
        for again in (boost, reopened):
            assert again.is_warm(node)
            assert again.is_warm(text)
            for asked in (f"Read: {node} Now?", f"Read: {text} Now?", f"Read: page: 5\n\n{text} Now?"):
                report = again.prefill(asked, repair="none").report
                assert [d.fidelity for d in report.documents] == [Fidelity.APPROXIMATE]
            assert again.prefill(f"Read: {node} Now?").report.documents[0].num_tokens > report.documents[0].num_tokens
        boost.forget(node)
        assert not boost.is_warm(text)
    with opened() as boost:
        boost.warm(text, progress=False)
        assert boost.prefill(f"Read: {node} Now?").report.num_document_hits == 1
        assert not boost.is_warm(node)


@pytest.mark.parametrize("chunking", ["at:", "at:x", "at:-3", ["document"], ["document", "nowhere"]])
def test_wrong_chunkings_change_nothing(chunking: object) -> None:
    with opened() as boost:
        with pytest.raises(OptionError, match="chunking"):
            boost.warm([LONG, document(7)], chunking=chunking)
        assert boost.stats().num_entries == 0


def test_a_store_has_a_name_that_lasts_as_long_as_its_contents(tmp_path: Path) -> None:
    with opened() as first, opened() as second:
        names = [first.store_id, second.store_id]
        first.clear()
        names.append(first.store_id)
        assert len(set(names)) == 3
        assert first.store_id == first.store_id
    with opened(cache_dir=tmp_path) as first:
        name = first.store_id
        with opened(cache_dir=tmp_path) as second:
            assert second.store_id == name
    with (
        opened(cache_dir=tmp_path) as third,
        KVBoost(build_model(seed=1), build_tokenizer(), cache_dir=tmp_path) as other,
    ):
        assert third.store_id == name
        assert other.store_id != name
        third.clear()
        assert third.store_id != name


def test_texts_that_share_a_piece_are_all_found_again(tmp_path: Path) -> None:
    """Nodes of one file: the metadata lines they share are one entry, and no node is lost for it."""
    lines = "file: somewhere.md\nauthor: someone with a rather long name\n\n"
    nodes = [lines + document(n) for n in range(3)]
    with opened(cache_dir=tmp_path) as first:
        first.warm(nodes, chunking=[f"at:{len(lines)}"] * 3, progress=False)
        assert sorted(first.texts()) == sorted(nodes)
        assert first.prefill(f"{lines}Something cold.").report.documents == []  # no piece of its own
    with opened(cache_dir=tmp_path) as second:
        assert [second.is_warm(node) for node in nodes] == [True] * 3
        report = second.prefill(f"Read: {nodes[1]} and {nodes[0]} Now?").report
        assert (report.num_document_hits, len(report.documents)) == (2, 2)
        second.forget(nodes[2])
        assert second.prefill(f"Read: {document(2)} Now?").report.documents == []


def test_only_parts_read_together_are_repaired_as_one() -> None:
    """Where each part is read on its own, or behind a little of the last, the first tokens of each want repair."""
    for overlap, whole in ((None, True), (0, False), (10, False)):
        with opened(overlap_tokens=overlap) as boost:
            boost.warm(LONG, primer=None, progress=False)
            num_parts = len([s for s in boost.segments(LONG) if s.document])
            assert num_parts > 2
            repair = BoundaryRepair("start", 2)
            with boost.engine.lock:
                segments = [Segment((7, 8, 9)), *boost.segments(LONG), Segment((7, 8))]
                report = boost.engine.prefill(segments, repair).report
            assert report.num_repaired_tokens == 2 * (1 if whole else num_parts)
