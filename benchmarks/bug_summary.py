"""From the records of single samples to the tables of the paper.

Knows records, means and intervals; knows nothing of models, engines or files. Questions about one document are no
independent samples, so intervals are 95 % bootstrap intervals over documents, all their questions drawn together.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from bugs import LETTERS
from common import interval, spread

Record = dict[str, Any]
BASELINE, PREFIX = "BASELINE", "PREFIX_CACHE"
HISTOGRAM_BINS = 20


def summary(records: Sequence[Record]) -> dict[str, Any]:
    """Everything the paper reports, by condition."""
    names = list(records[0]["sides"])
    result: dict[str, Any] = {
        "num_samples": len(records),
        "num_cold": sum(record["first"] for record in records),
        "buckets": {name: len(part) for name, part in scopes(records).items() if name not in ("all", "cold", "warm")},
        "quality": {name: quality(records, name) for name in names},
        "ttft_seconds": {name: _by_scope(records, lambda part, name=name: spread(ttft(part, name))) for name in names},
        "reuse": {name: reuse(records, name) for name in names},
    }
    for base, key in ((BASELINE, "speedup"), (PREFIX, "against_prefix_cache")):
        if base in names:
            result[key] = {
                name: _by_scope(records, lambda part, name=name, base=base: speedup(part, base, name))
                for name in names
                if name != base
            }
    return result


def scopes(records: Sequence[Record]) -> dict[str, list[Record]]:
    """All records, those of each bucket, and those of first and later questions about a document."""
    parts = {"all": list(records)}
    for record in sorted(records, key=lambda record: record["num_document_tokens"]):
        parts.setdefault(record["bucket"], []).append(record)
    parts["cold"] = [record for record in records if record["first"]]
    parts["warm"] = [record for record in records if not record["first"]]
    return {name: part for name, part in parts.items() if part}


def _by_scope(records: Sequence[Record], measure: Callable[[Sequence[Record]], Any]) -> dict[str, Any]:
    return {scope: measure(part) for scope, part in scopes(records).items()}


def ttft(records: Sequence[Record], name: str) -> list[float]:
    return [record["sides"][name]["ttft_seconds"] for record in records]


def speedup(records: Sequence[Record], base: str, name: str) -> dict[str, Any]:
    """How many times faster ``name`` is than ``base``. ``of_means`` is the paper's measure."""
    slow, fast = ttft(records, base), ttft(records, name)
    each = [a / b for a, b in zip(slow, fast, strict=True)]
    return {
        "of_means": statistics.fmean(slow) / statistics.fmean(fast),
        "of_means_interval": interval(_by_document(records, slow), _by_document(records, fast)),
        "of_medians": statistics.median(slow) / statistics.median(fast),
        "mean_of_ratios": statistics.fmean(each),
        "median_of_ratios": statistics.median(each),
    }


def quality(records: Sequence[Record], name: str) -> dict[str, Any]:
    """``accuracy``: the right letter scores highest of the four. ``agreement``: the same letter as with full prefill
    does. ``kl``: KL(full || this) of the first token, nats. ``letter_share``: the likeliest token is a letter.

    A small model may like one letter whatever is asked (``answers``), and then agrees with itself for nothing.
    ``_centred``: by scores less what full prefill gives each letter on average.
    """
    sides = [record["sides"][name] for record in records]
    right = [float(side["letter"] == record["answer"]) for side, record in zip(sides, records, strict=True)]
    result: dict[str, Any] = {"accuracy": statistics.fmean(right), "accuracy_interval": _share(records, right)}
    result["answers"] = {letter: sum(side["letter"] == letter for side in sides) for letter in LETTERS}
    centred = _centred(records, name)
    result["accuracy_centred"] = _same(centred, [record["answer"] for record in records])
    result["letter_share"] = statistics.fmean(side["says_letter"] for side in sides)
    if "kl" in sides[0]:
        agrees = [float(side["agrees"]) for side in sides]
        result |= {"agreement": statistics.fmean(agrees), "agreement_interval": _share(records, agrees)}
        result["agreement_centred"] = _same(centred, _centred(records, BASELINE))
        result["same_top"] = statistics.fmean(side["same_top"] for side in sides)
        result["kl"] = spread([side["kl"] for side in sides])
    return result


def _centred(records: Sequence[Record], name: str) -> list[str]:
    """The letter of each sample that scores most above its average with full prefill."""
    base = BASELINE if BASELINE in records[0]["sides"] else name
    usual = np.mean([record["sides"][base]["scores"] for record in records], axis=0)
    return [LETTERS[int(np.argmax(np.array(record["sides"][name]["scores"]) - usual))] for record in records]


def _same(these: Sequence[str], those: Sequence[str]) -> float:
    return statistics.fmean(a == b for a, b in zip(these, those, strict=True))


def reuse(records: Sequence[Record], name: str) -> dict[str, Any]:
    """Share of prompt tokens whose stored KV was used, and where the rest went."""
    ratios = [record["sides"][name]["reuse_ratio"] for record in records]
    counts = {
        kind: sum(record["sides"][name][kind] for record in records)
        for kind in ("num_exact_tokens", "num_approximate_tokens", "num_repaired_tokens", "num_live_tokens")
    }
    total = sum(counts.values())
    histogram, _ = np.histogram(ratios, HISTOGRAM_BINS, (0.0, 1.0))
    return {
        "by_scope": _by_scope(records, lambda part: spread([r["sides"][name]["reuse_ratio"] for r in part])),
        "histogram": histogram.tolist(),
        "share_of_tokens": {kind: count / total for kind, count in counts.items()},
        "num_with_notes": sum(record["sides"][name]["num_notes"] > 0 for record in records),
    }


def _by_document(records: Sequence[Record], values: Sequence[float]) -> np.ndarray:
    """Sums of ``values`` over the questions of each document."""
    sums: dict[int, float] = {}
    for record, value in zip(records, values, strict=True):
        sums[record["group"]] = sums.get(record["group"], 0.0) + value
    return np.array(list(sums.values()))


def _share(records: Sequence[Record], values: Sequence[float]) -> tuple[float, float]:
    return interval(_by_document(records, values), _by_document(records, [1.0] * len(values)))


def show(result: dict[str, Any]) -> str:
    """The tables as text."""
    head = f"{'accuracy':>9}{'agrees':>8}{'centred':>8}{'KL':>8}{'reuse':>7}"
    lines = [f"\n{'':16}{head}   TTFT mean / median / p95, ms   speed-up"]
    for name, measured in result["quality"].items():
        times = result["ttft_seconds"][name]["all"]
        agrees = " " * 24
        if "kl" in measured:
            agrees = f"{measured['agreement']:8.1%}{measured['agreement_centred']:8.1%}{measured['kl']['mean']:8.4f}"
        row = f"{name:16}{measured['accuracy']:9.1%}{agrees}{result['reuse'][name]['by_scope']['all']['mean']:7.1%}   "
        row += " / ".join(f"{times[key] * 1e3:7.1f}" for key in ("mean", "median", "p95"))
        faster = result.get("speedup", {}).get(name)
        if faster:
            low, high = faster["all"]["of_means_interval"]
            row += f"   {faster['all']['of_means']:.2f} [{low:.2f}, {high:.2f}]"
        lines.append(row)
    names = list(result["ttft_seconds"])
    lines.append("\nmean TTFT, ms" + "".join(f"{name:>16}" for name in names))
    for scope in result["ttft_seconds"][names[0]]:
        means = "".join(f"{result['ttft_seconds'][name][scope]['mean'] * 1e3:16.1f}" for name in names)
        lines.append(f"{scope:13}{means}")
    return "\n".join(lines)
