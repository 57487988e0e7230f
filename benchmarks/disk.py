"""How much faster a document comes back from disk than it is read by the model.

    python benchmarks/disk.py --documents 8

Documents of the project's own corpus are warmed with ``cache_dir``. For each one, the time of finding its file,
reading and checking it, and laying its keys at another place is compared with that of a prefill of the document alone,
in the same run. Files are in the system's cache, as those of a corpus in use are. Medians over documents.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from kvboost_rag import KVBoost, __version__, hub
from kvboost_rag.engine.assemble import assemble
from kvboost_rag.engine.stitch import stitch
from kvboost_rag.engine.store import TieredStore
from kvboost_rag.engine.types import Segment

PASSAGES = Path(__file__).parent.parent / "examples" / "data" / "passages"


def measure(boost: KVBoost, text: str) -> dict[str, float]:
    """Seconds for one warmed document, which memory has forgotten."""
    engine = boost.engine
    assert isinstance(engine.store, TieredStore)
    engine.store.memory.clear()
    segments = [Segment((1, 2, 3, 4, 5)), Segment(boost.tokens.encode(text), document=True)]
    with engine.lock:
        started = time.perf_counter()
        assembled = assemble(segments, engine.store, engine.model.fingerprint(), engine.cutting)
        cache = engine.model.new_cache(assembled.num_tokens)
        moved = stitch(assembled, cache, engine.model.rope())
        loaded = time.perf_counter() - started
        assert assembled.placements[-1].entry is not None
        ids = torch.tensor(segments[1].ids)
        started = time.perf_counter()
        engine.model.forward(ids, engine.model.new_cache(len(ids)))
        computed = time.perf_counter() - started
    return {"tokens": len(ids), "bytes": moved, "load_seconds": loaded, "prefill_seconds": computed}


def run(num_documents: int, kv_dtype: str) -> dict[str, Any]:
    texts = [p.read_text(encoding="utf-8").strip() for p in sorted(PASSAGES.glob("*.md"))][:num_documents]
    loaded = hub.load(hub.bundled_model(), dtype=torch.float32)
    with (
        tempfile.TemporaryDirectory() as folder,
        KVBoost(loaded.model, loaded.tokenizer, cache_dir=folder, kv_dtype=kv_dtype) as boost,
    ):
        boost.warm(texts)
        measure(boost, texts[0])  # once before it counts
        rows = [measure(boost, text) for text in texts]
    ratio = statistics.median(row["prefill_seconds"] / row["load_seconds"] for row in rows)
    return {"kv_dtype": kv_dtype, "prefill_over_load": ratio, "documents": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--json", type=Path, help="write everything here")
    arguments = parser.parse_args()
    results = [run(arguments.documents, kv_dtype) for kv_dtype in ("auto", "int8", "int4")]
    for result in results:
        median = {key: statistics.median(row[key] for row in result["documents"]) for key in result["documents"][0]}
        print(
            f"{result['kv_dtype']:5} {median['tokens']:.0f} tokens, {median['bytes'] / 1e6:.1f} MB: load "
            f"{median['load_seconds'] * 1e3:.0f} ms, prefill {median['prefill_seconds'] * 1e3:.0f} ms, "
            f"{result['prefill_over_load']:.0f} times faster"
        )
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        about = {
            "command": " ".join(sys.argv),
            "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
            "versions": {"kvboost_rag": __version__, "torch": torch.__version__},
        }
        arguments.json.write_text(json.dumps({**about, "results": results}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
