"""One call of a ``transformers`` decoder: the names of its arguments, its devices, its masks.

Knows how to run token ids over a cache; knows nothing of rope, chunks or what the model can be trusted with.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch

from kvboost_rag.engine import compat, exchange
from kvboost_rag.engine.attention import Plan
from kvboost_rag.engine.cache import SlotCache


class Runner:
    """Runs ``module``. ``planned``: whether its attention follows plans; else it gets explicit masks."""

    def __init__(self, module: Any):
        self.module = module
        self.names = compat.ForwardNames.of(module)
        self.device = execution_device(module)
        self.dtype: torch.dtype = module.dtype
        self.planned = True
        self.products: AbstractContextManager[Any] = contextlib.nullcontext()  # what planned forwards run in
        self.windows: dict[str, int | None] = {}  # by layer type, where layers differ and plans are not followed

    @torch.no_grad()
    def __call__(
        self,
        ids: torch.Tensor,
        cache: Any,
        positions: torch.Tensor | None = None,
        plan: Plan | None = None,
        num_logits: int = 1,
    ) -> torch.Tensor:
        """``ids`` (num_tokens,) behind what ``cache`` holds, or at ``positions`` (num_tokens,). Returns the last
        ``num_logits`` rows, (num_logits, vocab) float32: projecting only those is the last-logit saving of the
        paper's section 5.
        """
        arguments: dict[str, Any] = {"input_ids": ids.to(self.device)[None], "use_cache": True}
        if self.names.cache:
            arguments[self.names.cache] = cache
        if self.names.keep:
            arguments[self.names.keep] = num_logits
        if positions is not None:
            arguments["position_ids"] = positions.to(self.device)[None]
        if plan is not None:
            arguments["attention_mask"] = self._mask(plan, cache)
        with contextlib.ExitStack() as around:
            if plan is not None and self.planned:
                around.enter_context(exchange.planned(plan))
                around.enter_context(self.products)
            logits: torch.Tensor = self.module(**arguments).logits
        return logits[0, -num_logits:].float()

    def scattered(self, ids: torch.Tensor, cache: SlotCache, plan: Plan, num_logits: int = 1) -> torch.Tensor:
        """``ids`` (num_tokens,) at the positions of ``plan``, each into its own slot of ``cache``."""
        with cache.scattering(plan.positions):
            return self(ids, cache, plan.positions, plan, num_logits)

    @torch.no_grad()
    def rows(self, ids: torch.Tensor, positions: torch.Tensor, cache: Any, plan: exchange.Attending) -> torch.Tensor:
        """``ids`` and ``positions`` (rows, num_tokens) under ``plan``. Returns the last logits of every row, (rows,
        vocab) float32."""
        arguments: dict[str, Any] = {
            "input_ids": ids.to(self.device),
            "position_ids": positions.to(self.device),
            "attention_mask": torch.zeros(1, 1, 1, 1, dtype=self.dtype, device=self.device),
            "use_cache": True,
            str(self.names.cache): cache,
        }
        if self.names.keep:
            arguments[self.names.keep] = 1
        with exchange.planned(plan), self.products:
            logits: torch.Tensor = self.module(**arguments).logits
        return logits[:, -1].float()

    def _mask(self, plan: Plan, cache: SlotCache) -> Any:
        """A 4-D mask is taken as it is. Where plans are followed, one zero keeps the model from building its own."""
        if self.planned:
            return torch.zeros(1, 1, 1, 1, dtype=self.dtype, device=self.device)
        num_keys = cache.get_seq_length()
        if not self.windows:
            return plan.full_mask(None, num_keys, self.device)
        masks = {kind: plan.full_mask(window, num_keys, self.device) for kind, window in self.windows.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))


def execution_device(module: Any) -> torch.device:
    """Where token ids go in: an offloaded module's parameters lie elsewhere than where it computes."""
    embeddings = module.get_input_embeddings()
    hook = getattr(embeddings, "_hf_hook", None) or getattr(module, "_hf_hook", None)
    device = getattr(hook, "execution_device", None)
    if device is not None:
        return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    found: torch.device = embeddings.weight.device
    return found
