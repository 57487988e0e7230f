"""ChatKVBoost: a LangChain chat model over a KVBoost engine.

Knows LangChain's messages and chunks; how text becomes ids, and what is reused, is the engine's business. Documents
that were warmed are found in the messages wherever they stand, so every way of building a prompt hits.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, ChatMessage
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from pydantic import model_validator

from kvboost_rag.errors import OptionError
from langchain_kvboost.base import OverEngine

_ROLES = {"system": "system", "human": "user", "ai": "assistant"}
_ROUTING = ("stream", "disable_streaming", "tools")  # call options that LangChain itself reads and hands on
_NO_TOOLS = (
    "ChatKVBoost does not call tools. For RAG retrieve first: put the documents into the messages, or use "
    "create_kvboost_rag_chain, or create_agent(model, tools=[], middleware=[KVBoostRAGMiddleware(...)])"
)


class ChatKVBoost(OverEngine, BaseChatModel):
    """Chat with a local Hugging Face model that reuses the KV of every warmed document.

    Options of the constructor and of every call: ``temperature``, ``top_p``, ``top_k``, ``seed``,
    ``repetition_penalty``, ``max_tokens`` (or ``max_new_tokens``), ``stop`` (both are merged), ``do_sample`` (calls
    only), and of reuse: ``repair``, ``recompute_ratio``, ``quality``, ``mode``, ``auto_detect``. Unknown ones are
    warned of once. ``usage_metadata`` counts reused tokens as ``cache_read`` and newly stored ones as
    ``cache_creation``; the engine's report is in ``response_metadata["kvboost"]``.

    Tools and structured output are refused: the model is not constrained to write either.
    """

    streaming: bool = False

    @model_validator(mode="after")
    def _set_kvboost_profile(self) -> Any:
        if self.profile is None:  # the base class asks before the model is loaded
            self.profile = self._resolve_model_profile()
        return self

    def _resolve_model_profile(self) -> Any:
        """What the model's own configuration says; None while there is no engine yet."""
        from kvboost_rag.kvboost import KVBoost

        if not isinstance(self.engine, KVBoost):
            return None
        tokens = self.engine.context_tokens
        return {
            "name": self.model or self.engine.name,
            "max_input_tokens": tokens,
            "max_output_tokens": tokens,
            "text_inputs": True,
            "text_outputs": True,
            "image_inputs": False,
            "pdf_inputs": False,
            "audio_inputs": False,
            "video_inputs": False,
            "tool_calling": False,
            "structured_output": False,
            "open_weights": True,
            "temperature": True,
        }

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return self._answer(self.engine.generate(to_engine(messages), **self._options(stop, kwargs)))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return self._answer(await self.engine.agenerate(to_engine(messages), **self._options(stop, kwargs)))

    def _answer(self, result: Any) -> ChatResult:
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
            yield self._last(stream.result)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        async with self.engine.astream(to_engine(messages), **self._options(stop, kwargs)) as stream:
            async for piece in stream:
                chunk = ChatGenerationChunk(message=AIMessageChunk(content=piece))
                if run_manager:
                    await run_manager.on_llm_new_token(piece, chunk=chunk)
                yield chunk
            yield self._last(stream.result)

    def _last(self, result: Any) -> ChatGenerationChunk:
        """The chunk that ends a stream: no text, and everything that is counted once."""
        message = AIMessageChunk(content="", chunk_position="last", usage_metadata=_usage(result.report))
        return ChatGenerationChunk(message=message, generation_info=self._metadata(result))

    def _options(self, stop: Sequence[str] | None, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        if kwargs.get("tools"):  # bound by hand: never dropped in silence
            raise NotImplementedError(_NO_TOOLS)
        return super()._options(stop, {name: value for name, value in kwargs.items() if name not in _ROUTING})

    def get_num_tokens_from_messages(self, messages: Sequence[BaseMessage], tools: Any = None) -> int:
        """Tokens of the prompt that ``messages`` make, the template's own included; where the model could not be asked
        with them (a history cut in the middle), the sum of their texts."""
        if self.custom_get_token_ids is None:
            with contextlib.suppress(OptionError):
                return self.engine.count_tokens(to_engine(messages))
        return super().get_num_tokens_from_messages(list(messages), tools)

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(_NO_TOOLS)

    def with_structured_output(self, schema: Any = None, **kwargs: Any) -> Any:
        raise NotImplementedError(
            "ChatKVBoost does not constrain what the model writes, so the output may not fit the schema. Ask for JSON "
            "in the prompt and parse it: prompt | model | JsonOutputParser() of langchain_core.output_parsers"
        )


def to_engine(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """LangChain messages as the engine's. A text block with ``extras={"kvboost": ...}`` is a document of its own."""
    return [{"role": _role(message), "content": _content(message)} for message in messages]


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return _ROLES.get(message.role, message.role)
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
