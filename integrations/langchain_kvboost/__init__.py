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
    from langchain_kvboost.chains import create_kvboost_rag_chain
    from langchain_kvboost.chat_models import ChatKVBoost
    from langchain_kvboost.ingestion import KVBoostDocumentWarmer, warm_documents
    from langchain_kvboost.llms import KVBoostLLM
    from langchain_kvboost.middleware import KVBoostRAGMiddleware
    from langchain_kvboost.retrievers import KVBoostRetriever
    from langchain_kvboost.vectorstores import KVBoostVectorStore

_HOMES = {
    "ChatKVBoost": "chat_models",
    "KVBoostDocumentWarmer": "ingestion",
    "KVBoostLLM": "llms",
    "KVBoostRAGMiddleware": "middleware",
    "KVBoostRetriever": "retrievers",
    "KVBoostVectorStore": "vectorstores",
    "create_kvboost_rag_chain": "chains",
    "warm_documents": "ingestion",
}

__all__ = [
    "ChatKVBoost",
    "KVBoostDocumentWarmer",
    "KVBoostLLM",
    "KVBoostRAGMiddleware",
    "KVBoostRetriever",
    "KVBoostVectorStore",
    "create_kvboost_rag_chain",
    "warm_documents",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
