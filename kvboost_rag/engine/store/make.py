"""The store that options ask for.

Knows options and stores; knows nothing of models but their fingerprint.
"""

from __future__ import annotations

from pathlib import Path

from kvboost_rag.engine.config import EngineConfig
from kvboost_rag.engine.store.base import Store
from kvboost_rag.engine.store.disk import DiskStore
from kvboost_rag.engine.store.memory import MemoryStore
from kvboost_rag.engine.store.tiered import TieredStore


def make_store(config: EngineConfig, fingerprint: bytes) -> Store:
    """Memory, over a folder of this model's own in ``cache_dir`` if there is one. Raises OptionError."""
    memory = MemoryStore(config.max_cache_bytes, config.warmed_share, config.eviction)
    if config.cache_dir is None:
        return memory
    folder = Path(config.cache_dir).expanduser() / fingerprint.hex()[:16]
    return TieredStore(memory, DiskStore(folder, config.max_disk_bytes, own=True))
