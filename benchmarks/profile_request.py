"""Where the time of one reuse request goes, step by step and operator by operator.

    python benchmarks/profile_request.py --context 2048 --repair query

Four warm documents and a question, asked several times. First as it is: the engine's own report of its steps, medians.
Then with a clock around the functions that make up the steps, which waits for an accelerator at either end, so that
work is counted where it was asked for: medians again. Last, one request under ``torch.profiler``: the operators that
took longest by themselves, with the steps among them as ranges.

The parts of ``stitch`` are dequantise and rotate; the rest of it is copying. ``load`` is reading from disk, with
``--disk``. What is left up to the first token is sampling, decoding of text and locks.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import common
from torch.profiler import ProfilerActivity, profile, record_function
from workload import asked, documents_of

from kvboost_rag import KVBoost, Prompt
from kvboost_rag.engine import engine as engine_module
from kvboost_rag.engine import stitch as stitch_module
from kvboost_rag.engine.codecs import CODECS
from kvboost_rag.engine.store import DiskStore, TieredStore
from kvboost_rag.engine.types import Report
from kvboost_rag.segmenting import Segmenter

# step -> where its function is looked up, and by which name. Indented in the table: part of the step before.
STEPS: dict[str, list[tuple[Any, str]]] = {
    "tokenise": [(Segmenter, "segments")],
    "look up": [(engine_module, "assemble")],
    "  load": [(DiskStore, "load")],
    "stitch": [(engine_module, "stitch")],
    "  dequantise": [(type(codec), "decode") for codec in CODECS.values()],
    "  rotate": [(stitch_module, "move"), (stitch_module, "place")],
    "scout pass": [(engine_module, "scout")],
    "fused forward": [(engine_module, "fused_forward")],
}
COPY, REST = "  copy", "first token and the rest"
TABLE = [
    "tokenise",
    "look up",
    "  load",
    "stitch",
    "  dequantise",
    "  rotate",
    COPY,
    "scout pass",
    "fused forward",
    REST,
]
REPAIRS = ("none", "query")


class Clock:
    """Adds up seconds by step while its ``watching`` is on. A step inside itself counts once."""

    def __init__(self, device: str):
        self.device = device
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside: set[str] = set()

    def around(self, step: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if step in self._inside:
                return function(*args, **kwargs)
            self._inside.add(step)
            common.synchronize(self.device)
            started = time.perf_counter()
            try:
                with record_function(f"step: {step.strip()}"):
                    return function(*args, **kwargs)
            finally:
                common.synchronize(self.device)
                self.seconds[step] += time.perf_counter() - started
                self._inside.remove(step)

        return timed

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for step, places in STEPS.items():
                for owner, name in dict.fromkeys(places):
                    stack.enter_context(mock.patch.object(owner, name, self.around(step, getattr(owner, name))))
            yield


class Request:
    """One prompt asked again and again; from disk each time if ``disk``."""

    def __init__(self, boost: KVBoost, prompt: Prompt, disk: bool):
        self.boost, self.prompt, self.disk = boost, prompt, disk

    def ask(self) -> Report:
        if self.disk:
            assert isinstance(self.boost.engine.store, TieredStore)
            self.boost.engine.store.memory.clear()
        return self.boost.generate(self.prompt, max_new_tokens=1).report

    def steps(self, device: str) -> dict[str, float]:
        """Seconds by step; all but the indented ones add up to ``ttft``."""
        clock = Clock(device)
        with clock.watching():
            ttft = self.ask().ttft_seconds
        found = {step: clock.seconds[step] for step in STEPS}
        copied = found["stitch"] - found["  dequantise"] - found["  rotate"]
        whole = sum(seconds for step, seconds in found.items() if not step.startswith(" "))
        return {**found, COPY: max(0.0, copied), REST: max(0.0, ttft - whole), "ttft": ttft}

    def profile(self, device: str, num_rows: int) -> str:
        """The table of ``torch.profiler``."""
        activities = [ProfilerActivity.CPU]
        if device.startswith("cuda"):
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as found, Clock(device).watching():
            self.ask()
            common.synchronize(device)
        order = "self_device_time_total" if device.startswith("cuda") else "self_cpu_time_total"
        table: str = found.key_averages().table(sort_by=order, row_limit=num_rows, max_name_column_width=48)
        return table


def medians(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """What goes into the result file, and the operators' table."""
    model, tokenizer = common.load(arguments)
    device = arguments.device
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory()) if arguments.disk else None
        options = {"kv_dtype": arguments.kv_dtype, "cache_dir": folder, "repair": arguments.repair}
        boost = stack.enter_context(KVBoost(model, tokenizer, break_even=False, max_cache_bytes="16GB", **options))
        documents = documents_of(boost, arguments.context, room=1)
        boost.warm(documents, progress=False)
        request = Request(boost, asked(boost, documents), arguments.disk)
        for _ in range(2):  # computes the opening, sets up the libraries
            request.ask()
        reports = [request.ask() for _ in range(arguments.rounds)]
        steps = medians([request.steps(device) for _ in range(arguments.rounds)])
        table = request.profile(device, arguments.top)
    last = reports[-1]
    own = medians([{**report.seconds, "ttft": report.ttft_seconds} for report in reports])
    return {
        "context": arguments.context,
        "repair": arguments.repair,
        "kv_dtype": arguments.kv_dtype,
        "rounds": arguments.rounds,
        "num_prompt_tokens": last.num_prompt_tokens,
        "num_reused_tokens": last.num_reused_tokens,
        "num_repaired_tokens": last.num_repaired_tokens,
        "num_live_tokens": last.num_live_tokens,
        "moved_bytes": last.moved_bytes,
        "tiers": sorted({document.tier for document in last.documents}),
        "report_seconds": own,
        "step_seconds": {step.strip(): seconds for step, seconds in steps.items()},
    }, table


def show(result: dict[str, Any]) -> None:
    print(
        f"{result['num_prompt_tokens']} prompt tokens: {result['num_reused_tokens']} reused, "
        f"{result['num_repaired_tokens']} repaired, {result['num_live_tokens']} live; "
        f"{result['moved_bytes'] / 1e6:.1f} MB laid out; repair {result['repair']!r}, kept as {result['kv_dtype']!r}"
    )
    print("\nas the engine reports it, ms: ", end="")
    print(", ".join(f"{name} {seconds * 1e3:.2f}" for name, seconds in result["report_seconds"].items()))
    steps = result["step_seconds"]
    print(f"\n{'step, each waited for':28}{'ms':>10}{'share':>8}")
    for name in [*TABLE, "ttft"]:
        seconds = steps[name.strip()]
        print(f"{name:28}{seconds * 1e3:10.2f}{seconds / steps['ttft']:8.1%}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--context", type=int, default=2048, help="tokens of the prompt, about (2048)")
    parser.add_argument("--repair", choices=REPAIRS, default="query")
    parser.add_argument("--kv-dtype", choices=("auto", "int8", "int4"), default="auto")
    parser.add_argument("--disk", action="store_true", help="documents come from disk")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--top", type=int, default=25, help="operators in the table (25)")
    arguments = parser.parse_args(argv)
    result, table = run(arguments)
    show(result)
    print(f"\n{table}")
    common.save(arguments.json, {**common.about(arguments), **result, "operators": table.splitlines()})


if __name__ == "__main__":
    main()
