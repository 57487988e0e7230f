"""How much memory a request needs beside the model and what is kept: reuse against full prefill.

    python benchmarks/memory.py --contexts 2048 4096 8192

A prompt of four documents that fills the context is answered once in each way: ``reuse`` (documents warm, as
computed), ``reuse int8`` (kept as int8) and ``baseline`` (full prefill by the model's own attention). What is told is
the peak of the request less what was held before it: model, store and a short request that set up the libraries.

On a CPU each measurement is a process of its own. Before the request, freed memory is given back to the system and the
kernel's high-water mark of resident memory is set to what is resident. Where that cannot be done (it takes ``/proc``)
the row's ``since`` says so, and what is told is only by how much the request exceeded the highest before it. The mark
is what ``getrusage`` calls ``ru_maxrss``, which however begins at the parent's. On CUDA the allocator counts
(``max_memory_allocated``), and one process does them all.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import common
from bug_memory import peak_bytes, reset_peak
from workload import asked, documents_of, entries_of

from kvboost_rag import KVBoost

BUDGET = "16GB"  # nothing is to be evicted
WAYS: dict[str, dict[str, Any]] = {"reuse": {}, "reuse int8": {"kv_dtype": "int8"}, "baseline": {"mode": "baseline"}}


def settle() -> None:
    """Drop what nobody holds, and give it back."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def peak_of(call: Callable[[], Any], device: str) -> dict[str, Any]:
    """Bytes held before ``call``, and the most that was held while it ran; ``since``: what the peak counts from."""
    settle()
    common.synchronize(device)
    since = reset_peak(device)
    before = peak_bytes(device)  # what is held now
    call()
    common.synchronize(device)
    return {"before_bytes": before, "peak_bytes": peak_bytes(device), "since": since}


def measure(model: Any, tokenizer: Any, way: str, context: int, device: str, new: int) -> dict[str, Any]:
    """One request, by an engine of its own."""
    with KVBoost(model, tokenizer, break_even=False, max_cache_bytes=BUDGET, **WAYS[way]) as boost:
        documents = documents_of(boost, context, room=new)
        reuse = WAYS[way].get("mode") != "baseline"
        if reuse:
            boost.warm(documents, progress=False)
        boost.generate(boost.prompt([], "Who?"), max_new_tokens=2)  # sets up what the first request always does
        prompt = asked(boost, documents)
        reports = []
        held = peak_of(lambda: reports.append(boost.generate(prompt, max_new_tokens=new).report), device)
        entries = [entry for text in documents for entry in entries_of(boost, text)] if reuse else []
        return {
            "way": way,
            "context": context,
            **held,
            "request_bytes": held["peak_bytes"] - held["before_bytes"],
            "kv_buffer_bytes": (reports[0].num_prompt_tokens + new) * boost.engine.model.bytes_per_token,
            "store_bytes": boost.stats().used_bytes,
            "document_bytes": sum(entry.packed.num_bytes for entry in entries),
            "codecs": sorted({entry.packed.codec for entry in entries}),
            "num_prompt_tokens": reports[0].num_prompt_tokens,
            "num_reused_tokens": reports[0].num_reused_tokens,
            "num_repaired_tokens": reports[0].num_repaired_tokens,
            "num_live_tokens": reports[0].num_live_tokens,
        }


def apart(way: str, context: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """``measure`` in a process of its own. Raises RuntimeError with the end of what it said if it fails."""
    command = [sys.executable, __file__, "--one", way, "--contexts", str(context), "--new", str(arguments.new)]
    command += ["--model", arguments.model, "--device", arguments.device, "--dtype", arguments.dtype]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    rows = []
    together = arguments.device.startswith("cuda")
    loaded = common.load(arguments) if together else ()
    for context in arguments.contexts:
        for way in arguments.ways:
            with common.skipping(f"{way} at {context} tokens"):
                rows.append(
                    measure(*loaded, way, context, arguments.device, arguments.new)
                    if together
                    else apart(way, context, arguments)
                )
                common.log(f"{way} at {context} tokens: {rows[-1]['request_bytes'] / 1e6:.0f} MB")
    counted = "torch.cuda.max_memory_allocated" if together else "high-water mark of resident memory"
    return {"counted": counted, "max_new_tokens": arguments.new, "rows": rows}


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Everything in MB of 1,000,000 bytes."""
    print(f"{'':12}{'context':>8}{'tokens':>8}{'before':>9}{'request':>9}{'KV buffer':>11}{'documents':>11}   MB")
    for row in rows:
        before, request, buffer, documents = (
            f"{row[name] / 1e6:.0f}" for name in ("before_bytes", "request_bytes", "kv_buffer_bytes", "document_bytes")
        )
        print(
            f"{row['way']:12}{row['context']:8}{row['num_prompt_tokens']:8}{before:>9}{request:>9}{buffer:>11}"
            f"{documents:>11}"
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--contexts", type=int, nargs="*", default=[2048, 4096, 8192], help="2048 4096 8192")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS), help="all if not given")
    parser.add_argument("--new", type=int, default=8, help="tokens generated (8)")
    parser.add_argument("--one", choices=list(WAYS), help=argparse.SUPPRESS)  # in a process of its own
    arguments = parser.parse_args(argv)
    if arguments.one:
        found = measure(*common.load(arguments), arguments.one, arguments.contexts[0], arguments.device, arguments.new)
        print(json.dumps(found))
        return
    result = run(arguments)
    show(result["rows"])
    common.save(arguments.json, {**common.about(arguments), **result})


if __name__ == "__main__":
    main()
