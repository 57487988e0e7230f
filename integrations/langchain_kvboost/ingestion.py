"""Ways in without a vector store: LangChain documents are read by the model where they are ingested.

Knows LangChain's documents and transformers; reading is the engine's business.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from langchain_core.documents import BaseDocumentTransformer, Document

from kvboost_rag.calls import ON_ERROR, check_choice, warm_each
from kvboost_rag.errors import PromptTooLongError

if TYPE_CHECKING:
    from kvboost_rag import WarmReport


def warm_documents(documents: Iterable[Document], engine: Any, *, on_error: str = "warn", **options: Any) -> WarmReport:
    """Read ``documents`` once, so that prompts find them already read; those that are warm cost nothing.

    For a vector store that was filled before, and for anything else that yields documents. ``engine``: a
    ``kvboost_rag.KVBoost`` or an LLM object that has one; ``options``: those of ``KVBoost.warm``.

    A document that does not fit the model's context cannot be read, nor ever be part of a prompt. The others are read
    all the same; then ``on_error="warn"`` warns and counts it as ``num_rejected``, ``"raise"`` raises the
    PromptTooLongError. Other errors (a wrong option, a closed engine) are not about a document and always raised.
    """
    from kvboost_rag.owner import engine_of

    check_choice("on_error", on_error, ON_ERROR)
    boost = engine_of(engine)
    texts = [document.page_content for document in documents]
    try:
        return boost.warm(texts, **options)
    except PromptTooLongError:  # raised before any work
        chunkings = [options.pop("chunking", None)] * len(texts)
        report, refused = warm_each(boost, texts, chunkings, options, PromptTooLongError)
    (_, first), *_ = refused
    if on_error == "raise":
        raise first
    warnings.warn(
        f"{len(refused)} of {len(texts)} documents were not read: {first} Split documents before they are added.",
        UserWarning,
        stacklevel=2,
    )
    return report


class KVBoostDocumentWarmer(BaseDocumentTransformer):
    """Reads documents and hands the same objects on: a last step behind loaders and splitters.

    ``report`` is of the last call; ``on_error`` and ``options`` as in ``warm_documents``.
    """

    def __init__(self, engine: Any, *, on_error: str = "warn", **options: Any):
        from kvboost_rag.owner import engine_of

        check_choice("on_error", on_error, ON_ERROR)
        self.engine, self.on_error, self.options = engine_of(engine), on_error, options
        self.report: WarmReport | None = None

    def transform_documents(self, documents: Sequence[Document], **kwargs: Any) -> Sequence[Document]:
        """``kwargs`` override the options of the constructor. The async variant runs this in another thread."""
        options = {"on_error": self.on_error, **self.options, **kwargs}
        self.report = warm_documents(documents, self.engine, **options)
        return documents
