"""kvboost-rag for LangChain: a chat model that has already read the documents a retriever finds.

Each name is loaded on first use: importing this package does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvboost_rag.errors import MissingExtraError

try:
    import langchain_core  # noqa: F401
except ImportError as error:
    raise MissingExtraError.of("langchain-core", "langchain") from error

if TYPE_CHECKING:
    from langchain_kvboost.chat_models import ChatKVBoost
    from langchain_kvboost.retrievers import KVBoostRetriever
    from langchain_kvboost.vectorstores import KVBoostVectorStore

_HOMES = {
    "ChatKVBoost": "chat_models",
    "KVBoostRetriever": "retrievers",
    "KVBoostVectorStore": "vectorstores",
}

__all__ = ["ChatKVBoost", "KVBoostRetriever", "KVBoostVectorStore"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
