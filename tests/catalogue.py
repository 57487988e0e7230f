"""Tiny random models of every family: what is served, in which variants, and what is refused.

The tests run over it, and `docs/models.md` is made from it (`python tests/catalogue.py`). Models are built from their
configurations; a variant changes a few fields of one.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 300
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    "yarn, own attention factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "attention_factor": 1.3,
    },
}


def rope(**parameters: Any) -> dict[str, Any]:
    """Rope parameters under the name that this release of ``transformers`` has for them."""
    parameters = {"rope_theta": 10_000.0, **parameters}
    if hasattr(transformers.LlamaConfig(), "rope_parameters"):
        return {"rope_parameters": parameters}
    theta, rest = parameters.pop("rope_theta"), dict(parameters)
    partial = rest.pop("partial_rotary_factor", None)
    old = {"rope_theta": theta} | ({"partial_rotary_factor": partial} if partial is not None else {})
    if rest.get("rope_type") == "longrope":
        rest["type"] = rest.pop("rope_type")
    return old | ({"rope_scaling": rest} if rest.get("rope_type") != "default" and rest else {})


@dataclass(frozen=True)
class Family:
    """``model``: the class name without ``ForCausalLM``; ``changes``: to BASE; ``variants``: to both."""

    model: str
    changes: dict[str, Any] = field(default_factory=dict)
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)
    suffix: str = "ForCausalLM"


GROUPS = {"MHA": {"num_key_value_heads": 6}, "MQA": {"num_key_value_heads": 1}}
NINE = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72}
MIXED_WINDOW = {
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}
LONG = [1.0 + 0.5 * n for n in range(4)]
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": LONG}

SERVED: dict[str, Family] = {
    "Llama": Family(
        "Llama",
        variants=GROUPS
        | {"9 heads over 3": NINE, "head_dim 32": {"head_dim": 32}}
        | {name: rope(**parameters) for name, parameters in ROPES.items()}
        | {"dynamic": {**rope(rope_type="dynamic", factor=4.0), "max_position_embeddings": 64}},
    ),
    "Qwen2": Family("Qwen2", variants={"windows in half the layers": {"use_sliding_window": True, **MIXED_WINDOW}}),
    "Qwen3": Family("Qwen3", {"head_dim": 16}, {"yarn": rope(**ROPES["yarn"])}),
    "Mistral": Family("Mistral", {"sliding_window": None}, {"window 16": {"sliding_window": 16}}),
    "Mixtral": Family("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "Gemma": Family("Gemma", {"head_dim": 16}),
    "Gemma 2": Family("Gemma2", {"head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16}),
    "Gemma 3": Family(
        "Gemma3",
        {"head_dim": 16, "sliding_window": 16, "num_hidden_layers": 6, "query_pre_attn_scalar": 16},
    ),
    "Phi": Family("Phi", {"num_key_value_heads": 6}, {"rotary 0.25": rope(partial_rotary_factor=0.25)}),
    "Phi-3": Family(
        "Phi3",
        {"sliding_window": None},
        {
            "window 16": {"sliding_window": 16},
            "longrope": {**rope(**LONGROPE), "original_max_position_embeddings": 64},
        },
    ),
    "StableLM": Family("StableLm", {"hidden_size": 96}, {"qk-norm": {"qk_layernorm": True}}),
    "Falcon": Family("Falcon", {"multi_query": True, "alibi": False, "parallel_attn": True}),
    "GPT-NeoX": Family("GPTNeoX", {"hidden_size": 96}, {"serial residual": {"use_parallel_residual": False}}),
    "SmolLM3": Family("SmolLM3", {"no_rope_layers": [1, 1, 1, 0]}),
    "Cohere": Family("Cohere", {"logit_scale": 1.0}, {"qk-norm": {"use_qk_norm": True}}),
    "Cohere 2": Family("Cohere2", {"sliding_window": 16, "head_dim": 8, "logit_scale": 1.0}),
    "GLM-4": Family("Glm4", {"head_dim": 16}),
    "OLMo 2": Family("Olmo2"),
    "Granite": Family("Granite"),
    "gpt-oss": Family(
        "GptOss",
        {"head_dim": 16, "sliding_window": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}
# Their attention cannot be exchanged: fused forwards run it under explicit masks.
OWN_ATTENTION = ("Falcon",)

REFUSED: dict[str, tuple[Family, str]] = {
    "GPT-2": (Family("GPT2", suffix="LMHeadModel"), "positions enter another way"),
    "GPT-Neo": (Family("GPTNeo", {"num_layers": 4, "attention_types": [[["global", "local"], 2]]}), "another way"),
    "OPT": (Family("OPT", {"word_embed_proj_dim": 48, "ffn_dim": 96}), "another way"),
    "MPT": (Family("Mpt", {"d_model": 48, "n_heads": 6, "n_layers": 2}), "position"),
    "BLOOM": (Family("Bloom", {"n_head": 6, "n_layer": 2}), "position"),
    "Falcon with ALiBi": (Family("Falcon", {"alibi": True, "multi_query": False}), "ALiBi"),
    "DeepSeek V2 (MLA)": (
        Family(
            "DeepseekV2",
            {"kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
            | {"num_key_value_heads": 6, "first_k_dense_replace": 4},
        ),
        "MLA",
    ),
    "Falcon-H1": (
        Family("FalconH1", {"mamba_d_ssm": 48, "mamba_n_heads": 6, "mamba_d_head": 8, "mamba_d_state": 8}),
        "plain keys and values",
    ),
    "LFM2": (Family("Lfm2", {"layer_types": ["conv", "full_attention"] * 2}), "plain keys and values"),
    "Qwen3-Next": (
        Family(
            "Qwen3Next",
            {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
            | {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
            | {"linear_value_head_dim": 8, "shared_expert_intermediate_size": 32},
        ),
        "linear_attention",
    ),
    "Qwen3.5": (
        Family(
            "Qwen3_5",
            {"head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
            | {"linear_value_head_dim": 8},
        ),
        "linear_attention",
    ),
    "Mamba": (Family("Mamba", {"state_size": 8}), "plain keys and values"),
    "T5": (
        Family("T5", {"d_model": 48, "d_kv": 8, "num_layers": 2, "num_heads": 6}, suffix="ForConditionalGeneration"),
        "encoder-decoder",
    ),
    "BART": (
        Family("Bart", {"d_model": 48, "encoder_layers": 1, "decoder_layers": 1}, suffix="ForConditionalGeneration"),
        "encoder-decoder",
    ),
    "Llama 4 (chunked attention)": (
        Family("Llama4", {"head_dim": 8, "intermediate_size_mlp": 96, "num_local_experts": 2}),
        "chunked_attention",
    ),
}
TEXT_CONFIGS = ("Gemma3", "Llama4", "Qwen3_5")  # families whose plain configuration is that of several parts


def build(
    family: Family, changes: dict[str, Any] | None = None, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Any:
    """A random model with weights large enough for attention to be far from uniform."""
    options = {**BASE, **family.changes, **(changes or {})}
    config = getattr(transformers, family.model + ("TextConfig" if family.model in TEXT_CONFIGS else "Config"))(
        **options
    )
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(transformers, family.model + family.suffix)(config).to(dtype).eval()


def table() -> str:
    """`docs/models.md`: what the probe finds in every model of the catalogue."""
    from kvboost_rag import doctor

    lines = [
        "# Models",
        "",
        "Which models are served is not a list of names: a probe runs each one when it is loaded (what it checks is",
        "said in [`engine/probe.py`](../kvboost_rag/engine/probe.py)). Ask it about yours:",
        "",
        "```python",
        "import kvboost_rag",
        "",
        'print(kvboost_rag.doctor("HuggingFaceTB/SmolLM2-135M-Instruct"))',
        "```",
        "",
        "These tables are what it finds in the tiny random models of the test catalogue, on which claims are tested",
        "(`tests/engine/test_families.py`); `make docs` writes them.",
        "",
        "## Served",
        "",
        "At any position, in float32, bfloat16 and float16; under `transformers` 4.57 to 5.24.",
        "",
        "| family | rotation of the keys | attention | heads | rope type |",
        "|---|---|---|---|---|",
    ]
    for name, family in SERVED.items():
        for variant in ("", *family.variants):
            found = doctor(build(family, family.variants.get(variant))).capabilities
            guard = f", guarded at {found.switch.limit} tokens" if found.switch is not None else ""
            attention = found.attention + ("" if found.planned else "; by the model's own function")
            lines.append(
                f"| {name}{': ' + variant if variant else ''} | {found.rotation} | {attention} | {found.grouping} | "
                f"{found.rope_type}{guard} |"
            )
    lines += [
        "",
        "*Guarded*: the frequencies change with the length of the prompt. KV computed on one side of the limit is",
        "never used on the other; beyond it, longrope has a second set, and dynamic scaling one for every length, so",
        "nothing is kept there. *By the model's own function*: its attention cannot be exchanged; fused forwards run",
        'it under an explicit mask, and `repair="query"`, which needs to see attention, becomes `boundary`.',
        "",
        "## Refused",
        "",
        "With `UnsupportedModelError`, when they are loaded.",
        "",
        "| model | what was seen |",
        "|---|---|",
    ]
    for name, (family, _) in REFUSED.items():
        reason = doctor(build(family)).capabilities.reason
        lines.append(f"| {name} | {reason.split('cannot be served: ')[1].split('. Use a decoder')[0]} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (Path(__file__).parent.parent / "docs" / "models.md").write_text(table(), encoding="utf-8")
