"""KVBoostWarmTransform: the last step of a LlamaIndex ingestion pipeline, which has the model read each node.

Knows nodes and transformations; reading is the engine's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.schema import BaseNode, MetadataMode, TransformComponent


class KVBoostWarmTransform(TransformComponent):
    """Warms the text of each node exactly as synthesizers send it, and returns the nodes unchanged.

    Put it last: a transformation behind it could change the text. ``store_id`` is part of the component's hash, so an
    ingestion cache filled for another store, or another model, does not skip the warming.
    """

    store_id: str = ""
    _engine: Any = PrivateAttr()

    def __init__(self, engine: Any, **kwargs: Any):
        """``engine``: a ``kvboost_rag.KVBoost`` or an LLM object that has one."""
        from kvboost_rag.owner import engine_of

        engine = engine_of(engine)
        super().__init__(store_id=engine.store_id, **kwargs)
        self._engine = engine

    @classmethod
    def class_name(cls) -> str:
        return "KVBoostWarmTransform"

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        texts = [node.get_content(metadata_mode=MetadataMode.LLM) for node in nodes]
        self._engine.warm(texts, progress=bool(kwargs.get("show_progress", False)))
        return nodes

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        return await asyncio.to_thread(self.__call__, nodes, **kwargs)
