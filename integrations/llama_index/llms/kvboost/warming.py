"""Reading nodes: KVBoostWarmTransform, the last step of an ingestion pipeline, and the way back when nodes go.

Knows nodes, their metadata and indexes; reading is the engine's business. A node is warmed exactly as synthesizers send
it, metadata lines in front. Those lines are a part of their own, so the text behind them is found without them too, as
LangChain has it, and the other way round.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.schema import BaseNode, MetadataMode, TransformComponent
from llama_index.core.settings import Settings
from pydantic import computed_field

from kvboost_rag.calls import ON_ERROR, check_choice, warm_each
from kvboost_rag.errors import ClosedEngineError, OptionError

if TYPE_CHECKING:
    from kvboost_rag import KVBoost, WarmReport

logger = logging.getLogger(__name__)

NOT_OF_A_NODE = (OptionError, ClosedEngineError, TypeError)


def engine_for(owner: Any = None) -> KVBoost:
    """The engine that ``owner`` is or has; that of ``Settings.llm`` if None. Raises OptionError."""
    from kvboost_rag.owner import engine_of

    return engine_of(Settings.llm if owner is None else owner)


def content_of(node: BaseNode) -> str:
    """The node as it stands in prompts."""
    return node.get_content(metadata_mode=MetadataMode.LLM).strip()


def own_text(node: BaseNode) -> str:
    """What of ``content_of`` is kept on its own: the node's text if only metadata stands before it, else all of it."""
    content, text = content_of(node), node.get_content(metadata_mode=MetadataMode.NONE).strip()
    return text if text and content.endswith(text) else content


def chunking_of(node: BaseNode) -> str:
    """How ``content_of(node)`` is kept: cut where the node's own text begins, or whole."""
    at = len(content_of(node)) - len(own_text(node))
    return f"at:{at}" if at else "document"


def warm_nodes(nodes: Iterable[BaseNode], engine: Any = None, *, on_error: str = "warn", **options: Any) -> WarmReport:
    """Read ``nodes`` once, so that prompts find them already read; those that are warm cost nothing.

    For an index that was filled before. ``engine``: a ``kvboost_rag.KVBoost`` or an LLM object that has one; that of
    ``Settings.llm`` if not given. ``options``: those of ``KVBoost.warm``.

    A node that cannot be read, such as one longer than the model's context, keeps no other from being read. Then
    ``on_error="warn"`` logs it and counts it as ``num_rejected``; ``"raise"`` raises the first such error in the end.
    A wrong option or a closed engine has nothing to do with a node and is always raised.
    """
    check_choice("on_error", on_error, ON_ERROR)
    boost, given = engine_for(engine), list(nodes)
    options = {"progress": False, **options}
    chunkings = [options.pop("chunking")] * len(given) if "chunking" in options else [chunking_of(n) for n in given]
    texts = [content_of(node) for node in given]
    try:
        return boost.warm(texts, chunking=chunkings, **options)
    except NOT_OF_A_NODE:
        raise
    except Exception:  # of one of them: a length, memory, a disk
        report, errors = warm_each(boost, texts, chunkings, options, Exception, raised=NOT_OF_A_NODE)
    for number, error in errors:
        logger.warning("node %s was not read: %s", given[number].node_id, error)
    if errors and on_error == "raise":
        raise errors[0][1]
    return report


def forget_nodes(nodes: Iterable[BaseNode], engine: Any = None, *, keep: Iterable[BaseNode] | None = None) -> int:
    """Drop ``nodes`` from the store, but for what ``keep``, the nodes that stay, have in common with them: a text, or
    metadata lines. Returns how many texts were there.

    ``keep`` not given: metadata lines are left, since any other node may have the same.
    """
    boost, gone = engine_for(engine), list(nodes)
    staying = list(keep) if keep is not None else []
    texts = {text for node in staying for text in (content_of(node), own_text(node))}
    lines = {_lines(node) for node in (staying if keep is not None else gone)}
    own = dict.fromkeys(text for node in gone if (text := own_text(node)) not in texts)
    whole = dict.fromkeys(content_of(node) for node in gone if own_text(node) in own and _lines(node) not in lines)
    num_gone = boost.forget(own)
    boost.forget(text for text in whole if text not in texts)
    return num_gone


def _lines(node: BaseNode) -> str:
    """What stands before the node's own text."""
    return content_of(node).removesuffix(own_text(node))


@contextmanager
def evicting(index: Any, engine: Any = None) -> Iterator[None]:
    """Nodes that leave ``index`` inside the ``with`` block leave the engine's store too.

    LlamaIndex tells transformations of nodes that come, never of those that go. For ``refresh_ref_docs``,
    ``update_ref_doc``, ``delete_ref_doc``, ``delete_nodes`` and their async variants, and for a pipeline that writes to
    the index's vector store. What another node of the index has too is kept. Looks at all nodes of the index, before
    and after.

    Raises OptionError if the index cannot list its nodes: use ``forget_nodes`` then.
    """
    boost = engine_for(engine)
    before = _nodes(index)
    try:
        yield
    finally:
        after = _nodes(index)
        there = set(map(content_of, after))
        forget_nodes([node for node in before if content_of(node) not in there], boost, keep=after)


def _nodes(index: Any) -> list[BaseNode]:
    struct, vectors = index.index_struct, getattr(index, "vector_store", None)
    if getattr(vectors, "stores_text", False):
        try:
            return list(vectors.get_nodes(None))
        except NotImplementedError as error:
            raise OptionError.bad_value(
                "index", type(vectors).__name__, "a vector store that can list its nodes; else call forget_nodes"
            ) from error
    ids = struct.nodes_dict.values() if hasattr(struct, "nodes_dict") else getattr(struct, "nodes", None)
    if ids is None:
        return list(index.docstore.docs.values())
    return list(index.docstore.get_nodes(list(ids), raise_error=False))


class OfThisProcess:
    """A component with an ``_engine``: copies share it, and it is not pickled."""

    _engine: Any

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Any:
        memo = {} if memo is None else memo
        memo[id(self._engine)] = self._engine
        return super().__deepcopy__(memo)  # type: ignore[misc]

    def __getstate__(self) -> Any:
        raise TypeError(
            f"{type(self).__name__} holds a loaded model and cannot be pickled: run the pipeline without num_workers; "
            "or the other transformations with num_workers, and this one on what they return"
        )


class KVBoostWarmTransform(OfThisProcess, TransformComponent):
    """Warms the text of each node exactly as synthesizers send it, and returns the same nodes unchanged.

    Put it last: a transformation behind it could change the text. ``engine``, ``on_error`` and ``options`` as in
    ``warm_nodes``. ``report`` is of the last call.

    ``store_id``, which names the model and what is kept for it, is part of the component's hash, so an ingestion cache
    filled for another store, another model or a store that was cleared does not skip the warming. Nodes that were
    evicted since are warmed again when they are found, by a ``KVBoostNodePostprocessor``.

    Raises OptionError. Works in this process only: not with ``num_workers`` above 1.
    """

    on_error: str = "warn"
    options: dict[str, Any] = Field(default_factory=dict, description="options of KVBoost.warm")
    _engine: Any = PrivateAttr()
    _report: Any = PrivateAttr(default=None)

    def __init__(self, engine: Any = None, *, on_error: str = "warn", **options: Any):
        check_choice("on_error", on_error, ON_ERROR)
        boost = engine_for(engine)
        super().__init__(on_error=on_error, options=options)
        self._engine = boost

    @computed_field  # type: ignore[prop-decorator]
    @property
    def store_id(self) -> str:
        """Of the engine, as it is now."""
        return str(self._engine.store_id)

    @property
    def report(self) -> WarmReport | None:
        return self._report  # type: ignore[no-any-return]

    @classmethod
    def class_name(cls) -> str:
        return "KVBoostWarmTransform"

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        return self._warm(nodes, kwargs)

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        return await asyncio.to_thread(self._warm, nodes, kwargs)

    def forget(self, nodes: Iterable[BaseNode], keep: Iterable[BaseNode] | None = None) -> int:
        """As ``forget_nodes``."""
        return forget_nodes(nodes, self._engine, keep=keep)

    def _warm(self, nodes: Sequence[BaseNode], call: dict[str, Any]) -> Sequence[BaseNode]:
        options = {"progress": bool(call.get("show_progress", False)), **self.options}
        self._report = warm_nodes(nodes, self._engine, on_error=self.on_error, **options)
        return nodes
