"""What results look like: every token of the prompt, in its place, under its source; nothing fetched, nothing lost."""

from __future__ import annotations

import copy
import html
import pickle
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from conftest import build_model, build_tokenizer, document
from rich.console import Console

from kvboost_rag import GenerationResult, KVBoost, OptionError, WarmReport
from kvboost_rag.engine.types import DocumentReport, Fidelity, Report, Source, Trace
from kvboost_rag.show.html import readable
from kvboost_rag.show.picture import Picture
from kvboost_rag.show.reading import ReadDocument
from kvboost_rag.show.strip import NUM_LEVELS, attention_levels, stretches, title_of
from kvboost_rag.show.times import bars, speedup

DOCUMENTS = [document(n) for n in (1, 2, 3)]
VOID = {"meta", "rect", "br"}


@pytest.fixture(scope="module")
def boost() -> Iterator[KVBoost]:
    with KVBoost(build_model(), build_tokenizer(), break_even=False) as boost:
        boost.warm(DOCUMENTS[:2], progress=False)
        boost.generate(boost.prompt(DOCUMENTS[:1], "which?"), max_new_tokens=1)  # keeps the header
        yield boost


@pytest.fixture(scope="module")
def result(boost: KVBoost) -> GenerationResult:
    return boost.generate(boost.prompt(DOCUMENTS[::-1], "why?"), max_new_tokens=4, recompute_ratio=0.2)


class Reader(HTMLParser):
    """Checks that tags close in order, and collects the text of token spans and all attributes."""

    def __init__(self, page: str):
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["span"] and "details" in self.open:
            self.text += data


def printed(thing: object, width: int = 100) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"), highlight=False)  # noqa: SIM115
    console.print(thing)
    return console.export_text()


def of_trace(text: str, sources: list[Source], attention: list[float] | None = None, documents: int = 0) -> Picture:
    """A picture of a prompt whose tokens are characters, the first ``documents`` of them a document."""
    heat = None if attention is None else np.array(attention, dtype=np.float32)
    trace = Trace(np.arange(len(text)), np.array(sources, dtype=np.uint8), heat)
    held = [DocumentReport(documents, 0, Fidelity.APPROXIMATE)] if documents else []
    report = Report(num_prompt_tokens=len(text), documents=held, trace=trace)
    return Picture(report, lambda ids: [text[i] for i in ids])


def test_stretches_are_the_prompt_in_order_and_their_counts_the_report(
    boost: KVBoost, result: GenerationResult
) -> None:
    found = stretches(result.report, result.reads)
    prompt = boost.prompt(DOCUMENTS[::-1], "why?")
    assert "".join(span.text for each in found for span in each.spans) == prompt.text
    assert [each.number for each in found if each.number] == [1, 2, 3]
    at = 0
    for each in found:
        assert each.start == at
        assert sum(len(span.tokens) for span in each.spans) == each.num_tokens
        at += each.num_tokens
    assert at == result.report.num_prompt_tokens
    totals = [sum(each.counts[source] for each in found) for source in Source]
    assert totals[Source.LIVE] == result.report.num_live_tokens
    assert totals[Source.REPAIRED] == result.report.num_repaired_tokens > 0
    assert [each.counts[Source.LIVE] == each.num_tokens for each in found if each.number] == [True, False, False]
    assert found[0].title == "before the documents"
    assert found[-1].title == "question"


def test_a_prompt_without_documents_is_one_stretch(boost: KVBoost) -> None:
    found = stretches(boost.generate("a few words", max_new_tokens=1).report, lambda ids: ["x"] * len(ids))
    assert [each.title for each in found] == ["prompt"]
    assert stretches(Report(), lambda ids: []) == []


def test_the_page_holds_every_token_and_fetches_nothing(
    boost: KVBoost, result: GenerationResult, tmp_path: Path
) -> None:
    path = result.save_html(tmp_path / "strip.html")
    page = path.read_text(encoding="utf-8")
    reader = Reader(page)
    between = [s for s in stretches(result.report, result.reads) if s.title == "between"]
    whole = boost.prompt(DOCUMENTS[::-1], "why?").text
    for each in between:
        whole = whole.replace("".join(span.text for span in each.spans), "", 1)
    assert reader.text.replace("\n", "") == whole.replace("\n", "")
    assert not re.search(r"<script|https?:|@import|url\(|src=", page)
    assert not {name for name, _ in reader.attributes} & {"onclick", "onload", "href"}
    assert page.count("<details") == len(stretches(result.report, result.reads)) - len(between)


def test_text_cannot_break_out_of_the_page() -> None:
    evil = '</span><script>alert("1")</script>&amp;\x00\x1b[31m\u202e'
    picture = of_trace(evil, [Source.LIVE] * len(evil))
    page = picture._repr_html_()
    assert "<script" not in page
    assert html.escape(readable(evil)) in page
    assert "\x00" not in page
    assert "\x1b" not in page
    Reader(page)
    assert "\x1b" not in printed(picture)


def test_long_prompts_fold_and_short_ones_do_not() -> None:
    short, long = (of_trace("x" * length, [Source.LIVE] * length)._repr_html_() for length in (40, 4000))
    assert "<details open" in short
    assert "<details>" in long
    assert "<details open" not in long


def test_a_single_repaired_token_is_wide_enough_to_be_seen() -> None:
    sources = [Source.MOVED] * 4000
    sources[2000] = Source.REPAIRED
    page = of_trace("x" * 4000, sources, documents=4000)._repr_html_()
    (width,) = re.findall(r'<rect class="r" x="2000" width="([\d.]+)"', page)
    assert float(width) == 8


def test_attention_levels_rank_the_tokens_of_documents_only() -> None:
    attention = [9.0, *(float(n) for n in range(100)), 9.0]
    report = of_trace("x" * 102, [Source.MOVED] * 102, attention).report
    report.documents.append(DocumentReport(100, 1, Fidelity.APPROXIMATE))
    levels = attention_levels(report)
    assert levels[0] == levels[-1] == 0
    inside = levels[1:-1]
    assert (np.diff(inside) >= 0).all()
    assert set(inside) == set(range(NUM_LEVELS))
    counts = np.bincount(inside)
    assert counts[0] >= 50
    assert all(counts[1:-2] > counts[2:-1])
    unmeasured = of_trace("xx", [Source.MOVED] * 2, documents=2).report
    assert not attention_levels(unmeasured).any()


def test_bars_are_measured_where_a_full_prefill_was_run(boost: KVBoost, result: GenerationResult) -> None:
    full = boost.generate(boost.prompt(DOCUMENTS[::-1], "why?"), max_new_tokens=1, mode="baseline")
    reuse, other = result.against(full).bars
    assert reuse.seconds == pytest.approx(result.ttft_seconds)
    assert other.seconds == full.ttft_seconds
    assert other.measured
    assert speedup([reuse, other]) == f"{full.ttft_seconds / result.ttft_seconds:.1f} times"
    expected = Report(ttft_seconds=1.0, full_prefill_seconds=4.0, seconds={"lookup": 0.25})
    assert [bar.measured for bar in bars(expected)] == [True, False]
    assert bars(expected)[1].label == "about 4.00 s (expected)"
    assert len(bars(Report(ttft_seconds=1.0))) == 1
    assert bars(Report()) == []
    assert len(full.against(None).bars) == 1


def test_another_prompts_baseline_is_refused(boost: KVBoost, result: GenerationResult) -> None:
    with pytest.raises(OptionError, match="mode='baseline' for the same prompt"):
        result.against(result)
    other = boost.generate("something else", max_new_tokens=1, mode="baseline")
    with pytest.raises(OptionError, match="full="):
        result.save_html("never.html", full=other)
    assert not Path("never.html").exists()


@pytest.mark.parametrize("width", [40, 80, 160])
def test_the_terminal_shows_counts_documents_and_times(result: GenerationResult, width: int) -> None:
    text = printed(result, width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    report = result.report
    assert f"{report.num_prompt_tokens:,} prompt tokens" in lines[0]
    strip = next(line for line in lines if "▓" in line and "░" in line)
    assert len(strip) == min(width, 100, report.num_prompt_tokens)
    assert f"reused after moving {report.num_approximate_tokens:,}" in " ".join(text.split())
    assert "TTFT, reuse" in text
    if width >= 80:
        assert all(name in text for name in ("tokens", "exact", "moved", "repaired", "live", "from", "memory"))


def test_without_colours_the_glyphs_tell_the_sources_apart() -> None:
    text = "e" * 20 + "m" * 20 + "l" * 20
    sources = [Source.EXACT] * 20 + [Source.MOVED] * 20 + [Source.LIVE] * 20
    assert "█" * 20 + "▓" * 20 + "░" * 20 in printed(of_trace(text, sources, documents=60), 60)


def test_results_survive_pickling_and_copies_with_tokens_as_numbers(result: GenerationResult) -> None:
    for other in (pickle.loads(pickle.dumps(result)), copy.deepcopy(result)):
        assert other == result
        assert other.report.trace is not None
        Reader(other._repr_html_())
        assert f"{other.report.trace.ids[0]} " in other._repr_html_()


def test_what_was_asked_inside_is_recorded_once(boost: KVBoost) -> None:
    prompts = [boost.prompt(DOCUMENTS[:2], question) for question in ("one?", "two?")]
    with boost.record() as results, boost.record() as inner:
        first = boost.generate(prompts[0], max_new_tokens=2)
        batch = boost.generate_batch(prompts, max_new_tokens=2)
        modes = boost.generate_batch(prompts, max_new_tokens=2, mode="prefix")  # one after the other
        list(boost.stream(prompts[1], max_new_tokens=2))
    boost.generate(prompts[0], max_new_tokens=2)
    assert [id(each) for each in results] == [id(each) for each in inner]
    assert results[:5] == [first, *batch, *modes]
    assert len(results) == 6


def test_a_warm_report_lists_its_documents() -> None:
    with KVBoost(build_model(), build_tokenizer()) as boost:
        boost.warm(DOCUMENTS[:1], progress=False)
        report = boost.warm([*DOCUMENTS, ""], progress=False)
    assert [d.outcome for d in report.documents] == ["already warm", "read", "read"]
    assert sum(d.num_tokens for d in report.documents if d.outcome == "read") == report.num_tokens
    assert title_of(DOCUMENTS[0]) in report.documents[1].behind
    page = report._repr_html_()
    Reader(page)
    assert html.escape(title_of(DOCUMENTS[2])) in page
    assert "already warm" in printed(report)


def test_many_documents_fold() -> None:
    report = WarmReport(documents=[ReadDocument(f"text {n}", n, "read") for n in range(40)])
    page = report._repr_html_()
    assert "28 more" in page
    Reader(page)
    assert "... and 28 more" in printed(report)
    assert "of 0 documents" in printed(WarmReport())


@pytest.mark.parametrize(
    ("text", "title"), [("# A title\n\nmore", "A title"), ("\n\n##\nx", "x"), ("", ""), ("y" * 90, "y" * 47 + "…")]
)
def test_titles_are_first_lines(text: str, title: str) -> None:
    assert title_of(text) == title
