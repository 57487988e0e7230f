"""What documents take in memory, model by model and codec by codec.

`docs/memory.md` has its table from here (`python tests/sizing.py`). Shapes are facts about published models; sizes come
from packing KV of that shape with the engine's own codecs, and what fits from the engine's own store.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from kvboost_rag.engine.codecs import CODECS
from kvboost_rag.engine.config import EngineConfig, parse_bytes
from kvboost_rag.engine.store.memory import MemoryStore
from kvboost_rag.engine.types import KV
from kvboost_rag.report import format_bytes
from kvboost_rag.warming import ID_BYTES

PAGE = Path(__file__).parent.parent / "docs" / "memory.md"
BEGIN, END = "<!-- begin: written by `make docs` -->", "<!-- end -->"
NUM_TOKENS = 600
BUDGETS = {"2 GB": EngineConfig().max_cache_bytes, "10 GB": parse_bytes("10GB")}
HALF = torch.bfloat16  # what the models are published in; float16 takes the same


@dataclass(frozen=True)
class Shape:
    """``num_hidden_layers``, ``num_key_value_heads`` and ``head_dim`` of a model's configuration."""

    layers: int
    kv_heads: int
    head_dim: int

    def bytes_per_token(self, dtype: torch.dtype = HALF) -> int:
        """Raw KV: keys and values of every layer."""
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype.itemsize


MODELS = {
    "SmolLM2-135M": Shape(30, 3, 64),
    "SmolLM2-360M": Shape(32, 5, 64),
    "SmolLM2-1.7B": Shape(24, 32, 64),
    "SmolLM3-3B": Shape(36, 4, 128),
    "Qwen2.5-0.5B": Shape(24, 2, 64),
    "Qwen2.5-1.5B": Shape(28, 2, 128),
    "Qwen2.5-3B": Shape(36, 2, 128),
    "Qwen2.5-7B": Shape(28, 4, 128),
    "Qwen3-0.6B": Shape(28, 8, 128),
    "Qwen3-1.7B": Shape(28, 8, 128),
    "Qwen3-4B": Shape(36, 8, 128),
    "Qwen3-8B": Shape(36, 8, 128),
    "Llama-3.2-1B": Shape(16, 8, 64),
    "Llama-3.2-3B": Shape(28, 8, 128),
    "Llama-3.1-8B": Shape(32, 8, 128),
    "Mistral-7B-v0.3": Shape(32, 8, 128),
    "Gemma 2 2B": Shape(26, 4, 256),
    "Gemma 3 1B": Shape(26, 1, 256),
    "Gemma 3 4B (text)": Shape(34, 4, 256),
    "Phi-3-mini": Shape(32, 32, 96),
    "Phi-4-mini": Shape(32, 8, 128),
}


def packed_bytes(shape: Shape, codec: str, num_tokens: int = NUM_TOKENS, dtype: torch.dtype = HALF) -> int:
    """Bytes of a document's KV, really packed: all heads and tokens of one layer, times the layers.

    Layers are packed alike, heads are not: a group of values runs over all heads of a token.
    """
    return shape.layers * packed_layers(1, shape.kv_heads, shape.head_dim, codec, num_tokens, dtype)


@cache
def packed_layers(layers: int, kv_heads: int, head_dim: int, codec: str, num_tokens: int, dtype: torch.dtype) -> int:
    """Bytes of random KV of ``layers`` layers as ``codec`` keeps it."""
    generator = torch.Generator().manual_seed(0)
    keys, values = (
        torch.randn(layers, kv_heads, num_tokens, head_dim, generator=generator).to(dtype) for _ in range(2)
    )
    return CODECS[codec].encode(KV(keys, values, None)).num_bytes


def document_bytes(shape: Shape, codec: str, num_tokens: int = NUM_TOKENS) -> int:
    """What the store counts: the packed KV, and the ids of the tokens beside it."""
    return packed_bytes(shape, codec, num_tokens) + num_tokens * ID_BYTES


def largest_share(codec: str) -> float:
    """The KV that ``codec`` keeps as a share of raw KV, in the model where it saves least."""
    return max(packed_bytes(shape, codec) / packed_bytes(shape, "raw") for shape in MODELS.values())


def num_fitting(budget: int, num_bytes: int) -> int:
    """How many documents of ``num_bytes`` stay warm together under ``max_cache_bytes=budget``."""
    return MemoryStore(budget, EngineConfig().warmed_share).warmed_capacity // num_bytes


def table() -> str:
    """The generated part of `docs/memory.md`."""
    columns = ["model", "shape", "KV a token", *CODECS, *(f"documents in {name}" for name in BUDGETS)]
    lines = ["| " + " | ".join(columns) + " |", "|---" * 3 + "|--:" * (len(columns) - 3) + "|"]
    for name, shape in MODELS.items():
        sizes = [document_bytes(shape, codec) for codec in CODECS]
        cells = [name, f"{shape.layers} × {shape.kv_heads} × {shape.head_dim}", format_bytes(shape.bytes_per_token())]
        cells += map(format_bytes, sizes)
        cells += [" / ".join(f"{num_fitting(budget, size):,}" for size in sizes) for budget in BUDGETS.values()]
        lines.append("| " + " | ".join(cells) + " |")
    shares = ", ".join(f"`{codec}` at most {largest_share(codec):.3f}" for codec in CODECS if codec != "raw")
    return "\n".join([*lines, "", f"Share of the raw size in these models: {shares}."]) + "\n"


def page(text: str) -> str:
    """``text``, the page, with what stands between the markers written anew."""
    front, rest = text.split(BEGIN)
    _, back = rest.split(END)
    return f"{front}{BEGIN}\n\n{table()}\n{END}{back}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
