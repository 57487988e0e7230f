"""How fast documents are read into the store, and what they take there.

    python benchmarks/ingest.py --documents 12 --rounds 3

The same documents, each round once in every way, by a fresh engine with an empty store each time:

- ``prefill``: the ids of each document through the stock model alone, one forward each, logits of the last token only;
- ``warm``: ``KVBoost.warm`` as it is by default: tokenising, the automatic primer, hashing and storing included;
- ``warm, no primer``: the same with ``primer=None``: what priming costs is the difference;
- ``warm int8``, ``warm int4``: the same with ``kv_dtype``, quantising and judging included;
- ``warm to disk``: the same with ``cache_dir``, files written.

Building the engine is not timed. Told as tokens of documents per second, and as a ratio to ``prefill`` of the same
round; "after the first" leaves the first document out, which pays for the bundled primer and the chat opening that all
others share. Bytes per token are those of the KV as it is kept. Then, by codec, the time of reading a document back
from disk against that of a prefill, as ``disk.py`` measures it.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import common
import disk
import torch
from transformers import DynamicCache
from workload import entries_of

from kvboost_rag import KVBoost
from kvboost_rag.engine.runner import Runner
from kvboost_rag.tokens import Tokens

BAR = 0.9  # of the throughput of a raw prefill
BUDGET = "16GB"  # nothing is to be evicted
PREFILL = "prefill"


@dataclass(frozen=True)
class Way:
    """How documents are warmed. ``options``: of the engine; ``on_disk``: with a folder too."""

    options: dict[str, Any] = field(default_factory=dict)
    primer: str | None = "auto"
    on_disk: bool = False


WAYS = {
    "warm": Way(),
    "warm, no primer": Way(primer=None),
    "warm int8": Way({"kv_dtype": "int8"}),
    "warm int4": Way({"kv_dtype": "int4"}),
    "warm to disk": Way(on_disk=True),
}


class Ingestion:
    """Reads the same ``texts`` again and again. ``rest``: seconds of all documents but the first, run by run."""

    def __init__(self, model: Any, tokenizer: Any, texts: Sequence[str], device: str):
        self.model, self.tokenizer, self.texts, self.device = model, tokenizer, list(texts), device
        tokens = Tokens(tokenizer)
        self.ids = [torch.tensor(tokens.encode(text)) for text in self.texts]
        self.rest: dict[str, list[float]] = defaultdict(list)
        self.kept: dict[str, dict[str, Any]] = {}

    def _took(self, name: str, first: float, rest: float) -> float:
        self.rest[name].append(rest)
        return first + rest

    def prefill(self) -> float:
        """Seconds of the stock model, no engine on it."""
        runner = Runner(self.model)

        def run(documents: Sequence[torch.Tensor]) -> None:
            for ids in documents:
                runner(ids, DynamicCache())

        parts = self.ids[:1], self.ids[1:]
        first, rest = (common.seconds(lambda part=part: run(part), self.device) for part in parts)
        return self._took(PREFILL, first, rest)

    def warm(self, name: str, way: Way) -> float:
        """Seconds of ``KVBoost.warm``, by an engine that has read nothing."""
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory()) if way.on_disk else None
            boost = stack.enter_context(
                KVBoost(self.model, self.tokenizer, max_cache_bytes=BUDGET, cache_dir=folder, **way.options)
            )
            first, rest = (
                common.seconds(lambda part=part: boost.warm(part, way.primer, progress=False), self.device)
                for part in (self.texts[:1], self.texts[1:])
            )
            self.kept[name] = self._kept(boost)
        return self._took(name, first, rest)

    def _kept(self, boost: KVBoost) -> dict[str, Any]:
        entries = [entry for text in self.texts for entry in entries_of(boost, text)]
        num_tokens = sum(entry.num_tokens for entry in entries)
        assert num_tokens == sum(map(len, self.ids))
        return {
            "bytes_per_token": sum(entry.packed.num_bytes for entry in entries) / num_tokens,
            "raw_bytes_per_token": boost.engine.model.bytes_per_token,
            "num_kept_wider": boost.engine.keeper.num_kept_wider,
        }


def rows_of(ingestion: Ingestion, taken: dict[str, list[float]]) -> list[dict[str, Any]]:
    """What is told of each way."""
    num_tokens, num_rest = (sum(map(len, ids)) for ids in (ingestion.ids, ingestion.ids[1:]))
    rest = ingestion.rest
    rows = []
    for name, seconds in taken.items():
        row: dict[str, Any] = {
            "way": name,
            "seconds": seconds,
            "tokens_per_second": common.spread([num_tokens / each for each in seconds]),
            "of_prefill": common.ratio(taken[PREFILL], seconds),
        }
        if num_rest:
            row["tokens_per_second_after_the_first"] = common.spread([num_rest / each for each in rest[name]])
            row["of_prefill_after_the_first"] = common.ratio(rest[PREFILL], rest[name])
        rows.append(row | ingestion.kept.get(name, {}))
    return rows


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    model, tokenizer = common.load(arguments)
    texts = common.texts_of(tokenizer, arguments.tokens, arguments.documents)
    once = Ingestion(model, tokenizer, texts[:1], arguments.device)  # before it counts
    once.prefill()
    once.warm("warm", WAYS["warm"])
    ingestion = Ingestion(model, tokenizer, texts, arguments.device)
    sides = {PREFILL: ingestion.prefill}
    for name in arguments.ways:
        sides[name] = lambda name=name: ingestion.warm(name, WAYS[name])
    common.log(f"{len(texts)} documents, {sum(map(len, ingestion.ids))} tokens, {arguments.rounds} rounds")
    rows = rows_of(ingestion, common.alternate(sides, arguments.rounds, warmups=0))
    reloads = [
        disk.run(model, tokenizer, texts[: arguments.reload], kv_dtype, arguments.device)
        for kv_dtype in (disk.KV_DTYPES if arguments.reload else ())
    ]
    return {
        "num_documents": len(texts),
        "num_tokens": sum(map(len, ingestion.ids)),
        "rounds": arguments.rounds,
        "bar": BAR,
        "rows": rows,
        "reload": reloads,
    }


def show(result: dict[str, Any]) -> None:
    print(f"{'':18}{'tokens/s':>10}{'of prefill':>12}  [spread]      after the first  bytes/token  of raw")
    for row in result["rows"]:
        whole, after = row["of_prefill"], row.get("of_prefill_after_the_first", row["of_prefill"])
        line = f"{row['way']:18}{row['tokens_per_second']['median']:10.0f}{whole['median']:12.2f}"
        line += f"  [{whole['min']:.2f}, {whole['max']:.2f}]{after['median']:17.2f}"
        if "bytes_per_token" in row:
            line += f"{row['bytes_per_token']:13.0f}{row['bytes_per_token'] / row['raw_bytes_per_token']:8.3f}"
            line += f"   {row['num_kept_wider']} kept wider" if row["num_kept_wider"] else ""
        print(line)
    warm = next((row["of_prefill"]["median"] for row in result["rows"] if row["way"] == "warm"), None)
    if warm is not None:
        print(f"bar {result['bar']}: {'reached' if warm >= result['bar'] else 'not reached'}")
    disk.show(result["reload"])


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--documents", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=600, help="of each document, about (600)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS), help="all if not given")
    parser.add_argument("--reload", type=int, default=6, help="documents read back from disk, 0 for none (6)")
    arguments = parser.parse_args(argv)
    result = run(arguments)
    show(result)
    common.save(arguments.json, {**common.about(arguments), **result})


if __name__ == "__main__":
    main()
