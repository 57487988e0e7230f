"""Ways in without a vector store: LangChain documents are read by the model where they are ingested.

Knows LangChain's documents and transformers; reading is the engine's business.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from langchain_core.documents import BaseDocumentTransformer, Document

from kvboost_rag.errors import OptionError, PromptTooLongError

if TYPE_CHECKING:
    from kvboost_rag import WarmReport

ON_ERROR = ("warn", "raise")


def check_choice(option: str, value: object, choices: Sequence[str]) -> None:
    """Raises OptionError for a value that is not one of ``choices``."""
    if value not in choices:
        raise OptionError.bad_value(option, value, f"one of {', '.join(map(repr, choices))}")


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
        return _each(texts, boost, on_error, options)


def _each(texts: Sequence[str], boost: Any, on_error: str, options: dict[str, Any]) -> WarmReport:
    """Read one at a time, and leave out what is too long."""
    from kvboost_rag.report import WarmReport

    total, refused = WarmReport(), []
    for text in texts:
        try:
            report = boost.warm(text, **options)
        except PromptTooLongError as error:
            refused.append(error)
            report = WarmReport(num_documents=1, num_rejected=1)
        for field in fields(total):
            setattr(total, field.name, getattr(total, field.name) + getattr(report, field.name))
    if refused and on_error == "raise":
        raise refused[0]
    warnings.warn(
        f"{len(refused)} of {len(texts)} documents were not read: {refused[0]} Split documents before they are added.",
        UserWarning,
        stacklevel=3,
    )
    return total


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
