"""Asks vLLM with prefix caching. ``python ask_vllm.py WORKLOAD``.

The clock is the wall time of ``generate`` with one token.
"""

from __future__ import annotations

import os
import time
from importlib import metadata
from typing import Any

import protocol


def main() -> None:
    work = protocol.workload()
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{work['threads'] - 1}")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
    from vllm import LLM, SamplingParams  # reads the environment

    peer = LLM(
        model=work["model"],
        dtype=work["dtype"],
        enable_prefix_caching=True,
        max_model_len=work["max_tokens"],
        disable_log_stats=True,
    )
    one = SamplingParams(max_tokens=1, temperature=0.0)

    def ask(prompt: protocol.Prompt) -> tuple[float, dict[str, Any]]:
        started = time.perf_counter()
        (output,) = peer.generate([{"prompt_token_ids": prompt["ids"]}], one, use_tqdm=False)
        seconds = time.perf_counter() - started
        return seconds, {"num_cached_tokens": output.num_cached_tokens}

    name = next(name for name in ("vllm-cpu", "vllm") if _installed(name))
    protocol.answer(f"{name} {metadata.version(name)}, {work['dtype']}", work, ask)


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()
