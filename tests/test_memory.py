"""A prompt's merged KV is built once, in the buffer it is used from: peak memory, by counting allocations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from conftest import build_model
from prompts import ids
from torch.profiler import ProfilerActivity, profile

from kvboost_rag.engine import assemble, stitch
from kvboost_rag.engine.config import EngineConfig
from kvboost_rag.engine.engine import Engine
from kvboost_rag.engine.generate import GenerationOptions
from kvboost_rag.engine.model import Model
from kvboost_rag.engine.repair import NoRepair
from kvboost_rag.engine.store import MemoryStore
from kvboost_rag.engine.types import Segment, total_tokens

MAX_PEAK = 1.3  # times the size of the merged KV: the buffer itself, and what passes through on its way into it
HEADER, SEPARATOR, QUESTION = (Segment(ids(seed, length)) for seed, length in ((100, 11), (101, 2), (102, 9)))
# Next to nothing but KV, in as many layers as small real models have: 4 heads of 32 numbers for a hidden size of 16.
SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
}


class Peak:
    """Runs a function and counts the bytes that it holds on top of what was there before.

    Every call to torch's allocator in this thread is seen, those inside a kernel too, with the sizes asked for. What
    was allocated before and is freed meanwhile does not count.
    """

    def __init__(self, work: Callable[[], Any]):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            self.result = work()  # held until the count is over
        events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
        self.at_end = self.num_bytes = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            self.at_end += event.nbytes()
            self.num_bytes = max(self.num_bytes, self.at_end)


@cache
def model_of(dtype: torch.dtype, num_layers: int) -> Model:
    return Model(build_model(dtype=dtype, **{**SHAPE, "num_hidden_layers": num_layers}))


def engine_with(
    documents: Sequence[Segment],
    dtype: torch.dtype = torch.float32,
    num_layers: int = SHAPE["num_hidden_layers"],
    **config: Any,
) -> Engine:
    """An engine that has read ``documents``."""
    engine = Engine(model_of(dtype, num_layers), MemoryStore(10**9), EngineConfig(**config))
    with engine.lock:
        for document in documents:
            assert engine.warm([HEADER], document).stored
    return engine


def documents_of(*sizes: int) -> list[Segment]:
    return [Segment(ids(seed, size), document=True) for seed, size in enumerate(sizes)]


def prompt_of(documents: Sequence[Segment]) -> list[Segment]:
    """Every document in another place than where it was read."""
    parts = [part for document in reversed(documents) for part in (document, SEPARATOR)]
    return [HEADER, SEPARATOR, *parts, QUESTION]


def stitched(engine: Engine, segments: Sequence[Segment]) -> Any:
    """The buffer of a prompt with all that it reuses: what ``Engine.prefill`` does before anything is computed."""
    num_tokens = total_tokens(segments)
    assembled = assemble.assemble(segments, engine.store, engine.model.fingerprint(num_tokens), engine.cutting)
    buffer = engine.model.new_cache(num_tokens)
    stitch.stitch(assembled, buffer, engine.model.rope(num_tokens))
    assert all(placement.entry is not None for placement in assembled.placements if placement.chunk.document)
    return buffer


def size_of(engine: Engine, segments: Sequence[Segment]) -> int:
    return total_tokens(segments) * engine.model.bytes_per_token


# The counter


def test_the_counter_sees_every_byte_and_when_it_is_free_again() -> None:
    def work() -> torch.Tensor:
        one = torch.empty(10**6, dtype=torch.uint8)
        two = one.clone()
        del one
        return two[:10]  # a view: costs nothing, holds all of it

    for _ in range(2):
        peak = Peak(work)
        assert (peak.num_bytes, peak.at_end) == (2 * 10**6, 10**6)


def test_the_counter_sees_what_a_kernel_needs_inside() -> None:
    numbers = torch.randn(10**5)
    peak = Peak(numbers.median)  # works on a copy of its own
    assert peak.num_bytes >= numbers.nbytes
    assert peak.at_end < 100


def test_a_second_copy_of_the_buffer_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = documents_of(200, 300, 250)
    engine, segments = engine_with(documents), prompt_of(documents)
    once = Peak(lambda: stitched(engine, segments))
    place = stitch.stitch

    def twice(assembled: Any, buffer: Any, rope: Any) -> int:
        moved = place(assembled, buffer, rope)
        copy = buffer.copy_out(0, total_tokens(segments))
        for slab in buffer.slabs:
            slab.keys.copy_(copy.keys[slab.first : slab.last])
        return moved

    monkeypatch.setattr(stitch, "stitch", twice)
    copied = Peak(lambda: stitched(engine, segments))
    assert copied.at_end == once.at_end
    assert copied.num_bytes == pytest.approx(once.at_end + size_of(engine, segments), rel=0.01)


# Stitching


@pytest.mark.parametrize("sizes", [(200, 400, 300, 250), (1000,)], ids=["several documents", "one document"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "int4"])
def test_merged_kv_is_built_once_in_its_final_buffer(kv_dtype: str, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    documents = documents_of(*sizes)
    engine, segments = engine_with(documents, dtype, kv_dtype=kv_dtype, max_quantization_kl=1e9), prompt_of(documents)
    size = size_of(engine, segments)
    peak = Peak(lambda: stitched(engine, segments))
    codecs = {engine.store.peek(engine.content_key(document.ids)).packed.codec for document in documents}
    assert codecs == {engine.config.codec}
    assert size <= peak.at_end <= 1.01 * size  # the buffer, token ids, and nothing else is held
    assert peak.num_bytes <= MAX_PEAK * size


def test_a_recycled_buffer_is_not_allocated_again() -> None:
    documents = documents_of(200, 300)
    engine, segments = engine_with(documents), prompt_of(documents)
    engine.model.recycle(stitched(engine, segments))
    assert Peak(lambda: stitched(engine, segments)).num_bytes < 0.01 * size_of(engine, segments)


# The forward behind it


def test_decoding_appends_to_the_buffer_and_copies_nothing() -> None:
    documents = documents_of(400, 400)
    engine, segments = engine_with(documents), prompt_of(documents)
    with engine.lock:
        prefilled = engine.prefill(segments, NoRepair(), max_new_tokens=4)
        options = GenerationOptions(max_new_tokens=4)
        peak = Peak(lambda: engine.generate(prefilled, options, lambda new: False))
    assert prefilled.report.num_new_tokens == 4
    assert peak.num_bytes < 0.1 * size_of(engine, segments)  # what one token needs, not what it looks at


def test_a_long_cold_prefill_in_slices_needs_less() -> None:
    segments = [Segment(ids(5, 900))]
    beside = {}  # bytes held beside the KV
    for num_slice in (100, 300, 2048):
        engine = engine_with([], num_layers=4, prefill_chunk_tokens=num_slice)
        with engine.lock:
            peak = Peak(lambda engine=engine: engine.prefill(segments, NoRepair()))
        assert peak.at_end >= size_of(engine, segments)
        beside[num_slice] = peak.num_bytes - size_of(engine, segments)
    assert beside[300] < 0.6 * beside[2048]
    assert beside[100] < 0.6 * beside[300]
