"""Asks llama.cpp through llama-cpp-python. ``python ask_llama_cpp.py WORKLOAD``.

``Llama.generate`` keeps the longest prefix the prompt shares with the one before it and rewinds to it; every prompt
goes through one sequence. The weights are those of the GGUF file: as quantised as they are there.
"""

from __future__ import annotations

import time
from importlib import metadata
from pathlib import Path
from typing import Any

import protocol
from llama_cpp import Llama


def main() -> None:
    work = protocol.workload()
    if not work["gguf"]:
        raise SystemExit("this workload names no GGUF file")
    threads = work["threads"]
    peer = Llama(
        work["gguf"], n_ctx=work["max_tokens"], n_threads=threads, n_threads_batch=threads, verbose=False, seed=0
    )

    def ask(prompt: protocol.Prompt) -> tuple[float, dict[str, Any]]:
        ids = prompt["ids"]
        before = list(peer.input_ids[: peer.n_tokens])
        shared = next(
            (n for n, (a, b) in enumerate(zip(ids, before, strict=False)) if a != b), min(len(ids), len(before))
        )
        started = time.perf_counter()
        next(peer.generate(ids, temp=0.0))
        return time.perf_counter() - started, {"num_shared_tokens": shared}

    weights = Path(work["gguf"]).stem.split(".")[-1]
    protocol.answer(f"llama-cpp-python {metadata.version('llama-cpp-python')}, {weights}", work, ask)


if __name__ == "__main__":
    main()
