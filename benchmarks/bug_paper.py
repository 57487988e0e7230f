"""What the paper published, beside what was measured here, as a Markdown table.

Knows numbers; knows nothing of how they came about. The text of the paper gives these; the 95th percentiles and most
means by bucket stand only in its tables, which the text at hand lacks: a dash. The paper's machine is a GeForce RTX
4060, its model Qwen2.5-3B in float16, its prefix cache vLLM's: ratios may be compared, milliseconds may not. (Its
abstract says 16 % over the prefix cache, its section 6.3 says 14 % of the same two means, whose ratio is 1.16.)
"""

from __future__ import annotations

from typing import Any

NAMES = {"BASELINE": "Baseline", "PREFIX_CACHE": "vLLM prefix cache", "CHUNK_REUSE": "KVBoost"}
PAPER: dict[str, dict[str, float]] = {
    "accuracy": {"BASELINE": 0.991, "PREFIX_CACHE": 0.991, "CHUNK_REUSE": 0.992},
    "mean": {"BASELINE": 639.1, "PREFIX_CACHE": 165.5, "CHUNK_REUSE": 142.4},
    "median": {"BASELINE": 440.3, "PREFIX_CACHE": 80.0, "CHUNK_REUSE": 76.1},
    "speed-up, means": {"PREFIX_CACHE": 3.86, "CHUNK_REUSE": 4.49},
    "speed-up, medians": {"PREFIX_CACHE": 5.50, "CHUNK_REUSE": 5.79},
    "speed-up, 0-500": {"PREFIX_CACHE": 3.34 / 1.53, "CHUNK_REUSE": 3.34},
    "speed-up, 2K+": {"CHUNK_REUSE": 4.84},
    "speed-up, cold": {"PREFIX_CACHE": 1.0, "CHUNK_REUSE": 1.0},
    "over prefix cache, all": {"CHUNK_REUSE": 1.16},
    "over prefix cache, 0-500": {"CHUNK_REUSE": 1.53},
    "over prefix cache, 500-1K": {"CHUNK_REUSE": 1.36},
    "reuse": {"PREFIX_CACHE": 0.395, "CHUNK_REUSE": 0.364},
    "memory": {"BASELINE": 6140.6, "CHUNK_REUSE": 6125.8},
}
Result = dict[str, Any]
Row = tuple[str, str, dict[str, float], dict[str, float]]  # label, format, paper, ours


def table(result: Result) -> str:
    """``paper / ours`` in each cell; conditions the paper has not have ours only."""
    names = list(result["quality"])
    head = ["", *(f"{name} ({NAMES[name]})" if name in NAMES else name for name in names)]
    lines = ["paper / ours", "", "| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for label, style, paper, ours in rows(result):
        if ours:
            lines.append("| " + " | ".join([label, *(_cell(name, style, paper, ours) for name in names)]) + " |")
    return "\n".join(lines)


def _cell(name: str, style: str, paper: dict[str, float], ours: dict[str, float]) -> str:
    own = format(ours[name], style) if name in ours else "–"
    if name not in NAMES:
        return own
    return f"{format(paper[name], style) if name in paper else '–'} / {own}"


def rows(result: Result) -> list[Row]:
    """Tables 2 to 5 and the reuse of Figure 7."""
    return [*_quality(result), *_times(result), *_ratios(result), *_reuse(result), *_memory(result)]


def _quality(result: Result) -> list[Row]:
    found = result["quality"]
    agreement = {name: measured["agreement"] for name, measured in found.items() if "agreement" in measured}
    centred = {name: measured["agreement_centred"] for name, measured in found.items() if "kl" in measured}
    divergence = {name: measured["kl"]["mean"] for name, measured in found.items() if "kl" in measured}
    return [
        ("accuracy (Table 2)", ".1%", PAPER["accuracy"], {name: found[name]["accuracy"] for name in found}),
        ("same letter as full prefill", ".1%", {}, agreement),
        ("… scores less each letter's average", ".1%", {}, centred),
        ("KL of the first token, nats", ".4f", {}, divergence),
    ]


def _times(result: Result) -> list[Row]:
    times = result["ttft_seconds"]

    def milliseconds(scope: str, key: str) -> dict[str, float]:
        return {name: by_scope[scope][key] * 1e3 for name, by_scope in times.items() if scope in by_scope}

    whole = [
        (f"TTFT, {key}, ms (Table 3)", ".1f", PAPER.get(key, {}), milliseconds("all", key))
        for key in ("mean", "median", "p95")
    ]
    buckets = [
        (f"TTFT, mean, ms, {bucket} tokens, n = {count} (Table 4)", ".1f", {}, milliseconds(bucket, "mean"))
        for bucket, count in result["buckets"].items()
    ]
    mixed = [(f"TTFT, median, ms, {s} (Figure 5)", ".1f", {}, milliseconds(s, "median")) for s in ("cold", "warm")]
    return [*whole, *buckets, *mixed]


def _ratios(result: Result) -> list[Row]:
    def ratios(key: str, scope: str, measure: str = "of_means") -> dict[str, float]:
        found = result.get(key, {})
        return {name: by_scope[scope][measure] for name, by_scope in found.items() if scope in by_scope}

    made: list[Row] = [
        ("speed-up, means (Table 3)", ".2f", PAPER["speed-up, means"], ratios("speedup", "all")),
        ("speed-up, medians (Table 3)", ".2f", PAPER["speed-up, medians"], ratios("speedup", "all", "of_medians")),
        ("speed-up, mean of single ratios", ".2f", {}, ratios("speedup", "all", "mean_of_ratios")),
    ]
    for scope in (*result["buckets"], "cold", "warm"):
        label = f"speed-up, {scope}"
        made.append((f"{label} (Figure 6)", ".2f", PAPER.get(label, {}), ratios("speedup", scope)))
    for scope in ("all", *result["buckets"]):
        label = f"over prefix cache, {scope}"
        made.append((f"{label} (Table 4)", ".2f", PAPER.get(label, {}), ratios("against_prefix_cache", scope)))
    return made


def _reuse(result: Result) -> list[Row]:
    found = {name: measured["by_scope"] for name, measured in result["reuse"].items()}
    return [
        (
            f"reuse ratio, mean, {scope} (Figure 7)",
            ".1%",
            PAPER["reuse"] if scope == "all" else {},
            {name: by_scope[scope]["mean"] for name, by_scope in found.items() if scope in by_scope},
        )
        for scope in ("all", "cold", "warm")
    ]


def _memory(result: Result) -> list[Row]:
    peaks = {name: peak["bytes"] / 1e6 for name, peak in result["memory"].items()}
    stores = {name: count / 1e6 for name, count in result["store_bytes"].items()}
    return [
        ("peak memory of a process of its own, MB (Table 5)", ".1f", PAPER["memory"], peaks),
        ("KV kept, at most, MB", ".1f", {}, stores),
    ]
