"""KVBoostSynthesizer: whole nodes in order, whatever fits; the rest by the policy that was chosen, never cut.

Thread 16: nodes cut in two (here with each policy; through an index in ``test_llama_index_query.py``).
"""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from conftest import build_model, build_tokenizer, document
from llama_index.core import Settings
from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.llms import MockLLM
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.llms.kvboost import KVBoostLLM, KVBoostSynthesizer, KVBoostWarmTransform

from kvboost_rag import KVBoost, OptionError, Prompt, PromptTooLongError

GIANT = document(50, words=300)


def nodes(*numbers: int, scores: list[float | None] | None = None) -> list[NodeWithScore]:
    given = scores or [1.0 - n / 100 for n in numbers]
    return [
        NodeWithScore(node=TextNode(text=document(n), id_=str(n), metadata={"file": "a.md"}), score=score)
        for n, score in zip(numbers, given, strict=True)
    ]


def text(number: int) -> str:
    return f"file: a.md\n\n{document(number)}"


@pytest.fixture
def llm(boost: KVBoost) -> KVBoostLLM:
    return KVBoostLLM(engine=boost, max_new_tokens=6)


@pytest.fixture
def asked(boost: KVBoost, monkeypatch: pytest.MonkeyPatch) -> list[Prompt]:
    """Every prompt the engine was asked to answer."""
    seen: list[Prompt] = []
    work = boost._work
    monkeypatch.setattr(boost, "_work", lambda prompt, options: (seen.append(prompt), work(prompt, options))[1])
    return seen


def numbers_in(prompt: Prompt) -> list[int]:
    """Which nodes a prompt has, in order; every one of them whole and a document of its own."""
    found = [n for n in range(20) if document(n).split()[0] in prompt.text]
    assert sorted(prompt.documents) == sorted(text(n) for n in found)
    return [int(d.split("word")[1].split("x")[0]) for d in prompt.documents]


# The prompt


async def test_nodes_stand_whole_and_in_order_as_documents(
    boost: KVBoost, llm: KVBoostLLM, asked: list[Prompt]
) -> None:
    synthesizer = KVBoostSynthesizer(llm, system="You are kind.", instruction="Read:\n")
    expected = boost.prompt([text(3), text(1), text(2)], "which?", "You are kind.", "Read:\n")
    answer = boost.generate(expected, max_new_tokens=6).text
    assert answer
    del asked[:]
    response = synthesizer.synthesize("which?", nodes(3, 1, 2))
    assert str(response) == answer
    assert [n.node_id for n in response.source_nodes] == ["3", "1", "2"]
    assert set(response.metadata) == {"1", "2", "3"}
    assert str(await synthesizer.asynthesize(QueryBundle("which?"), nodes(3, 1, 2))) == answer
    chunks = [f" {text(3)}\n", "", text(1), text(2)]
    assert synthesizer.get_response("which?", chunks) == answer
    assert await synthesizer.aget_response("which?", chunks) == answer
    assert asked == [expected] * 4


async def test_streams_come_piece_by_piece(llm: KVBoostLLM) -> None:
    answer = str(KVBoostSynthesizer(llm).synthesize("which?", nodes(0, 1)))
    synthesizer = KVBoostSynthesizer(llm, streaming=True)
    response = synthesizer.synthesize("which?", nodes(0, 1))
    assert isinstance(response, StreamingResponse)
    pieces = [piece for piece in response.response_gen if piece]
    assert "".join(pieces) == answer
    assert len(pieces) > 1
    streamed = await synthesizer.asynthesize("which?", nodes(0, 1))
    assert isinstance(streamed, AsyncStreamingResponse)
    pieces = [piece async for piece in streamed.async_response_gen() if piece]
    assert "".join(pieces) == answer
    assert len(pieces) > 1


async def test_a_stream_left_early_frees_the_engine(boost: KVBoost, llm: KVBoostLLM) -> None:
    synthesizer = KVBoostSynthesizer(llm, streaming=True, max_new_tokens=400)
    stream = synthesizer.get_response("which?", [text(0)])
    next(stream)
    stream.close()
    astream = await synthesizer.aget_response("which?", [text(0)])
    await anext(astream)
    await astream.aclose()
    result = await asyncio.wait_for(asyncio.to_thread(boost.generate, "x", max_new_tokens=1), 60)
    assert result.report.num_new_tokens == 1


def test_options_of_the_llm_the_synthesizer_and_the_call(llm: KVBoostLLM, asked: list[Prompt]) -> None:
    full = KVBoostSynthesizer(llm).get_response("which?", [text(0)])
    short = KVBoostSynthesizer(llm, max_new_tokens=2)
    assert full.startswith(str(short.synthesize("which?", nodes(0))))
    assert len(str(short.synthesize("which?", nodes(0)))) < len(full)
    assert str(short.synthesize("which?", nodes(0), max_tokens=6)) == full
    assert str(KVBoostSynthesizer(llm, stop=full[1:3]).synthesize("which?", nodes(0))) == full[: full.index(full[1:3])]
    with pytest.raises(OptionError, match="tempreature"):
        short.synthesize("which?", nodes(0), tempreature=1)
    llm.system_prompt = "Be brief."
    del asked[:]
    KVBoostSynthesizer(llm).synthesize("which?", nodes(0))
    KVBoostSynthesizer(llm, system="Be long.").synthesize("which?", nodes(0))
    assert ["Be brief." in p.text for p in asked] == [True, False]


def test_the_header_is_what_prompts_begin_with(boost: KVBoost, llm: KVBoostLLM, asked: list[Prompt]) -> None:
    synthesizer = KVBoostSynthesizer(llm, system="You are kind.", instruction="Read:\n")
    synthesizer.get_response("which?", [text(0)])
    assert synthesizer.header.header() == asked[-1].header()
    KVBoostWarmTransform(boost, header=synthesizer.header, first=True)([nodes(0)[0].node])
    synthesizer.get_response("which?", [text(0)])
    assert boost.order([text(1), text(0)], header=asked[-1]) == [1, 0]


def test_without_nodes_nothing_is_asked(llm: KVBoostLLM, asked: list[Prompt]) -> None:
    assert str(KVBoostSynthesizer(llm).synthesize("which?", [])) == "Empty Response"
    streaming = KVBoostSynthesizer(llm, streaming=True, empty_response="Nothing.")
    assert "".join(streaming.synthesize("which?", []).response_gen) == "Nothing."
    assert asked == []
    for overflow in ("drop_lowest", "refine_groups", "error"):
        assert KVBoostSynthesizer(llm, overflow=overflow).get_response("which?", []) != ""
        assert KVBoostSynthesizer(llm, overflow=overflow).get_response("which?", ["", " "]) != ""
    assert [p.documents for p in asked] == [[]] * 6


def test_a_text_that_was_read_without_its_lines_is_found_inside(boost: KVBoost, llm: KVBoostLLM) -> None:
    boost.warm([document(0), document(1)], progress=False)
    boost.warm(document(3), progress=False)
    quoting = f"{document(3)} and more words of a node that was never read"
    response = llm.complete_prompt(KVBoostSynthesizer(llm)._packing("?", [text(0), quoting], {}).prompt([0, 1]))
    documents = response.additional_kwargs["kvboost"]["documents"]
    sizes = [len(boost.tokens.encode(t)) for t in (document(0), quoting)]
    assert [(d["num_tokens"], bool(d["tier"])) for d in documents] == [(sizes[0], True), (sizes[1], False)]


# What is too much


def test_what_fits_is_sent_without_a_warning(llm: KVBoostLLM, asked: list[Prompt]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for overflow in ("drop_lowest", "refine_groups", "error"):
            KVBoostSynthesizer(llm, overflow=overflow).synthesize("which?", nodes(0, 1, 2))
    assert [numbers_in(p) for p in asked] == [[0, 1, 2]] * 3


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_the_lowest_scores_are_dropped(llm: KVBoostLLM, asked: list[Prompt], asynchronous: bool) -> None:
    KVBoostWarmTransform(llm)([n.node for n in nodes(*range(9))])
    synthesizer = KVBoostSynthesizer(llm)

    async def ask(given: list[NodeWithScore], count: int) -> list[str]:
        with pytest.warns(UserWarning, match=rf"^{count} of {len(given)} nodes were left out.* context holds 2048"):
            if asynchronous:
                response = await synthesizer.asynthesize("which?", given)
            else:
                response = synthesizer.synthesize("which?", given)
        sources = [n.node_id for n in response.source_nodes]
        assert [str(n) for n in numbers_in(asked[-1])] == sources  # what was left out is no source
        return sources

    given = nodes(*range(9), scores=[0.5, 0.1, 0.9, 0.2, 0.8, 0.7, 0.0, 0.6, 0.3])
    kept = await ask(given, 3)
    assert kept == ["0", "2", "4", "5", "7", "8"]
    # as many as fit: with one node more it would be too long
    engine, fuller = synthesizer._llm.engine, [text(i) for i in (0, 2, 3, 4, 5, 7, 8)]
    assert engine.count_tokens(engine.prompt(fuller, "which?")) + 6 > engine.context_tokens
    # equal scores: the last ones go; none: they go first
    assert await ask(nodes(*range(9), scores=[0.5] * 9), 3) == list("012345")
    assert await ask(nodes(*range(9), scores=[None, 0.1, None, 0.2, 0.3, 0.4, 0.5, None, 0.6]), 3) == list("134568")
    # a call's options count
    with pytest.warns(UserWarning, match="^5 of 9 nodes"):
        left = synthesizer._fitting("which?", given, {"max_new_tokens": 700})
    assert [n.node_id for n in left] == ["2", "4", "5", "7"]


def test_a_node_too_long_by_itself_goes_before_any_other(llm: KVBoostLLM, asked: list[Prompt]) -> None:
    giant = NodeWithScore(node=TextNode(text=GIANT, id_="giant"), score=1.0)
    synthesizer = KVBoostSynthesizer(llm)
    with pytest.warns(UserWarning, match="^1 of 4 nodes"):
        response = synthesizer.synthesize("which?", [*nodes(0, 1), giant, *nodes(2)])
    assert [n.node_id for n in response.source_nodes] == ["0", "1", "2"]
    with pytest.raises(PromptTooLongError, match="the prompt with 1 of 2 nodes has"):
        synthesizer.synthesize("which?", [giant, giant])
    assert len(asked) == 1


async def test_without_scores_the_last_are_dropped(llm: KVBoostLLM, asked: list[Prompt]) -> None:
    chunks = [text(n) for n in range(9)]
    with pytest.warns(UserWarning, match="^3 of 9 nodes"):
        KVBoostSynthesizer(llm).get_response("which?", chunks)
    with pytest.warns(UserWarning, match="^3 of 9 nodes"):
        await KVBoostSynthesizer(llm).aget_response("which?", chunks)
    assert [numbers_in(p) for p in asked] == [[0, 1, 2, 3, 4, 5]] * 2


@pytest.mark.parametrize("streaming", [False, True])
async def test_groups_of_whole_nodes_refine_the_answer(
    boost: KVBoost, llm: KVBoostLLM, asked: list[Prompt], streaming: bool
) -> None:
    KVBoostWarmTransform(boost)([n.node for n in nodes(*range(9))])
    options: dict[str, Any] = {"overflow": "refine_groups", "refine": "<{question}~{answer}>", "streaming": streaming}
    synthesizer = KVBoostSynthesizer(llm, **options)
    response = synthesizer.synthesize("which {x}?", nodes(*range(9)))
    answer = "".join(response.response_gen) if streaming else str(response)
    groups = [numbers_in(p) for p in asked]
    assert len(groups) == 2
    assert groups[0] + groups[1] == list(range(9))
    assert len(response.source_nodes) == 9
    first = boost.generate(asked[0], max_new_tokens=6).text
    assert asked[1].text.count(f"<which {{x}}?~{first}>") == 1
    assert "~" not in asked[0].text
    assert boost.generate(asked[1], max_new_tokens=6).text == answer
    del asked[:]
    response = await synthesizer.asynthesize("which {x}?", nodes(*range(9)))
    again = "".join([p async for p in response.async_response_gen()]) if streaming else str(response)
    assert again == answer
    assert [numbers_in(p) for p in asked] == groups


def test_a_long_answer_is_shortened_and_no_node(llm: KVBoostLLM, asked: list[Prompt]) -> None:
    """Beside a node of 1677 tokens there is room for a part of it only."""
    long = [document(n, words=150) for n in (10, 11)]
    synthesizer = KVBoostSynthesizer(llm, overflow="refine_groups")
    first = "answer " * 100
    packing = synthesizer._packing("which?", long, {})
    prompt, left = packing.next_group([1], first)
    assert left == []
    assert prompt.documents == [long[1]]
    assert "answer answer" in prompt.text
    assert first not in prompt.text
    assert packing.fits([1], "")
    assert not packing.fits([1], first)
    synthesizer.get_response("which?", long)
    assert [p.documents for p in asked] == [[long[0]], [long[1]]]


def test_groups_are_refused_before_any_work_if_a_node_fits_nowhere(llm: KVBoostLLM, asked: list[Prompt]) -> None:
    synthesizer = KVBoostSynthesizer(llm, overflow="refine_groups")
    with pytest.raises(PromptTooLongError, match="the prompt with 1 of 3 nodes has"):
        synthesizer.get_response("which?", [text(0), text(1), GIANT])
    assert asked == []


@pytest.mark.parametrize("streaming", [False, True])
async def test_an_error_with_the_numbers(llm: KVBoostLLM, asked: list[Prompt], streaming: bool) -> None:
    synthesizer = KVBoostSynthesizer(llm, overflow="error", streaming=streaming)
    expected = llm.engine.count_tokens(llm.engine.prompt([text(n) for n in range(9)], "which?"))
    for _ in range(2):
        with pytest.raises(PromptTooLongError, match=rf"9 of 9 nodes has {expected} tokens and 6 new.* holds 2048"):
            synthesizer.synthesize("which?", nodes(*range(9)))
        with pytest.raises(PromptTooLongError, match=rf"9 of 9 nodes has {expected} tokens"):
            await synthesizer.asynthesize("which?", nodes(*range(9)))
    assert asked == []


def test_a_question_too_long_is_refused_whatever_the_policy(llm: KVBoostLLM) -> None:
    for overflow in ("drop_lowest", "refine_groups", "error"):
        for chunks in ([], [text(0)]):
            with pytest.raises(PromptTooLongError, match=rf"the prompt with {len(chunks)} of {len(chunks)} nodes"):
                KVBoostSynthesizer(llm, overflow=overflow).get_response("why? " * 500, chunks)


def test_a_narrower_context_of_the_llm_counts(boost: KVBoost, asked: list[Prompt]) -> None:
    llm = KVBoostLLM(engine=boost, max_new_tokens=6, context_window=900)
    with pytest.warns(UserWarning, match=r"^2 of 4 nodes .* context holds 900"):
        KVBoostSynthesizer(llm).synthesize("which?", nodes(0, 1, 2, 3))
    assert numbers_in(asked[-1]) == [0, 1]


# As LlamaIndex has it


def test_a_base_model_without_a_template(tokenizer: Any) -> None:
    with KVBoost(build_model(), build_tokenizer(chat_template=None)) as engine:
        KVBoostWarmTransform(engine)([n.node for n in nodes(0, 1)])
        llm = KVBoostLLM(engine=engine, max_new_tokens=4)
        expected = engine.generate(engine.prompt([text(0), text(1)], "which?"), max_new_tokens=4)
        assert str(KVBoostSynthesizer(llm).synthesize("which?", nodes(0, 1))) == expected.text
        assert expected.report.num_document_hits == 2


def test_wrong_options_are_named(llm: KVBoostLLM, boost: KVBoost) -> None:
    with pytest.raises(OptionError, match=r"overflow='cut' is not valid; overflow takes one of 'drop_lowest', 're"):
        KVBoostSynthesizer(llm, overflow="cut")
    with pytest.raises(OptionError, match=r"refine='again\?' is not valid"):
        KVBoostSynthesizer(llm, refine="again?")
    with pytest.raises(OptionError, match="engine="):
        KVBoostSynthesizer(MockLLM())
    with pytest.raises(OptionError, match="llm='KVBoost' is not valid; llm takes a KVBoostLLM"):
        KVBoostSynthesizer(boost)


def test_the_llm_of_the_settings(llm: KVBoostLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Settings, "_llm", llm)
    synthesizer = KVBoostSynthesizer()
    assert synthesizer._llm is llm
    assert synthesizer.get_prompts() == {}
    synthesizer.update_prompts({})


class Seen(BaseEventHandler):
    names: list[str]

    def handle(self, event: Any, **kwargs: Any) -> None:
        self.names.append(event.class_name())


@pytest.fixture
def events() -> Any:
    handler, root = Seen(names=[]), get_dispatcher()
    root.add_event_handler(handler)
    yield handler.names
    root.event_handlers.remove(handler)


async def test_events_are_those_of_other_synthesizers(llm: KVBoostLLM, events: list[str]) -> None:
    debug = LlamaDebugHandler(print_trace_on_end=False)
    synthesizer = KVBoostSynthesizer(llm, callback_manager=CallbackManager([debug]))
    expected = [
        "SynthesizeStartEvent",
        "GetResponseStartEvent",
        "LLMCompletionStartEvent",
        "LLMCompletionEndEvent",
        "GetResponseEndEvent",
        "SynthesizeEndEvent",
    ]
    synthesizer.synthesize("which?", nodes(0))
    assert [name for name in events if name in expected] == expected
    del events[:]
    await synthesizer.asynthesize("which?", nodes(0))
    assert [name for name in events if name in expected] == expected
    assert len(debug.get_event_pairs(CBEventType.SYNTHESIZE)) == 2
    assert len(debug.get_event_pairs(CBEventType.LLM)) == 2


async def test_the_event_loop_neither_counts_nor_answers(
    boost: KVBoost, llm: KVBoostLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set()

    def spy(work: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: (threads.add(threading.current_thread()), work(*args, **kwargs))[1]

    for name in ("count_tokens", "is_warm", "segments", "_work"):
        monkeypatch.setattr(boost, name, spy(getattr(boost, name)))
    for overflow in ("drop_lowest", "refine_groups", "error"):
        for streaming in (False, True):
            synthesizer = KVBoostSynthesizer(llm, overflow=overflow, streaming=streaming)
            response = await synthesizer.asynthesize("which?", nodes(0, 1))
            if streaming:
                assert [p async for p in response.async_response_gen()]
    assert threads
    assert threading.main_thread() not in threads
