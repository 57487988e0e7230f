"""The planned attention equals the model's own under an explicit mask, and leaves the model as it was."""

from __future__ import annotations

import pytest
import torch
from conftest import build_model

from kvboost_rag.engine import exchange
from kvboost_rag.engine.attention import Capture, Plan, block_attention

NUM_KEYS, HEAD_DIM = 300, 16


def reference(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float):
    """Every head its own keys, every query every key: (1, queries, heads, head_dim), and the probabilities."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    probabilities = (query @ key.transpose(-1, -2) * scale + mask).softmax(-1)
    return (probabilities @ value).transpose(1, 2), probabilities


def inputs(heads: int, kv_heads: int, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    query = torch.randn(1, len(positions), heads, HEAD_DIM).transpose(1, 2)
    # a view of a longer buffer, as the engine hands it over
    key, value = (torch.randn(1, kv_heads, NUM_KEYS + 50, HEAD_DIM)[:, :, :NUM_KEYS] for _ in range(2))
    return query, key, value


POSITIONS = {
    "scattered": torch.arange(3, NUM_KEYS, 2),
    "the end": torch.arange(NUM_KEYS - 9, NUM_KEYS),
    "everything": torch.arange(NUM_KEYS),
    "runs and gaps": torch.cat([torch.arange(0, 40, 3), torch.arange(50, 250), torch.arange(251, NUM_KEYS, 7)]),
    "one": torch.tensor([NUM_KEYS - 1]),
    "first and last": torch.tensor([0, NUM_KEYS - 1]),
}


@pytest.mark.parametrize("heads,kv_heads", [(4, 4), (4, 2), (9, 3), (4, 1)], ids=["MHA", "GQA", "9/3", "MQA"])
@pytest.mark.parametrize("where", POSITIONS)
@pytest.mark.parametrize("captured", [False, True])
def test_equals_the_reference(heads: int, kv_heads: int, where: str, captured: bool) -> None:
    positions = POSITIONS[where]
    query, key, value = inputs(heads, kv_heads, positions)
    capture = Capture(NUM_KEYS) if captured else None
    plan = Plan(positions, torch.float32, capture=capture)
    result = block_attention(query, key, value, plan, 0.3, layer=0)
    expected, probabilities = reference(
        query, key, value, Plan(positions, torch.float32).full_mask(None, NUM_KEYS, torch.device("cpu")), 0.3
    )
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=0)
    if capture is not None:
        torch.testing.assert_close(capture.scores, probabilities.amax((0, 1, 2)), atol=1e-5, rtol=0)


def test_a_run_of_positions_goes_in_larger_blocks_than_scattered_ones() -> None:
    cpu = torch.device("cpu")
    for where, most in (("everything", 128), ("scattered", 32)):
        blocks = Plan(POSITIONS[where], torch.float32).blocks(None, cpu)
        assert max(block.last - block.first for block in blocks) == most
        assert [block.first for block in blocks[1:]] == [block.last for block in blocks[:-1]]
        assert blocks[-1].last == len(POSITIONS[where])
        assert all(block.end == POSITIONS[where][block.last - 1] + 1 for block in blocks)


def test_hidden_slots_are_seen_by_no_query() -> None:
    positions = torch.arange(NUM_KEYS - 5, NUM_KEYS)
    query, key, value = inputs(4, 2, positions)
    hidden = torch.zeros(NUM_KEYS, dtype=torch.bool)
    hidden[20:90] = True
    plan = Plan(positions, torch.float32, hidden)
    before = block_attention(query, key, value, plan, 0.3, layer=0)
    key[:, :, 20:90], value[:, :, 20:90] = 7.0, -7.0
    torch.testing.assert_close(block_attention(query, key, value, plan, 0.3, layer=0), before)


def test_only_the_counted_queries_count_and_layers_add_up() -> None:
    positions = torch.arange(NUM_KEYS - 100, NUM_KEYS)  # more than one block
    query, key, value = inputs(4, 2, positions)
    _, probabilities = reference(
        query, key, value, Plan(positions, torch.float32).full_mask(None, NUM_KEYS, torch.device("cpu")), 0.3
    )
    for first_query in (0, 10, 70, 99):
        capture = Capture(NUM_KEYS, first_query)
        plan = Plan(positions, torch.float32, capture=capture)
        for layer in (0, 1):
            block_attention(query, key, value, plan, 0.3, layer)
        expected = 2 * probabilities[:, :, first_query:].amax((0, 1, 2))
        torch.testing.assert_close(capture.scores, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("stock", ["sdpa", "eager"])
def test_outside_a_plan_the_model_is_what_it_was(stock: str) -> None:
    model = build_model()
    model.set_attn_implementation(stock)
    ids = torch.randint(5, 300, (2, 40))
    padding = torch.ones_like(ids)
    padding[0, :7] = 0  # left padding: a mask the model has to build
    before = model(ids, attention_mask=padding).logits
    generated = model.generate(ids, attention_mask=padding, max_new_tokens=8, do_sample=False)
    uninstall = exchange.install(model)
    assert torch.equal(model(ids, attention_mask=padding).logits, before)
    assert torch.equal(model.generate(ids, attention_mask=padding, max_new_tokens=8, do_sample=False), generated)
    uninstall()
    assert model.config._attn_implementation == stock


def test_a_shared_model_gets_its_own_attention_back_from_the_last_engine() -> None:
    model = build_model()
    stock = model.config._attn_implementation
    first, second = exchange.install(model), exchange.install(model)
    first()
    assert exchange.is_installed(model)
    second()
    assert model.config._attn_implementation == stock
