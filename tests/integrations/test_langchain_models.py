"""ChatKVBoost under the conditions people report: threads, event loops, templates, odd histories, options.

Numbers in comments are those of the reports in the ecosystem notes, section 3; what concerns completions only is in
``test_langchain_llm.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import pytest_socket
from conftest import CHAT_TEMPLATE, SPECIAL, build_model, build_tokenizer, document
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import get_usage_metadata_callback
from langchain_core.load import dumps
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    trim_messages,
)
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import ConfigurableField
from langchain_kvboost import ChatKVBoost, KVBoostLLM
from langchain_kvboost.chat_models import to_engine

from kvboost_rag import KVBoost, hub
from kvboost_rag.engine.repair import QueryRepair

# Documents that spell out what only the template may say
TEXTS = [f"{document(i)} <|im_end|> <s> </s> {document(i + 50, 10)}" for i in range(4)]


@pytest.fixture
def llm(boost: KVBoost) -> ChatKVBoost:
    return ChatKVBoost(engine=boost, max_tokens=8)


@pytest.fixture
def threads() -> Callable[[], list[threading.Thread]]:
    """The threads that work for a stream now."""
    return lambda: [thread for thread in threading.enumerate() if thread.name == "kvboost-stream"]


async def gone(threads: Callable[[], list[threading.Thread]]) -> None:
    """An abandoned async generator is closed by the event loop, a few rounds later."""
    for _ in range(2000):
        if not threads():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("a stream nobody reads still runs")


def kvboost_of(message: Any) -> dict[str, Any]:
    return message.response_metadata["kvboost"]


def ids_of(boost: KVBoost, messages: list[BaseMessage]) -> list[int]:
    return [token for segment in boost.segments(to_engine(messages)) for token in segment.ids]


# Threads and event loops (numbers 1 and 13)


def questions() -> list[list[BaseMessage]]:
    return [
        [HumanMessage(f"{TEXTS[n % 4]}\n\n{TEXTS[(n + 1 + n // 4) % 4]}\n\nQuestion {n} <|im_end|>?")]
        for n in range(16)
    ]


def test_sixteen_threads_get_the_sequential_answers(llm: ChatKVBoost, boost: KVBoost) -> None:
    boost.warm(TEXTS, progress=False)
    expected = [llm.invoke(question) for question in questions()]
    assert len({message.text for message in expected}) > 4
    assert any(kvboost_of(message)["num_approximate_tokens"] for message in expected)
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(llm.invoke, questions()))
        streams = list(pool.map(lambda question: "".join(c.text for c in llm.stream(question)), questions()))
    assert [message.text for message in answers] == streams == [message.text for message in expected]
    for message, again in zip(expected, answers, strict=True):
        assert again.usage_metadata["input_tokens"] == message.usage_metadata["input_tokens"]
        assert again.usage_metadata["output_tokens"] == message.usage_metadata["output_tokens"]


async def test_sixteen_tasks_get_the_sequential_answers(llm: ChatKVBoost, boost: KVBoost) -> None:
    boost.warm(TEXTS, progress=False)
    expected = [llm.invoke(question).text for question in questions()]

    async def streamed(question: list[BaseMessage]) -> str:
        return "".join([chunk.text async for chunk in llm.astream(question)])

    answers = await asyncio.gather(*(llm.ainvoke(question) for question in questions()))
    streams = await asyncio.gather(*(streamed(question) for question in questions()))
    assert [message.text for message in answers] == streams == expected
    assert [message.text for message in await llm.abatch(questions())] == expected


@pytest.mark.parametrize("kind", [ChatKVBoost, KVBoostLLM])
@pytest.mark.parametrize("way", ["ainvoke", "astream", "abatch"])
async def test_the_event_loop_goes_on_while_the_model_works(
    boost: KVBoost, monkeypatch: pytest.MonkeyPatch, kind: Any, way: str
) -> None:
    """The engine waits for the loop to have done something else: a blocked one never would."""
    working, ticked, waited = threading.Event(), threading.Event(), []
    segments = boost._segmenter.segments

    def waiting(*args: Any) -> Any:
        working.set()
        waited.append(ticked.wait(60))
        return segments(*args)

    monkeypatch.setattr(boost._segmenter, "segments", waiting)
    model = kind(engine=boost, max_tokens=4)

    async def tick() -> None:
        while not working.is_set():
            await asyncio.sleep(0)
        ticked.set()

    async def ask() -> None:
        if way == "astream":
            assert [chunk async for chunk in model.astream("hello")]
        else:
            await (model.ainvoke("hello") if way == "ainvoke" else model.abatch(["hello", "again"]))

    await asyncio.gather(tick(), ask())
    assert waited
    assert all(waited)


@pytest.mark.parametrize("way", ["ainvoke", "astream"])
async def test_cancelling_a_task_frees_the_engine(
    llm: ChatKVBoost, boost: KVBoost, threads: Callable[[], list[Any]], way: str
) -> None:
    started, loop = asyncio.Event(), asyncio.get_running_loop()
    tokens: list[int] = []
    generate = boost.engine.generate

    def counting(prefilled: Any, options: Any, on_tokens: Any) -> str:
        def step(new: list[int]) -> bool:
            tokens.extend(new)
            loop.call_soon_threadsafe(started.set)
            return on_tokens(new)

        return generate(prefilled, options, step)

    boost.engine.generate = counting  # type: ignore[method-assign]

    async def ask() -> None:
        if way == "ainvoke":
            await llm.ainvoke("hello", max_tokens=1900)
        else:
            async for _ in llm.astream("hello", max_tokens=1900):
                pass

    task = asyncio.create_task(ask())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await gone(threads)
    assert 0 < len(tokens) < 1900
    assert (await llm.ainvoke("hello")).text == llm.invoke("hello").text != ""


async def test_breaking_out_frees_the_engine_at_once(
    llm: ChatKVBoost, boost: KVBoost, threads: Callable[[], list[Any]]
) -> None:
    expected = llm.invoke("hello").text
    for _ in llm.stream("hello", max_tokens=1900):
        break
    assert not threads()
    async for _ in llm.astream("hello", max_tokens=1900):
        break
    await gone(threads)
    async with contextlib.aclosing(llm.astream("hello", max_tokens=1900)) as stream:
        await anext(stream)
    await gone(threads)
    assert llm.invoke("hello").text == expected


# number 10: an error inside generation reaches the reader


async def test_an_error_inside_generation_reaches_the_reader(
    llm: ChatKVBoost, boost: KVBoost, monkeypatch: pytest.MonkeyPatch, threads: Callable[[], list[Any]]
) -> None:
    expected = llm.invoke("once upon")
    generate = boost.engine.generate

    def failing(prefilled: Any, options: Any, on_tokens: Any) -> str:
        seen: list[int] = []

        def step(new: list[int]) -> bool:
            seen.extend(new)
            if len(seen) > 6:
                raise RuntimeError("the GPU is on fire")
            return on_tokens(new)

        return generate(prefilled, options, step)

    with monkeypatch.context() as patch:
        patch.setattr(boost.engine, "generate", failing)
        pieces: list[str] = []
        with pytest.raises(RuntimeError, match="on fire"):
            for chunk in llm.stream("once upon"):
                pieces.append(chunk.text)
        assert 0 < len("".join(pieces)) < len(expected.text)
        with pytest.raises(RuntimeError, match="on fire"):
            async for chunk in llm.astream("once upon"):
                pieces.append(chunk.text)
        for call in (llm.invoke, llm.batch):
            with pytest.raises(RuntimeError, match="on fire"):
                call("once upon" if call == llm.invoke else ["once upon"])
        with pytest.raises(RuntimeError, match="on fire"):
            await llm.ainvoke("once upon")
    assert not threads()
    assert llm.invoke("once upon").text == expected.text


# Templates (numbers 4, 6, 7, 11 and 21)

HISTORY = [SystemMessage("Be kind."), HumanMessage("hi"), AIMessage("hello"), HumanMessage("who?")]
TURN = "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
ASK = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
TEMPLATES = {
    "ordinary": CHAT_TEMPLATE,
    "none": None,
    "writes its own BOS": "{{ '<s>' }}" + CHAT_TEMPLATE,
    "no system": "{% for m in messages %}{% if m['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}" + TURN + "{% endfor %}" + ASK,
    "alternating": "{% for m in messages %}{% if m['role'] != 'system' and (m['role'] == 'user') != "
    "((loop.index0 - (1 if messages[0]['role'] == 'system' else 0)) % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    + TURN
    + "{% endfor %}"
    + ASK,
}
NUM_BOS = {"ordinary": 0, "none": 1, "writes its own BOS": 1, "no system": 0, "alternating": 0}


@pytest.fixture(params=list(TEMPLATES))
def templated(request: pytest.FixtureRequest) -> Iterator[ChatKVBoost]:
    with KVBoost(build_model(), build_tokenizer(chat_template=TEMPLATES[request.param])) as boost:
        yield ChatKVBoost(engine=boost, max_tokens=4, metadata={"template": request.param})


@pytest.mark.parametrize(
    "messages",
    [
        HISTORY,
        [HumanMessage("who?"), HumanMessage("where?")],
        [
            SystemMessage("be kind"),
            SystemMessage("and short"),
            HumanMessage("who?"),
            HumanMessage("where?"),
            AIMessage("nobody"),
            AIMessage("nowhere"),
            HumanMessage("why?"),
        ],
        [HumanMessage("who?"), AIMessage("it was")],
        [HumanMessage([{"type": "text", "text": "who?"}, " where?"])],
    ],
    ids=["history", "two questions", "doubled roles", "the model's turn last", "blocks"],
)
async def test_every_history_is_answered_whatever_the_template(
    templated: ChatKVBoost, messages: list[BaseMessage]
) -> None:
    boost, name = templated.engine, templated.metadata["template"]
    answer = templated.invoke(messages)
    assert answer.usage_metadata["output_tokens"] == 4
    ids = ids_of(boost, messages)
    assert answer.usage_metadata["input_tokens"] == len(ids)
    assert ids.count(1) == NUM_BOS[name]  # number 11: never twice
    assert not NUM_BOS[name] or ids[0] == 1
    text = boost.tokenizer.decode(ids)
    said = [message.text for message in messages]
    places = [text.index(each) for each in said]
    assert places == sorted(places)  # nothing of it is lost, whatever the roles
    assert (await templated.ainvoke(messages)).text == answer.text


def test_the_template_is_applied_and_its_tokens_are_tokens(llm: ChatKVBoost, boost: KVBoost) -> None:
    """Number 4: no ``Human: ...``; number 11: ids as the tokenizer itself makes them of the templated text."""
    ids = ids_of(boost, HISTORY)
    roles = ["system", "user", "assistant", "user"]
    plain = [{"role": role, "content": m.text} for role, m in zip(roles, HISTORY, strict=True)]
    expected = boost.tokenizer.apply_chat_template(plain, add_generation_prompt=True, tokenize=True, return_dict=True)
    assert boost.tokenizer.decode(ids) == boost.tokenizer.decode(expected["input_ids"])
    assert "Human" not in boost.tokenizer.decode(ids)
    assert ids.count(SPECIAL.index("<|im_start|>")) == len(HISTORY) + 1


def test_a_document_cannot_close_its_turn_and_has_the_same_ids_anywhere(llm: ChatKVBoost, boost: KVBoost) -> None:
    """Number 21: a chunk alone is the chunk in the prompt, so it hits; special-token strings in it stay text."""
    boost.warm(TEXTS, progress=False)
    messages: list[BaseMessage] = [HumanMessage(f"x{TEXTS[0]}y {TEXTS[1]}")]
    segments = boost.segments(to_engine(messages))
    assert [s.ids for s in segments if s.document] == [boost.tokens.encode(text) for text in TEXTS[:2]]
    ids = ids_of(boost, messages)
    assert ids.count(SPECIAL.index("<|im_end|>")) == 1  # the template's
    assert kvboost_of(llm.invoke(messages))["num_document_hits"] == 2


def test_tool_messages_are_refused_by_name(llm: ChatKVBoost) -> None:
    """Number 7: a tool's result last. This model was never shown one, so it is not passed on as something else."""
    with pytest.raises(ValueError, match="message type='tool' is not valid"):
        llm.invoke([HumanMessage("a"), ToolMessage("r", tool_call_id="1")])
    with pytest.raises(ValueError, match="only text is served"):
        llm.invoke([HumanMessage([{"type": "image_url", "image_url": {"url": "http://x"}}])])


def test_roles_of_chat_messages_are_langchains_or_the_templates() -> None:
    messages = [ChatMessage("s", role="system"), ChatMessage("h", role="human"), ChatMessage("c", role="critic")]
    assert [m["role"] for m in to_engine(messages)] == ["system", "user", "critic"]


# number 2: tools are never accepted and dropped


def test_tools_and_structured_output_are_refused(llm: ChatKVBoost) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    with pytest.raises(NotImplementedError, match=r"does not call tools.*create_kvboost_rag_chain"):
        llm.bind_tools([tool])
    with pytest.raises(NotImplementedError, match="does not call tools"):
        llm.bind(tools=[tool]).invoke("hello")
    with pytest.raises(NotImplementedError, match="JsonOutputParser"):
        llm.with_structured_output({"type": "object"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert llm.invoke("hello", tools=[]).text


async def test_an_agent_without_tools_works_and_one_with_tools_is_refused(llm: ChatKVBoost) -> None:
    """Numbers 1 and 2: under LangGraph, sync and async."""
    agents = pytest.importorskip("langchain.agents")
    question = {"messages": [HumanMessage("hello")]}
    expected = llm.invoke("hello").text
    agent = agents.create_agent(llm, tools=[])
    assert agent.invoke(question)["messages"][-1].text == expected
    assert (await agent.ainvoke(question))["messages"][-1].text == expected
    streamed = [chunk.text async for chunk, _ in agent.astream(question, stream_mode="messages")]
    assert "".join(streamed) == expected
    assert len(streamed) > 1

    def weather(city: str) -> str:
        """The weather."""
        return city

    with pytest.raises(NotImplementedError, match="does not call tools"):
        agents.create_agent(llm, tools=[weather]).invoke(question)


# Usage: exact, disjoint, also where prompts store what they missed


def marked(*texts: str) -> list[BaseMessage]:
    """Documents in blocks of their own, known to be documents before they were read."""
    blocks: list[Any] = []
    for text in texts:
        blocks += [{"type": "text", "text": text, "extras": {"kvboost": {}}}, {"type": "text", "text": "\n\n"}]
    return [SystemMessage("s" * 200), HumanMessage([*blocks, {"type": "text", "text": "which?"}])]


async def test_usage_is_exact_and_its_parts_are_disjoint(llm: ChatKVBoost, boost: KVBoost) -> None:
    a, b, c = TEXTS[:3]
    length = {text: len(boost.tokens.encode(text)) for text in TEXTS}
    rounds = [
        marked(a),
        marked(a),
        marked(b, a),
        marked(b, b, c),
        marked(c, a, b),
        marked(document(30), c, document(30)),
    ]
    seen = []
    for messages in rounds:
        message = llm.invoke(messages)
        usage, report = message.usage_metadata, kvboost_of(message)
        details = usage["input_token_details"]
        assert usage["input_tokens"] == len(ids_of(boost, messages))
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        assert details["cache_read"] == report["num_exact_tokens"] + report["num_approximate_tokens"]
        assert details["cache_creation"] <= report["num_live_tokens"]  # what is stored was computed, not read
        assert sum(details.values()) <= usage["input_tokens"]
        parts = ("num_exact_tokens", "num_approximate_tokens", "num_repaired_tokens", "num_live_tokens")
        assert usage["input_tokens"] == sum(report[part] for part in parts)
        seen.append(details)
    assert seen[0]["cache_read"] == 0
    assert seen[0]["cache_creation"] > length[a]  # the document, and the opening before it
    assert seen[1]["cache_read"] > length[a]
    assert seen[1]["cache_creation"] == 0
    assert seen[2]["cache_creation"] == length[b]
    for messages in (rounds[4], marked(document(31))):
        whole = None
        async for chunk in llm.astream(messages):
            whole = chunk if whole is None else whole + chunk
        assert whole is not None
        assert set(whole.usage_metadata) == {"input_tokens", "output_tokens", "total_tokens", "input_token_details"}
        assert whole.usage_metadata["input_tokens"] == len(ids_of(boost, messages))
        assert sum(whole.usage_metadata["input_token_details"].values()) <= whole.usage_metadata["input_tokens"]


def test_langchains_own_counter_sums_what_was_read(llm: ChatKVBoost, boost: KVBoost) -> None:
    boost.warm(TEXTS, progress=False)
    with get_usage_metadata_callback() as callback:
        messages = [llm.invoke(question) for question in questions()[:3]]
    total = callback.usage_metadata[llm.model]
    read = [message.usage_metadata["input_token_details"]["cache_read"] for message in messages]
    assert total["input_token_details"]["cache_read"] == sum(read) > 0
    assert total["output_tokens"] == 24


def test_everything_else_is_in_the_response_metadata(llm: ChatKVBoost, boost: KVBoost) -> None:
    whole = None
    for chunk in llm.stream("hello"):
        whole = chunk if whole is None else whole + chunk
    for message in (llm.invoke("hello"), whole):
        metadata = message.response_metadata
        assert metadata["model_name"] == llm.model
        assert metadata["finish_reason"] == "length"
        assert {"seconds", "ttft_seconds", "documents", "repair", "mode", "notes"} <= metadata["kvboost"].keys()
        json.dumps(metadata)
    llm.engine.warm(TEXTS[:1], progress=False)
    (told,) = kvboost_of(llm.invoke([HumanMessage(TEXTS[0])]))["documents"]
    assert told["num_tokens"] == len(boost.tokens.encode(TEXTS[0]))


# Options (numbers 3, 5, 8)


def test_the_limit_is_kept_by_all_its_names(boost: KVBoost) -> None:
    def count(message: AIMessage) -> int:
        return message.usage_metadata["output_tokens"]

    assert count(ChatKVBoost(engine=boost, max_new_tokens=3).invoke("hello")) == 3
    llm = ChatKVBoost(engine=boost, max_tokens=3)
    assert count(llm.invoke("hello")) == 3
    assert count(llm.invoke("hello", max_new_tokens=5)) == count(llm.bind(max_tokens=5).invoke("hello")) == 5
    with pytest.raises(ValueError, match="are the same option"):
        llm.bind(max_tokens=5).invoke("hello", max_new_tokens=6)
    assert count(ChatKVBoost(engine=boost).invoke("hello")) == 256  # not 100, not 20


def test_stop_is_cut_across_tokens_in_every_way_of_calling(boost: KVBoost) -> None:
    free = ChatKVBoost(engine=boost, max_tokens=24).invoke("hello").text
    stop = free[6:10]
    assert len(boost.tokens.encode(stop)) > 1
    llm = ChatKVBoost(engine=boost, max_tokens=24, stop=stop)
    expected = free[: free.index(stop)]
    assert llm.invoke("hello").text == expected
    assert llm.invoke("hello").response_metadata["finish_reason"] == "stop"
    pieces = [chunk.text for chunk in llm.stream("hello")]
    assert "".join(pieces) == expected
    assert llm.invoke("hello", stop=[free[2:4], "never said"]).text == free[: free.index(free[2:4])]


def test_do_sample_and_temperature(boost: KVBoost) -> None:
    greedy = ChatKVBoost(engine=boost, max_tokens=12, seed=3)
    warm = ChatKVBoost(engine=boost, max_tokens=12, seed=3, temperature=1.0)
    base, drawn = greedy.invoke("hello").text, warm.invoke("hello").text
    assert base != drawn == warm.invoke("hello").text  # a seed gives the same draw
    assert greedy.invoke("hello", do_sample=True).text == drawn  # temperature 1 if there is none
    assert warm.invoke("hello", do_sample=False).text == base
    assert warm.invoke("hello", do_sample=True).text == drawn
    assert warm.invoke("hello", temperature=0).text == warm.invoke("hello", temperature=0.0).text == base
    assert greedy.invoke("hello", do_sample=True, temperature=3.0).text != drawn
    assert warm.invoke("hello", seed=4).text != drawn
    assert warm.invoke("hello", top_k=1).text == base
    assert warm.invoke("hello", top_p=0.0).text == base
    assert warm.invoke("hello", temperature=None).text == drawn  # None is the model's own


def test_quality_and_repair_override_one_another_by_level(boost: KVBoost) -> None:
    """A call's own word counts, whichever of the names it uses; both at once on one level are an error."""
    boost.warm(TEXTS, progress=False)
    question = questions()[1]

    def ask(own: dict[str, Any], call: dict[str, Any]) -> tuple[str, int]:
        report = kvboost_of(ChatKVBoost(engine=boost, max_tokens=1, **own).invoke(question, **call))
        return report["repair"], report["num_repaired_tokens"]

    exact, fast, none = ask({"quality": "exact"}, {}), ask({"quality": "fast"}, {}), ask({"repair": "none"}, {})
    assert exact[1] > fast[1] > none[1] == 0
    assert ask({"quality": "exact"}, {"repair": "none"}) == none
    assert ask({"repair": "none"}, {"quality": "exact"}) == exact
    assert ask({"quality": "exact"}, {"quality": "fast"}) == fast
    assert ask({"quality": "exact"}, {"recompute_ratio": 0.05}) == fast
    assert ask({"repair": "query", "recompute_ratio": 0.9}, {"quality": "fast"}) == fast
    assert ask({"repair": "query", "recompute_ratio": 0.9}, {"repair": "none"}) == none
    assert ask({"repair": "query", "recompute_ratio": 0.9}, {"recompute_ratio": 0.05}) == fast
    assert ask({"repair": QueryRepair(0.05)}, {}) == fast
    for own, call in (({"quality": "exact", "repair": "none"}, {}), ({}, {"quality": "exact", "repair": "none"})):
        with pytest.raises(ValueError, match="quality='exact' picks the repair itself"):
            ask(own, call)


def test_what_langchain_hands_on_is_not_unknown(llm: ChatKVBoost) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert llm.invoke("hello", stream=True).text == llm.invoke("hello", disable_streaming=True).text
        ChatKVBoost(engine=llm.engine, api_key="x", base_url="y", timeout=1, max_retries=2, streaming=True)
    with pytest.warns(UserWarning, match="unknown option 'n'; it takes: temperature"):
        llm.invoke("hello", n=2)  # number 13: evaluation tools pass it
    with pytest.warns(UserWarning, match="ChatKVBoost ignores the unknown option 'temprature'"):
        ChatKVBoost(engine=llm.engine, temprature=1)


def test_a_field_set_later_counts(llm: ChatKVBoost) -> None:
    llm.temperature, llm.seed = 1.0, 3  # number 13
    assert llm.invoke("hello").text == llm.invoke("hello", temperature=1.0, seed=3).text
    assert llm.invoke("hello").text != llm.invoke("hello", temperature=0.0).text


# Construction: one engine, one loading, a profile


@pytest.fixture
def folder(boost: KVBoost, tmp_path: Any) -> str:
    boost.engine.model.module.save_pretrained(tmp_path)
    boost.tokenizer.save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize("kind", [ChatKVBoost, KVBoostLLM])
def test_weights_are_loaded_once_and_offline(kind: Any, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = []
    load = hub.load
    monkeypatch.setattr(hub, "load", lambda name, **options: loads.append(name) or load(name, **options))
    pytest_socket.disable_socket(allow_unix_socket=True)  # number 9
    try:
        model = kind(model_name=folder, max_tokens=2)
        assert model.invoke("hello") is not None
    finally:
        pytest_socket.enable_socket()
    assert loads == [folder]
    assert model.model == folder
    again = model.configurable_fields(temperature=ConfigurableField(id="t")).with_config(configurable={"t": 1.0})
    assert again.invoke("hello") is not None
    model.bind(stop=["x"]).invoke("hello")
    kind(engine=model)
    model.model_copy()
    assert loads == [folder]
    with pytest.raises(ValueError, match="temperature=-1"):
        kind(model=folder, temperature=-1)
    assert loads == [folder]  # a wrong option is found before
    model.engine.close()


def test_the_profile_is_the_configurations(folder: str, boost: KVBoost) -> None:
    loaded = ChatKVBoost(model=folder)
    given = ChatKVBoost(engine=boost)
    for llm in (loaded, given):
        assert llm.profile is not None
        assert llm.profile["max_input_tokens"] == llm.profile["max_output_tokens"] == 2048
        assert llm.profile["name"] == llm.model
        assert (llm.profile["tool_calling"], llm.profile["structured_output"]) == (False, False)
    assert ChatKVBoost(engine=boost, profile={"max_input_tokens": 7}).profile == {"max_input_tokens": 7}
    loaded.engine.close()


@pytest.mark.parametrize("kind", [ChatKVBoost, KVBoostLLM])
def test_nothing_of_the_engine_is_written_out(kind: Any, boost: KVBoost) -> None:
    llm = kind(engine=boost, repair=QueryRepair(0.3), stop=["x"])
    assert not kind.is_lc_serializable()
    for written in (dumps(llm), repr(llm), str(llm.model_dump()), json.dumps(llm._identifying_params)):
        assert len(written) < 4000
        assert "KVBoost object" not in written
        assert "LlamaForCausalLM" not in written
        assert "tensor" not in written
    assert json.loads(dumps(llm))["type"] == "not_implemented"


@pytest.mark.parametrize("kind", [ChatKVBoost, KVBoostLLM])
def test_traces_name_provider_model_options_and_versions(kind: Any, boost: KVBoost) -> None:
    llm = kind(engine=boost, model="mine", temperature=0.5, max_tokens=7)
    params = llm._get_ls_params(stop=["x"])
    assert (params["ls_provider"], params["ls_model_name"]) == ("kvboost", "mine")
    assert params["ls_model_type"] == ("chat" if kind is ChatKVBoost else "llm")
    assert (params["ls_temperature"], params["ls_max_tokens"], params["ls_stop"]) == (0.5, 7, ["x"])
    assert llm._get_ls_params(temperature=1.0)["ls_temperature"] == 1.0
    assert {"langchain-core", "kvboost-rag"} <= llm.metadata["lc_versions"].keys()
    assert llm._llm_type == "kvboost"


@pytest.mark.parametrize("kind", [ChatKVBoost, KVBoostLLM])
def test_what_is_no_engine_is_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match="engine='x' is not valid"):
        kind(engine="x")
    with pytest.raises(ValueError, match=r"needs engine= \(a KVBoost\) or model="):
        kind()


def test_a_closed_engine_says_so(llm: ChatKVBoost, boost: KVBoost) -> None:
    boost.close()
    with pytest.raises(RuntimeError, match="was closed"):
        llm.invoke("hello")
    with pytest.raises(RuntimeError, match="was closed"):
        list(llm.stream("hello"))


def test_importing_the_models_loads_no_torch() -> None:
    code = (
        "import sys, langchain_kvboost.chat_models, langchain_kvboost.llms; "
        "assert 'torch' not in sys.modules, 'torch was loaded'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# LangChain's cache, and token counts


async def test_langchains_cache_tells_options_apart(boost: KVBoost) -> None:
    cache = InMemoryCache()
    plain = ChatKVBoost(engine=boost, max_tokens=6, cache=cache)
    first = plain.invoke("hello")
    assert plain.invoke("hello").text == (await plain.ainvoke("hello")).text == first.text
    assert len(cache._cache) == 1
    plain.invoke("hello", max_tokens=4)
    plain.invoke("hello", stop=["q"])
    ChatKVBoost(engine=boost, max_tokens=6, cache=cache, stop=["z"]).invoke("hello")
    ChatKVBoost(engine=boost, max_tokens=6, cache=cache, quality="exact").invoke("hello")
    assert len(cache._cache) == 5


def test_tokens_of_messages_are_those_of_their_prompt(llm: ChatKVBoost, boost: KVBoost) -> None:
    """Number 15."""
    assert llm.get_num_tokens_from_messages(HISTORY) == len(ids_of(boost, HISTORY))
    assert llm.get_num_tokens_from_messages(HISTORY) == llm.invoke(HISTORY).usage_metadata["input_tokens"]
    assert llm.get_num_tokens("thin then") == len(boost.tokens.encode("thin then"))
    assert llm.get_num_tokens_from_messages([ToolMessage("result", tool_call_id="1")]) > 0
    kept = trim_messages(HISTORY, max_tokens=70, token_counter=llm, strategy="last", include_system=True)
    assert kept == [HISTORY[0], *HISTORY[-len(kept) + 1 :]]
    assert len(kept) < len(HISTORY)
    custom = ChatKVBoost(engine=boost, custom_get_token_ids=lambda text: [1])
    assert custom.get_num_tokens_from_messages(HISTORY) == len(HISTORY)
    assert custom.get_num_tokens("many words here") == 1


def test_a_prompt_too_long_says_by_how_much(llm: ChatKVBoost) -> None:
    with pytest.raises(ValueError, match=r"context holds 2048: \d+ too many"):
        llm.invoke("x" * 3000)


def test_a_chat_prompt_template_ends_where_the_model_answers(llm: ChatKVBoost, boost: KVBoost) -> None:
    """Numbers 4 and 5: pipeline and template, the prompt is not echoed, and the generation ends."""
    prompt = ChatPromptTemplate.from_messages([("system", "Be {tone}."), ("human", "{question}")])
    message = (prompt | llm).invoke({"tone": "kind", "question": "zebra crossing?"})
    assert "zebra" not in message.text
    assert message.usage_metadata["output_tokens"] <= 8
    expected = boost.generate(
        [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "zebra crossing?"}], max_new_tokens=8
    )
    assert message.text == expected.text
