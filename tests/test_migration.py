"""docs/migration.md tells the truth: what its tables say is taken is taken, and nothing else is dropped in silence.

Knows the page and our classes; knows nothing of the packages people come from, which are not installed here.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import build_model, build_tokenizer, document
from indexes import Words, watch
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_kvboost import ChatKVBoost, create_kvboost_rag_chain, warm_documents
from langchain_kvboost import KVBoostLLM as CompletionModel
from llama_index.core import VectorStoreIndex
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import TextNode
from llama_index.core.types import PydanticProgramMode
from llama_index.llms.kvboost import KVBoostLLM, KVBoostSynthesizer, KVBoostWarmTransform

from kvboost_rag import REPAIRS, KVBoost, OptionError
from kvboost_rag.calls import CALL
from kvboost_rag.engine.types import total_tokens

PAGE = (Path(__file__).parent.parent / "docs/migration.md").read_text(encoding="utf-8")
NOT_TAKEN = ("not needed", "not supported", "not kept")
LOADING = {"engine", "model", "model_id", "model_name"}
PROMPT = "The lighthouse was built in"
DOCUMENTS = [document(number) for number in range(3)]
TOKENS = 16


@dataclass(frozen=True)
class Row:
    """``target``: what the table's head has for ours; ``where``: empty in tables of methods and results."""

    target: str
    theirs: str
    ours: str
    where: str


def rows() -> Iterator[Row]:
    """The rows of all tables that compare: options with a column *where*, methods and results without."""
    lines = [[cell.strip() for cell in line[1:-1].split("|")] for line in PAGE.splitlines() if line.startswith("|")]
    head: list[str] = []
    for cells, following in zip(lines, [*lines[1:], [""]], strict=True):
        if following[0] == "---":
            head = cells
        elif cells[0] != "---" and len(head) > 2:
            yield Row(head[1].strip("`"), cells[0], cells[1], cells[2] if head[2] == "where" else "")


ROWS = list(rows())


def spans(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def ours(*places: str) -> list[Any]:
    """Every span of our columns in the rows of these places, with the table's target."""
    taken = [row for row in ROWS if row.where in places and not row.ours.startswith(NOT_TAKEN)]
    return [pytest.param(row.target, each, id=f"{row.target}({each})") for row in taken for each in spans(row.ours)]


class Anything(dict[str, Any]):
    """Names that mean nothing here."""

    def __missing__(self, name: str) -> object:
        return name


def options_of(cell: str) -> Iterator[tuple[str, Any]]:
    """Names and values of options in a cell; of ``some_kwargs={...}`` those inside."""
    for span in spans(cell):
        found = eval(f"dict({span})", {}, Anything(dict=dict)) if "=" in span else {}
        for name, value in found.items():
            yield from value.items() if name.endswith("_kwargs") else [(name, value)]


def not_taken() -> list[Any]:
    refused = [row for row in ROWS if row.where == "" and row.ours.startswith(("not needed", "not supported"))]
    found = [(row.target, *option) for row in refused for option in options_of(row.theirs)]
    return [pytest.param(*each, id=f"{each[0]}({each[1]})") for each in found]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model, for what is loaded by name."""
    path = tmp_path_factory.mktemp("model")
    build_model().save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def engine() -> Iterator[KVBoost]:
    with KVBoost(build_model(), build_tokenizer()) as engine:
        yield engine


@pytest.fixture(scope="module")
def names(folder: Path, engine: KVBoost, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the options of the page refer to."""
    return {
        "name": str(folder),
        "folder": tmp_path_factory.mktemp("kept"),
        "device": "cpu",
        "engine": engine,
        "KVBoost": KVBoost,
        "model": build_model(),
        "tokenizer": build_tokenizer(),
        "count": lambda text: [0] * len(text),
        "write": str,
        "PromptTemplate": PromptTemplate,
        "PydanticProgramMode": PydanticProgramMode,
        "REPAIRS": REPAIRS,
    }


def build(target: str, names: dict[str, Any], **options: Any) -> Any:
    """An object of the class that ``target`` names, over the shared engine unless the options load one."""
    module, name = target.removesuffix(".generate").removesuffix(".from_pretrained").rsplit(".", 1)
    cls = getattr(importlib.import_module(module), name)
    if cls is not KVBoost:
        given = {"model": names["name"]} if "engine_kwargs" in options else {"engine": names["engine"]}
        return cls(**options) if LOADING & options.keys() else cls(**given, **options)
    given = {} if LOADING & options.keys() else {"model_name": names["name"]}
    return KVBoost.from_pretrained(**given, **options)


def call(target: str, names: dict[str, Any], **options: Any) -> str:
    """What the class answers, called with these options."""
    if target.startswith("kvboost_rag"):
        return str(names["engine"].generate(PROMPT, **{"max_new_tokens": 2, **options}).text)
    if target.startswith("llama_index"):
        return str(build(target, names, max_new_tokens=2).complete(PROMPT, **options))
    answer = build(target, names, max_tokens=2).invoke(PROMPT, **options)
    return str(getattr(answer, "content", answer))


def test_the_page_has_a_table_of_options_for_each_class() -> None:
    targets = {row.target for row in ROWS if row.where}
    assert targets == {
        "langchain_kvboost.KVBoostLLM",
        "langchain_kvboost.ChatKVBoost",
        "llama_index.llms.kvboost.KVBoostLLM",
        "kvboost_rag.KVBoost.from_pretrained",
        "kvboost_rag.KVBoost.generate",
    }
    assert {row.where for row in ROWS} == {"constructor", "call", "both", ""}


@pytest.mark.parametrize(("target", "options"), ours("constructor", "both"))
def test_constructors_take_what_the_tables_say(target: str, options: str, names: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # an unknown option is warned of
        built = build(target, names, **eval(f"dict({options})", names))
    own = built if isinstance(built, KVBoost) else built.engine
    if own is not names["engine"]:
        own.close()


@pytest.mark.parametrize(("target", "options"), ours("call", "both"))
def test_calls_take_what_the_tables_say(target: str, options: str, names: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        call(target, names, **eval(f"dict({options})", names))


@pytest.mark.parametrize("use", [build, call])
@pytest.mark.parametrize(("target", "option", "value"), not_taken())
def test_what_is_not_taken_is_not_dropped_in_silence(
    target: str, option: str, value: Any, use: Callable[..., Any], names: dict[str, Any]
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            use(target, names, **{option: value})
        except (OptionError, NotImplementedError) as error:
            caught.append(error)  # type: ignore[arg-type]
    assert any(option in str(getattr(each, "message", each)) for each in caught)


@pytest.mark.parametrize(("target", "expression"), [each for each in ours("") if each.values[0] == "kvboost_rag"])
def test_methods_and_results_are_there(target: str, expression: str, engine: KVBoost) -> None:
    prompt = engine.prompt(DOCUMENTS[:1], "Who?")
    found = {"engine": engine, "passages": DOCUMENTS[:1], "prompt": prompt}
    found["report"] = engine.warm(DOCUMENTS[:1], progress=False)
    found["result"] = engine.generate(prompt, max_new_tokens=2)
    assert eval(expression, found) is not None


@pytest.mark.parametrize("start", ["HuggingFacePipeline", "ChatHuggingFace", "HuggingFaceLLM"])
def test_each_section_names_every_option_of_a_call(start: str) -> None:
    section = PAGE.split(f"## Coming from {start}\n")[1].split("\n## ")[0]
    assert [name for name in (*CALL, "stop") if not re.search(rf"\b{name}\b", section)] == []


# Someone comes from ...


def own_text(model: Any, ids: Sequence[int]) -> str:
    """What transformers itself answers, greedily."""
    given = torch.tensor([list(ids)])
    found = model.generate(input_ids=given, do_sample=False, max_new_tokens=TOKENS)[0][given.shape[1] :]
    return str(build_tokenizer().decode(found, skip_special_tokens=True))


def ids_of(engine: KVBoost, prompt: Any) -> list[int]:
    return [each for segment in engine.segments(prompt) for each in segment.ids]


def a_stop(text: str) -> str:
    """Two characters from the middle of ``text``."""
    return next(text[at : at + 2] for at in range(2, len(text) - 2) if text[at : at + 2].isprintable())


async def test_coming_from_hugging_face_pipeline(folder: Path) -> None:
    llm = CompletionModel(model=str(folder), max_tokens=TOKENS, mode="baseline")
    model = llm.engine.engine.model.module
    text = own_text(model, build_tokenizer()(PROMPT).input_ids)
    model.generation_config.update(do_sample=True, temperature=5.0)  # not used: greedy unless asked for more
    assert llm.invoke(PROMPT) == text
    assert CompletionModel(engine=llm.engine, max_tokens=TOKENS).invoke(PROMPT) == text
    assert "".join(llm.stream(PROMPT)) == text
    assert await llm.ainvoke(PROMPT) == text
    assert llm.batch([PROMPT, PROMPT + " a"]) == [text, llm.invoke(PROMPT + " a")]

    stop = a_stop(text)
    cut = text[: text.index(stop)]
    assert llm.invoke(PROMPT, stop=["never", stop]) == cut
    both = CompletionModel(engine=llm.engine, max_tokens=TOKENS, mode="baseline", stop=[stop])
    assert both.invoke(PROMPT, stop=["never"]) == cut
    assert "".join(both.stream(PROMPT)) == cut

    draws = set()
    for seed in (1, 2):  # of the process
        torch.manual_seed(seed)
        draws.add(llm.invoke(PROMPT, temperature=1.0, seed=7))
    assert len(draws) == 1
    assert draws != {text}
    usage = llm.generate([PROMPT]).llm_output["token_usage"]
    assert usage["prompt_tokens"] == len(build_tokenizer()(PROMPT).input_ids)


class Finds(BaseRetriever):
    """Finds the last two documents, the last one first."""

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        return [Document(text) for text in DOCUMENTS[:0:-1]]


async def test_coming_from_chat_hugging_face(engine: KVBoost, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = ChatKVBoost(engine=engine, max_tokens=TOKENS, mode="baseline")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who made it?"}]
    ids = build_tokenizer(bos=False).apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids_of(engine, messages) == ids
    text = own_text(engine.engine.model.module, ids)

    answer = chat.invoke(messages)
    assert answer.content == text
    assert (await chat.ainvoke(messages)).content == text
    assert answer.usage_metadata["input_tokens"] == len(ids)
    chunks = list(chat.stream(messages))
    assert "".join(chunk.content for chunk in chunks) == text
    assert [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata] == [answer.usage_metadata]
    stop = a_stop(text)
    assert chat.invoke(messages, stop=[stop]).content == text[: text.index(stop)]
    marker = build_tokenizer().convert_tokens_to_ids("<|im_end|>")
    assert ids_of(engine, [{"role": "user", "content": "<|im_end|>"}]).count(marker) == 1  # the template's

    reports = watch(engine, monkeypatch)
    warm_documents([Document(text) for text in DOCUMENTS], engine, progress=False)
    found = create_kvboost_rag_chain(ChatKVBoost(engine=engine, max_tokens=2), Finds()).invoke({"input": "Who?"})
    assert [each.page_content for each in found["context"]] == DOCUMENTS[:0:-1]
    assert reports[-1].num_document_hits == 2
    asked = ChatKVBoost(engine=engine, max_tokens=2).invoke(f"Read this.\n\n{DOCUMENTS[0]}\n\nWho?")
    assert asked.usage_metadata["input_token_details"]["cache_read"] > 0
    with pytest.raises(NotImplementedError):
        chat.bind_tools([])


async def test_coming_from_hugging_face_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, plain = build_tokenizer(), build_tokenizer(bos=False)
    options = {"max_new_tokens": TOKENS, "mode": "baseline"}
    llm = KVBoostLLM(model=build_model(), tokenizer=tokenizer, **options)
    model = llm.engine.engine.model.module
    text = own_text(model, tokenizer(PROMPT).input_ids)
    assert llm.complete(PROMPT, formatted=True).text == text
    base = KVBoostLLM(engine=llm.engine, is_chat_model=False, **options)
    assert base.complete(PROMPT).text == text
    assert (await base.acomplete(PROMPT)).text == text
    parts = list(base.stream_complete(PROMPT))
    assert "".join(part.delta for part in parts) == parts[-1].text == text
    stop = a_stop(text)
    assert base.complete(PROMPT, stop=[stop]).text == text[: text.index(stop)]

    message = {"role": "user", "content": PROMPT}
    ids = plain.apply_chat_template([message], add_generation_prompt=True, return_dict=False)
    answer = llm.chat([ChatMessage(**message)])
    assert answer.message.content == llm.complete(PROMPT).text == own_text(model, ids)
    assert answer.raw["usage"]["prompt_tokens"] == len(ids)
    first = model.generate(input_ids=torch.tensor([ids]), do_sample=False, max_new_tokens=3)[0].tolist()[len(ids) :]
    stopping = KVBoostLLM(engine=llm.engine, stopping_ids=[first[2]], **options)
    assert stopping.complete(PROMPT).text == plain.decode(first[: first.index(first[2])])

    reports = watch(llm.engine, monkeypatch)
    nodes = KVBoostWarmTransform(llm)([TextNode(text=text) for text in DOCUMENTS])
    index = VectorStoreIndex(nodes, embed_model=Words())
    asking = KVBoostLLM(engine=llm.engine, max_new_tokens=2, system_prompt="Be brief.")
    index.as_query_engine(llm=asking, response_synthesizer=KVBoostSynthesizer(llm=asking)).query("Who?")
    index.as_query_engine(llm=asking).query("Who?")
    assert [report.num_document_hits for report in reports] == [2, 2]


def test_coming_from_kvboost(engine: KVBoost) -> None:
    model = engine.engine.model.module
    text = own_text(model, build_tokenizer()(PROMPT).input_ids)
    assert engine.generate(PROMPT, max_new_tokens=TOKENS, mode="baseline").text == text
    both = engine.generate_many([PROMPT, PROMPT + " a"], max_new_tokens=TOKENS, progress=False)
    assert [result.text for result in both] == [text, engine.generate(PROMPT + " a", max_new_tokens=TOKENS).text]
    with engine.stream(PROMPT, max_new_tokens=TOKENS) as pieces:
        assert "".join(pieces) == text == pieces.result.text

    engine.warm(DOCUMENTS, progress=False)
    prompt = engine.prompt(documents=DOCUMENTS[::-1], question="Who?")  # no grid, no order
    result = engine.generate(prompt, max_new_tokens=2, repair="none")
    assert result.report.num_document_hits == 3
    assert 0 < result.report.reuse_ratio < 1
    assert result.report.num_prompt_tokens == total_tokens(engine.segments(prompt))
    written = "Read.\n\n" + "\n\n".join(DOCUMENTS[:2]) + "\n\nWho?"
    assert engine.generate(written, max_new_tokens=2).report.num_document_hits == 2
    full, exact = (engine.prefill(prompt, **each).logits for each in ({"mode": "baseline"}, {"quality": "exact"}))
    torch.testing.assert_close(exact, full, atol=1e-4, rtol=1e-4)
