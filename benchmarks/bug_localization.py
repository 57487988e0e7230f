"""The paper's experiment (section 6): time to first token and answers on questions about bugs in code.

    python benchmarks/bug_localization.py --json bugs.json                 # 1,000 samples; --limit 80 for fewer
    python benchmarks/bug_localization.py --json bugs.json --resume        # goes on where it was stopped
    python benchmarks/bug_figures.py bugs.json --out figures               # figures, and a table beside the paper's

Each sample is a header, a code document and a question with four answers (``bugs.py``), put to every condition in turn,
in one process, over one model; which one begins changes from sample to sample. The first question about a document is
*cold*, later ones are *warm*.

    BASELINE        computes everything, with the model's own attention
    PREFIX_CACHE    mode="prefix": reuses the leading run it has seen before; begins empty
    CHUNK_REUSE     mode="reuse": reuses documents wherever they stand; begins empty
    INGESTED        mode="reuse", every document warmed before the first question; this product's normal case
    INGESTED_NONE   the same with repair="none"
    INGESTED_FIRST  the prompts' beginning is known when documents are warmed (warm(header=..., first=True)): exact
                    where the document comes first

Documents are warmed as many at a time as ``--cache`` holds; that is timed by itself and counts in no sample. Where the
document stands first (``--layout leading``, as in the paper's section 6.1) a prefix cache finds all there is to find:
what is reused is exact once a document is warm, and only INGESTED moves anything. ``--layout preamble`` puts another
sentence in front of the document each time (section 7.1).

TTFT is the engine's own: from the call to the first token, tokenising, lookup and repair included. The answer is the
letter with the highest logit where the first token is chosen, so a sample costs one prefill per condition. A small
model answers near chance: agreement with full prefill is the measure, accuracy is reported. Peak memory (Table 5)
cannot be told apart in one process, so each condition runs ``--memory`` samples in a process of its own; its peak
counts from behind the loading of the model.

Results are written sample by sample beside ``--json``, under the same name with .jsonl, until the run is complete.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from json import loads
from pathlib import Path
from typing import Any

import bugs
import common
from bug_journal import Journal
from bug_memory import peak_bytes, reset_peak
from bug_sides import CONDITIONS, LAYOUTS, Runner
from bug_summary import Record, show, summary
from bugs import Group


def measure(runner: Runner, groups: Sequence[Group], journal: Journal) -> list[Record]:
    """The records of all groups; those the journal has are taken from it."""
    sizes = {group.number: len(group.questions) for group in groups}
    known = journal.complete_groups(sizes)
    starts, at = {}, 0
    for group in groups:
        starts[group.number], at = at, at + len(group.questions)
    started, num_asked = time.perf_counter(), 0
    for shelf in runner.shelves(groups):
        waiting = [group for group in shelf if group.number not in known]
        if not waiting:
            continue
        runner.ingest(shelf)
        for group in waiting:
            for index in range(len(group.questions)):
                journal.add(runner.sample(group, index, starts[group.number] + index))
            num_asked += len(group.questions)
            pace = (time.perf_counter() - started) / num_asked
            total = len(journal.records)
            common.log(f"{total}/{at} samples, {pace:.2f} s each; {pace * (at - total) / 60:.0f} min to go")
    return sorted(journal.records, key=lambda record: record["number"])


def measure_memory(arguments: argparse.Namespace) -> dict[str, Any]:
    """Peak bytes of each condition, each in a process of its own."""
    limit = str(min(arguments.memory, arguments.limit or arguments.memory))
    found = {}
    for name in arguments.conditions:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "memory.json")
            command = [sys.executable, __file__, "--conditions", name, "--memory", "0", "--json", str(path)]
            for option in ("model", "device", "dtype", "cache", "layout", "questions"):
                command += [f"--{option}", str(getattr(arguments, option))]
            with common.skipping(f"memory of {name}"):
                subprocess.run([*command, "--limit", limit], check=True, stdout=subprocess.DEVNULL)
                found[name] = loads(path.read_text(encoding="utf-8"))["peak"]
    return found


def settings(arguments: argparse.Namespace, groups: Sequence[Group]) -> dict[str, Any]:
    """What two runs must have in common to be one."""
    kept = {name: getattr(arguments, name) for name in ("conditions", "layout", "cache", "questions", "device")}
    kept |= {name: common.about(arguments)[name] for name in ("model", "dtype", "machine", "versions")}
    return kept | {"data_hash": bugs.data_hash(groups), "num_groups": len(groups)}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything that goes into the result file."""
    journal = Journal(arguments.json and arguments.json.with_suffix(".jsonl"))
    memory = measure_memory(arguments) if arguments.memory and not journal.exists else {}
    model, tokenizer = common.load(arguments)
    runner = Runner(model, tokenizer, arguments.conditions, arguments.cache, arguments.layout)
    everything = bugs.build(runner.count_tokens, num_questions=arguments.questions)
    groups = bugs.limited(everything, arguments.limit)
    journal.open({"settings": settings(arguments, groups), "memory": memory}, arguments.resume)
    runner.warm_up()
    since = reset_peak(arguments.device)
    records = measure(runner, groups, journal)
    longest = max(record["num_prompt_tokens"] for record in records)
    result = {
        **common.about(arguments),
        "settings": journal.head["settings"],
        "full_data_hash": bugs.data_hash(everything),
        "num_resumed": journal.num_resumed,
        **summary(records),
        "memory": journal.head["memory"],
        "peak": {"bytes": peak_bytes(arguments.device), "since": since},
        "largest_prompt_bytes": longest * runner.any.engine.model.bytes_per_token,
        "store_bytes": runner.store_bytes,
        "warming": runner.warming,
        "records": records,
    }
    runner.close()
    common.save(arguments.json, result)
    journal.remove()
    return result


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--limit", type=int, help="samples, in whole groups, buckets in the paper's proportions (all)")
    parser.add_argument("--questions", type=int, default=bugs.NUM_QUESTIONS, help="about each document (%(default)s)")
    parser.add_argument("--conditions", nargs="+", default=list(CONDITIONS), choices=CONDITIONS, metavar="NAME")
    parser.add_argument("--layout", default="leading", choices=LAYOUTS, help="what stands before documents (leading)")
    parser.add_argument("--cache", default="4GB", help="budget of the engine that is warmed (%(default)s)")
    parser.add_argument("--memory", type=int, default=16, help="samples per process for peak memory; 0: none (16)")
    parser.add_argument("--resume", action="store_true", help="go on with what --json's .jsonl holds")
    arguments = parser.parse_args()
    if arguments.resume and not arguments.json:
        parser.error("--resume needs --json, beside which the samples are kept")
    try:
        print(show(run(arguments)))
    except KeyboardInterrupt:
        common.log("stopped; the same command with --resume goes on")
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
