"""The slot buffer behaves as a transformers cache, without copying what it holds."""

from __future__ import annotations

import torch
from conftest import build_model
from transformers import DynamicCache

from kvboost_rag.engine.cache import Slab, SlotCache
from kvboost_rag.engine.model import Model


def test_appending_equals_a_dynamic_cache_and_keeps_the_buffer() -> None:
    model = Model(build_model())
    ids = torch.randint(5, 300, (40,))
    ours, theirs = model.new_cache(64), DynamicCache()
    address = ours.slabs[0].keys.data_ptr()
    for piece in (ids[:25], ids[25:26], ids[26:]):
        assert torch.equal(model.forward(piece, ours), model.forward(piece, theirs))
    assert ours.get_seq_length() == 40
    assert ours.slabs[0].keys.data_ptr() == address
    for layer, stock in zip(ours.layers, theirs.layers, strict=True):
        assert torch.equal(layer.keys, stock.keys)
        assert torch.equal(layer.values, stock.values)


def test_a_full_buffer_grows() -> None:
    model = Model(build_model())
    ids = torch.randint(5, 300, (40,))
    tight = model.new_cache(10)
    for piece in (ids[:10], ids[10:30], ids[30:]):
        logits = model.forward(piece, tight)
    assert torch.equal(logits, model.forward(ids[30:], _filled(model, ids[:30])))


def _filled(model: Model, ids: torch.Tensor) -> DynamicCache:
    cache = DynamicCache()
    for piece in (ids[:10], ids[10:]):
        model.forward(piece, cache)
    return cache


def test_scattered_rows_go_to_their_slots_and_the_length_stays() -> None:
    cache = SlotCache([Slab(0, torch.zeros(2, 3, 8, 4), torch.zeros(2, 3, 8, 4))])
    cache.set_length(8)
    rows = torch.randn(1, 3, 2, 4)
    with cache.scattering(torch.tensor([1, 6])):
        keys, _ = cache.update(rows, rows, 0)
    assert keys.shape == (1, 3, 8, 4)
    assert torch.equal(keys[:, :, [1, 6]], rows)
    assert not keys[:, :, [0, 2, 3, 4, 5, 7]].any()
    assert cache.get_seq_length() == 8


def test_a_copy_shares_nothing_with_the_buffer() -> None:
    cache = SlotCache([Slab(0, torch.randn(2, 3, 8, 4), torch.randn(2, 3, 8, 4))])
    kv = cache.copy_out(2, 5)
    before = kv.keys.clone()
    cache.slabs[0].keys.zero_()
    assert torch.equal(kv.keys, before)
    assert (kv.position, kv.num_tokens) == (2, 3)
    assert kv.keys.is_contiguous()
