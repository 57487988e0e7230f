"""Documents that stay read: run this twice, and the second run answers its first question from disk.

    python examples/07_persistent_store.py [MODEL]
    python examples/07_persistent_store.py [MODEL]

MODEL is a hub name or a folder; left out, the bundled small model is used, which needs no network. A folder among the
temporary files holds about 100 MB for it; delete the folder to begin anew.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from kvboost_rag import KVBoost, hub, sample


def main(model: str | None = None) -> None:
    passages = list(sample.passages().values())[:4]
    folder = Path(tempfile.gettempdir()) / "kvboost-example-store"
    with KVBoost.from_pretrained(model or hub.bundled_model(), cache_dir=folder) as engine:
        there = sum(map(engine.is_warm, passages))
        print(f"{there} of {len(passages)} passages are in {folder} from an earlier run")
        if there < len(passages):
            print(engine.warm(passages))  # and write each one as it is read

        found = [passages[1], passages[3], passages[0]]
        prompt = engine.prompt(documents=found, question="Who is the captain of the Marigold?")
        result = engine.generate(prompt, max_new_tokens=32)
        print(f"\n{result.text.strip()}\n{result.report}")
        for number, document in enumerate(result.report.documents, 1):
            print(f"document {number}: {document.num_tokens} tokens from {document.tier}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
