"""KL against work: what each strategy gives for the tokens it computes. Draws what ``quality.py`` wrote.

    python benchmarks/quality_plot.py benchmarks/results/quality_musique_smollm2.json --out docs/images/kl_vs_work.png

One panel for each file and kind of prompt, one line for each way documents were read and strategy that repairs them:
it starts at the diamond, where nothing is repaired, and goes on through its budgets. Whiskers are 95 % bootstrap
intervals over questions. The dotted line is the floor: the same text, tokenised as a whole and computed in full. Writes
the PNG and an SVG beside it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from rows import JOINED

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

ENCODINGS = ("not rotated", "alone", "header", "shared primer", "primer")
# Okabe and Ito's colours: they are told apart by the colour-blind too.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F3C8D", "#555555")
DRAWN = {  # by family of repair: marker, line style
    "none": ("D", ""),
    "query": ("o", "-"),
    "deviation": ("s", "--"),
    "boundary, first": ("^", "-."),
    "boundary, last": ("v", ":"),
}
WHISKERED = ("none", "query")  # all of them hide the lines
NOTED = {"query": (-4, -12)}  # budgets that are written beside their points, and where
FLOOR = "tokenised as a whole (floor)"
NAMES = {"bundled": "SmolLM2-135M-Instruct"}
WORK_TICKS = (0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.5)
MAX_WORK = 0.6  # rows that compute nearly everything say little and stretch the axis
INK = "#222222"


@dataclass(frozen=True)
class Point:
    """One row. ``low`` and ``high``: of its KL's interval; ``budget``: what is written beside it."""

    name: str
    encoding: str
    family: str
    budget: str
    work: float
    kl: float
    low: float
    high: float


def family_of(strategy: dict[str, Any]) -> tuple[str, str]:
    """Family and budget of a strategy, by its options: older files do not name it."""
    if "side" in strategy:
        side = "first" if strategy["side"] == "start" else "last"
        return f"boundary, {side}", f"{strategy['num_tokens']}"
    for option, family in (("check_layer", "deviation"), ("num_first_tokens", "query")):
        if option in strategy:
            squared, ratio = "sq " if strategy.get("measure") == "squared" else "", strategy["recompute_ratio"]
            return family, "default" if ratio is None else f"{squared}{ratio * 100:g} %"
    return "none", ""


def points_of(result: dict[str, Any], kind: str) -> list[Point]:
    found = []
    for line in result["rows"]:
        strategy = result["strategies"].get(line["row"])
        if strategy is None or line.get("kind", "questions") != kind or line["row"].endswith(", full"):
            continue
        family, budget = family_of(strategy)
        if not budget.startswith("sq") and line["work"] <= MAX_WORK:
            low, high = line["ratio_interval"]
            place = (line["work"], line["ratio"], low, high)
            found.append(Point(line["row"], strategy["encoding"], family, budget, *place))
    return found


def floor_of(result: dict[str, Any], kind: str) -> float | None:
    lines = (x for x in result["rows"] if x["row"] == JOINED and x.get("kind", "questions") == kind)
    return next((line["ratio"] for line in lines), None)


def strategies(points: Sequence[Point]) -> dict[tuple[str, str], list[Point]]:
    """The points of each line, from nothing repaired to the largest budget."""
    starts = {p.encoding: p for p in points if p.family == "none"}
    lines: dict[tuple[str, str], list[Point]] = {}
    for point in sorted(points, key=lambda p: p.work):
        if point.family != "none":
            lines.setdefault((point.encoding, point.family), []).append(point)
    for (encoding, _), members in lines.items():
        if encoding in starts:
            members.insert(0, starts[encoding])
    for encoding, start in starts.items():
        if not any(encoding == each for each, _ in lines):
            lines[encoding, "none"] = [start]
    return lines


def draw(axes: Axes, points: Sequence[Point], floor: float | None, colours: dict[str, str]) -> None:
    lines = strategies(points)
    for (encoding, family), members in sorted(lines.items(), key=lambda line: list(colours).index(line[0][0])):
        marker, style = DRAWN[family]
        colour = colours[encoding]
        label = encoding if family == "none" else f"{encoding}, {family}"
        work, kl = [p.work for p in members], [p.kl for p in members]
        own = [at for at, p in enumerate(members) if p.family == family]
        look = {"marker": marker, "markevery": own, "markersize": 5, "linewidth": 1.5}
        axes.plot(work, kl, style or "none", color=colour, label=label, **look)
        for point in members:
            if point.family in WHISKERED:
                reach = [[point.kl - point.low], [point.high - point.kl]]
                axes.errorbar([point.work], [point.kl], yerr=reach, fmt="none", ecolor=colour, alpha=0.4, elinewidth=1)
            if point.family in NOTED:
                place = {"xytext": NOTED[point.family], "textcoords": "offset points", "fontsize": 7}
                axes.annotate(point.budget, (point.work, point.kl), color=colour, **place)
    for point in points:  # where nothing is repaired
        if point.family == "none" and point.encoding in colours:
            axes.plot([point.work], [point.kl], "D", color=colours[point.encoding], markersize=6, markeredgecolor="w")
    if floor is not None:
        axes.axhline(floor, color=INK, linestyle=":", linewidth=1, label=FLOOR)


def dress(axes: Axes, title: str, points: Sequence[Point]) -> None:
    axes.set_xscale("log")
    low = min(p.work for p in points)
    axes.set_xlim(low * 0.85, max(p.work for p in points) * 1.25)
    axes.set_xticks([tick for tick in WORK_TICKS if low * 0.85 <= tick <= axes.get_xlim()[1]])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * 100:g} %"))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("share of the prompt's tokens computed at question time")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def panels_of(
    results: Sequence[dict[str, Any]], encodings: Sequence[str]
) -> list[tuple[str, list[Point], float | None]]:
    panels = []
    for result in results:
        for kind in dict.fromkeys(line.get("kind", "questions") for line in result["rows"]):
            points = [p for p in points_of(result, kind) if p.encoding in encodings]
            if points:
                num = next(line.get("num_questions", result["num_questions"]) for line in result["rows"])
                model = NAMES.get(result["model"], result["model"])
                title = f"{model}: {kind}, {result['data'].removesuffix('.json')}, {num} prompts"
                panels.append((title, points, floor_of(result, kind)))
    return panels


def plot(results: Sequence[dict[str, Any]], out: Path, encodings: Sequence[str] = ENCODINGS) -> None:
    """Write ``out`` (.png) and the same as .svg. Raises SystemExit if there is nothing to draw."""
    panels = panels_of(results, encodings)
    if not panels:
        raise SystemExit(f"no row of these files is of {', '.join(encodings)}")
    drawn = [each for each in encodings if any(p.encoding == each for _, points, _ in panels for p in points)]
    colours = {encoding: COLOURS[at % len(COLOURS)] for at, encoding in enumerate(drawn)}
    plt.rcParams.update({"svg.hashsalt": "kvboost", "text.color": INK, "axes.labelcolor": INK, "font.size": 9})
    size = (5.6 * len(panels) + 2.4, 4.8)
    figure, grid = plt.subplots(1, len(panels), figsize=size, sharey=True, squeeze=False, layout="constrained")
    figure.patch.set_facecolor("white")
    labels: dict[str, Any] = {}
    for axes, (title, points, floor) in zip(grid[0], panels, strict=True):
        axes.set_facecolor("white")
        draw(axes, points, floor, colours)
        dress(axes, title, points)
        handles, names = axes.get_legend_handles_labels()
        labels |= dict(zip(names, handles, strict=True))
    grid[0][0].set_ylabel("KL from full prefill,\nrelative to documents encoded alone and moved")
    names = sorted(labels, key=lambda name: (name == FLOOR, [*drawn, FLOOR].index(name.split(", ")[0]), name))
    place = {"loc": "outside right upper", "frameon": False, "fontsize": 8}
    figure.legend([labels[name] for name in names], names, **place)
    save(figure, out)


def save(figure: Any, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    for path, facts in ((out.with_suffix(".png"), {"Software": None}), (out.with_suffix(".svg"), {"Date": None})):
        figure.savefig(path, dpi=160, metadata=facts, facecolor="white", bbox_inches="tight")
    plt.close(figure)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, help="files that quality.py wrote")
    parser.add_argument("--out", type=Path, default=Path("docs/images/kl_vs_work.png"))
    parser.add_argument("--encodings", nargs="+", default=ENCODINGS, help=f"ways of reading ({', '.join(ENCODINGS)})")
    arguments = parser.parse_args(words)
    plot([json.loads(p.read_text(encoding="utf-8")) for p in arguments.results], arguments.out, arguments.encodings)


if __name__ == "__main__":
    main()
