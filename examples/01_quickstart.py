"""Ask a small corpus questions, and see what was reused and how much faster it was. This is what `make demo` runs.

    python examples/01_quickstart.py [--repair none] [--recompute-ratio 0.15] [--json PATH]

The heart of it, for your own documents:

    engine = KVBoost.from_pretrained("Qwen/Qwen2.5-0.5B-Instruct")
    engine.warm(texts)                                              # once, at ingestion
    prompt = engine.prompt(documents=found, question="Who built the lighthouse?")
    result = engine.generate(prompt)                                # any order, any position
    print(result.text, result.report)
"""

from pathlib import Path

from kvboost_rag.demo import main

if __name__ == "__main__":
    raise SystemExit(main(Path(__file__).parent / "data"))
