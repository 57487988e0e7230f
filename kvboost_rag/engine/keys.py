"""The two hashes of a chunk: where it stands, and what it says (paper, section 4.2).

Knows token ids and bytes; knows nothing of models, text or stores. A *fingerprint* of everything else that KV
depends on (weights, dtype, rope, tokenizer, tenant) goes into both hashes, so entries of different engines never meet.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from kvboost_rag.engine.types import Chunk, ChunkKeys


def id_bytes(ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int64."""
    return np.asarray(ids, dtype="<i8").tobytes()


def content_hash(ids: Sequence[int], fingerprint: bytes) -> bytes:
    """Equation 5: the chunk alone, wherever it stands."""
    return hashlib.sha256(b"content" + fingerprint + id_bytes(ids)).digest()


def prefix_hash(ids: Sequence[int], previous: bytes, fingerprint: bytes) -> bytes:
    """Equation 4: the chunk and everything before it. ``previous`` is empty for the first chunk."""
    return hashlib.sha256(b"prefix" + fingerprint + previous + id_bytes(ids)).digest()


def chunk_keys(chunks: Iterable[Chunk], fingerprint: bytes) -> list[ChunkKeys]:
    """Both hashes of every chunk of a prompt, in order."""
    keys: list[ChunkKeys] = []
    previous = b""
    for chunk in chunks:
        previous = prefix_hash(chunk.ids, previous, fingerprint)
        keys.append(ChunkKeys(prefix=previous, content=content_hash(chunk.ids, fingerprint)))
    return keys
