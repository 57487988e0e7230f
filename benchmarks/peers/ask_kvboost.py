"""Asks kvboost. ``python ask_kvboost.py WORKLOAD DTYPE``; DTYPE ``default`` is its own choice (float16).

Its documents are warmed with its own ``warm`` first. The clock runs from the call to its ``on_token`` callback: what it
stores behind the first token is not counted, what it looks up and repairs before its own clock starts is.
"""

from __future__ import annotations

import sys
import time
from importlib import metadata
from typing import Any

import protocol
import torch
from kvboost import KVBoost
from transformers import AutoModelForCausalLM, AutoTokenizer

STORE = {"max_cache_bytes": 4_000_000_000, "max_chunks": 4096, "device": "cpu"}


def engine(folder: str, dtype: str) -> Any:
    if dtype == "default":
        return KVBoost.from_pretrained(folder, **STORE)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    return KVBoost(model, AutoTokenizer.from_pretrained(folder), **STORE)


def main() -> None:
    work, dtype = protocol.workload(), sys.argv[2]
    torch.set_num_threads(work["threads"])
    peer = engine(work["model"], dtype)

    def ask(prompt: protocol.Prompt) -> tuple[float, dict[str, Any]]:
        at: list[float] = []
        started = time.perf_counter()
        result = peer.generate(
            prompt["text"], max_new_tokens=1, temperature=1.0, on_token=lambda token: at.append(time.perf_counter())
        )
        ended = time.perf_counter()
        said = {
            "reported_ttft_seconds": result.ttft_ms / 1e3,
            "reported_reuse": result.kv_reuse_ratio,
            "call_seconds": ended - started,
        }
        return at[0] - started, said

    for document in work["documents"]:
        peer.warm(document)
    protocol.answer(f"kvboost {metadata.version('kvboost')}, {peer.model.dtype}".replace("torch.", ""), work, ask)


if __name__ == "__main__":
    main()
