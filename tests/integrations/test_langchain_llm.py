"""KVBoostLLM held to what LangChain expects of a BaseLLM: langchain-tests has no suite for completion models."""

from __future__ import annotations

import asyncio
import json
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import pytest_socket
from conftest import build_model, build_tokenizer, document
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler
from langchain_core.globals import set_llm_cache
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate
from langchain_kvboost import KVBoostLLM

from kvboost_rag import KVBoost
from kvboost_rag.engine.repair import QueryRepair

PROMPTS = ["once upon", "a time there", "was another one"]


@pytest.fixture
def llm(boost: KVBoost) -> KVBoostLLM:
    return KVBoostLLM(engine=boost, max_tokens=12)


@pytest.fixture
def answers(boost: KVBoost) -> list[str]:
    """The engine's own, for PROMPTS and 12 tokens."""
    return [boost.generate(prompt, max_new_tokens=12).text for prompt in PROMPTS]


@pytest.fixture
def calls(boost: KVBoost, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The lists of prompts that reach ``generate_many``."""
    seen: list[list[str]] = []
    many = boost.generate_many

    def spy(prompts: list[str], **options: Any) -> Any:
        seen.append(list(prompts))
        return many(prompts, **options)

    monkeypatch.setattr(boost, "generate_many", spy)
    return seen


@pytest.fixture
def llm_cache() -> Iterator[InMemoryCache]:
    cache = InMemoryCache()
    set_llm_cache(cache)
    yield cache
    set_llm_cache(None)


def break_after(boost: KVBoost, monkeypatch: pytest.MonkeyPatch, num_tokens: int = 2) -> None:
    """Let the engine fail behind so many tokens."""
    generate = boost.engine.generate

    def failing(prefilled: Any, options: Any, on_tokens: Any) -> str:
        left = num_tokens

        def step(new: list[int]) -> bool:
            nonlocal left
            if not left:
                raise RuntimeError("the GPU is on fire")
            left -= 1
            return on_tokens(new)

        return generate(prefilled, options, step)

    monkeypatch.setattr(boost.engine, "generate", failing)


@pytest.fixture
def threads() -> Callable[[], list[threading.Thread]]:
    """The threads that work for a stream now."""
    return lambda: [thread for thread in threading.enumerate() if thread.name == "kvboost-stream"]


class Tokens(BaseCallbackHandler):
    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.chunks: list[str] = []
        self.ended: list[str] = []

    def on_llm_new_token(self, token: str, *, chunk: Any = None, **kwargs: Any) -> None:
        self.tokens.append(token)
        self.chunks.append(chunk.text)

    def on_llm_end(self, response: Any, **kwargs: Any) -> None:
        self.ended.append(response.generations[0][0].text)

    def on_llm_error(self, error: BaseException, **kwargs: Any) -> None:
        self.ended.append(type(error).__name__)


class AsyncTokens(AsyncCallbackHandler):
    def __init__(self) -> None:
        self.tokens: list[str] = []

    async def on_llm_new_token(self, token: str, **kwargs: Any) -> None:
        self.tokens.append(token)


# Every way of calling gives the engine's own text


async def test_every_way_of_calling_gives_the_same_text(llm: KVBoostLLM, answers: list[str]) -> None:
    prompt, text = PROMPTS[0], answers[0]
    assert text
    assert llm.invoke(prompt) == text
    assert await llm.ainvoke(prompt) == text
    pieces = list(llm.stream(prompt))
    assert "".join(pieces) == text
    assert len([piece for piece in pieces if piece]) > 1
    assert "".join([piece async for piece in llm.astream(prompt)]) == text
    events = [event async for event in llm.astream_events(prompt, version="v2")]
    assert [e["event"] for e in events][0 :: len(events) - 1] == ["on_llm_start", "on_llm_end"]
    assert "".join(e["data"]["chunk"] for e in events if e["event"] == "on_llm_stream") == text


# number 14: a list of prompts runs together


def test_batch_is_one_call_for_all_prompts(llm: KVBoostLLM, answers: list[str], calls: list[list[str]]) -> None:
    assert llm.batch(PROMPTS) == answers
    assert calls == [PROMPTS]


async def test_abatch_is_one_call_for_all_prompts(llm: KVBoostLLM, answers: list[str], calls: list[list[str]]) -> None:
    assert await llm.abatch(PROMPTS) == answers
    assert calls == [PROMPTS]
    assert llm.batch([]) == []


async def test_max_concurrency_bounds_each_call(llm: KVBoostLLM, answers: list[str], calls: list[list[str]]) -> None:
    assert llm.batch(PROMPTS, config={"max_concurrency": 2}) == answers
    assert await llm.abatch(PROMPTS, config={"max_concurrency": 2}) == answers
    assert calls[0] == PROMPTS[:2]
    assert sum(map(len, calls)) == 5  # the third prompt of abatch went alone, so that it can be cancelled


def test_batch_size_bounds_what_runs_together(boost: KVBoost, answers: list[str], monkeypatch: Any) -> None:
    sizes = []
    run = boost.generate_many

    def spy(prompts: Any, max_batch_size: int, **options: Any) -> Any:
        sizes.append(max_batch_size)
        return run(prompts, max_batch_size=max_batch_size, **options)

    monkeypatch.setattr(boost, "generate_many", spy)
    assert KVBoostLLM(engine=boost, max_tokens=12, batch_size=2).batch(PROMPTS) == answers
    assert sizes == [2]
    with pytest.raises(ValueError, match="batch_size"):
        KVBoostLLM(engine=boost, batch_size=0)


async def test_a_failing_batch_raises_or_fills_every_slot(llm: KVBoostLLM, boost: KVBoost) -> None:
    too_long = "x" * 3000
    with pytest.raises(ValueError, match="the model's context holds 2048"):
        llm.batch([PROMPTS[0], too_long])
    for outcomes in (
        llm.batch([PROMPTS[0], too_long], return_exceptions=True),
        await llm.abatch([PROMPTS[0], too_long], return_exceptions=True),
    ):
        assert [type(each).__name__ for each in outcomes] == ["PromptTooLongError"] * 2
    assert llm.invoke(PROMPTS[0]) == boost.generate(PROMPTS[0], max_new_tokens=12).text


async def test_generate_tells_usage_model_and_report(llm: KVBoostLLM, boost: KVBoost) -> None:
    for result in (llm.generate(PROMPTS), await llm.agenerate(PROMPTS), await llm.agenerate(PROMPTS[:1])):
        infos = [generations[0].generation_info for generations in result.generations]
        usage = result.llm_output["token_usage"]
        prompts = PROMPTS[: len(infos)]
        assert usage["prompt_tokens"] == sum(boost.count_tokens(prompt) for prompt in prompts)
        assert usage["completion_tokens"] == sum(info["kvboost"]["num_new_tokens"] for info in infos)
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert result.llm_output["model_name"] == llm.model
        assert {info["finish_reason"] for info in infos} <= {"stop", "length"}
        json.dumps([result.llm_output, infos])


def test_warmed_documents_are_found_in_the_string(llm: KVBoostLLM, boost: KVBoost) -> None:
    boost.warm([document(1), document(2)], progress=False)
    result = llm.generate([f"{document(2)}\n\n{document(1)}\n\nwhich?"] * 2)
    assert [g[0].generation_info["kvboost"]["num_document_hits"] for g in result.generations] == [2, 2]


# numbers 3 and 5: stop strings, and nothing of the prompt in the text


async def test_stop_of_constructor_and_call_are_merged_and_never_in_the_text(boost: KVBoost) -> None:
    free = KVBoostLLM(engine=boost, max_tokens=24).invoke("hello")
    assert len(boost.tokens.encode(free[4:7])) > 1  # each stop string is several tokens
    own, call = free[8:11], free[4:7]
    expected = free[: min(free.index(own), free.index(call))]
    llm = KVBoostLLM(engine=boost, max_tokens=24, stop=own)
    assert llm.invoke("hello") == free[: free.index(own)]
    assert llm.invoke("hello", stop=[call]) == expected
    assert llm.bind(stop=[call]).invoke("hello") == expected
    assert await llm.ainvoke("hello", stop=[call]) == expected
    assert llm.batch(["hello", "hello"], stop=[call]) == [expected] * 2
    assert "".join(llm.stream("hello", stop=[call])) == expected
    assert "".join([piece async for piece in llm.astream("hello", stop=[call])]) == expected


async def test_the_prompt_is_never_echoed(llm: KVBoostLLM) -> None:
    prompt = "zebra crossing"
    texts = [llm.invoke(prompt), await llm.ainvoke(prompt), *llm.batch([prompt, "x"]), "".join(llm.stream(prompt))]
    assert all(prompt not in text for text in texts)


# Streams


async def test_a_stream_that_ends_at_once_still_has_a_chunk(tokenizer: Any) -> None:
    model = build_model()
    with KVBoost(model, tokenizer) as boost:
        first = int(boost.prefill("hello").logits.argmax())
        assert boost.tokens.decode([first]) == ""  # one of the ids behind the vocabulary
        model.generation_config.eos_token_id = first  # the model has nothing to say
        for options in ({"max_tokens": 5}, {"max_tokens": 1}):
            llm = KVBoostLLM(engine=boost, **options)
            (generation,) = llm.generate(["hello"]).generations[0]
            assert generation.generation_info["kvboost"]["num_new_tokens"] == 1
            assert generation.generation_info["finish_reason"] == "stop"
            assert generation.text == llm.invoke("hello") == ""
            assert list(llm.stream("hello")) == [""]
            assert [piece async for piece in llm.astream("hello")] == [""]


async def test_callbacks_get_every_token_once(llm: KVBoostLLM) -> None:
    sync, both, asynchronous = Tokens(), Tokens(), AsyncTokens()
    text = "".join(llm.stream("hello", config={"callbacks": [sync]}))
    assert "".join([piece async for piece in llm.astream("hello", config={"callbacks": [both, asynchronous]})]) == text
    for tokens in (sync.tokens, sync.chunks, both.tokens, asynchronous.tokens):
        assert "".join(tokens) == text
        assert len(tokens) > 1
    assert sync.ended == both.ended == [text]


async def test_breaking_out_frees_the_engine(llm: KVBoostLLM, boost: KVBoost, threads: Any) -> None:
    long = llm.bind(max_tokens=1500)
    handler = Tokens()
    for _ in long.stream("hello", config={"callbacks": [handler]}):
        break
    assert not threads()
    assert handler.ended == ["GeneratorExit"]
    async for _ in long.astream("hello"):
        break
    await gone(threads)
    assert llm.invoke("hello") == boost.generate("hello", max_new_tokens=12).text


async def gone(threads: Any) -> None:
    """An abandoned async generator is closed by the event loop, a few rounds later."""
    for _ in range(2000):
        if not threads():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("a stream nobody reads still runs")


# number 10: an error inside generation reaches the reader


async def test_an_error_inside_generation_reaches_the_reader(
    llm: KVBoostLLM, boost: KVBoost, monkeypatch: pytest.MonkeyPatch, threads: Any
) -> None:
    expected = llm.invoke(PROMPTS[0])
    with monkeypatch.context() as patch:
        break_after(boost, patch)
        pieces: list[str] = []
        handler = Tokens()
        with pytest.raises(RuntimeError, match="on fire"):
            pieces += llm.stream(PROMPTS[0], config={"callbacks": [handler]})
        assert handler.tokens
        assert handler.ended == ["RuntimeError"]
        with pytest.raises(RuntimeError, match="on fire"):
            async for piece in llm.astream(PROMPTS[0]):
                pieces.append(piece)
        assert pieces
        with pytest.raises(RuntimeError, match="on fire"):
            llm.invoke(PROMPTS[0])
        with pytest.raises(RuntimeError, match="on fire"):
            await llm.ainvoke(PROMPTS[0])
    assert not threads()
    assert llm.invoke(PROMPTS[0]) == expected  # the engine's lock is free again


# LangChain's cache


def test_the_cache_answers_the_same_question_once(
    llm: KVBoostLLM, llm_cache: InMemoryCache, calls: list[list[str]]
) -> None:
    first = llm.invoke("hello")
    assert llm.invoke("hello") == first
    assert llm.batch(["hello", "other"])[0] == first
    assert calls == [["hello"], ["other"]]


def test_what_changes_the_text_changes_the_cache_key(
    boost: KVBoost, tokenizer: Any, llm_cache: InMemoryCache, calls: list[list[str]]
) -> None:
    plain = KVBoostLLM(engine=boost, max_tokens=6)
    plain.invoke("hello")
    others: list[dict[str, Any]] = [
        {"temperature": 0.5, "seed": 1},
        {"max_tokens": 5},
        {"stop": ["q"]},
        {"repair": "none"},
        {"repair": QueryRepair(0.5)},
        {"quality": "fast"},
        {"mode": "baseline"},
        {"repetition_penalty": 2.0},
    ]
    for number, options in enumerate(others):
        KVBoostLLM(**{"engine": boost, "max_tokens": 6, **options}).invoke("hello")
        assert len(calls) == 2 + number, options
    KVBoostLLM(engine=boost, max_tokens=6).invoke("hello")
    assert len(calls) == 1 + len(others)  # an equal one shares the answer
    with KVBoost(build_model(seed=1), tokenizer) as same_name:
        other = KVBoostLLM(engine=same_name, max_tokens=6)
        assert other.model == plain.model
        assert other.invoke("hello") == same_name.generate("hello", max_new_tokens=6).text != plain.invoke("hello")


def test_identifying_params_are_plain_data(boost: KVBoost) -> None:
    llm = KVBoostLLM(engine=boost, stop=["a"], repair=QueryRepair(0.5))
    assert json.loads(json.dumps(llm._identifying_params)) == llm._identifying_params
    params = llm._identifying_params
    assert (params["model"], params["temperature"], params["stop_strings"]) == (llm.model, 0.0, ["a"])
    assert "0.5" in params["repair"]
    assert llm.asdict()["_type"] == "kvboost"


# numbers 9 and 15: our own tokenizer, and no network


def test_tokens_are_counted_by_the_models_tokenizer_offline(llm: KVBoostLLM, boost: KVBoost) -> None:
    pytest_socket.disable_socket(allow_unix_socket=True)
    try:
        text = "the <|im_end|> thin then"
        assert llm.get_token_ids(text) == list(boost.tokens.encode(text))
        assert llm.get_num_tokens(text) == len(boost.tokenizer(text, split_special_tokens=True).input_ids) - 1  # BOS
        assert llm.invoke("hello")
    finally:
        pytest_socket.enable_socket()


def test_a_custom_counter_is_respected(boost: KVBoost) -> None:
    llm = KVBoostLLM(engine=boost, custom_get_token_ids=lambda text: [7] * len(text.split()))
    assert llm.get_num_tokens("one two three") == 3


# Options


def test_a_prompt_template_and_a_parser_make_a_chain(llm: KVBoostLLM, boost: KVBoost) -> None:
    chain = PromptTemplate.from_template("Tell of {what}.") | llm | StrOutputParser()
    assert chain.invoke({"what": "cats"}) == boost.generate("Tell of cats.", max_new_tokens=12).text
    assert "".join(chain.stream({"what": "cats"})) == chain.invoke({"what": "cats"})


def test_unknown_options_warn_once_by_name(llm: KVBoostLLM, boost: KVBoost) -> None:
    with pytest.warns(UserWarning, match="KVBoostLLM ignores the unknown option 'presence_penalty'"):
        llm.invoke("hello", presence_penalty=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm.invoke("hello", presence_penalty=2)
        list(llm.stream("hello", presence_penalty=2))
        KVBoostLLM(engine=boost, api_key="x", timeout=3)
    with pytest.warns(UserWarning, match="unknown option 'best_of'"):
        KVBoostLLM(engine=boost, best_of=2)


WRONG: list[dict[str, Any]] = [
    {"temperature": -1},
    {"temperature": "hot"},
    {"top_p": 2},
    {"top_k": 0},
    {"max_tokens": 0},
    {"seed": -1},
    {"stop": [""]},
    {"stop": [5]},
    {"stop": 5},
    {"repair": "glue"},
    {"quality": "best"},
    {"mode": "magic"},
    {"recompute_ratio": 2},
    {"auto_detect": "perhaps"},
    {"do_sample": "yes"},
]


@pytest.mark.parametrize("options", WRONG, ids=str)
async def test_wrong_values_raise_naming_the_option(llm: KVBoostLLM, options: dict[str, Any]) -> None:
    (name,) = options
    named = "max_new_tokens" if name == "max_tokens" else name
    with pytest.raises(ValueError, match=named):
        llm.invoke("hello", **options)
    with pytest.raises(ValueError, match=named):
        await llm.ainvoke("hello", **options)
    with pytest.raises(ValueError, match=named):
        next(llm.stream("hello", **options))
    if name != "do_sample":  # a call's option only
        with pytest.raises(ValueError, match=f"{name}|{named}"):
            KVBoostLLM(model="/nowhere", **options)


def test_both_names_of_the_limit_may_be_given_if_they_agree(llm: KVBoostLLM, boost: KVBoost) -> None:
    for options in ({"max_tokens": 3}, {"max_new_tokens": 3}, {"max_tokens": 3, "max_new_tokens": 3}):
        assert llm.generate(["hello"], **options).llm_output["token_usage"]["completion_tokens"] == 3
        assert KVBoostLLM(engine=boost, **options).max_tokens == 3
    with pytest.raises(ValueError, match="max_tokens=3 and max_new_tokens=4 are the same option"):
        llm.invoke("hello", max_tokens=3, max_new_tokens=4)
    with pytest.raises(ValueError, match="max_tokens=3 and max_new_tokens=4 are the same option"):
        KVBoostLLM(engine=boost, max_tokens=3, max_new_tokens=4)


def test_an_empty_prompt_is_an_error_where_there_is_no_bos() -> None:
    with KVBoost(build_model(), build_tokenizer(bos=False)) as boost:
        llm = KVBoostLLM(engine=boost, max_tokens=3)
        with pytest.raises(ValueError, match="empty"):
            llm.invoke("")
        with pytest.raises(ValueError, match="empty"):
            llm.batch(["", "x"])
        assert llm.invoke("x") is not None
