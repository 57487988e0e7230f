"""How much faster a document comes back from disk than it is read by the model.

    python benchmarks/disk.py --documents 8

Documents of the project's own corpus are warmed with ``cache_dir``. For each one, the time of finding its file,
reading and checking it, and laying its keys at another place is compared with that of a prefill of the document alone,
in the same run. Files are in the system's cache, as those of a corpus in use are. Medians over documents.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from typing import Any

import common
import torch
from workload import parts_of

from kvboost_rag import KVBoost, sample
from kvboost_rag.engine.assemble import assemble
from kvboost_rag.engine.stitch import stitch
from kvboost_rag.engine.store import TieredStore
from kvboost_rag.engine.types import Segment, total_tokens

KV_DTYPES = ("auto", "int8", "int4")
BEFORE = Segment((1, 2, 3, 4, 5))  # so that every document has to move


def measure(boost: KVBoost, text: str, device: str) -> dict[str, float]:
    """Seconds for one warmed document, which memory has forgotten."""
    engine = boost.engine
    assert isinstance(engine.store, TieredStore)
    engine.store.memory.clear()
    parts = parts_of(boost, text)
    segments = [BEFORE, *parts]
    ids = torch.tensor([token for part in parts for token in part.ids])
    moved = []

    def reload() -> None:
        num_tokens = total_tokens(segments)
        assembled = assemble(segments, engine.store, engine.model.fingerprint(num_tokens), engine.cutting)
        assert all(placement.entry is not None for placement in assembled.placements[-len(parts) :])
        cache = engine.model.new_cache(assembled.num_tokens)
        moved.append(stitch(assembled, cache, engine.model.rope(num_tokens)))

    with engine.lock:
        loaded = common.seconds(reload, device)
        computed = common.seconds(lambda: engine.model.forward(ids, engine.model.new_cache(len(ids))), device)
    return {"tokens": len(ids), "bytes": moved[0], "load_seconds": loaded, "prefill_seconds": computed}


def run(model: Any, tokenizer: Any, texts: Sequence[str], kv_dtype: str, device: str) -> dict[str, Any]:
    """One codec: the rows of all documents, and the median of prefill over reload."""
    with (
        tempfile.TemporaryDirectory() as folder,
        KVBoost(model, tokenizer, cache_dir=folder, kv_dtype=kv_dtype) as boost,
    ):
        boost.warm(texts, progress=False)
        measure(boost, texts[0], device)  # once before it counts
        rows = [measure(boost, text, device) for text in texts]
    ratio = statistics.median(row["prefill_seconds"] / row["load_seconds"] for row in rows)
    return {"kv_dtype": kv_dtype, "prefill_over_load": ratio, "documents": rows}


def show(results: Sequence[dict[str, Any]]) -> None:
    for result in results:
        median = {key: statistics.median(row[key] for row in result["documents"]) for key in result["documents"][0]}
        print(
            f"{result['kv_dtype']:5} {median['tokens']:.0f} tokens, {median['bytes'] / 1e6:.1f} MB: load "
            f"{median['load_seconds'] * 1e3:.0f} ms, prefill {median['prefill_seconds'] * 1e3:.0f} ms, "
            f"{result['prefill_over_load']:.0f} times faster"
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--documents", type=int, default=8, help="how many of the corpus (8)")
    arguments = parser.parse_args(argv)
    model, tokenizer = common.load(arguments)
    texts = list(sample.passages().values())[: arguments.documents]
    results = [run(model, tokenizer, texts, kv_dtype, arguments.device) for kv_dtype in KV_DTYPES]
    show(results)
    common.save(arguments.json, {**common.about(arguments), "results": results})


if __name__ == "__main__":
    main()
