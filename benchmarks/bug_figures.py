"""Figures 2 to 7 of the paper and a table beside its published figures, from a result of ``bug_localization.py``.

    python benchmarks/bug_figures.py bugs.json --out figures

Prints the table as Markdown. Knows result files and matplotlib; measures nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from bug_paper import table

COLOURS = {
    "BASELINE": "#4d4d4d",
    "PREFIX_CACHE": "#d98c21",
    "CHUNK_REUSE": "#1f77b4",
    "INGESTED": "#2a9d5c",
    "INGESTED_NONE": "#95c8a8",
    "INGESTED_FIRST": "#146c43",
}
PAPER_SPEEDUPS = {"0-500": 3.34, "2K+": 4.84}  # of KVBoost, by bucket: all that the text tells
REUSE_BINS = 10
Result = dict[str, Any]


def draw(result: Result, folder: Path, formats: Sequence[str] = ("png", "svg")) -> list[Path]:
    """One file per figure and format. Returns their paths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, (title, paint) in FIGURES.items():
        figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
        paint(axes, result)
        axes.set_title(f"{title}\n{result['model']}, {result['machine']}, n = {result['num_samples']}", fontsize=9)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
        for ending in formats:
            path = folder / f"{name}.{ending}"
            figure.savefig(path, dpi=150)
            written.append(path)
        pyplot.close(figure)
    return written


def accuracy_by_reuse(axes: Any, result: Result) -> None:
    """Figure 2: samples in bins of their reuse ratio; crosses where full prefill is agreed with."""
    for name in [name for name in result["quality"] if name not in ("BASELINE", "PREFIX_CACHE")]:
        sides = [(record["sides"][name], record["answer"]) for record in result["records"]]
        bins = np.minimum((np.array([s["reuse_ratio"] for s, _ in sides]) * REUSE_BINS).astype(int), REUSE_BINS - 1)
        right = np.array([s["letter"] == answer for s, answer in sides])
        filled = np.unique(bins)
        centres = (filled + 0.5) / REUSE_BINS
        axes.plot(centres, [right[bins == b].mean() for b in filled], "o-", color=COLOURS[name], label=f"{name}: right")
        if "agreement" in result["quality"][name]:
            agrees = np.array([s["agrees"] for s, _ in sides])
            means = [agrees[bins == b].mean() for b in filled]
            axes.plot(centres, means, "x--", color=COLOURS[name], label=f"{name}: as full prefill")
    axes.set(xlabel="reuse ratio of the sample", ylabel="share of samples", xlim=(0, 1), ylim=(0, 1.05))


def _bars(
    axes: Any, groups: Sequence[str], values: dict[str, list[float]], errors: dict[str, Any] | None = None
) -> None:
    width = 0.8 / len(values)
    for number, (name, heights) in enumerate(values.items()):
        places = np.arange(len(groups)) + (number - (len(values) - 1) / 2) * width
        axes.bar(places, heights, width, color=COLOURS[name], label=name, yerr=errors and errors[name])
    axes.set_xticks(range(len(groups)), groups)


def ttft_by_bucket(axes: Any, result: Result) -> None:
    """Figure 3."""
    times = result["ttft_seconds"]
    _bars(axes, list(result["buckets"]), {n: [times[n][b]["mean"] * 1e3 for b in result["buckets"]] for n in times})
    axes.set(xlabel="tokens of the document", ylabel="mean TTFT, ms")


def ttft_cdf(axes: Any, result: Result) -> None:
    """Figure 4."""
    shares = np.arange(1, result["num_samples"] + 1) / result["num_samples"]
    for name in result["ttft_seconds"]:
        times = np.sort([record["sides"][name]["ttft_seconds"] for record in result["records"]])
        axes.step(times * 1e3, shares, where="post", color=COLOURS[name], label=name)
    axes.set(xlabel="TTFT, ms", ylabel="share of samples", xscale="log", ylim=(0, 1.02))


def cold_and_warm(axes: Any, result: Result) -> None:
    """Figure 5: medians, with the quarters around them."""
    scopes = [scope for scope in ("cold", "warm") if any(r["first"] == (scope == "cold") for r in result["records"])]
    values: dict[str, list[float]] = {}
    errors: dict[str, Any] = {}
    for name in result["ttft_seconds"]:
        times = [
            [r["sides"][name]["ttft_seconds"] * 1e3 for r in result["records"] if r["first"] == (scope == "cold")]
            for scope in scopes
        ]
        low, middle, high = (np.array([np.percentile(part, p) for part in times]) for p in (25, 50, 75))
        values[name], errors[name] = list(middle), [middle - low, high - middle]
    _bars(axes, [f"{scope} ({'first' if scope == 'cold' else 'later'} questions)" for scope in scopes], values, errors)
    axes.set(ylabel="median TTFT, ms")


def speedups(axes: Any, result: Result) -> None:
    """Figure 6: ratios of means, with their intervals; diamonds are the paper's."""
    buckets = list(result["buckets"])
    values: dict[str, list[float]] = {}
    errors: dict[str, Any] = {}
    for name, by_scope in result["speedup"].items():
        ratios = np.array([by_scope[bucket]["of_means"] for bucket in buckets])
        low, high = np.array([by_scope[bucket]["of_means_interval"] for bucket in buckets]).T
        values[name] = list(ratios)
        errors[name] = [np.maximum(ratios - low, 0), np.maximum(high - ratios, 0)]
    _bars(axes, buckets, values, errors)
    published = [(buckets.index(bucket), value) for bucket, value in PAPER_SPEEDUPS.items() if bucket in buckets]
    if published:
        axes.plot(*zip(*published, strict=True), "D", color="black", fillstyle="none", label="KVBoost in the paper")
    axes.axhline(1, color="black", linewidth=0.6)
    axes.set(xlabel="tokens of the document", ylabel="times faster than BASELINE (means)")


def reuse_distribution(axes: Any, result: Result) -> None:
    """Figure 7."""
    for name in [name for name in result["reuse"] if name != "BASELINE"]:
        found = result["reuse"][name]
        edges = np.linspace(0, 1, len(found["histogram"]) + 1)
        label = f"{name}: mean {found['by_scope']['all']['mean']:.1%}"
        axes.stairs(found["histogram"], edges, color=COLOURS[name], label=label, linewidth=1.6)
    axes.set(xlabel="reuse ratio of the sample", ylabel="samples", xlim=(0, 1))


Paint = Callable[[Any, Result], None]
FIGURES: dict[str, tuple[str, Paint]] = {
    "figure2_accuracy_by_reuse": ("Answers by reuse ratio (Figure 2)", accuracy_by_reuse),
    "figure3_ttft_by_bucket": ("Mean time to first token by length (Figure 3)", ttft_by_bucket),
    "figure4_ttft_cdf": ("Distribution of the time to first token (Figure 4)", ttft_cdf),
    "figure5_cold_warm": ("First and later questions about a document (Figure 5)", cold_and_warm),
    "figure6_speedup": ("Speed-up over full prefill (Figure 6)", speedups),
    "figure7_reuse": ("Distribution of reuse ratios (Figure 7)", reuse_distribution),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="what bug_localization.py --json wrote, with BASELINE among the rest")
    parser.add_argument("--out", type=Path, help="folder for the figures; none are drawn if left out")
    parser.add_argument("--formats", nargs="+", default=["png", "svg"], help="of the figures (png svg)")
    arguments = parser.parse_args()
    result = json.loads(arguments.result.read_text(encoding="utf-8"))
    if arguments.out:
        draw(result, arguments.out, arguments.formats)
    print(table(result))


if __name__ == "__main__":
    main()
