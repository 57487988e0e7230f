"""Our engine and other ones on the same prompts, up to the first token. The sweep ``peers`` of ``ttft.py``.

Peers run in processes of their own (``peers/``), one after the other; in front of each one and behind it full prefill
and our engine run on the same prompts, alternating prompt by prompt. Ratios are of medians: full prefill's before and
after tell how far the machine drifted meanwhile.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import common
import torch
from sides import FULL, Bench, Side

from kvboost_rag import Prompt, hub

PEERS = Path(__file__).parent / "peers"
NUM_DOCUMENTS = 4
NUM_COLD = 2
PEER_SECONDS = 3600
FIRST_TOKENS = 256  # of the prompt that does not count
ORDERS = ([1, 3, 0, 2], [2, 0, 3, 1], [3, 2, 1, 0])  # none begins like another one, or like the warm one
QUESTIONS = (
    "Who is the captain of the Marigold?",
    "In what year was the Tide Clock finished?",
    "What is kettle bread flavoured with?",
    "How many seats does the Cork Theatre have?",
    "Which village was the first to grow blue barley?",
    "What is the fine for breaking the Well Law?",
    "What does the winner of the Coracle Race receive?",
)
OURS: Mapping[str, Mapping[str, Any]] = {"ours, none": {"repair": "none"}, "ours, default": {}}
EXACT: Mapping[str, Mapping[str, Any]] = {
    "ours, nothing warmed": {"repair": "none"},
    'ours, nothing warmed, mode="prefix"': {"mode": "prefix"},
}
Seconds = dict[str, dict[str, list[float]]]  # case -> side -> seconds
Cases = dict[str, list[Prompt]]


def peers(bench: Bench, arguments: argparse.Namespace) -> dict[str, Any]:
    """Every peer whose interpreter was given. A peer that fails costs a line."""
    texts = bench.texts(NUM_DOCUMENTS, arguments.headline_tokens, NUM_DOCUMENTS * (1 + NUM_COLD))
    cases = prompts(bench, texts)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "workload.json"
        path.write_text(json.dumps(workload(bench, arguments, texts, cases, Path(folder))), encoding="utf-8")
        before = ours(bench, texts[:NUM_DOCUMENTS], cases)
        for python, script, options in asked_for(arguments):
            name = " ".join([script, *options])
            common.log(f"peers: {name}")
            with common.skipping(name):
                said = ask(python, script, path, options)
                after = ours(bench, texts[:NUM_DOCUMENTS], cases)
                found[said["peer"]] = compared(said, before, after)
                show(said["peer"], found[said["peer"]])
                before = after
    if not found:
        found["none"] = compared({"peer": "none", "cases": {}}, before, before)
        show("no peer", found["none"])
    return found


def prompts(bench: Bench, texts: Sequence[str]) -> Cases:
    """Cases as ``peers/protocol.py`` tells them."""
    documents, questions = texts[:NUM_DOCUMENTS], iter(QUESTIONS)
    sets = [texts[n : n + NUM_DOCUMENTS] for n in range(NUM_DOCUMENTS, len(texts), NUM_DOCUMENTS)]
    prompt = bench.engine.prompt
    return {
        "cold": [prompt(each, QUESTIONS[0]) for each in sets],
        "warm": [prompt(documents, next(questions))],
        "same": [prompt(documents, next(questions)) for _ in ORDERS],
        "shuffled": [prompt([documents[n] for n in order], next(questions)) for order in ORDERS],
    }


def workload(
    bench: Bench, arguments: argparse.Namespace, texts: Sequence[str], cases: Cases, folder: Path
) -> dict[str, Any]:
    """What a peer reads."""

    def told(prompt: Prompt) -> dict[str, Any]:
        return {"text": prompt.text, "ids": bench.ids(prompt).tolist()}

    (text,) = common.texts_of(bench.tokenizer, FIRST_TOKENS, 1)
    first = told(bench.engine.prompt([" ".join(text.split(" ")[::-1])], QUESTIONS[-1]))  # begins like no other
    asked = {case: [told(prompt) for prompt in each] for case, each in cases.items()}
    return {
        "model": model_folder(bench, arguments, folder),
        "gguf": gguf() if arguments.model == "bundled" else None,
        "dtype": arguments.dtype,
        "threads": torch.get_num_threads(),
        "max_tokens": max(len(prompt["ids"]) for each in [[first], *asked.values()] for prompt in each) + 64,
        "documents": list(texts[:NUM_DOCUMENTS]),
        "first": first,
        "cases": asked,
    }


def model_folder(bench: Bench, arguments: argparse.Namespace, folder: Path) -> str:
    """Where the peers find the model: its own folder or hub name, or a copy of one that lies nowhere."""
    if arguments.model == "bundled":
        return str(hub.bundled_model())
    if arguments.model.startswith("shape:"):
        bench.engine.engine.model.module.save_pretrained(folder / "model")
        bench.tokenizer.save_pretrained(folder / "model")
        return str(folder / "model")
    return str(arguments.model)


def gguf() -> str | None:
    """The file the bundled model comes in."""
    spec = importlib.util.find_spec(hub.BUNDLED_PACKAGE)
    places = spec.submodule_search_locations if spec else None
    return next((str(file) for place in places or () for file in sorted(Path(place).glob("*.gguf"))), None)


def asked_for(arguments: argparse.Namespace) -> list[tuple[Path, str, list[str]]]:
    """``(interpreter, script, its options)`` of the peers that were given; a line for each that was not."""
    asked: list[tuple[Path, str, list[str]]] = []
    for option, script, runs in (
        ("kvboost", "ask_kvboost.py", [[dtype] for dtype in arguments.kvboost_dtypes or ("default", arguments.dtype)]),
        ("vllm", "ask_vllm.py", [[]]),
        ("llama_cpp", "ask_llama_cpp.py", [[]]),
    ):
        python = getattr(arguments, f"peer_{option}")
        if python is None:
            common.log(f"{option}: skipped (--peer-{option.replace('_', '-')} was not given)")
        else:
            asked += [(python, script, options) for options in runs]
    return asked


def ask(python: Path, script: str, path: Path, options: Sequence[str]) -> dict[str, Any]:
    """What a peer's script prints last. Raises RuntimeError with its last words if it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads()), "HF_HUB_OFFLINE": "1"}
    command = [str(python), str(PEERS / script), str(path), *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=PEER_SECONDS, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr.strip()[-2000:]}")
    said: dict[str, Any] = json.loads(lines[-1])
    return said


def ours(bench: Bench, documents: Sequence[str], cases: Cases) -> Seconds:
    """Full prefill and our engine on the same prompts, documents warmed; then ``same`` again with nothing warmed, where
    what the ``warm`` prompt left behind is exact."""
    bench.warm(documents)
    bench.engine.generate(cases["warm"][0], max_new_tokens=1)  # once before it counts
    found = {case: alternating(bench, cases[case], OURS, full=True) for case in ("same", "shuffled")}
    bench.engine.clear()
    found["cold"] = alternating(bench, cases["cold"], {"ours, none": {"repair": "none"}}, full=True)
    bench.engine.clear()
    bench.engine.generate(cases["warm"][0], max_new_tokens=1)
    found["same"] |= alternating(bench, cases["same"], EXACT, full=False)
    return found


def alternating(
    bench: Bench, asked: Sequence[Prompt], ways: Mapping[str, Mapping[str, Any]], full: bool
) -> dict[str, list[float]]:
    """Every side once for each prompt, prompt after prompt."""
    sides = ({FULL: {"mode": "baseline"}} if full else {}) | dict(ways)
    timed = {name: Side(bench, iter(asked).__next__, options) for name, options in sides.items()}
    return common.alternate(timed, len(asked), warmups=0)


def compared(said: Mapping[str, Any], before: Seconds, after: Seconds) -> dict[str, Any]:
    """A peer's seconds by case beside ours; ``peer_over``: its median over that of each side."""
    table: dict[str, Any] = {}
    for case in said["cases"] or before:
        sides = {side: before[case][side] + after[case][side] for side in before.get(case, {})}
        row: dict[str, Any] = {"ours": {side: {"seconds": common.spread(v), "each": v} for side, v in sides.items()}}
        if case in said["cases"]:
            peer = said["cases"][case]
            median = statistics.median(peer["seconds"])
            row["peer"] = {"seconds": common.spread(peer["seconds"]), "each": peer["seconds"], "said": peer["said"]}
            row["peer_over"] = {side: median / statistics.median(values) for side, values in sides.items()}
        if FULL in sides:
            row["drift"] = statistics.median(after[case][FULL]) / statistics.median(before[case][FULL])
        table[case] = row
    return table


def show(peer: str, table: Mapping[str, Any]) -> None:
    print(f"\n{peer}\n  {'':48}{'TTFT':>12}{'peer / this':>14}")
    for case, row in table.items():
        if "peer" in row:
            print(f"  {case + ', ' + peer:48}{row['peer']['seconds']['median'] * 1e3:9.1f} ms")
        for side, taken in row["ours"].items():
            over = f"{row['peer_over'][side]:14.2f}" if "peer_over" in row else ""
            print(f"  {case + ', ' + side:48}{taken['seconds']['median'] * 1e3:9.1f} ms{over}", flush=True)
