"""Products by oneDNN: the same numbers, only inside planned forwards, and nothing left on the model."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import build_model
from prompts import HEADER, QUESTION, A, B, C, assert_same, cold, prefill

from kvboost_rag.engine import products as module
from kvboost_rag.engine.config import EngineConfig
from kvboost_rag.engine.engine import Engine
from kvboost_rag.engine.model import Model
from kvboost_rag.engine.products import Products, products
from kvboost_rag.engine.repair import FullRepair
from kvboost_rag.engine.store import MemoryStore

LARGE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
EVERYTHING = 10**9


@pytest.fixture
def model() -> torch.nn.Module:
    return build_model(**LARGE)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Tensor]]:
    """The weights oneDNN was given."""
    given: list[torch.Tensor] = []
    honest = module._onednn

    def watched(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        given.append(weight)
        return honest(rows, weight, bias)

    monkeypatch.setattr(module, "_onednn", watched)
    yield given


def linears(model: torch.nn.Module) -> list[torch.nn.Linear]:
    return [part for part in model.modules() if type(part) is torch.nn.Linear]


@pytest.mark.parametrize("budget", [0, 256 * 512 * 4, EVERYTHING], ids=["as they are", "two packed", "all packed"])
def test_the_same_logits(model: Any, asked: list[torch.Tensor], budget: int) -> None:
    ids = torch.randint(5, 300, (1, 20))
    with torch.no_grad():
        expected = model(ids).logits
        around = Products(model, budget)
        with around:
            found = model(ids).logits
    assert len(asked) >= 3 * model.config.num_hidden_layers
    assert around.packed_bytes <= budget
    assert sum(weight.is_mkldnn for weight in asked) == {0: 0, EVERYTHING: len(asked)}.get(budget, 2)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_a_bias_is_added(asked: list[torch.Tensor]) -> None:
    layer = torch.nn.Linear(256, 512)
    for budget in (0, EVERYTHING):
        with torch.no_grad(), Products(Holder(layer), budget):
            found = layer(torch.ones(2, 5, 256))
        torch.testing.assert_close(found, layer(torch.ones(2, 5, 256)), atol=1e-4, rtol=0)
    assert len(asked) == 2


class Holder(torch.nn.Module):
    """A module of one layer and no vocabulary."""

    def __init__(self, layer: torch.nn.Module):
        super().__init__()
        self.layer = layer

    def get_input_embeddings(self) -> None:
        return None

    get_output_embeddings = get_input_embeddings


def test_nothing_is_left_on_the_model(model: Any) -> None:
    around = Products(model, EVERYTHING)
    with pytest.raises(KeyboardInterrupt), around:
        assert any("forward" in layer.__dict__ for layer in linears(model))
        with around:
            pass
        assert any("forward" in layer.__dict__ for layer in linears(model))
        raise KeyboardInterrupt
    assert not any("forward" in layer.__dict__ for layer in linears(model))


def test_another_thread_multiplies_as_ever(model: Any, asked: list[torch.Tensor]) -> None:
    ids = torch.randint(5, 300, (1, 20))
    results = []

    def run() -> None:
        with torch.no_grad():
            results.append(model(ids).logits)

    with Products(model, EVERYTHING):
        other = threading.Thread(target=run)
        other.start()
        other.join()
    run()
    assert not asked
    assert torch.equal(*results)


def test_a_weight_that_was_changed_is_not_its_copy(model: Any, asked: list[torch.Tensor]) -> None:
    ids = torch.randint(5, 300, (1, 20))
    around = Products(model, EVERYTHING)
    with torch.no_grad():
        first, *others = [layer for layer in linears(model) if layer.weight.numel() >= module.MIN_WEIGHTS]
        first.weight.mul_(2)
        others[0].weight = torch.nn.Parameter(others[0].weight * 3)
        expected = model(ids).logits
        with around:
            found = model(ids).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert sum(not weight.is_mkldnn for weight in asked) == 1  # the other one is a parameter nobody asked about


def test_few_rows_small_layers_and_the_vocabulary_are_left_alone(model: Any, asked: list[torch.Tensor]) -> None:
    with torch.no_grad(), Products(model, EVERYTHING):
        model(torch.randint(5, 300, (1, module.MIN_ROWS - 1)))
        assert not asked
        model(torch.randint(5, 300, (1, module.MIN_ROWS)))
    assert all(weight.numel() >= module.MIN_WEIGHTS for weight in asked)
    assert not any(weight is model.lm_head.weight for weight in asked)


def test_other_types_and_hooked_layers_are_left_alone(model: Any) -> None:
    hooked = linears(model)[0]
    hooked.forward = hooked.forward  # what accelerate does to layers whose weights it moves
    assert hooked not in module._layers(model)
    assert module._layers(copy.deepcopy(model).to(torch.bfloat16)) == []


@pytest.mark.parametrize("failure", ["missing", "wrong", "slow"])
def test_where_onednn_does_not_help_nothing_is_exchanged(
    model: Any, failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = module._onednn

    def failing(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if failure == "missing":
            raise NotImplementedError("no such operator")
        for _ in range(50):
            result = honest(rows, weight, bias)
        return result + 1 if failure == "wrong" else result

    monkeypatch.setattr(module, "_onednn", failing)
    assert not isinstance(products(model, EVERYTHING), Products)


def test_weights_changed_behind_the_back_of_their_version_are_packed_anew(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What merging an adapter does; a new engine is what the README asks for then."""
    monkeypatch.setattr(module, "_pays", lambda weight: True)
    ids = torch.randint(5, 300, (1, 20))
    before = products(model, EVERYTHING)
    layer = next(layer for layer in linears(model) if layer.weight.numel() >= module.MIN_WEIGHTS)
    layer.weight.data += 0.1
    again = products(model, EVERYTHING)
    assert again is not before
    with torch.no_grad():
        expected = model(ids).logits
        with again:
            found = model(ids).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_the_copies_go_with_the_last_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_pays", lambda weight: True)
    inner = build_model(**LARGE)
    engines = [Model(inner, max_packed_bytes=EVERYTHING) for _ in range(2)]
    copies = weakref.ref(products(inner, EVERYTHING))
    engines[0].close()
    gc.collect()
    assert copies() is not None
    engines[1].close()
    gc.collect()
    assert copies() is None


def test_a_copy_of_the_model_made_meanwhile_is_its_own(model: Any, asked: list[torch.Tensor]) -> None:
    with Products(model, EVERYTHING):
        other = copy.deepcopy(model)
    ids = torch.randint(5, 300, (1, 20))
    with torch.no_grad():
        assert torch.equal(other(ids).logits, model(ids).logits)
    assert not asked


def test_where_there_is_no_room_for_copies_none_are_made(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_pays", lambda weight: True)

    def full(*arguments: object) -> None:
        raise RuntimeError("not enough memory")

    monkeypatch.setattr(module.Product, "__init__", full)
    assert not isinstance(products(model, EVERYTHING), Products)


def test_engines_over_one_model_share_the_copies(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_pays", lambda weight: True)
    first = products(model, EVERYTHING)
    assert products(model, EVERYTHING) is first
    assert products(model, 0) is not first


def test_reuse_and_full_repair_equal_a_cold_prefill(asked: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_pays", lambda weight: True)
    model = Model(build_model(**LARGE), max_packed_bytes=EVERYTHING)
    engine = Engine(model, MemoryStore(10**8), EngineConfig(chunk_size=16))
    with engine.lock:
        for document in (A, B, C):
            engine.warm([HEADER], document)
    assert asked
    exact = [HEADER, B, QUESTION]
    assert_same(prefill(engine, exact).logits, cold(engine, exact))
    moved = [HEADER, C, A, QUESTION]
    asked.clear()
    reference = cold(engine, moved)
    assert not asked, "the baseline is the model's own"
    assert_same(prefill(engine, moved, FullRepair()).logits, reference)


def test_the_slow_truth_keeps_its_own_products(asked: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_pays", lambda weight: True)
    engine = Engine(Model(build_model(**LARGE), stock_attention=True), MemoryStore(10**8), EngineConfig(chunk_size=16))
    prefill(engine, [HEADER, A, QUESTION])
    assert not asked
