"""ChatKVBoost: a LangChain chat model over a KVBoost engine.

Knows LangChain's messages and chunks; how text becomes ids, and what is reused, is the engine's business. Documents
that were warmed are found in the messages wherever they stand, so every way of building a prompt hits.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, ChatMessage
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from pydantic import Field, PrivateAttr, model_validator

from kvboost_rag.errors import OptionError

_ROLES = {"system": "system", "human": "user", "ai": "assistant"}
_FIELDS = ("temperature", "top_p", "top_k", "seed", "repetition_penalty", "repair", "recompute_ratio", "mode")
_CALL = (*_FIELDS, "auto_detect", "max_new_tokens")


class ChatKVBoost(BaseChatModel):
    """Chat with a local Hugging Face model that reuses the KV of every warmed document.

    ``engine``: a ``kvboost_rag.KVBoost``, shared with retrievers, vector stores and other models; or ``model``: a hub
    name or folder, loaded with ``engine_kwargs`` on construction. Options left at None are the engine's own.
    """

    engine: Any = Field(default=None, exclude=True, repr=False)
    model: str = ""
    engine_kwargs: dict[str, Any] = Field(default_factory=dict, repr=False)
    temperature: float = 0.0
    max_tokens: int = 256
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    stop: list[str] | str | None = None
    repair: Any = None
    recompute_ratio: float | None = None
    mode: str | None = None
    streaming: bool = False
    _warned: set[str] = PrivateAttr(default_factory=set)

    @model_validator(mode="after")
    def _load(self) -> ChatKVBoost:
        from kvboost_rag.kvboost import KVBoost
        from kvboost_rag.owner import engine_of

        if self.engine is None:
            if not self.model:
                raise OptionError("ChatKVBoost needs engine= (a KVBoost) or model= (a hub name or folder)")
            self.engine = KVBoost.from_pretrained(self.model, **self.engine_kwargs)
        self.engine = engine_of(self.engine)
        self.model = self.model or self.engine.name
        return self

    @property
    def _llm_type(self) -> str:
        return "kvboost"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        options = {name: getattr(self, name) for name in (*_FIELDS, "max_tokens", "stop")}
        if not isinstance(self.repair, str | None):
            options["repair"] = repr(self.repair)  # a strategy object; what identifies must be plain data
        return {"model": self.model, **options}

    def _options(self, stop: Sequence[str] | None, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The engine's options of one call: this model's fields, overridden by the call's."""
        options = {name: getattr(self, name) for name in _FIELDS if getattr(self, name) is not None}
        if "repair" in kwargs and "recompute_ratio" not in kwargs:
            options.pop("recompute_ratio", None)
        max_tokens = kwargs.pop("max_tokens", None)
        options["max_new_tokens"] = self.max_tokens if max_tokens is None else max_tokens
        for name, value in kwargs.items():
            if name in _CALL:
                options[name] = value
            elif name not in self._warned and not name.startswith("ls_"):
                self._warned.add(name)
                warnings.warn(
                    f"ChatKVBoost ignores the unknown option {name!r}; it takes: max_tokens, stop, {', '.join(_CALL)}",
                    stacklevel=4,
                )
        own = [self.stop] if isinstance(self.stop, str) else list(self.stop or ())
        merged = list(dict.fromkeys([*own, *(stop or ())]))
        if merged:
            options["stop"] = merged
        return options

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        result = self.engine.generate(to_engine(messages), **self._options(stop, kwargs))
        message = AIMessage(
            content=result.text,
            usage_metadata=_usage(result.report),
            response_metadata=self._metadata(result),
        )
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        with self.engine.stream(to_engine(messages), **self._options(stop, kwargs)) as stream:
            for piece in stream:
                chunk = ChatGenerationChunk(message=AIMessageChunk(content=piece))
                if run_manager:
                    run_manager.on_llm_new_token(piece, chunk=chunk)
                yield chunk
            result = stream.result
        last = AIMessageChunk(content="", chunk_position="last", usage_metadata=_usage(result.report))
        yield ChatGenerationChunk(message=last, generation_info=self._metadata(result))

    def _metadata(self, result: Any) -> dict[str, Any]:
        return {"model_name": self.model, "finish_reason": result.finish_reason, "kvboost": result.report.to_dict()}

    def get_token_ids(self, text: str) -> list[int]:
        return list(self.engine.tokens.encode(text))

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("ChatKVBoost does not call tools: pass retrieved documents in the messages instead")


def to_engine(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """LangChain messages as the engine's. A text block with ``extras={"kvboost": ...}`` is a document of its own."""
    return [{"role": _role(message), "content": _content(message)} for message in messages]


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    if message.type not in _ROLES:
        raise OptionError.bad_value("message type", message.type, "system, human or ai messages")
    return _ROLES[message.type]


def _content(message: BaseMessage) -> str | list[Any]:
    if isinstance(message.content, str):
        return message.content
    from kvboost_rag.prompt import Piece, document_piece

    blocks: list[Any] = []
    for block in message.content:
        marked = isinstance(block, dict) and "kvboost" in (block.get("extras") or {})
        if marked and isinstance(block.get("text"), str):
            text = block["text"]
            piece = document_piece(text)
            if piece is None:
                continue
            start = text.index(piece.text)
            blocks += [Piece(text[:start]), piece, Piece(text[start + len(piece.text) :])]
        else:
            blocks.append(block)
    return blocks


def _usage(report: Any) -> UsageMetadata:
    return UsageMetadata(
        input_tokens=report.num_prompt_tokens,
        output_tokens=report.num_new_tokens,
        total_tokens=report.num_prompt_tokens + report.num_new_tokens,
        input_token_details=InputTokenDetails(
            cache_read=report.num_reused_tokens, cache_creation=report.num_stored_tokens
        ),
    )
