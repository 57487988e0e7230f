"""LlamaIndex's messages as the engine's, and the engine's results as LlamaIndex's responses.

Knows the types of both sides; knows nothing of options, events or engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, MessageRole, TextBlock

from kvboost_rag.errors import OptionError
from kvboost_rag.prompt import Prompt

_ROLES = {
    MessageRole.SYSTEM: "system",
    MessageRole.DEVELOPER: "system",
    MessageRole.USER: "user",
    MessageRole.ASSISTANT: "assistant",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
}


class ReadyPrompt(str):
    """The text of a prompt, for LlamaIndex's events, with the prompt itself."""

    prompt: Prompt

    def __new__(cls, prompt: Prompt) -> ReadyPrompt:
        ready = super().__new__(cls, prompt.text)
        ready.prompt = prompt
        return ready


@dataclass(frozen=True)
class Template:
    """A chat template as a ``messages_to_prompt``. ``chat_format``: the engine's."""

    chat_format: Any

    def __call__(self, messages: Sequence[ChatMessage]) -> str:
        text: str = self.chat_format.render(to_engine(messages)).text
        return text


def check_text_only(messages: Sequence[ChatMessage]) -> None:
    """Raises OptionError for a message with anything but text."""
    for message in messages:
        for block in message.blocks:
            if not isinstance(block, TextBlock):
                raise OptionError(f"KVBoostLLM serves text only, and a message holds a {type(block).__name__}")


def to_engine(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Raises OptionError for roles that only models with tools have."""
    for message in messages:
        if message.role not in _ROLES:
            raise OptionError.bad_value("message role", message.role.value, "system, user or assistant")
    return [{"role": _ROLES[message.role], "content": message.content or ""} for message in messages]


def completion_response(text: str, delta: str | None, result: Any) -> CompletionResponse:
    """``text``: everything so far; ``delta``: the new piece; ``result``: what the engine returned, at the end."""
    return CompletionResponse(text=text, delta=delta, raw=_raw(result), additional_kwargs=_extra(result))


def chat_response(text: str, delta: str | None, result: Any) -> ChatResponse:
    """As ``completion_response``. The report is with the message, where LlamaIndex's own adapters put it."""
    message = ChatMessage(role=MessageRole.ASSISTANT, content=text, additional_kwargs=_extra(result))
    return ChatResponse(message=message, delta=delta, raw=_raw(result))


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
