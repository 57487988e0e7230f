"""A conversation that brings a document into every turn, and reuses those of the turns before.

    python examples/05_chat_with_memory.py [MODEL]

MODEL is a hub name or a folder; left out, the bundled small model is used, which needs no network.

Every turn sends the whole conversation as plain messages. Its documents are found in them and reused where they stand;
questions and answers, which are short, are computed anew.
"""

from __future__ import annotations

import sys

from kvboost_rag import KVBoost, hub, sample

TURNS = (
    ("10-blue-barley", "Which village was the first to grow blue barley?"),
    ("11-kettle-bread", "What is kettle bread flavoured with?"),
    ("08-floating-school", "Who is the head teacher of the Floating School?"),
    ("09-tide-clock", "In what year was the Tide Clock finished?"),
)


def main(model: str | None = None) -> None:
    passages = sample.passages()
    with KVBoost.from_pretrained(model or hub.bundled_model()) as engine:
        print(engine.warm(passages[name] for name, _ in TURNS))

        messages: list[dict[str, str]] = []
        for number, (name, question) in enumerate(TURNS, 1):
            content = f"{passages[name]}\n\nQuestion: {question}\nAnswer in one short sentence."
            messages.append({"role": "user", "content": content})
            result = engine.generate(messages, max_new_tokens=32)
            messages.append({"role": "assistant", "content": result.text.strip()})
            print(f"\nturn {number}: {question}\n{messages[-1]['content']}\n{result.report}")

        full = engine.generate(messages[:-1], max_new_tokens=1, mode="baseline")
        print(f"\nTTFT of the last turn: full prefill {full.ttft_seconds:.2f} s, reuse {result.ttft_seconds:.2f} s")


if __name__ == "__main__":
    main(*sys.argv[1:2])
