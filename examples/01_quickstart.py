"""The whole idea in plain Python: read passages once, ask about any of them, in any order.

    python examples/01_quickstart.py [MODEL]

MODEL is a hub name or a folder; left out, the bundled small model is used, which needs no network.
"""

from __future__ import annotations

import sys

from kvboost_rag import KVBoost, hub, sample


def main(model: str | None = None) -> None:
    passages = list(sample.passages().values())[18:24]
    with KVBoost.from_pretrained(model or hub.bundled_model()) as engine:
        print(engine.warm(passages))  # once, when documents come in

        question = "How many seats does the Cork Theatre have?"
        for found in ([passages[2], passages[4], passages[0]], [passages[5], passages[3], passages[2]]):
            prompt = engine.prompt(documents=found, question=question)
            result = engine.generate(prompt, max_new_tokens=32)  # any documents, any order, any position
            print(f"\n{result.text.strip()}\n{result.report}")

        full = engine.generate(prompt, max_new_tokens=32, mode="baseline")
        print(f"\nfull prefill of the last prompt: {full.ttft_seconds:.2f} s, reuse: {result.ttft_seconds:.2f} s")


if __name__ == "__main__":
    main(*sys.argv[1:2])
