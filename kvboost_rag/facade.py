"""What both halves of ``KVBoost`` stand on: the reading one and the asking one.

Knows that an engine can be closed; knows nothing else.
"""

from __future__ import annotations

from kvboost_rag.engine.engine import Engine
from kvboost_rag.errors import ClosedEngineError
from kvboost_rag.prompt import ChatFormat
from kvboost_rag.segmenting import Segmenter


class Facade:
    """Set up by ``KVBoost``."""

    engine: Engine
    chat_format: ChatFormat
    _segmenter: Segmenter
    _closed: bool = False

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedEngineError("this engine was closed; build a new one with KVBoost.from_pretrained")
