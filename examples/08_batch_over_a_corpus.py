"""Many questions about a corpus in one call: prompts that share a beginning run together.

    python examples/08_batch_over_a_corpus.py [MODEL]

MODEL is a hub name or a folder; left out, the bundled model is used, which needs no network. It is small: not all of
its answers are right.
"""

from __future__ import annotations

import sys

import _bundled

from kvboost_rag import KVBoost, hub, sample


def main(model: str | None = None) -> None:
    passages = dict(list(sample.passages().items())[6:12])
    questions = [item.question for item in sample.questions() if item.passage in passages]
    search = _bundled.search_in(list(passages.values()), k=3)
    with KVBoost.from_pretrained(model or hub.bundled_model()) as engine:
        print(engine.warm(passages.values()))
        prompts = [engine.prompt(documents=search(question), question=question) for question in questions]
        results = engine.generate_many(prompts, max_new_tokens=24)  # shows a progress bar

        for question, result in zip(questions, results, strict=True):
            print(f"{question} | {' '.join(result.text.split())}")  # an answer a line, in the order of the questions

        hits = sum(result.report.num_document_hits for result in results)
        print(f"documents hit {hits}/{sum(len(result.report.documents) for result in results)}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
