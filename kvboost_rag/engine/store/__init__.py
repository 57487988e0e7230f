"""Where KV waits until it is asked for (paper, section 4.4)."""

from kvboost_rag.engine.store.base import Entry, Put, Store, StoreStats, WarmText
from kvboost_rag.engine.store.disk import DiskStore
from kvboost_rag.engine.store.eviction import EVICTIONS, Eviction
from kvboost_rag.engine.store.memory import MemoryStore
from kvboost_rag.engine.store.null import NullStore
from kvboost_rag.engine.store.tiered import TieredStore

__all__ = [
    "EVICTIONS",
    "DiskStore",
    "Entry",
    "Eviction",
    "MemoryStore",
    "NullStore",
    "Put",
    "Store",
    "StoreStats",
    "TieredStore",
    "WarmText",
]
