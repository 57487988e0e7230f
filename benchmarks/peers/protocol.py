"""What the peers' scripts share: a workload in, seconds to the first token out. Standard library only.

The workload is a JSON file: ``model`` (a folder of a model), ``gguf`` (a file, or null), ``dtype``, ``threads``,
``max_tokens`` (of a prompt and its first token), ``documents`` (texts) and ``cases``: lists of prompts, each
``{"text", "ids"}``. Cases are asked in their order: ``cold`` (documents not seen before), ``warm`` (the documents, in
their order, for the first time), ``same`` (same documents, same order, another question), ``shuffled`` (another order,
another question; no two begin with the same document). A first prompt of its own, ``first``, does not count.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Prompt = dict[str, Any]  # {"text": str, "ids": list[int]}
Ask = Callable[[Prompt], tuple[float, dict[str, Any]]]  # seconds from the call to the first token, and what it said


def workload() -> dict[str, Any]:
    """The workload named first on the command line."""
    work: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    return work


def answer(peer: str, work: dict[str, Any], ask: Ask) -> None:
    """Ask everything; print the seconds of each case, and what was said with them, as the last line."""
    ask(work["first"])
    cases = {}
    for case, prompts in work["cases"].items():
        asked = [ask(prompt) for prompt in prompts]
        cases[case] = {"seconds": [seconds for seconds, _ in asked], "said": [said for _, said in asked]}
    print()
    print(json.dumps({"peer": peer, "cases": cases}), flush=True)
