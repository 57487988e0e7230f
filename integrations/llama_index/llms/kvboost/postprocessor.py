"""KVBoostNodePostprocessor: whatever a retriever found, the model has read it before the question is asked.

Knows LlamaIndex's postprocessors; finding is the retriever's job, reading is the engine's.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import BaseNode, NodeWithScore, QueryBundle
from llama_index.llms.kvboost.warming import OfThisProcess, content_of, engine_for, warm_nodes

from kvboost_rag.calls import ON_ERROR, ORDERS, check_choice


class KVBoostNodePostprocessor(OfThisProcess, BaseNodePostprocessor):
    """Warms nodes that are not warm yet, and brings those on disk to memory, in the background. Same objects out.

    For indexes whose nodes never went through a ``KVBoostWarmTransform``: ``VectorStoreIndex(nodes=...)``,
    ``insert_nodes``, one filled long ago; and for a store that lost them. Put it last, behind what removes nodes.

    ``engine``: a ``kvboost_rag.KVBoost`` or an LLM object that has one; that of ``Settings.llm`` if not given.
    ``order``: ``"retrieval"`` leaves the order alone; ``"cache"`` puts nodes first whose exact KV is kept behind the
    prompt's beginning, which saves work and may change answers. ``header``: what the prompts begin with, as in
    ``KVBoost.warm`` (``KVBoostSynthesizer.header``); used for both. ``first``: keep a second version of each node,
    straight behind ``header``: exact when it comes first. ``on_error``: as in ``warm_nodes``.

    Raises OptionError. The async variant runs in another thread.
    """

    order: str = "retrieval"
    header: Any = None
    first: bool = False
    on_error: str = "warn"
    _engine: Any = PrivateAttr()

    def __init__(
        self,
        engine: Any = None,
        *,
        order: str = "retrieval",
        header: Any = None,
        first: bool = False,
        on_error: str = "warn",
        **kwargs: Any,
    ):
        check_choice("order", order, ORDERS)
        check_choice("on_error", on_error, ON_ERROR)
        boost = engine_for(engine)
        super().__init__(order=order, header=header, first=first, on_error=on_error, **kwargs)
        self._engine = boost

    @classmethod
    def class_name(cls) -> str:
        return "KVBoostNodePostprocessor"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        texts = [content_of(found.node) for found in nodes]
        warm = [self._engine.is_warm(text) for text in texts]
        there = [found.node for found, known in zip(nodes, warm, strict=True) if known]
        cold = [found.node for found, known in zip(nodes, warm, strict=True) if not known]
        self._prefetch(there)
        if any(map(content_of, cold)):
            warm_nodes(cold, self._engine, on_error=self.on_error, header=self.header, first=self.first)
            self._prefetch(cold)  # a store opened again may have had them all the same
        if self.first and there:  # None: cut as they were when they were warmed
            options = {"header": self.header, "first": True, "chunking": None}
            warm_nodes(there, self._engine, on_error=self.on_error, **options)
        if self.order == "cache":
            return [nodes[i] for i in self._engine.order(texts, header=self.header)]
        return nodes

    def _prefetch(self, nodes: list[BaseNode]) -> None:
        with suppress(Exception):  # it only saves time
            self._engine.prefetch(map(content_of, nodes))
