"""LangChain's own suites (langchain-tests) over our classes: none overridden, no socket but asyncio's own.

What is skipped is skipped by a declared capability: tools, structured output, other media than text, another model per
call.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import pytest_socket
from conftest import build_model, build_tokenizer, document
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from langchain_kvboost import ChatKVBoost, KVBoostRetriever, KVBoostVectorStore
from langchain_tests.integration_tests import (
    ChatModelIntegrationTests,
    RetrieversIntegrationTests,
    VectorStoreIntegrationTests,
)
from langchain_tests.unit_tests import ChatModelUnitTests

from kvboost_rag import KVBoost

_numbers = itertools.count(1000)  # of documents nobody has read


@cache
def shared() -> KVBoost:
    """One engine for the whole module: constructing a model over it must load nothing."""
    return KVBoost(build_model(), build_tokenizer(), max_cache_bytes="64MB")


@pytest.fixture(scope="module", autouse=True)
def _close() -> Iterator[None]:
    yield
    shared().close()


@pytest.fixture(autouse=True)
def _offline() -> Iterator[None]:
    pytest_socket.disable_socket(allow_unix_socket=True)  # asyncio's self-pipe is one
    yield
    pytest_socket.enable_socket()


def test_sockets_are_off() -> None:
    import socket

    with pytest.raises(pytest_socket.SocketBlockedError):
        socket.create_connection(("127.0.0.1", 9))


class Params:
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatKVBoost

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": shared()}

    @property
    def supports_model_override(self) -> bool:
        return False

    @property
    def has_tool_calling(self) -> bool:
        return False

    @property
    def has_structured_output(self) -> bool:
        return False


class TestChatUnit(Params, ChatModelUnitTests):
    pass


class TestChatIntegration(Params, ChatModelIntegrationTests):
    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**super().chat_model_params, "max_tokens": 8}

    @property
    def supported_usage_metadata_details(self) -> dict[str, Any]:
        kinds = ["cache_read_input", "cache_creation_input"]
        return {"invoke": kinds, "stream": kinds}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        text = document(next(_numbers))
        shared().warm([text], progress=False)
        message = self._ask([HumanMessage(f"{text}\n\nwhich?")], stream)
        assert message.usage_metadata["input_token_details"]["cache_read"] > 0
        return message

    def invoke_with_cache_creation_input(self, *, stream: bool = False) -> AIMessage:
        block = {"type": "text", "text": document(next(_numbers)), "extras": {"kvboost": {}}}
        message = self._ask([HumanMessage([block, {"type": "text", "text": "\n\nwhich?"}])], stream)
        assert message.usage_metadata["input_token_details"]["cache_creation"] > 0
        return message

    def _ask(self, messages: list[Any], stream: bool) -> AIMessage:
        model = ChatKVBoost(**self.chat_model_params)
        if not stream:
            return model.invoke(messages)
        whole: AIMessageChunk | None = None
        for chunk in model.stream(messages):
            whole = chunk if whole is None else whole + chunk
        assert whole is not None
        return whole


class TestVectorStore(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self) -> Iterator[VectorStore]:
        yield KVBoostVectorStore(InMemoryVectorStore(self.get_embeddings()), shared())
        shared().clear()


class TestRetriever(RetrieversIntegrationTests):
    @property
    def retriever_constructor(self) -> type[BaseRetriever]:
        return KVBoostRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        embeddings = VectorStoreIntegrationTests.get_embeddings()
        inner = InMemoryVectorStore.from_texts([document(i) for i in range(6)], embeddings)
        return {"base_retriever": inner.as_retriever(), "engine": shared()}

    @property
    def retriever_query_example(self) -> str:
        return "which word2x3?"


@pytest.mark.parametrize("suite", [TestChatUnit, TestChatIntegration, TestVectorStore, TestRetriever])
def test_no_standard_test_is_overridden_or_expected_to_fail(suite: type) -> None:
    own = {name for cls in (suite, Params) for name in vars(cls)}
    assert not {name for name in own if name.startswith("test_")}
    assert not getattr(suite, "pytestmark", [])
