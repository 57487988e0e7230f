"""KVBoostLLM: a LlamaIndex LLM over a KVBoost engine.

Knows LlamaIndex's messages and responses; how text becomes ids, and what is reused, is the engine's business. Nodes
that were warmed are found in the prompt wherever they stand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
)
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.custom import CustomLLM

from kvboost_rag.errors import OptionError

_FIELDS = ("max_new_tokens", "temperature", "top_p", "top_k", "seed", "stop", "repair", "recompute_ratio", "mode")
_ROLES = {MessageRole.SYSTEM: "system", MessageRole.USER: "user", MessageRole.ASSISTANT: "assistant"}


class KVBoostLLM(CustomLLM):
    """A local Hugging Face model that reuses the KV of every warmed node.

    ``engine``: a ``kvboost_rag.KVBoost``, shared with transforms and other LLM objects; or ``model_name``: a hub name
    or folder, loaded with ``engine_kwargs``. Options left at None are the engine's own.
    """

    model_name: str = Field(default="", description="hub name or folder of the model")
    max_new_tokens: int = Field(default=256, gt=0)
    temperature: float = Field(default=0.0, ge=0)
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: list[str] | str | None = None
    repair: str | None = None
    recompute_ratio: float | None = None
    mode: str | None = None
    _engine: Any = PrivateAttr()

    def __init__(
        self,
        model_name: str = "",
        engine: Any = None,
        engine_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        from kvboost_rag.kvboost import KVBoost
        from kvboost_rag.owner import engine_of

        if engine is None:
            if not model_name:
                raise OptionError("KVBoostLLM needs engine= (a KVBoost) or model_name= (a hub name or folder)")
            engine = KVBoost.from_pretrained(model_name, **(engine_kwargs or {}))
        engine = engine_of(engine)
        super().__init__(model_name=model_name or engine.name, **kwargs)
        self._engine = engine

    @property
    def engine(self) -> Any:
        """The KVBoost engine this LLM answers with."""
        return self._engine

    @classmethod
    def class_name(cls) -> str:
        return "KVBoostLLM"

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(
            context_window=self._engine.context_tokens,
            num_output=self.max_new_tokens,
            is_chat_model=self._engine.chat_format.has_template,
            model_name=self.model_name,
        )

    def _options(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        options = {name: getattr(self, name) for name in _FIELDS if getattr(self, name) is not None}
        if "repair" in kwargs and "recompute_ratio" not in kwargs:
            options.pop("recompute_ratio", None)
        if "max_tokens" in kwargs:
            kwargs["max_new_tokens"] = kwargs.pop("max_tokens")
        return {**options, **{k: v for k, v in kwargs.items() if v is not None}}

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        result = self._engine.generate(self._prompt(prompt, formatted), **self._options(kwargs))
        return CompletionResponse(text=result.text, raw=_raw(result), additional_kwargs=_extra(result))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        def responses() -> CompletionResponseGen:
            for text, delta, result in self._pieces(self._prompt(prompt, formatted), kwargs):
                yield CompletionResponse(text=text, delta=delta, raw=_raw(result), additional_kwargs=_extra(result))

        return responses()

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        result = self._engine.generate(_to_engine(messages), **self._options(kwargs))
        return ChatResponse(message=_assistant(result.text, result), raw=_raw(result))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        def responses() -> ChatResponseGen:
            for text, delta, result in self._pieces(_to_engine(messages), kwargs):
                yield ChatResponse(message=_assistant(text, result), delta=delta, raw=_raw(result))

        return responses()

    def _prompt(self, prompt: str, formatted: bool) -> str:
        return prompt if formatted or self.completion_to_prompt is None else self.completion_to_prompt(prompt)

    def _pieces(self, prompt: Any, kwargs: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
        """(everything so far, the new piece, the result once there is one), at least once."""
        text = ""
        with self._engine.stream(prompt, **self._options(kwargs)) as stream:
            for piece in stream:
                text += piece
                yield text, piece, None
            yield text, "", stream.result


def _to_engine(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    return [
        {"role": _ROLES.get(message.role, str(message.role.value)), "content": message.content or ""}
        for message in messages
    ]


def _assistant(text: str, result: Any) -> ChatMessage:
    return ChatMessage(role=MessageRole.ASSISTANT, content=text, additional_kwargs=_extra(result))


def _extra(result: Any) -> dict[str, Any]:
    return {"kvboost": result.report.to_dict()} if result is not None else {}


def _raw(result: Any) -> dict[str, Any] | None:
    if result is None:
        return None
    report = result.report
    usage = {
        "prompt_tokens": report.num_prompt_tokens,
        "completion_tokens": report.num_new_tokens,
        "total_tokens": report.num_prompt_tokens + report.num_new_tokens,
        "cached_tokens": report.num_reused_tokens,
    }
    return {"usage": usage, "finish_reason": result.finish_reason}
