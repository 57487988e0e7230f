"""Prompts of token segments and engines that have read their documents, for the tests of the engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from conftest import build_model

from kvboost_rag.engine.config import EngineConfig
from kvboost_rag.engine.engine import Engine, Prefilled
from kvboost_rag.engine.model import Model
from kvboost_rag.engine.repair import NoRepair, Repair
from kvboost_rag.engine.store import MemoryStore
from kvboost_rag.engine.types import Segment

TOLERANCE = 1e-4


def ids(seed: int, length: int) -> tuple[int, ...]:
    return tuple(int(i) for i in np.random.default_rng(seed).integers(5, 300, length))


HEADER = Segment(ids(100, 11))
A, B, C, NEW = (Segment(ids(seed, length), document=True) for seed, length in ((1, 40), (2, 130), (3, 64), (4, 50)))
SEP, QUESTION = Segment(ids(101, 2)), Segment(ids(102, 9))
PRIMER = [Segment(ids(103, 4)), Segment(ids(104, 60), document=True)]


def make(family: str = "llama", store: object = None, **changes: object) -> Engine:
    return Engine(Model(build_model(family, **changes)), store or MemoryStore(10**8), EngineConfig(chunk_size=16))


def warmed(family: str = "llama", **changes: object) -> Engine:
    engine = make(family, **changes)
    with engine.lock:
        for document in (A, B, C):
            engine.warm(PRIMER, document)
    return engine


def prefill(
    engine: Engine, segments: Sequence[Segment], repair: Repair | None = None, mode: str = "reuse"
) -> Prefilled:
    with engine.lock:
        prefilled = engine.prefill(segments, repair or NoRepair(), mode)
        engine.keep(prefilled)
        return prefilled


def cold(engine: Engine, segments: Sequence[Segment]) -> torch.Tensor:
    return prefill(engine, segments, mode="baseline").logits


def assert_same(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, atol=TOLERANCE, rtol=0)


GAPS = {
    "shuffled": [HEADER, C, SEP, A, SEP, B, QUESTION],
    "new first": [HEADER, NEW, SEP, A, SEP, B, QUESTION],
    "new between": [HEADER, A, SEP, NEW, SEP, C, QUESTION],
    "new last": [HEADER, A, SEP, C, SEP, NEW, QUESTION],
    "twice": [HEADER, A, SEP, B, SEP, A, QUESTION],
    "no header": [B, SEP, A, QUESTION],
    "documents only": [A, B, C],
    "documents only, other order": [C, A, B],
    "one document": [B],
    "no separators": [HEADER, A, B, C, QUESTION],
}
