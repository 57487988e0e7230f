"""LlamaIndex's KVBoostLLM: every way to ask gives one answer, is observed, can be left, and takes what others take.

Numbers in comments are those of the reports in the ecosystem notes, section 3.
"""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from itertools import pairwise
from typing import Any

import llama_index.core
import pytest
import torch
from conftest import build_model, build_tokenizer, document
from indexes import Words
from llama_index.core import Document, PromptTemplate, Settings, VectorStoreIndex
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, MessageRole, TextBlock
from llama_index.core.callbacks import CallbackManager, LlamaDebugHandler, TokenCountingHandler
from llama_index.core.callbacks.schema import EventPayload
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.program import FunctionCallingProgram
from llama_index.core.prompts import ChatPromptTemplate
from llama_index.core.query_engine import RouterQueryEngine, SubQuestionQueryEngine
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.selectors import LLMSingleSelector
from llama_index.core.tools import FunctionTool, QueryEngineTool
from llama_index.llms.kvboost import KVBoostLLM, KVBoostWarmTransform
from pydantic import BaseModel

from kvboost_rag import KVBoost, OptionError, PromptTooLongError
from kvboost_rag.engine.repair import QueryRepair
from kvboost_rag.engine.types import Report, total_tokens
from kvboost_rag.prompt import Piece
from kvboost_rag.report import GenerationResult

PATIENCE = 60  # seconds after which a test gives up waiting for another thread
HELLO = [ChatMessage("hello there")]
EIGHT = ("complete", "stream_complete", "acomplete", "astream_complete", "chat", "stream_chat", "achat", "astream_chat")
FOUR = ("complete_prompt", "stream_complete_prompt", "acomplete_prompt", "astream_complete_prompt")
STREAMS = ("stream_complete", "stream_chat", "stream_complete_prompt")
ASYNC_STREAMS = ("astream_complete", "astream_chat", "astream_complete_prompt")
ASYNC = ("acomplete", "achat", "acomplete_prompt", *ASYNC_STREAMS)


@pytest.fixture(scope="module")
def endless() -> Iterator[KVBoost]:
    """A model without an end token: its answers have the length they were asked for."""
    with KVBoost(build_model(eos_token_id=None), build_tokenizer(), max_cache_bytes="64MB") as engine:
        yield engine


@pytest.fixture
def llm(endless: KVBoost) -> KVBoostLLM:
    return KVBoostLLM(engine=endless, max_new_tokens=8)


@pytest.fixture
def asked(endless: KVBoost, monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], Any]]:
    """(ids, options) of every prompt the engine decodes behind."""
    seen: list[tuple[tuple[int, ...], Any]] = []
    generate = endless.engine.generate

    def watched(prefilled: Any, options: Any, on_tokens: Any) -> str:
        seen.append((tuple(prefilled.ids.tolist()), options))
        return generate(prefilled, options, on_tokens)

    monkeypatch.setattr(endless.engine, "generate", watched)
    return seen


@pytest.fixture
def reuse(endless: KVBoost, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, str]]:
    """(repair strategy, mode) of every prompt the engine runs."""
    seen: list[tuple[Any, str]] = []
    prefill = endless.engine.prefill

    def watched(segments: Any, repair: Any, mode: str, *rest: Any) -> Any:
        seen.append((repair, mode))
        return prefill(segments, repair, mode, *rest)

    monkeypatch.setattr(endless.engine, "prefill", watched)
    return seen


@pytest.fixture
def events() -> Iterator[list[Any]]:
    """What LlamaIndex's instrumentation tells of LLMs."""
    seen: list[Any] = []

    class Listener(BaseEventHandler):
        def handle(self, event: Any, **kwargs: Any) -> None:
            seen.append(event)

    root, listener = get_dispatcher(), Listener()
    root.add_event_handler(listener)
    yield seen
    root.event_handlers.remove(listener)


@pytest.fixture
def index(llm: KVBoostLLM) -> VectorStoreIndex:
    Settings.tokenizer = llm.tokenizer_fn
    documents = [Document(text=document(number, words=12)) for number in range(4)]
    return VectorStoreIndex.from_documents(
        documents, transformations=[KVBoostWarmTransform(llm.engine)], embed_model=Words()
    )


def streams() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kvboost-stream"]


def argument(llm: KVBoostLLM, way: str) -> Any:
    """The same question for each method."""
    if way.endswith("_prompt"):
        return llm.engine.chat_format.render([{"role": "user", "content": "hello there"}])
    return HELLO if "chat" in way else "hello there"


async def responses(llm: KVBoostLLM, way: str, asked: Any = None, **options: Any) -> list[Any]:
    """All responses of a method, one if it does not stream."""
    answer = getattr(llm, way)(argument(llm, way) if asked is None else asked, **options)
    if way.startswith("a"):
        answer = await answer
    if isinstance(answer, AsyncIterator):
        return [response async for response in answer]
    return list(answer) if "stream" in way else [answer]


def text_of(response: Any) -> str:
    return response.message.content if hasattr(response, "message") else response.text


def report_of(response: Any) -> dict[str, Any]:
    return (response.message if hasattr(response, "message") else response).additional_kwargs["kvboost"]


# One answer


def test_it_is_an_llm(llm: KVBoostLLM) -> None:
    assert BaseLLM.__name__ in [base.__name__ for base in KVBoostLLM.__mro__]
    assert llm.class_name() == llm.to_dict()["class_name"] == "KVBoostLLM"
    own = {name for name in (*EIGHT, *FOUR, "metadata") if name in vars(KVBoostLLM)}
    assert own == {*EIGHT, *FOUR, "metadata"}


async def test_every_way_to_ask_gives_the_same_answer_to_the_same_ids(
    llm: KVBoostLLM, asked: list[tuple[tuple[int, ...], Any]]
) -> None:
    found = {way: await responses(llm, way) for way in (*EIGHT, *FOUR)}
    assert len({ids for ids, _ in asked}) == 1
    assert len(asked) == 12
    assert len({text_of(answers[-1]) for answers in found.values()}) == 1
    assert text_of(found["complete"][-1])
    for way, answers in found.items():
        usage = answers[-1].raw["usage"]
        assert usage["prompt_tokens"] == len(asked[0][0]), way
        assert usage["completion_tokens"] == 8
        assert usage["total_tokens"] == usage["prompt_tokens"] + 8
        assert report_of(answers[-1])["num_prompt_tokens"] == usage["prompt_tokens"]
        if "stream" in way:
            assert len(answers) > 2
            assert "".join(answer.delta for answer in answers) == text_of(answers[-1])
            assert all(text_of(b) == text_of(a) + b.delta for a, b in pairwise(answers))
            assert [answer.raw is None for answer in answers] == [True] * (len(answers) - 1) + [False]


async def test_wrappers_of_the_prompt_hold_for_every_way(
    endless: KVBoost, asked: list[tuple[tuple[int, ...], Any]]
) -> None:
    llm = KVBoostLLM(
        engine=endless,
        max_new_tokens=2,
        completion_to_prompt=lambda prompt: f"Q: {prompt}\nA:",
        messages_to_prompt=lambda messages: "".join(f"Q: {message.content}\nA:" for message in messages),
    )
    for way in EIGHT:
        await responses(llm, way)
    opening = endless.tokens.opening_ids
    assert {ids for ids, _ in asked} == {(*opening, *endless.tokens.encode("Q: hello there\nA:"))}
    asked.clear()
    await responses(llm, "complete", formatted=True)
    await responses(llm, "stream_complete", formatted=True)
    await responses(llm, "acomplete", formatted=True)
    assert {ids for ids, _ in asked} == {(*opening, *endless.tokens.encode("hello there"))}


def test_a_model_that_is_no_chat_model_completes_strings_as_they_stand(
    endless: KVBoost, asked: list[tuple[tuple[int, ...], Any]]
) -> None:
    llm = KVBoostLLM(engine=endless, max_new_tokens=2, is_chat_model=False)
    assert not llm.metadata.is_chat_model
    llm.complete("hello there")
    llm.predict(PromptTemplate("hello {who}"), who="there")
    raw = (*endless.tokens.opening_ids, *endless.tokens.encode("hello there"))
    assert [ids for ids, _ in asked] == [raw, raw]
    # a chat template, for what LlamaIndex turns into a string itself
    asked.clear()
    llm.predict(ChatPromptTemplate([ChatMessage("hello {who}")]), who="there")
    llm.chat(HELLO)
    templated, chatted = (endless.tokens.decode(ids) for ids, _ in asked)
    assert templated == chatted
    with KVBoost(build_model(), build_tokenizer(chat_template=None)) as base:
        assert not KVBoostLLM(engine=base).metadata.is_chat_model
        assert KVBoostLLM(engine=base, max_new_tokens=2).chat(HELLO).raw["usage"]["completion_tokens"] >= 1
        assert KVBoostLLM(engine=base, is_chat_model=True).metadata.is_chat_model


def test_prompts_of_the_engine_keep_their_documents(llm: KVBoostLLM) -> None:
    texts = [document(70), document(71)]
    llm.engine.warm(texts)
    prompt = llm.engine.prompt(texts, "which?")
    report = report_of(llm.complete_prompt(prompt, auto_detect=False))
    assert report["num_document_hits"] == 2
    assert report["num_prompt_tokens"] == llm.engine.count_tokens(prompt)
    messages = [{"role": "user", "content": [Piece(texts[1], "document"), Piece(" which?")]}]
    response = llm.complete_prompt(messages, auto_detect=False, max_new_tokens=3)
    assert report_of(response)["num_document_hits"] == 1
    usage = response.raw["usage"]
    assert usage["completion_tokens"] == 3
    reused = sum(report_of(response)[name] for name in ("num_exact_tokens", "num_approximate_tokens"))
    assert usage["cached_tokens"] == reused > 20
    # and in plain text they are found
    assert report_of(llm.complete(f"{texts[0]}\n\nwhich?"))["num_document_hits"] == 1
    assert llm.complete(f"{texts[0]}\n\nwhich?", mode="baseline").raw["usage"]["cached_tokens"] == 0


def test_messages_of_all_kinds_of_text_and_of_nothing_else(
    llm: KVBoostLLM, asked: list[tuple[tuple[int, ...], Any]]
) -> None:
    llm.chat(
        [
            ChatMessage("be brief", role=MessageRole.DEVELOPER),
            ChatMessage(blocks=[TextBlock(text="a"), TextBlock(text="b")]),
        ]
    )
    llm.chat([ChatMessage("be brief", role="system"), ChatMessage("a\nb")])
    llm.chat([ChatMessage("x"), ChatMessage("y", role=MessageRole.CHATBOT), ChatMessage("z")])
    llm.chat([ChatMessage("x"), ChatMessage("y", role=MessageRole.ASSISTANT), ChatMessage("z")])
    ids = [ids for ids, _ in asked]
    assert ids[0] == ids[1] != ids[2] == ids[3]
    picture = [ChatMessage(blocks=[TextBlock(text="what is it?"), ImageBlock(url="http://localhost/none.png")])]
    for ask in (llm.chat, llm.stream_chat, KVBoostLLM(engine=llm.engine, messages_to_prompt=str).chat):
        with pytest.raises(OptionError, match="holds a ImageBlock"):
            ask(picture)
    with pytest.raises(OptionError, match="message role='tool'"):
        llm.chat([ChatMessage("42", role=MessageRole.TOOL)])
    with pytest.raises(TypeError, match="prompt is a string, not list"):
        llm.complete(HELLO)  # type: ignore[arg-type]


# Events


def names_of(events: list[Any]) -> list[str]:
    told = [type(event).__name__ for event in events]
    return [name for name in told if name.startswith(("LLMChat", "LLMCompletion", "Exception"))]


@pytest.mark.parametrize("way", [*EIGHT, *FOUR])
async def test_events_come_in_order(llm: KVBoostLLM, events: list[Any], way: str) -> None:
    debug = LlamaDebugHandler(print_trace_on_end=False)
    llm.callback_manager = CallbackManager([debug])
    answers = await responses(llm, way)
    kind = "LLMChat" if "chat" in way else "LLMCompletion"
    progress = [f"{kind}InProgressEvent"] * len(answers) if "stream" in way else []
    assert names_of(events) == [f"{kind}StartEvent", *progress, f"{kind}EndEvent"]
    start, end = events[0], events[-1]
    told = [event for event in events if type(event).__name__.startswith(kind)]
    assert told[-1].response.raw == answers[-1].raw
    assert start.span_id or told[0].span_id
    assert end.span_id
    if kind == "LLMCompletion":
        prompt = argument(llm, way)
        assert {event.prompt for event in told} == {prompt if isinstance(prompt, str) else prompt.text}
    ((begun, ended),) = debug.get_llm_inputs_outputs()
    assert begun.payload[EventPayload.SERIALIZED] == llm.to_payload()
    assert EventPayload.EXCEPTION not in ended.payload


async def test_token_counts_are_the_engines(llm: KVBoostLLM) -> None:
    counter = TokenCountingHandler(tokenizer=lambda text: pytest.fail("counted instead of asked"))
    llm.callback_manager = CallbackManager([counter])
    answers = [(await responses(llm, way))[-1] for way in (*EIGHT, *FOUR)]
    assert len(counter.llm_token_counts) == 12
    assert counter.prompt_llm_token_count == sum(answer.raw["usage"]["prompt_tokens"] for answer in answers) > 0
    assert counter.completion_llm_token_count == 12 * 8


@pytest.mark.parametrize("way", [*EIGHT, *FOUR])
async def test_an_error_in_the_engine_reaches_the_reader(
    llm: KVBoostLLM, events: list[Any], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    debug = LlamaDebugHandler(print_trace_on_end=False)
    llm.callback_manager = CallbackManager([debug])

    def failing(prefilled: Any, options: Any, on_tokens: Any) -> str:
        on_tokens([70])
        raise RuntimeError("out of tokens")

    monkeypatch.setattr(llm.engine.engine, "generate", failing)
    with pytest.raises(RuntimeError, match="out of tokens"):
        await responses(llm, way)
    assert not streams()
    ((_, ended),) = debug.get_llm_inputs_outputs()
    assert str(ended.payload[EventPayload.EXCEPTION]) == "out of tokens"
    if "stream" in way:
        assert names_of(events)[-1] == "ExceptionEvent"
    monkeypatch.undo()
    assert text_of((await responses(llm, way))[-1])  # and the engine serves the next


# Leaving early


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("how", ["close", "drop", "throw"])
@pytest.mark.parametrize("way", STREAMS)
def test_leaving_a_stream_frees_the_engine(llm: KVBoostLLM, asked: list[Any], way: str, how: str, keep: bool) -> None:
    """``keep``: a handler that keeps the exception keeps, with its traceback, all that was running."""
    debug = LlamaDebugHandler(print_trace_on_end=False)
    llm.callback_manager = CallbackManager([debug] if keep else [])
    stream = getattr(llm, way)(argument(llm, way), max_new_tokens=1500)
    assert next(stream).delta is not None
    assert streams()
    if how == "close":
        stream.close()
    elif how == "throw":
        with pytest.raises(KeyError):
            stream.throw(KeyError("reader"))
    else:
        del stream
    assert not streams()
    if keep:
        ((_, ended),) = debug.get_llm_inputs_outputs()
        assert EventPayload.EXCEPTION in ended.payload
    assert llm.complete("hello").raw["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("how", ["close", "cancel"])
@pytest.mark.parametrize("way", ASYNC_STREAMS)
async def test_leaving_an_async_stream_frees_the_engine(llm: KVBoostLLM, way: str, how: str) -> None:
    debug = LlamaDebugHandler(print_trace_on_end=False)
    llm.callback_manager = CallbackManager([debug])
    first = asyncio.Event()

    async def read(leave: bool) -> None:
        async with aclosing(await getattr(llm, way)(argument(llm, way), max_new_tokens=1500)) as stream:
            async for _ in stream:
                first.set()
                if leave:
                    break

    reading = asyncio.create_task(read(how == "close"))
    await first.wait()
    if how == "cancel":
        assert streams()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
    else:
        await reading
    assert not streams()
    ((_, ended),) = debug.get_llm_inputs_outputs()
    assert EventPayload.EXCEPTION in ended.payload


@pytest.mark.parametrize("way", ["acomplete", "achat", "acomplete_prompt"])
async def test_cancelling_a_call_frees_the_engine(llm: KVBoostLLM, asked: list[Any], way: str) -> None:
    reading = asyncio.create_task(responses(llm, way, max_new_tokens=1500))
    while not asked:
        await asyncio.sleep(0.001)
    assert streams()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert not streams()


# The event loop


@pytest.mark.parametrize("options", [{}, {"context_window": 2000}], ids=["whole window", "narrow window"])
@pytest.mark.parametrize("way", [*ASYNC, "aquery", "apredict"])
async def test_the_event_loop_is_never_blocked(
    endless: KVBoost, index: VectorStoreIndex, monkeypatch: pytest.MonkeyPatch, way: str, options: dict[str, Any]
) -> None:
    """The engine waits for the loop to have done something else: a blocked one never would. (13)"""
    working, ticked, waited = threading.Event(), threading.Event(), []
    segments = endless._segmenter.segments

    def waiting(*args: Any) -> Any:
        working.set()
        waited.append(ticked.wait(PATIENCE))
        return segments(*args)

    monkeypatch.setattr(endless._segmenter, "segments", waiting)
    llm = KVBoostLLM(engine=endless, max_new_tokens=2, **options)

    async def tick() -> None:
        while not working.is_set():
            await asyncio.sleep(0.001)
        ticked.set()

    async def ask() -> None:
        if way == "aquery":
            assert str(await index.as_query_engine(llm=llm, similarity_top_k=1).aquery("word1x1?"))
        elif way == "apredict":
            assert await llm.apredict(PromptTemplate("hello"))
        else:
            assert await responses(llm, way)

    await asyncio.gather(tick(), ask())
    assert waited
    assert all(waited)


# Options


async def test_options_of_fields_calls_and_generate_kwargs(endless: KVBoost, asked: list[tuple[Any, Any]]) -> None:
    given = {"max_new_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 1, "repetition_penalty": 1.1}
    as_fields = KVBoostLLM(engine=endless, **given)
    as_kwargs = KVBoostLLM(engine=endless, generate_kwargs=given)
    bare = KVBoostLLM(engine=endless)
    assert as_fields.to_dict() == as_kwargs.to_dict() != bare.to_dict()
    texts = {text_of((await responses(as_fields, way))[-1]) for way in (*EIGHT, *FOUR)}
    texts |= {text_of((await responses(bare, way, **given))[-1]) for way in (*EIGHT, *FOUR)}
    texts.add(as_kwargs.complete("hello there").text)
    assert len(texts) == 1
    for _, options in asked:
        assert {name: getattr(options, name) for name in given} == given
    asked.clear()
    as_fields.complete("hello", max_tokens=2, temperature=None, top_k=7)
    assert (asked[0][1].max_new_tokens, asked[0][1].temperature, asked[0][1].top_k) == (2, 0.5, 7)


@pytest.mark.parametrize(
    ("fields", "call", "temperature"),
    [
        ({}, {}, 0.0),
        ({"temperature": None}, {}, 0.0),
        ({}, {"do_sample": True}, 1.0),
        ({"temperature": 0.3}, {"do_sample": True}, 0.3),
        ({"temperature": 0.3}, {"do_sample": False}, 0.0),
        ({"temperature": 0.3}, {"temperature": 0.6, "do_sample": True}, 0.6),
        ({"generate_kwargs": {"do_sample": True}}, {}, 1.0),
        ({"generate_kwargs": {"temperature": 0.7, "do_sample": False}}, {}, 0.0),
        ({"temperature": 0.7, "generate_kwargs": {"temperature": 0.7, "do_sample": True}}, {}, 0.7),
        ({"do_sample": True}, {"temperature": 0.0}, 0.0),
    ],
)
def test_sampling_is_on_when_someone_says_so(
    endless: KVBoost, asked: list[tuple[Any, Any]], fields: dict[str, Any], call: dict[str, Any], temperature: float
) -> None:
    KVBoostLLM(engine=endless, max_new_tokens=1, **fields).complete("hello", **call)
    assert asked[-1][1].temperature == temperature


def test_reuse_options_belong_together(endless: KVBoost, reuse: list[tuple[Any, str]]) -> None:
    def used(fields: dict[str, Any], **call: Any) -> tuple[Any, str]:
        KVBoostLLM(engine=endless, max_new_tokens=1, **fields).complete("hello", **call)
        return reuse[-1]

    assert used({"recompute_ratio": 0.5}) == (QueryRepair(0.5), "reuse")
    assert used({"recompute_ratio": 0.5}, recompute_ratio=0.25)[0] == QueryRepair(0.25)
    # a ratio belongs to the strategy it was given with
    assert used({"repair": "deviation", "recompute_ratio": 0.5}, repair="query")[0] == QueryRepair()
    assert used({"repair": "none"}, quality="high")[0] == QueryRepair(0.15)
    assert used({"quality": "high"}, recompute_ratio=0.3)[0] == QueryRepair(0.3)
    assert used({"quality": 0.2})[0] == QueryRepair(0.2)
    assert used({"mode": "prefix"})[1] == "prefix"
    assert used({"mode": "prefix"}, mode="baseline")[1] == "baseline"
    assert used({"repair": QueryRepair(0.4)})[0] == QueryRepair(0.4)
    llm = KVBoostLLM(engine=endless, max_new_tokens=1)
    text = document(75)
    endless.warm([text])
    assert report_of(llm.complete(f"{text} ?"))["num_document_hits"] == 1
    assert report_of(llm.complete(f"{text} ?", auto_detect=False))["num_document_hits"] == 0
    off = KVBoostLLM(engine=endless, max_new_tokens=1, auto_detect=False)
    assert report_of(off.complete(f"{text} ?"))["num_document_hits"] == 0
    with pytest.raises(OptionError, match="quality='high' picks the repair itself"):
        llm.complete("hello", quality="high", repair="none")


def test_fields_may_be_set_later_and_tools_pass_their_own(llm: KVBoostLLM, asked: list[tuple[Any, Any]]) -> None:
    """What ragas does: it sets the temperature, and passes n, temperature, stop and callbacks to complete. (13)"""
    llm.temperature = 0.01
    llm.complete("hello", seed=1)
    assert asked[-1][1].temperature == 0.01
    with pytest.warns(UserWarning) as caught:
        llm.complete("hello", n=1, temperature=0.2, stop=None, callbacks=None)
    assert asked[-1][1].temperature == 0.2
    assert sorted(str(warning.message).split("'")[1] for warning in caught) == ["callbacks", "n"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm.complete("hello", n=1, callbacks=[])  # once is enough
    for _ in range(2):
        with pytest.raises(OptionError, match="did you mean 'temperature'"):
            llm.complete("hello", temprature=0.5)
    llm.temperature = -1.0
    with pytest.raises(OptionError, match=r"temperature=-1\.0"):
        llm.complete("hello")


def test_stop_strings_of_both_levels(endless: KVBoost) -> None:
    free = KVBoostLLM(engine=endless, max_new_tokens=40).complete("hello").text
    own, call = free[9:11], free[4:6]
    assert own
    assert call
    llm = KVBoostLLM(engine=endless, max_new_tokens=40, stop=own)
    assert llm.complete("hello").text == free[: free.index(own)]
    both = min(free.index(own), free.index(call))
    for given in (call, [call], (call, own)):
        *_, last = llm.stream_complete("hello", stop=given)
        assert last.text == llm.complete("hello", stop=given).text == free[:both]
        assert last.raw["finish_reason"] == "stop"
    with pytest.raises(OptionError, match="stop=7"):
        llm.complete("hello", stop=7)


def test_stopping_ids_end_the_text(endless: KVBoost, boost: KVBoost) -> None:
    free = KVBoostLLM(engine=endless, max_new_tokens=40).complete("hello").text
    (letter, *_) = [char for char in free if char.isascii() and char.isprintable()]
    (token,) = endless.tokens.encode(letter)
    llm = KVBoostLLM(engine=endless, max_new_tokens=40, stopping_ids=[token])
    assert llm.complete("hello").text == free[: free.index(letter)]
    assert llm.complete("hello", stop=free[:1]).text == ""
    KVBoostLLM(engine=boost, stopping_ids=[2, 4])  # special tokens have no text
    with pytest.raises(OptionError, match=r"stop_ids=\[2, -1\]"):
        KVBoostLLM(engine=boost, stopping_ids=[2, -1])


async def test_a_smaller_context_window_is_kept(endless: KVBoost, asked: list[Any]) -> None:
    prompt = "x " * 60
    needed = len(endless.tokens.encode(prompt)) + 8  # the template's own tokens do not count
    fits = KVBoostLLM(engine=endless, max_new_tokens=8, context_window=needed)
    assert fits.metadata.context_window == needed
    tight = KVBoostLLM(engine=endless, max_new_tokens=8, context_window=needed - 1)
    for way in (*EIGHT, *FOUR):
        question: Any = [ChatMessage(prompt)] if "chat" in way else prompt
        if way.endswith("_prompt"):
            question = [{"role": "user", "content": prompt}]
        assert (await responses(fits, way, question))[-1].raw["usage"]["total_tokens"] > needed
        asked.clear()
        with pytest.raises(PromptTooLongError, match=rf"context_window={needed - 1} .* 1 too many"):
            await responses(tight, way, question)
    assert not asked  # before any work
    assert tight.complete(prompt, max_new_tokens=7).text
    with pytest.raises(PromptTooLongError, match="2 too many"):  # with the BOS
        tight.complete(prompt[:-1] + ".", formatted=True, max_new_tokens=8)
    with pytest.raises(OptionError, match="max_new_tokens='8'"):
        tight.complete(prompt, max_new_tokens="8")
    with pytest.raises(OptionError, match=r"context_window=4096 is not valid; .* 2048"):
        KVBoostLLM(engine=endless, context_window=4096)
    with pytest.raises(PromptTooLongError, match="context holds 2048"):
        KVBoostLLM(engine=endless).complete("x" * 3000)


# Building one


def test_wrong_options_are_refused_before_a_model_is_loaded(endless: KVBoost) -> None:
    for options, match in (
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"repair": "magic"}, "repair='magic'"),
        ({"quality": "high", "repair": "none"}, "quality='high'"),
        ({"mode": "fast"}, "mode='fast'"),
        ({"stop": [""]}, "stop="),
        ({"top_p": 2.0}, "top_p=2.0"),
        ({"max_tokens": 3, "max_new_tokens": 4}, "max_tokens=3 and max_new_tokens=4"),
        ({"temperature": 0.1, "generate_kwargs": {"temperature": 0.2}}, "give one of them"),
        ({"generate_kwargs": {"temprature": 0.2}}, "did you mean 'temperature'"),
        ({"generate_kwargs": {"do_sample": 1}}, "do_sample=1"),
        ({"temprature": 0.2}, "did you mean 'temperature'"),
    ):
        with pytest.raises(ValueError, match=match):
            KVBoostLLM(model_name="/nowhere", **options)
    with pytest.raises(OSError, match="/nowhere"):
        KVBoostLLM(model_name="/nowhere")
    with pytest.raises(OptionError, match="needs engine="):
        KVBoostLLM()
    with pytest.raises(OptionError, match="model='some/name' is not valid"):
        KVBoostLLM(model="some/name", tokenizer=endless.tokenizer)
    with pytest.raises(OptionError, match="leave out tokenizer, device_map"):
        KVBoostLLM(engine=endless, tokenizer=endless.tokenizer, device_map="auto")
    with pytest.raises(OptionError, match="engine='gpt'"):
        KVBoostLLM(engine="gpt")
    with pytest.warns(UserWarning, match="ignores the unknown option 'tokenizer_outputs_to_remove'"):
        KVBoostLLM(engine=endless, tokenizer_outputs_to_remove=[])
    with pytest.warns(UserWarning, match="generate_kwargs of KVBoostLLM ignores the unknown option 'num_beams'"):
        KVBoostLLM(engine=endless, generate_kwargs={"num_beams": 2})


def test_the_names_hugging_face_users_know(tmp_path: Any) -> None:
    model, tokenizer = build_model(), build_tokenizer()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    other = build_tokenizer(chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}")
    model.config.save_pretrained(tmp_path / "other")
    other.save_pretrained(tmp_path / "other")
    common: dict[str, Any] = {
        "context_window": 512,
        "max_new_tokens": 4,
        "system_prompt": "Be brief.",
        "is_chat_model": True,
    }
    named = KVBoostLLM(
        model_name=str(tmp_path / "model"),
        tokenizer_name=str(tmp_path / "other"),
        device_map="cpu",
        model_kwargs={"torch_dtype": torch.float64, "local_files_only": True},
        tokenizer_kwargs={"local_files_only": True},
        generate_kwargs={"temperature": 0.7, "do_sample": False},
        engine_kwargs={"max_cache_bytes": "32MB"},
        callback_manager=CallbackManager(),
        stopping_ids=[2],
        **common,
    )
    with named.engine as engine:
        assert engine.engine.model.module.dtype == torch.float64
        assert engine.chat_format.render([{"role": "user", "content": "x"}]).text == "x"
        assert engine.engine.config.max_cache_bytes == 32_000_000
        assert (named.temperature, named.model_name) == (0.0, str(tmp_path / "model"))
        assert named.chat(HELLO).raw["usage"]["completion_tokens"] >= 1
    given = KVBoostLLM(model=build_model(), tokenizer=tokenizer, engine_kwargs={"repair": "none"}, **common)
    with given.engine as engine:
        assert (given.model_name, given.metadata.context_window, given.metadata.num_output) == ("llama", 512, 4)
        assert engine.tokenizer is tokenizer
        assert (
            given.predict(PromptTemplate("hello"))
            == given.chat([ChatMessage("Be brief.", role="system"), ChatMessage("hello")]).message.content
        )
    with pytest.raises(OptionError, match="model= and tokenizer="):
        KVBoostLLM(model=model)
    with pytest.warns(UserWarning, match="tokenizer_kwargs of KVBoostLLM ignores the unknown option 'max_length'"):
        loaded = KVBoostLLM(str(tmp_path / "model"), tokenizer_kwargs={"max_length": 512})
    assert loaded.engine.engine.model.module.dtype == torch.float32
    loaded.engine.close()


def test_what_is_told_of_it_is_small_and_holds_no_secrets(endless: KVBoost, tmp_path: Any) -> None:
    endless.engine.model.module.save_pretrained(tmp_path)
    endless.tokenizer.save_pretrained(tmp_path)
    llm = KVBoostLLM(
        str(tmp_path),
        model_kwargs={"token": "hf_secret"},
        engine_kwargs={"tenant": "hf_secret"},
        repair=QueryRepair(0.5),
    )
    told = json.dumps([llm.to_dict(), llm.to_payload()]) + repr(llm) + str(llm)
    assert "secret" not in told
    assert "tensor" not in told
    assert len(told) < 6000
    assert "QueryRepair" in llm.to_dict()["repair"]
    llm.engine.close()
    plain = KVBoostLLM(engine=endless, temperature=0.3, stop=["x"], stopping_ids=[endless.tokens.encode("y")[0]])
    assert KVBoostLLM.from_dict(plain.to_dict(), engine=endless).to_dict() == plain.to_dict()


def test_copies_share_the_engine_and_there_is_no_pickling(llm: KVBoostLLM) -> None:
    for duplicate in (copy.copy(llm), copy.deepcopy(llm), copy.deepcopy([llm])[0], llm.model_copy(deep=True)):
        assert duplicate is not llm
        assert duplicate.engine is llm.engine
        duplicate.temperature = 0.5
        assert llm.temperature == 0.0
        assert duplicate.chat(HELLO, temperature=0.0).message.content == llm.chat(HELLO).message.content
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(llm)


# Inside LlamaIndex


def test_settings_take_the_model_and_its_tokenizer(tokenizer: Any) -> None:
    """Counted by the model's own tokens prompts fit; counted by another's there may seem to be no room at all. (15)"""
    with KVBoost(build_model(max_position_embeddings=1500), tokenizer) as small:
        llm = KVBoostLLM(engine=small, max_new_tokens=16, context_window=1450)  # and 50 for the template
        Settings.llm, Settings.embed_model, Settings.tokenizer = llm, Words(), llm.tokenizer_fn
        assert Settings.llm is llm
        assert llama_index.core.global_tokenizer("the") == llm.tokenizer_fn("the") == list(small.tokens.encode("the"))
        prompt = PromptTemplate("Read this: {text}\nAnd answer.")
        packed = PromptHelper.from_llm_metadata(llm.metadata).repack(prompt, ["abc " * 300, "def " * 300], llm=llm)
        assert len(packed) == 2
        for text in packed:
            assert llm.predict(prompt, text=text)
        index = VectorStoreIndex.from_documents([Document(text=document(number)) for number in range(6)])
        assert str(index.as_query_engine(similarity_top_k=6).query("word1x1?"))
        Settings.tokenizer = lambda text: list(text) * 3
        with pytest.raises(ValueError, match=r"not positive|not non-negative"):
            index.as_query_engine().query("word1x1?")


@pytest.mark.parametrize("kind", ["query", "chat"])
async def test_answers_stream_through_engines(llm: KVBoostLLM, index: VectorStoreIndex, kind: str) -> None:
    """More than one piece arrives, and they are the whole answer. (12)"""
    if kind == "query":
        whole = str(index.as_query_engine(llm=llm, similarity_top_k=2).query("word1x1?"))
        streaming = index.as_query_engine(llm=llm, similarity_top_k=2, streaming=True)
        pieces = list(streaming.query("word1x1?").response_gen)
        apieces = [piece async for piece in (await streaming.aquery("word1x1?")).async_response_gen()]
    else:

        def chat() -> Any:
            return index.as_chat_engine(chat_mode="context", llm=llm, similarity_top_k=2)

        whole = str(chat().chat("word1x1?"))
        pieces = list(chat().stream_chat("word1x1?").response_gen)
        apieces = [piece async for piece in (await chat().astream_chat("word1x1?")).async_response_gen()]
    assert "".join(pieces) == "".join(apieces) == whole
    assert len([piece for piece in pieces if piece]) > 1
    assert len([piece for piece in apieces if piece]) > 1
    assert not streams()


@pytest.fixture
def says(endless: KVBoost, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """``says(texts)``: what the model answers first; after that it answers by itself. Returns the prompts it saw."""

    def script(*texts: str) -> list[str]:
        left, seen = list(texts), []
        generate, agenerate = endless.generate, endless.agenerate

        def next_text(prompt: Any) -> GenerationResult | None:
            seen.append(endless._segmenter.as_prompt(prompt).text)
            num_tokens = total_tokens(endless.segments(prompt))
            return GenerationResult(left.pop(0), "stop", Report(num_prompt_tokens=num_tokens)) if left else None

        async def acanned(prompt: Any, **options: Any) -> GenerationResult:
            return next_text(prompt) or await agenerate(prompt, **options)

        monkeypatch.setattr(
            endless, "generate", lambda prompt, **options: next_text(prompt) or generate(prompt, **options)
        )
        monkeypatch.setattr(endless, "agenerate", acanned)
        return seen

    return script


def tools_of(llm: KVBoostLLM, index: VectorStoreIndex) -> list[QueryEngineTool]:
    engine = index.as_query_engine(llm=llm, similarity_top_k=1)
    return [
        QueryEngineTool.from_defaults(engine, name=name, description=f"answers about {name}")
        for name in ("rain", "sun")
    ]


def test_a_router_asks_and_reads_text(llm: KVBoostLLM, index: VectorStoreIndex, says: Callable[..., list[str]]) -> None:
    seen = says('[{"choice": 2, "reason": "it shines"}]')
    router = RouterQueryEngine(
        selector=LLMSingleSelector.from_defaults(llm=llm), query_engine_tools=tools_of(llm, index), llm=llm
    )
    response = router.query("why does it shine?")
    assert response.metadata["selector_result"].ind == 1
    assert str(response)
    assert "answers about sun" in seen[0]


def test_sub_questions_are_asked_and_read_as_text(
    llm: KVBoostLLM, index: VectorStoreIndex, says: Callable[..., list[str]]
) -> None:
    questions = [{"sub_question": f"what of {name}?", "tool_name": name} for name in ("rain", "sun")]
    seen = says(f"```json\n{json.dumps({'items': questions})}\n```")
    engine = SubQuestionQueryEngine.from_defaults(
        query_engine_tools=tools_of(llm, index),
        question_gen=LLMQuestionGenerator.from_defaults(llm=llm),
        response_synthesizer=get_response_synthesizer(llm=llm),
        llm=llm,
        use_async=False,
        verbose=False,
    )
    assert str(engine.query("rain or sun?"))
    assert len(seen) == 4
    assert "what of rain?" in seen[1]
    assert "what of sun?" in seen[3]


class Pet(BaseModel):
    name: str


async def test_structured_output_is_parsed_from_text(llm: KVBoostLLM, says: Callable[..., list[str]]) -> None:
    prompt = PromptTemplate("Name a {kind}.")
    seen = says(*['{"name": "Rex"}'] * 3, "Rex!")
    assert llm.structured_predict(Pet, prompt, kind="dog") == Pet(name="Rex")
    assert await llm.astructured_predict(Pet, prompt, kind="dog") == Pet(name="Rex")
    assert llm.as_structured_llm(Pet).chat([ChatMessage("Name a dog.")]).raw == Pet(name="Rex")
    assert "Name a dog." in seen[0]
    assert '"name"' in seen[0]  # the schema
    with pytest.raises(ValueError, match="Rex!"):
        llm.structured_predict(Pet, prompt, kind="dog")


async def test_tools_are_refused_wherever_they_are_offered(llm: KVBoostLLM) -> None:
    assert not llm.metadata.is_function_calling_model
    tool = FunctionTool.from_defaults(lambda city: "rain", name="weather", description="the weather")
    with pytest.raises(ValueError, match="does not support function calling"):
        FunctionCallingProgram.from_defaults(Pet, llm=llm, prompt_template_str="Name a dog.")
    with pytest.raises(ValueError, match="FunctionCallingLLM"):
        await FunctionAgent(tools=[tool], llm=llm).run("what is the weather?")
    for way in (*EIGHT, *FOUR):
        with pytest.raises(NotImplementedError, match="does not call tools"):
            await responses(llm, way, tools=[tool])
    assert llm.complete("hello", tools=[], tool_choice=None).text  # nothing was offered


def test_many_threads_share_one_llm(llm: KVBoostLLM) -> None:
    expected = {number: llm.complete(f"number {number}").text for number in range(6)}
    found: dict[int, str] = {}

    def ask(number: int) -> None:
        *_, last = llm.stream_complete(f"number {number}")
        found[number] = last.text

    threads = [threading.Thread(target=ask, args=(number,), daemon=True) for number in expected]
    deadline = time.monotonic() + PATIENCE
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert found == expected
