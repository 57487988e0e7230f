"""Finds out at load time whether, and how, a model's KV can be moved: by running it, not by its name.

Knows a ``transformers`` model and what plain rotary KV must look like; knows nothing of stores or prompts. Three steps
(the paper's section 4.8 has a list of names instead):

1. Every layer caches plain keys and values of one shape, and nothing else.
2. One token alone, at several positions. Its hidden states are the same at all of them, so each layer's key must be
   the exactly rotated one, by frequencies and a pairing that are found out, or the same (a layer without positions):
   `rotation.py`.
3. Eight tokens over the cache of eight others give what sixteen give at once; a moved chunk is what a prefill at its
   place gives; and a fused forward at scattered positions gives the logits of a prefill.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import DynamicCache

from kvboost_rag.engine import compat, exchange
from kvboost_rag.engine.attention import Plan, Traits
from kvboost_rag.engine.cache import SlotCache
from kvboost_rag.engine.capabilities import Capabilities, Layer, Reuse, Rotary
from kvboost_rag.engine.rope import Rope, move
from kvboost_rag.engine.rotation import KEY_TOLERANCE, Source, keys_at, rotations, switch_of
from kvboost_rag.engine.runner import Runner
from kvboost_rag.errors import UnsupportedModelError

NUM_TOKENS = 16
# How far logits may be off, as the norm of the difference over their norm.
LOGIT_TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
PLAIN_LAYERS = {"DynamicLayer", "DynamicSlidingWindowLayer"}
PLAIN_TYPES = {"full_attention", "sliding_attention", "attention"}
INSTEAD = (
    "Use a decoder with rotary positions and plain keys and values, such as Llama, Qwen2/3, Mistral, Gemma 1-3, Phi, "
    "SmolLM or gpt-oss; this model still runs with transformers' own generate()."
)
FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError, NotImplementedError)


@dataclass(frozen=True)
class Probed:
    """What the probe found. ``sources``: per layer, where its frequencies are read from, None if it does not rotate.

    ``devices``: per layer, where its KV lives.
    """

    capabilities: Capabilities
    sources: tuple[Source | None, ...]
    devices: tuple[torch.device, ...]

    def rope(self) -> Rope:
        """The frequencies that the model's last forward used."""
        tables = [None if s is None else getattr(*s).detach().float().cpu() for s in self.sources]
        width = next(table.shape[0] for table in tables if table is not None)
        rows = torch.stack([torch.zeros(width) if table is None else table for table in tables])
        interleaved = any(layer.rotary is Rotary.INTERLEAVED for layer in self.capabilities.layers)
        return Rope(rows[0] if bool((rows == rows[0]).all()) else rows, interleaved)


def probe(runner: Runner) -> Probed:
    """Examine the module of ``runner``, in evaluation mode, on which ``exchange.install`` was tried.

    Sets how ``runner`` masks. Raises UnsupportedModelError with what was seen.
    """
    name = f"{type(runner.module).__name__} (model_type {runner.module.config.model_type!r})"
    try:
        check_design(runner)
        return _probe(runner)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{name} cannot be served: {error}. {INSTEAD}") from error.__cause__
    except torch.OutOfMemoryError:
        raise
    except FAILURES as error:
        raise UnsupportedModelError(
            f"{name} cannot be served: a forward over a cache of plain keys and values failed ({error}). {INSTEAD}"
        ) from error


def check_design(runner: Runner) -> None:
    """Step 1: what the configuration, the signature and the stock cache say. Raises UnsupportedModelError."""
    module, config = runner.module, compat.text_config(runner.module)
    if getattr(module.config, "is_encoder_decoder", False):
        raise UnsupportedModelError("it is an encoder-decoder: its decoder's KV depends on the encoder's input")
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedModelError("its layers cache latent vectors instead of keys (MLA)")
    foreign = sorted(set(compat.layer_types(config)) - PLAIN_TYPES)
    foreign = foreign or sorted(set(compat.stock_cache_layers(module)) - PLAIN_LAYERS)
    if foreign:
        raise UnsupportedModelError(
            "its layers keep other state than plain keys and values, or keep them in another way "
            f"({', '.join(foreign)})"
        )
    if any(isinstance(part, torch.nn.Conv1d) for part in module.modules()):
        raise UnsupportedModelError("it has convolutions, whose state is no keys and values (state-space or hybrid)")
    if any("mrope_section" in parameters for parameters in compat.rope_parameters(config)):
        raise UnsupportedModelError("its positions have several axes (M-RoPE)")
    if getattr(config, "alibi", False) or getattr(getattr(config, "attn_config", None), "alibi", False):
        raise UnsupportedModelError("its attention is biased by distance (ALiBi), its keys carry no position")
    if not runner.names.positions or not runner.names.cache:
        missing = "position_ids" if runner.names.cache else "cache or past_key_values"
        raise UnsupportedModelError(f"its forward takes no {missing}: positions cannot be given to it")


def _probe(runner: Runner) -> Probed:
    config = compat.text_config(runner.module)
    switch = switch_of(config)
    token = _token_ids(runner)[3]
    with exchange.recording() as traits:
        still = keys_at(runner, token, 0)
    num_layers = config.num_hidden_layers
    shapes = {(*tuple(keys.shape[1:]), values.shape[-1]) for keys, values in still}
    if len(still) != num_layers or len(shapes) != 1 or any(keys.shape[-1] != v.shape[-1] for keys, v in still):
        raise UnsupportedModelError(
            f"its {num_layers} layers do not cache keys and values of one shape each (found {len(still)} of shapes "
            f"{sorted(shapes)})"
        )
    found = rotations(runner, token, [keys for keys, _ in still], switch)
    layers = []
    for number, (rotary, source) in enumerate(found):
        trait = traits.get(number) or Traits(window=_window(config, number))
        width = 0 if source is None else 2 * getattr(*source).shape[0]
        layers.append(Layer(rotary, width, trait.window, trait.softcap, trait.sinks is not None))
    widths = {(layer.rotary, layer.rotary_dim) for layer in layers if layer.rotary is not Rotary.NONE}
    if len(widths) > 1:
        raise UnsupportedModelError(f"its layers rotate in different ways ({sorted(widths)})")
    capabilities = Capabilities(
        model_class=type(runner.module).__name__,
        model_type=str(runner.module.config.model_type),
        reuse=Reuse.ANY_POSITION,
        layers=tuple(layers),
        num_heads=config.num_attention_heads,
        kv_heads=still[0][0].shape[1],
        head_dim=still[0][0].shape[-1],
        rope_type=str(compat.rope_parameters(config)[0]["rope_type"]),
        switch=switch,
        planned=len(traits) == num_layers,
        notes=tuple(_left_out(config, layers)),
    )
    probed = Probed(capabilities, tuple(s for _, s in found), tuple(keys.device for keys, _ in still))
    runner.windows = {} if len({layer.window for layer in layers}) == 1 else _windows(config, layers)
    return _checked(runner, probed)


def _left_out(config: Any, layers: list[Layer]) -> Iterator[str]:
    """What the configuration has and the model's attention does without."""
    cap = getattr(config, "attn_logit_softcapping", None)
    if cap and all(layer.softcap is None for layer in layers):
        yield (
            f"the soft cap of {cap:g} is left out by the attention this model was loaded with; "
            "load it with attn_implementation='eager' to have it"
        )


def _window(config: Any, layer: int) -> int | None:
    """The window of a layer that never told: by the configuration."""
    types = compat.layer_types(config)
    window = getattr(config, "sliding_window", None)
    return window if not types or types[layer] == "sliding_attention" else None


def _windows(config: Any, layers: list[Layer]) -> dict[str, int | None]:
    types = compat.layer_types(config)
    return {types[n]: layer.window for n, layer in enumerate(layers)} if types else {}


def _token_ids(runner: Runner) -> list[int]:
    step = max(1, runner.module.get_input_embeddings().weight.shape[0] // (NUM_TOKENS + 1))
    return [step * n for n in range(1, NUM_TOKENS + 1)]


def _checked(runner: Runner, probed: Probed) -> Probed:
    """Step 3. Where scattered positions do not work out, only prefixes may be reused."""
    ids = torch.tensor(_token_ids(runner))
    half, num_tokens = NUM_TOKENS // 2, NUM_TOKENS
    shape = (probed.capabilities.kv_heads, num_tokens, probed.capabilities.head_dim)
    whole, split = (SlotCache.allocate(probed.devices, shape, runner.dtype) for _ in range(2))
    expected = runner(ids, whole, num_logits=num_tokens)
    runner(ids[:half], split)
    second = runner(ids[half:], split, num_logits=half)
    tolerance = LOGIT_TOLERANCE.get(runner.dtype, 1e-1)
    if not _close(second, expected[half:], tolerance):
        raise UnsupportedModelError(
            "8 tokens over the cache of 8 others give other logits than 16 at once: keys and values are not all that "
            "a position leaves behind"
        )
    if not _moves(runner, probed, ids[3:9], at=5):
        raise UnsupportedModelError("keys moved by rotation are not what a prefill at the new place computes")
    for planned in (True, False) if probed.capabilities.planned else (False,):
        runner.planned = planned
        if _scatters(runner, ids, whole, expected, tolerance):
            return replace(probed, capabilities=replace(probed.capabilities, planned=planned))
    return replace(
        probed,
        capabilities=replace(
            probed.capabilities,
            planned=False,
            reuse=Reuse.PREFIX_ONLY,
            reason="its attention does not follow an explicit mask, so scattered positions cannot be computed",
        ),
    )


def _moves(runner: Runner, probed: Probed, ids: torch.Tensor, at: int) -> bool:
    """A chunk encoded at 0 and moved is the chunk encoded at its place without context."""
    caches = [DynamicCache(), DynamicCache()]
    for cache, start in zip(caches, (0, at), strict=True):
        runner(ids, cache, torch.arange(start, start + len(ids)))
    rope, tolerance = probed.rope(), KEY_TOLERANCE.get(runner.dtype, 3e-2)
    for number, (there, here) in enumerate(zip(caches[1].layers, caches[0].layers, strict=True)):
        moved = move(here.keys, at, rope.of_layers(number, number + 1))
        for ours, theirs in ((moved, there.keys), (here.values, there.values)):
            # (tokens, kv_heads * head_dim); deep layers add up what rounding leaves
            rows = [side[0].transpose(0, 1).flatten(1).float() for side in (ours, theirs)]
            if not _close(rows[0], rows[1], 10 * tolerance):
                return False
    return True


def _scatters(runner: Runner, ids: torch.Tensor, cache: SlotCache, expected: torch.Tensor, tolerance: float) -> bool:
    """Some tokens computed again in the middle of a filled buffer give the logits ``expected`` of all ``ids``."""
    positions = torch.tensor([4, 5, 6, 9, len(ids) - 1], device=runner.device)
    kept = [(slab.keys.clone(), slab.values.clone()) for slab in cache.slabs]
    cache.zero_slots(positions.cpu())
    try:
        logits = runner.scattered(ids[positions.cpu()], cache, Plan(positions, runner.dtype), len(positions))
    except FAILURES:
        return False
    finally:
        for slab, (keys, values) in zip(cache.slabs, kept, strict=True):
            slab.keys.copy_(keys)
            slab.values.copy_(values)
    return _close(logits, expected[positions.to(expected.device)], tolerance)


def _close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> bool:
    """Row by row (rows, channels), by norms. In half precision most rows must be close: rounding may send a token of a
    mixture of experts to another expert. False for NaN."""
    off = (ours - theirs.to(ours)).norm(dim=-1) / theirs.norm(dim=-1).to(ours)
    return bool((off.max() if tolerance <= LOGIT_TOLERANCE[torch.float32] else off.median()) <= tolerance)
