"""KVBoostLLM: a LlamaIndex LLM over a KVBoost engine.

Knows LlamaIndex's messages and responses; how text becomes ids, and what is reused, is the engine's business. Nodes
that were warmed are found in the prompt wherever they stand.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
)
from llama_index.core.bridge.pydantic import Field, PrivateAttr, field_serializer
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.custom import CustomLLM
from llama_index.core.llms.llm import default_completion_to_prompt
from llama_index.llms.kvboost.events import aobserved, observed
from llama_index.llms.kvboost.messages import (
    ReadyPrompt,
    Template,
    chat_response,
    check_text_only,
    completion_response,
    to_engine,
)
from llama_index.llms.kvboost.options import CALL, check_call, engine_from, given_options, unknown

from kvboost_rag.calls import REUSE, SAMPLING, listed, merged
from kvboost_rag.errors import OptionError, PromptTooLongError
from kvboost_rag.prompt import Prompt

_FIELDS = (*SAMPLING, *REUSE, "max_new_tokens")
_TOOLS = ("tools", "tool_choice", "functions")

EnginePrompt = Prompt | Sequence[Mapping[str, Any]]
Build = Callable[[str, str | None, Any], Any]  # a response of: all text so far, the new piece, the finished result


class KVBoostLLM(CustomLLM):
    """A local Hugging Face model that reuses the KV of every warmed node.

    ``engine``: a ``kvboost_rag.KVBoost``, or an object that has one, shared with transforms and other LLM objects
    (``model_name`` is then the name it goes by). Or as ``HuggingFaceLLM``: ``model_name``, a hub name or folder, with
    ``tokenizer_name``, ``device_map``, ``model_kwargs``, ``tokenizer_kwargs``; or ``model`` and ``tokenizer``, loaded
    objects. ``engine_kwargs``: options of ``KVBoost.from_pretrained``.

    Options, as fields and of every call: ``max_new_tokens`` (or ``max_tokens``), ``temperature``, ``top_p``,
    ``top_k``, ``seed``, ``repetition_penalty``, ``do_sample``, ``stop`` (a call's are added to the field's); of reuse:
    ``repair``, ``recompute_ratio``, ``quality``, ``mode``, ``auto_detect``. ``generate_kwargs`` sets the same fields.
    What is None is the engine's own. Of names nobody takes, those that look like a slip raise OptionError, others are
    warned of once.

    ``stopping_ids``: tokens that end the answer, besides the model's own end tokens.
    ``context_window``: what LlamaIndex may fill, at most the model's own; longer prompts raise PromptTooLongError. The
    chat template's own tokens come on top, so leave room for them where LlamaIndex packs prompts to the brim.
    ``is_chat_model``: whether prompts are messages; if the tokenizer has a chat template, unless given. ``complete``
    then makes its prompt a user's message, except with ``formatted=True`` or a ``completion_to_prompt`` of yours,
    whose string is completed as it stands. ``messages_to_prompt``, if given, takes the template's place.

    ``raw["usage"]`` counts tokens, those reused as ``cached_tokens``; ``additional_kwargs["kvboost"]`` is the engine's
    report. Tools and images are refused. Copies share the engine; there is no pickling.

    Raises OptionError, or pydantic's ValidationError, before a model is loaded.
    """

    model_name: str = Field(default="", description="hub name or folder of the model")
    context_window: int | None = Field(default=None, gt=0, description="at most the model's own")
    is_chat_model: bool | None = None
    stopping_ids: list[int] = Field(default_factory=list)
    max_new_tokens: int = Field(default=256, gt=0)
    temperature: float | None = Field(default=0.0, ge=0)
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    stop: list[str] | str | None = None
    repair: Any = None
    recompute_ratio: float | None = None
    quality: str | float | None = None
    mode: str | None = None
    auto_detect: bool | None = None
    _engine: Any = PrivateAttr(default=None)
    _warned: set[str] = PrivateAttr(default_factory=set)

    def __init__(
        self,
        model_name: str | None = None,
        engine: Any = None,
        engine_kwargs: Mapping[str, Any] | None = None,
        *,
        model: Any = None,
        tokenizer: Any = None,
        tokenizer_name: str | None = None,
        device_map: Any = None,
        model_kwargs: Mapping[str, Any] | None = None,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        generate_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ):
        loading = {
            "model": model,
            "tokenizer": tokenizer,
            "tokenizer_name": tokenizer_name,
            "device_map": device_map,
            "model_kwargs": model_kwargs,
            "tokenizer_kwargs": tokenizer_kwargs,
            "engine_kwargs": engine_kwargs,
        }
        options = given_options(kwargs, generate_kwargs, {*type(self).model_fields, "engine", *loading})
        super().__init__(model_name=model_name or "", **options)
        check_call(self._options({}, listed(self.stop)) | {"stop_ids": self.stopping_ids})
        self._engine = engine_from(engine, model_name, **loading)
        self.model_name = self.model_name or self._engine.name
        if options.get("messages_to_prompt") is None:
            self.messages_to_prompt = Template(self._engine.chat_format)
        _ = self.metadata  # a wrong window is refused now

    @property
    def engine(self) -> Any:
        """The KVBoost engine this LLM answers with."""
        return self._engine

    @classmethod
    def class_name(cls) -> str:
        return "KVBoostLLM"

    @property
    def metadata(self) -> LLMMetadata:
        window = self._engine.context_tokens
        if self.context_window is not None and self.context_window > window:
            raise OptionError.bad_value("context_window", self.context_window, f"at most the model's own, {window}")
        has_template = self._engine.chat_format.has_template
        return LLMMetadata(
            context_window=self.context_window or window,
            num_output=self.max_new_tokens,
            is_chat_model=has_template if self.is_chat_model is None else self.is_chat_model,
            is_function_calling_model=False,
            model_name=self.model_name,
        )

    def tokenizer_fn(self, text: str) -> list[int]:
        """The model's token ids of ``text``, for ``Settings.tokenizer = llm.tokenizer_fn``."""
        return list(self._engine.tokens.encode(text))

    # Strings

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return self._answer(self._prompt(prompt, formatted), kwargs, completion_response)

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return await self._aanswer(self._prompt(prompt, formatted), kwargs, completion_response)

    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        responses = self._responses(self._prompt(prompt, formatted), kwargs, completion_response)
        return observed(llm_completion_callback, self, prompt, responses, kwargs)

    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        responses = self._aresponses(self._prompt(prompt, formatted), kwargs, completion_response)
        return await aobserved(llm_completion_callback, self, prompt, responses, kwargs)

    # Messages

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return self._answer(self._chat(messages), kwargs, chat_response)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return await self._aanswer(self._chat(messages), kwargs, chat_response)

    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        responses = self._responses(self._chat(messages), kwargs, chat_response)
        return observed(llm_chat_callback, self, messages, responses, kwargs)

    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        responses = self._aresponses(self._chat(messages), kwargs, chat_response)
        return await aobserved(llm_chat_callback, self, messages, responses, kwargs)

    # The engine's own prompts, in which documents are marked

    def complete_prompt(self, prompt: EnginePrompt, **kwargs: Any) -> CompletionResponse:
        """As ``complete`` for what ``engine.prompt()`` built, or the engine's messages. Events show its text."""
        return self.complete(self._ready(prompt), formatted=True, **kwargs)

    async def acomplete_prompt(self, prompt: EnginePrompt, **kwargs: Any) -> CompletionResponse:
        return await self.acomplete(self._ready(prompt), formatted=True, **kwargs)

    def stream_complete_prompt(self, prompt: EnginePrompt, **kwargs: Any) -> CompletionResponseGen:
        return self.stream_complete(self._ready(prompt), formatted=True, **kwargs)

    async def astream_complete_prompt(self, prompt: EnginePrompt, **kwargs: Any) -> CompletionResponseAsyncGen:
        return await self.astream_complete(self._ready(prompt), formatted=True, **kwargs)

    # Copies

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> KVBoostLLM:
        memo = {} if memo is None else memo
        for shared in (self._engine, self._engine.chat_format):
            memo[id(shared)] = shared
        return super().__deepcopy__(memo)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "KVBoostLLM holds a loaded model and cannot be pickled: run the pipeline without num_workers, or build an "
            "LLM in each process; with the same cache_dir they share what was warmed"
        )

    @field_serializer("repair")
    def _plain_repair(self, repair: Any) -> str | None:
        return repair if isinstance(repair, str | None) else repr(repair)

    # From LlamaIndex to the engine

    def _prompt(self, prompt: str, formatted: bool) -> Any:
        """What the engine is asked for ``complete(prompt)``."""
        if isinstance(prompt, ReadyPrompt):
            return prompt.prompt
        if not isinstance(prompt, str):
            raise TypeError(f"prompt is a string, not {type(prompt).__name__}; see chat() and complete_prompt()")
        if formatted:
            return prompt
        if self.completion_to_prompt not in (None, default_completion_to_prompt):
            return self.completion_to_prompt(prompt)
        return self._chat([ChatMessage(prompt)]) if self.metadata.is_chat_model else prompt

    def _chat(self, messages: Sequence[ChatMessage]) -> Any:
        """What the engine is asked for ``chat(messages)``."""
        check_text_only(messages)
        if self.messages_to_prompt is None or isinstance(self.messages_to_prompt, Template):
            return to_engine(messages)
        return self.messages_to_prompt(messages)

    def _ready(self, prompt: Any) -> ReadyPrompt:
        return ReadyPrompt(prompt if isinstance(prompt, Prompt) else self._engine.chat_format.render(prompt))

    def _options(self, kwargs: Mapping[str, Any], stops: Sequence[str]) -> dict[str, Any]:
        """The engine's options of one call: this model's fields, overridden by the call's."""
        if any(kwargs.get(name) for name in _TOOLS):  # never dropped in silence
            raise NotImplementedError(
                "KVBoostLLM does not call tools: use a ReActAgent, which asks for them in the prompt, or retrieve "
                "first and put the nodes into the prompt"
            )
        for name in kwargs.keys() - {*CALL, *_TOOLS, *self._warned}:
            unknown(name, CALL)
            self._warned.add(name)  # not reached for a slip, which raises every time
        call = {name: value for name, value in kwargs.items() if name in CALL and name != "stop"}
        own = {name: getattr(self, name) for name in _FIELDS}
        return merged(own, call, [*stops, *listed(kwargs.get("stop"))])

    def _request(self, prompt: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The engine's options for ``prompt``. Raises PromptTooLongError by ``context_window``, the chat template's own
        tokens not counted, as LlamaIndex counts; by the model's own window the engine does."""
        options = self._options(kwargs, listed(self.stop)) | {"stop_ids": self.stopping_ids}
        if self._is_narrow and isinstance(options["max_new_tokens"], int):
            if not isinstance(prompt, str):
                pieces = self._ready(prompt).prompt.pieces
                prompt = Prompt(tuple(piece for piece in pieces if piece.kind != "template"))
            window, num_tokens = self.metadata.context_window, self._engine.count_tokens(prompt)
            if num_tokens + options["max_new_tokens"] > window:
                what = f"with context_window={window} the prompt without its template"
                raise PromptTooLongError(num_tokens, options["max_new_tokens"], window, what)
        return options

    async def _arequest(self, prompt: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """As ``_request``; counting takes a while."""
        return (
            await asyncio.to_thread(self._request, prompt, kwargs) if self._is_narrow else self._request(prompt, kwargs)
        )

    @property
    def _is_narrow(self) -> bool:
        return self.context_window is not None and self.context_window < self._engine.context_tokens

    # From the engine to LlamaIndex

    def _answer(self, prompt: Any, kwargs: Mapping[str, Any], build: Build) -> Any:
        result = self._engine.generate(prompt, **self._request(prompt, kwargs))
        return build(result.text, None, result)

    async def _aanswer(self, prompt: Any, kwargs: Mapping[str, Any], build: Build) -> Any:
        result = await self._engine.agenerate(prompt, **await self._arequest(prompt, kwargs))
        return build(result.text, None, result)

    def _responses(self, prompt: Any, kwargs: Mapping[str, Any], build: Build) -> Generator[Any]:
        """At least one response; the last one alone has the result."""
        text = ""
        with self._engine.stream(prompt, **self._request(prompt, kwargs)) as stream:
            for piece in stream:
                text += piece
                yield build(text, piece, None)
            yield build(text, "", stream.result)

    async def _aresponses(self, prompt: Any, kwargs: Mapping[str, Any], build: Build) -> AsyncGenerator[Any]:
        """As ``_responses`` for an event loop."""
        text = ""
        async with self._engine.astream(prompt, **await self._arequest(prompt, kwargs)) as stream:
            async for piece in stream:
                text += piece
                yield build(text, piece, None)
            yield build(text, "", stream.result)
