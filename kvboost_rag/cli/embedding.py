"""Texts and questions to vectors, by a sentence-transformers model.

Knows that library's loader; knows nothing of stores or of the language model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvboost_rag import hub
from kvboost_rag.errors import MissingExtraError, ModelNotFoundError

Vectors = npt.NDArray[np.float32]


class Embedder(Protocol):
    """Vectors are of any length; those of one embedder have one number of dimensions."""

    def documents(self, texts: Sequence[str]) -> Vectors:
        """(len(texts), dimensions)"""

    def question(self, text: str) -> Vectors:
        """(dimensions,)"""


class SentenceEmbedder:
    """A sentence-transformers model, with its own prompts for questions and documents where it has them."""

    def __init__(self, model: Any):
        self._model = model

    def documents(self, texts: Sequence[str]) -> Vectors:
        return np.asarray(self._model.encode_document(list(texts), show_progress_bar=False), dtype=np.float32)

    def question(self, text: str) -> Vectors:
        return np.asarray(self._model.encode_query(text, show_progress_bar=False), dtype=np.float32)


def load(name: str) -> Embedder:
    """``"bundled"``, or a name or folder for sentence-transformers. Raises MissingExtraError, ModelNotFoundError."""
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise MissingExtraError.of("sentence-transformers", "cli") from error
    where = str(hub.bundled_embedder()) if name == "bundled" else name
    try:
        return SentenceEmbedder(SentenceTransformer(where))
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(
            f"no embedder could be loaded from {name!r}: {error}\nCheck the name, give the folder of a "
            "sentence-transformers model, or use --embedder bundled, which needs no network."
        ) from error
