"""Gives a ``transformers`` model the planned attention without touching it, and takes it away again.

Knows the registry of ``transformers``, plans and threads; knows nothing of how a plan attends. The attention is
registered under ``kvboost_<stock>``, where ``<stock>`` is the implementation the model came with. Outside a fused
forward it *is* that implementation, masks included. The plan of a fused forward travels in a context variable, so
threads do not meet.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch

from kvboost_rag.engine import compat
from kvboost_rag.engine.attention import Plan, Traits

_PREFIX = "kvboost_"


class Attending(Protocol):
    """What the attention of a model may be told to do instead of its own."""

    @property
    def stock(self) -> bool: ...

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, layer: int, traits: Traits
    ) -> torch.Tensor:
        """(rows, queries, heads, head_dim) from queries (rows, heads, queries, head_dim) and what the cache gave."""


_plan: ContextVar[Attending | None] = ContextVar("kvboost_attention_plan", default=None)


@contextmanager
def planned(plan: Attending) -> Iterator[None]:
    """Attention calls of this thread follow ``plan`` until the context ends."""
    token = _plan.set(plan)
    try:
        yield
    finally:
        _plan.reset(token)


def _stock_function(name: str, module: torch.nn.Module) -> Callable[..., Any]:
    if name == "eager":
        eager: Callable[..., Any] = sys.modules[type(module).__module__].eager_attention_forward
        return eager
    return compat.attention_function(name)


Recorded = dict[int, Traits]
_recorded: ContextVar[Recorded | None] = ContextVar("kvboost_recorded_traits", default=None)


@contextmanager
def recording() -> Iterator[Recorded]:
    """Collects, per layer that asks our attention, what it hands over. A layer that is missing never asked."""
    found: Recorded = {}
    token = _recorded.set(found)
    try:
        yield found
    finally:
        _recorded.reset(token)


def _attention_for(stock: str) -> Callable[..., Any]:
    def kvboost_attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        plan, recorded, layer = _plan.get(), _recorded.get(), getattr(module, "layer_idx", 0)
        traits = Traits.of(kwargs, stock)
        if recorded is not None:
            recorded[layer] = traits
        if plan is not None and not plan.stock:
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            return plan.attend(query, key, value, scale, layer, traits), None
        name = stock
        if isinstance(plan, Plan):
            attention_mask = plan.full_mask(traits.window, key.shape[2], query.device)
            name = "eager" if stock.startswith("flash") else stock  # flash kernels take no mask
        result: tuple[torch.Tensor, torch.Tensor | None] = _stock_function(name, module)(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return result

    return kvboost_attention


_users: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
_users_lock = threading.Lock()


def is_installed(model: Any) -> bool:
    return str(model.config._attn_implementation).startswith(_PREFIX)


def install(model: Any) -> Callable[[], None]:
    """Give ``model`` the planned attention on top of its own.

    Returns a function that gives its own back, once every engine that shares the model has called theirs.
    Raises whatever ``set_attn_implementation`` raises for a model that has no exchangeable attention.
    """
    with _users_lock:
        if not is_installed(model):
            stock = model.config._attn_implementation
            compat.register_attention(_PREFIX + stock, _attention_for(stock), masks_like=stock)
            model.set_attn_implementation(_PREFIX + stock)
            _users[model] = 0
        _users[model] = _users.get(model, 0) + 1

    def uninstall() -> None:
        with _users_lock:
            _users[model] -= 1
            if _users[model] == 0 and is_installed(model):
                model.set_attn_implementation(model.config._attn_implementation.removeprefix(_PREFIX))

    return uninstall
