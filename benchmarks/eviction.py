"""Which policy of eviction finds the most documents in a store that is too small for all of them.

    python benchmarks/eviction.py --rounds 200 --seeds 10

No model: entries are sizes only. 50 documents of 100 to 1,200 tokens; popularity follows Zipf's law (weight 1 / rank),
whatever the size. Each round draws 14 of them without replacement, shuffled, looks all of them up, then stores those
that missed, as the engine does with a prompt. Importance is drawn at random per document: the length of its keys has
nothing to do with how often it is asked for. "steady" keeps popularity as it is; "shifting" deals it out anew each
quarter of the rounds, so that a policy also has to forget. The budget is a share of all documents' bytes. Every policy
sees the same draws; the first tenth of the rounds, which fills the store, is not counted.

Printed and written to ``results/eviction_zipf.json``: the share of documents, and of their tokens, that were found; and
the difference of the first to lru, in points, with the standard error over seeds. Deterministic by seed.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvboost_rag.engine.store import EVICTIONS, Entry, MemoryStore
from kvboost_rag.engine.types import ChunkKeys

NUM_DOCUMENTS = 50
NUM_DRAWN = 14
BUDGETS = (0.3, 0.6)
WORKLOADS = {"steady": 1, "shifting": 4}  # name -> how often popularity is dealt out
BYTES_PER_TOKEN = 46_080  # SmolLM2-135M in float32
REFERENCE = "lru"
RESULTS = Path(__file__).parent / "results" / "eviction_zipf.json"


@dataclass(frozen=True)
class Weight:
    """KV of which only the size matters."""

    num_bytes: int
    codec: str = "raw"


@dataclass(frozen=True, eq=False)
class Document:
    keys: ChunkKeys
    ids: npt.NDArray[np.int64]
    importance: float

    def entry(self) -> Entry:
        """As the engine keeps a document that missed: an approximate by-product."""
        packed = Weight(len(self.ids) * BYTES_PER_TOKEN)
        return Entry(self.keys, self.ids, packed, exact=False, importance=self.importance)


def corpus(rng: np.random.Generator) -> list[Document]:
    sizes = rng.integers(100, 1201, NUM_DOCUMENTS)
    importances = rng.normal(10.0, 1.0, NUM_DOCUMENTS)
    return [
        Document(ChunkKeys(b"", number.to_bytes(2, "little")), np.full(size, number), float(importance))
        for number, (size, importance) in enumerate(zip(sizes, importances, strict=True))
    ]


def draws(rng: np.random.Generator, num_rounds: int, num_deals: int) -> list[npt.NDArray[np.int64]]:
    """The documents of each round, shuffled."""
    weights = 1 / np.arange(1, NUM_DOCUMENTS + 1)
    weights /= weights.sum()
    rounds: list[npt.NDArray[np.int64]] = []
    for part in np.array_split(np.arange(num_rounds), num_deals):
        popularity = rng.permutation(weights)
        for _ in part:
            drawn = rng.choice(NUM_DOCUMENTS, NUM_DRAWN, replace=False, p=popularity)
            rounds.append(rng.permutation(drawn))
    return rounds


def replay(
    documents: list[Document], rounds: list[npt.NDArray[np.int64]], budget: float, policy: str
) -> tuple[float, float]:
    """Shares of documents and of tokens that were found."""
    max_bytes = int(budget * sum(document.entry().num_bytes for document in documents))
    store = MemoryStore(max_bytes, eviction=policy)
    asked: list[tuple[int, bool]] = []  # tokens of each document asked for, and whether it was found
    for number, drawn in enumerate(rounds):
        wanted = [documents[i] for i in drawn]
        missed = [document for document in wanted if store.find(document.keys, document.ids) is None]
        for document in missed:
            store.put(document.entry())
        if number >= len(rounds) // 10:
            asked += [(len(document.ids), document not in missed) for document in wanted]
    assert store.stats().used_bytes <= max_bytes
    tokens, found = np.array(asked).T
    return float(found.mean()), float((tokens * found).sum() / tokens.sum())


def run(num_rounds: int, num_seeds: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for workload, num_deals in WORKLOADS.items():
        for budget in BUDGETS:
            found: dict[str, list[tuple[float, float]]] = {policy: [] for policy in EVICTIONS}
            for seed in range(num_seeds):
                rng = np.random.default_rng(seed)
                documents = corpus(rng)
                rounds = draws(rng, num_rounds, num_deals)
                for policy in EVICTIONS:
                    found[policy].append(replay(documents, rounds, budget, policy))
            rates = {policy: np.array(found[policy]) for policy in EVICTIONS}  # (seeds, 2) each
            rows += [row(workload, budget, policy, rates[policy], rates[REFERENCE]) for policy in EVICTIONS]
    return rows


def row(
    workload: str, budget: float, policy: str, rates: npt.NDArray[np.float64], reference: npt.NDArray[np.float64]
) -> dict[str, Any]:
    documents, tokens = rates.mean(axis=0)
    gain = 100 * (rates[:, 0] - reference[:, 0])
    error = gain.std(ddof=1) / np.sqrt(len(gain)) if len(gain) > 1 else 0.0
    return {
        "workload": workload,
        "budget": budget,
        "policy": policy,
        "document_hit_rate": round(float(documents), 4),
        "token_hit_rate": round(float(tokens), 4),
        "points_to_lru": round(float(gain.mean()), 2),
        "standard_error": round(float(error), 2),
        "per_seed": rates[:, 0].round(4).tolist(),
    }


def show(rows: list[dict[str, Any]]) -> None:
    print(f"{'workload':10}{'budget':>7}  {'policy':12}{'documents':>10}{'tokens':>9}{'to lru, points':>17}")
    for r in rows:
        print(
            f"{r['workload']:10}{r['budget']:7.0%}  {r['policy']:12}{r['document_hit_rate']:10.1%}"
            f"{r['token_hit_rate']:9.1%}{r['points_to_lru']:+9.1f} ± {r['standard_error']:.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--json", type=Path, default=RESULTS, help="write everything here")
    arguments = parser.parse_args()
    rows = run(arguments.rounds, arguments.seeds)
    show(rows)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    result = {"command": " ".join(sys.argv), "rounds": arguments.rounds, "seeds": arguments.seeds, "rows": rows}
    arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
