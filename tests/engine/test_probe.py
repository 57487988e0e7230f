"""The probe sees what a model does, whatever it is called; and layers may live on several devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import cpu_offload
from catalogue import SERVED, build
from conftest import build_model
from transformers import DynamicCache
from transformers.models.llama import modeling_llama

from kvboost_rag.engine.cache import Slab, SlotCache
from kvboost_rag.engine.capabilities import Reuse, Rotary
from kvboost_rag.engine.config import EngineConfig
from kvboost_rag.engine.engine import Engine
from kvboost_rag.engine.model import Model
from kvboost_rag.engine.repair import FullRepair, QueryRepair
from kvboost_rag.engine.store import MemoryStore
from kvboost_rag.engine.types import Fidelity, Segment
from kvboost_rag.errors import UnsupportedModelError

HEADER, A, B = (Segment(tuple(range(start, start + 20)), document=start > 50) for start in (10, 60, 110))
QUESTION = Segment((200, 201, 202))


def attending_to_order(self: Any, hidden_states: torch.Tensor, position_embeddings: Any, **kwargs: Any) -> Any:
    """A Llama attention that takes no mask: what comes later in the cache is what lies behind."""
    hidden = hidden_states
    shape = (*hidden.shape[:-1], -1, self.head_dim)
    query, key, value = (
        projection(hidden).view(shape).transpose(1, 2) for projection in (self.q_proj, self.k_proj, self.v_proj)
    )
    query, key = modeling_llama.apply_rotary_pos_emb(query, key, *position_embeddings)
    cache = kwargs.get("past_key_values") if kwargs.get("past_key_values") is not None else kwargs.get("cache")
    key, value = cache.update(key, value, self.layer_idx)
    key, value = (modeling_llama.repeat_kv(side, self.num_key_value_groups) for side in (key, value))
    rows, keys = query.shape[2], key.shape[2]
    visible = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=visible)
    return self.o_proj(mixed.transpose(1, 2).reshape(*hidden.shape[:-1], -1)), None


def with_attention(forward: Callable[..., Any]) -> Any:
    model = build_model()
    for layer in model.model.layers:
        layer.self_attn.forward = forward.__get__(layer.self_attn)
    return model


def test_attention_that_ignores_masks_leaves_prefixes_to_reuse() -> None:
    engine = Engine(Model(with_attention(attending_to_order)), MemoryStore(10**8), EngineConfig(chunk_size=16))
    capabilities = engine.model.capabilities
    assert capabilities.reuse is Reuse.PREFIX_ONLY
    assert "mask" in str(capabilities)
    with engine.lock:
        engine.warm([HEADER], A)
        expected = engine.prefill([HEADER, A, B, QUESTION], FullRepair(), "baseline").logits
        for _ in range(2):
            result = engine.prefill([HEADER, A, B, QUESTION], QueryRepair(0.2))
            engine.keep(result)
            torch.testing.assert_close(result.logits, expected, atol=1e-4, rtol=0)
        assert result.report.num_exact_tokens == 60
        assert result.report.mode == "prefix"
        moved = engine.prefill([B, A, QUESTION], QueryRepair(0.2))
    assert moved.report.num_document_hits == 0
    assert any("only prefixes" in note for note in moved.report.notes)


def test_keys_that_carry_more_than_a_rotation_are_refused() -> None:
    model = build_model()
    turn = modeling_llama.apply_rotary_pos_emb

    def shifted(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        query, key = turn(query, key, cos, sin)
        return query, key + 0.1 * sin[:, None]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_llama, "apply_rotary_pos_emb", shifted)
        with pytest.raises(UnsupportedModelError, match="layer 0 at position 1"):
            Model(model)


def test_a_model_without_positions_is_refused() -> None:
    model = build(SERVED["SmolLM3"], {"no_rope_layers": [0, 0, 0, 0]})
    with pytest.raises(UnsupportedModelError, match="no layer rotates"):
        Model(model)


def test_state_besides_keys_and_values_is_refused() -> None:
    """A layer that remembers its last input outside the cache passes the rotation, not the halves."""
    model, layer = build_model(), None
    layer = model.model.layers[1].mlp
    own, last = layer.forward, []

    def remembering(hidden: torch.Tensor) -> torch.Tensor:
        previous = torch.cat([hidden.new_zeros(1, 1, hidden.shape[-1]), hidden[:, :-1]], dim=1)
        last.append(previous)
        return own(hidden + previous)

    layer.forward = remembering
    with pytest.raises(UnsupportedModelError, match="8 tokens over the cache of 8 others"):
        Model(model)


def test_a_failing_forward_is_refused_with_its_error() -> None:
    model = build_model()

    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("this layer wants a cache of its own")

    model.model.layers[2].self_attn.forward = broken
    with pytest.raises(UnsupportedModelError, match="wants a cache of its own"):
        Model(model)


def test_local_and_global_frequencies_are_told_apart() -> None:
    model = Model(build(SERVED["Gemma 3"]))
    table = model.rope().inv_freq
    assert table.shape == (6, 8)
    assert torch.equal(table[0], table[4])
    assert not torch.equal(table[4], table[5])  # the sixth layer is the global one
    model.close()


def test_pairing_and_width_are_found() -> None:
    found = Model(build(SERVED["GLM-4"])).capabilities
    assert {(layer.rotary, layer.rotary_dim) for layer in found.layers} == {(Rotary.INTERLEAVED, 8)}
    assert found.head_dim == 16


# Several devices


def test_each_layer_s_buffer_lies_on_its_device() -> None:
    devices = [torch.device(name) for name in ("cpu", "cpu", "meta", "meta", "cpu")]
    cache = SlotCache.allocate(devices, (2, 16, 8), torch.float32)
    assert [(slab.first, slab.last, slab.device.type) for slab in cache.slabs] == [
        (0, 2, "cpu"),
        (2, 4, "meta"),
        (4, 5, "cpu"),
    ]
    assert [layer.device for layer in cache.layers] == devices
    with cache.scattering(torch.tensor([1, 5])):
        assert [layer.slots.device for layer in cache.layers] == devices


def in_slabs(model: Model, sizes: tuple[int, ...]) -> None:
    """Make ``model`` hand out buffers as if its layers lay on several devices."""

    def new_cache(capacity: int) -> SlotCache:
        slabs, first = [], 0
        for size in sizes:
            keys, values = (torch.empty(size, model.kv_heads, capacity, model.head_dim) for _ in range(2))
            slabs.append(Slab(first, keys, values))
            first += size
        return SlotCache(slabs)

    model.new_cache = new_cache


@pytest.mark.parametrize("name", ["Llama", "Gemma 3", "Cohere 2"])
def test_stitching_over_slabs_equals_one_buffer(name: str) -> None:
    def logits(sizes: tuple[int, ...]) -> torch.Tensor:
        engine = Engine(Model(build(SERVED[name])), MemoryStore(10**8), EngineConfig(chunk_size=16))
        if sizes:
            in_slabs(engine.model, sizes)
        with engine.lock:
            engine.warm([HEADER], A)
            engine.warm([HEADER], B)
            return engine.prefill([QUESTION, B, A, QUESTION], QueryRepair(0.2)).logits

    num_layers = build(SERVED[name]).config.num_hidden_layers
    assert torch.equal(logits((1, 2, num_layers - 3)), logits(()))


def test_offloaded_weights_are_run_where_accelerate_runs_them() -> None:
    plain = Engine(Model(build_model()), MemoryStore(10**8), EngineConfig(chunk_size=16))
    offloaded = cpu_offload(build_model(), execution_device=torch.device("cpu"))
    assert next(offloaded.parameters()).is_meta
    engine = Engine(Model(offloaded), MemoryStore(10**8), EngineConfig(chunk_size=16))
    assert engine.model.device == torch.device("cpu")
    assert engine.model.fingerprint() == plain.model.fingerprint()
    results = []
    for each in (plain, engine):
        with each.lock:
            each.warm([HEADER], A)
            results.append(each.prefill([QUESTION, A, QUESTION], QueryRepair(0.2)))
    assert results[1].report.documents[0].fidelity is Fidelity.APPROXIMATE
    assert torch.equal(results[0].logits, results[1].logits)


# cases.md, sections 1 and 2: what no other test holds


def test_one_prefix_with_other_endings_over_windows() -> None:
    """A later request never gets an earlier one's content: same long opening, other ends, one after the other."""
    engine = Engine(Model(build(SERVED["Mistral"], {"sliding_window": 32})), MemoryStore(10**8), EngineConfig())
    opening = Segment(tuple(5 + n % 290 for n in range(200)))
    for end in (QUESTION, Segment((7, 8)), QUESTION, Segment((9,))):
        with engine.lock:
            expected = engine.prefill([opening, end], FullRepair(), "baseline").logits
            result = engine.prefill([opening, end], QueryRepair(0.1))
            engine.keep(result)
        torch.testing.assert_close(result.logits, expected, atol=1e-4, rtol=0)
    assert result.report.num_exact_tokens == 128  # whole chunks


@pytest.mark.parametrize("distance", [700, 1500])
def test_yarn_documents_move_far(distance: int) -> None:
    """Beyond the length yarn was scaled for, too, its attention factor applied once."""
    family = SERVED["Llama"]
    engine = Engine(
        Model(build(family, family.variants["yarn, own attention factor"])), MemoryStore(10**8), EngineConfig()
    )
    filler = Segment(tuple(5 + (n * 7) % 290 for n in range(distance)), document=True)
    with engine.lock:
        engine.warm([], A)
        moved = engine.prefill([filler, A, QUESTION], QueryRepair(0.0))
        start = distance
        cache = DynamicCache()
        engine.model.forward(torch.tensor(A.ids), cache, torch.arange(start, start + len(A.ids)))
    for ours, theirs in zip(moved.cache.layers, cache.layers, strict=True):
        ours = ours.keys[:, :, start : start + len(A.ids)]
        torch.testing.assert_close(ours, theirs.keys, atol=2e-4, rtol=0)
