"""kvboost-rag for LlamaIndex: a query-engine backend that has already read the nodes an index finds."""

from kvboost_rag.errors import MissingExtraError

try:
    import llama_index.core  # noqa: F401
except ImportError as error:
    raise MissingExtraError.of("llama-index-core", "llama-index") from error

from llama_index.llms.kvboost.base import KVBoostLLM
from llama_index.llms.kvboost.postprocessor import KVBoostNodePostprocessor
from llama_index.llms.kvboost.synthesizer import KVBoostSynthesizer
from llama_index.llms.kvboost.warming import KVBoostWarmTransform, evicting, forget_nodes, warm_nodes

__all__ = [
    "KVBoostLLM",
    "KVBoostNodePostprocessor",
    "KVBoostSynthesizer",
    "KVBoostWarmTransform",
    "evicting",
    "forget_nodes",
    "warm_nodes",
]
