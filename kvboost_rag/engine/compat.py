"""What differs between releases of ``transformers``, in one place.

Knows names and signatures; knows nothing of rope, plans or chunks. Written for 4.57 to 5.24; every other module uses
what is the same in all of them. `make test-compat` runs the engine's tests against the oldest and the newest.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface


@dataclass(frozen=True)
class ForwardNames:
    """How a model's forward calls what we hand it. None: it takes no such thing."""

    cache: str | None
    keep: str | None
    positions: bool

    @classmethod
    def of(cls, model: Any) -> ForwardNames:
        """By signature, once: ``cache`` is the name in newer releases, ``logits_to_keep`` was once another."""
        parameters = inspect.signature(model.forward).parameters

        def first(*names: str) -> str | None:
            return next((name for name in names if name in parameters), None)

        return cls(
            cache=first("cache", "past_key_values"),
            keep=first("logits_to_keep", "num_logits_to_keep"),
            positions="position_ids" in parameters,
        )


def text_config(model: Any) -> Any:
    """The configuration of the decoder, inside that of a model with several parts."""
    return model.config.get_text_config(decoder=True)


def layer_types(config: Any) -> tuple[str, ...]:
    """What each layer is, where the configuration says so, else nothing."""
    return tuple(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ())


def stock_cache_layers(model: Any) -> list[str]:
    """Class names of the layers of the cache that ``transformers`` itself would give ``model``."""
    return [type(layer).__name__ for layer in DynamicCache(config=model.config).layers]


def rope_parameters(config: Any) -> list[dict[str, Any]]:
    """Every set of rope parameters of a configuration (some have one per layer type), old names and new."""
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    sets = [v for v in given.values() if isinstance(v, dict)] or [given]
    return [{**s, "rope_type": s.get("rope_type", s.get("type", "default"))} for s in sets]


def num_queries(query_length: Any) -> int:
    """Of ``get_mask_sizes``: an integer in current releases, a tensor of positions in older ones."""
    return query_length if isinstance(query_length, int) else int(query_length.shape[0])


def register_attention(name: str, attention: Callable[..., Any], masks_like: str) -> None:
    """Make ``attention`` known under ``name``, with the masks of the implementation ``masks_like``.

    Without a mask function of the same name, masks the model would have built vanish silently.
    """
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[masks_like])


def attention_function(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[name]
    return function


def continue_sampling(
    module: Any, input_ids: torch.Tensor, mask: torch.Tensor, processors: Any, stopping: Any, kwargs: dict[str, Any]
) -> torch.Tensor:
    """``transformers``' own loop from ``input_ids`` (rows, num_tokens) on, all but the last of which are in the cache.

    ``mask``: as ``input_ids``, 0 where a row is padded, on the left. ``kwargs``: what ``generate`` prepared for the
    prompts alone. Left as they are, the next token would stand one place too early.
    """
    kwargs["attention_mask"] = mask
    if "position_ids" in kwargs:
        kwargs["position_ids"] = (mask.long().cumsum(-1) - 1).clamp_min(0)
    if "cache_position" in kwargs:
        kwargs["cache_position"] = torch.arange(input_ids.shape[1], device=input_ids.device)[-1:]
    result: torch.Tensor = module._sample(input_ids, processors, stopping, **kwargs)
    return result
