"""The figures of docs/evidence.md and the systems' pages: claims with their intervals, and the course of the runs."""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

mpl.rcParams.update(
    {
        "svg.hashsalt": "fedprune",  # the same data make the same file
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#dddddd",
        "axes.axisbelow": True,
        "figure.facecolor": "white",
        "legend.frameon": False,
    }
)
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999933", "#882255", "#6699cc")
"""Colours that readers with any colour vision can tell apart (Okabe and Ito, then Tol)."""
OF_VERDICT = {"shown": "#009e73", "does not hold here": "#d55e00", "open": "#777777"}
PRUNES = {True: "#0072b2", False: "#555555"}
DOT_STYLE = {"linestyle": "none", "markersize": 4, "alpha": 0.6}


@dataclass(frozen=True)
class Bar:
    """A claim's line: the mean difference in points, the seeds' interval, the mean of each seed, and the verdict."""

    name: str
    text: str
    mean: float
    low: float
    high: float
    by_seed: Sequence[float]
    floor: float  # the difference above which the claim holds
    verdict: str


@dataclass
class Series:
    """The runs of one setting: accuracy in per cent by seed and round, and by seed the last one with its megabytes."""

    label: str
    course: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    last: dict[str, tuple[float, float]] = field(default_factory=dict)


@dataclass
class Cost:
    """What the runs of one setting cost and reached: megabytes, 10¹² operations, and accuracy in per cent, by seed."""

    label: str
    spent: dict[str, list[float]]
    reached: list[float]
    prunes: bool = False


def costs(found: Sequence[Cost]) -> Figure:
    """Accuracy of the clients' own models against each cost: a diamond is the mean of the seeds, a dot a seed."""
    axes = list(found[0].spent)
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, len(axes), sharey=True)
    for panel, axis in zip(panels, axes, strict=True):
        for number, cost in enumerate(found):
            colour, spent = COLOURS[number % len(COLOURS)], cost.spent[axis]
            means = [sum(values) / len(values) for values in (spent, cost.reached)]
            panel.plot(spent, cost.reached, marker="o", color=colour, **DOT_STYLE)
            panel.plot(*([mean] for mean in means), marker="D", color=colour, linestyle="none", label=cost.label)
        panel.set_xlabel(axis)
        panel.set_xlim(left=-0.03 * max(max(cost.spent[axis]) for cost in found))
    panels[0].set_ylabel("clients' own models, accuracy, %")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    return figure


def ranks(found: Sequence[Cost]) -> Figure:
    """The means of many systems, each with its name: accuracy against each cost, and the seeds' standard deviation."""
    axes = list(found[0].spent)
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    panels = figure.subplots(1, len(axes), sharey=True)
    for panel, axis in zip(panels, axes, strict=True):
        panel.set_xlabel(axis)
        least = min(value for cost in found if (value := fmean(cost.spent[axis])))
        panel.set_xscale("symlog", linthresh=least)  # training alone sends nothing
        panel.xaxis.set_major_formatter("{x:g}")
        for cost in found:
            place, spread = (fmean(cost.spent[axis]), fmean(cost.reached)), stdev(cost.reached)
            panel.errorbar(*place, spread, color=PRUNES[cost.prunes], fmt="D", markersize=5, elinewidth=0.8)
        panel.margins(x=0.14)
    panels[0].set_ylabel("clients' own models, accuracy, %")
    marks = [
        mpl.lines.Line2D([], [], color=colour, marker="D", linestyle="none", label="pruned" if prunes else "dense")
        for prunes, colour in PRUNES.items()
    ]
    figure.legend(handles=marks, loc="outside upper center", ncols=2, fontsize=8)
    figure.draw_without_rendering()  # the panels have their places
    for panel, axis in zip(panels, axes, strict=True):
        _name_marks(panel, [(fmean(cost.spent[axis]), fmean(cost.reached), cost) for cost in found])
    return figure


def _name_marks(panel: Axes, marks: Sequence[tuple[float, float, Cost]]) -> None:
    """Write each mark's name where it covers no mark and no other name: beside it, or else above or below."""
    taken = [Bbox.from_bounds(*(panel.transData.transform(mark[:2]) - 5), 10, 10) for mark in marks]
    for *place, cost in sorted(marks, key=lambda mark: -mark[1]):
        for up, (across, side) in product((0, 8, -8, 16, -16, 24, -24, 32, -32), ((7, "left"), (-7, "right"))):
            name = panel.annotate(
                cost.label, place, (across, up), textcoords="offset points", ha=side, va="center", fontsize=7.5,
                color=PRUNES[cost.prunes],
            )  # fmt: skip
            covered = name.get_window_extent()
            inside = panel.bbox.x0 <= covered.x0 and covered.x1 <= panel.bbox.x1
            if inside and not any(covered.overlaps(other) for other in taken):
                break
            name.remove()
        else:
            raise ValueError(f"no place for the name {cost.label!r}")
        taken.append(covered)
        if abs(up) > 8:
            line = {"arrowstyle": "-", "linewidth": 0.4, "shrinkA": 0, "shrinkB": 3}
            panel.annotate("", place, (across, up), textcoords="offset points", arrowprops=line)


def claims(sections: Mapping[str, Sequence[Bar]]) -> Figure:
    """One panel for each section, with one line for each claim that has runs."""
    heights = [len(bars) + 0.8 for bars in sections.values()]
    figure = Figure(figsize=(10, 0.42 * sum(heights) + 1), layout="constrained")
    panels = figure.subplots(len(sections), 1, gridspec_kw={"height_ratios": heights}, squeeze=False)[:, 0]
    for panel, (title, bars) in zip(panels, sections.items(), strict=True):
        for row, bar in enumerate(bars):
            colour = OF_VERDICT[bar.verdict.partition(":")[0]]
            panel.plot([bar.low, bar.high], [row, row], color=colour, linewidth=2.5, solid_capstyle="butt")
            panel.plot(bar.by_seed, [row] * len(bar.by_seed), marker="o", color=colour, **DOT_STYLE)
            panel.plot([bar.mean], [row], marker="D", color=colour, markersize=6)
            panel.plot([bar.floor, bar.floor], [row - 0.4, row + 0.4], color="black", linewidth=1.2)
        panel.set_yticks(
            range(len(bars)),
            [textwrap.fill(f"{bar.name}  {bar.text}", 62, break_on_hyphens=False) for bar in bars],
            fontsize=8,
        )
        panel.set_ylim(len(bars) - 0.4, -0.6)
        panel.set_title(title, loc="left", fontsize=9, fontweight="bold")
    panels[-1].set_xlabel("difference in points; a claim holds to the right of its black line")
    marks = [mpl.lines.Line2D([], [], color=colour, linewidth=2.5, label=said) for said, colour in OF_VERDICT.items()]
    marks.append(mpl.lines.Line2D([], [], color="black", marker="D", linestyle="none", label="mean of the seeds"))
    marks.append(mpl.lines.Line2D([], [], color="black", marker="o", **DOT_STYLE, label="mean of a seed"))
    figure.legend(handles=marks, loc="outside upper center", ncols=len(marks), fontsize=8)
    return figure


def papers(found: Sequence[tuple[Bar, float]]) -> Figure:
    """One line for each claim of which a paper gives a difference: the paper's, and ours with its interval."""
    figure = Figure(figsize=(10, 0.3 * len(found) + 1.2), layout="constrained")
    panel = figure.subplots()
    for row, (bar, paper) in enumerate(found):
        colour = OF_VERDICT[bar.verdict.partition(":")[0]]
        panel.plot([bar.low, bar.high], [row, row], color=colour, linewidth=2.5, solid_capstyle="butt")
        panel.plot([bar.mean], [row], marker="D", color=colour, markersize=5)
        panel.plot([paper], [row], marker="x", color="black", markersize=6)
        panel.plot([bar.floor, bar.floor], [row - 0.4, row + 0.4], color="black", linewidth=1.2)
    labels = [textwrap.fill(f"{bar.name}  {bar.text}", 78, break_on_hyphens=False) for bar, _ in found]
    panel.set_yticks(range(len(found)), labels, fontsize=7)
    panel.set_ylim(len(found) - 0.4, -0.6)
    panel.set_xlabel("difference in points; a claim holds to the right of its black line")
    marks = [mpl.lines.Line2D([], [], color=colour, linewidth=2.5, label=said) for said, colour in OF_VERDICT.items()]
    marks.append(mpl.lines.Line2D([], [], color="black", marker="D", linestyle="none", label="ours"))
    marks.append(mpl.lines.Line2D([], [], color="black", marker="x", linestyle="none", label="the paper's"))
    figure.legend(handles=marks, loc="outside upper center", ncols=len(marks), fontsize=8)
    return figure


def course(found: Sequence[Series]) -> Figure:
    """Left: mean accuracy of the personal models by round. Right: the last one, by megabytes of the busiest node."""
    figure = Figure(figsize=(10, 3.6 + 0.17 * -(-len(found) // 3)), layout="constrained")
    by_round, by_bytes = figure.subplots(1, 2)
    for number, series in enumerate(found):
        colour, again = COLOURS[number % len(COLOURS)], number // len(COLOURS)
        dash, marker = ("-", "--", ":")[again], ("o", "s", "^")[again]
        points: dict[int, list[float]] = {}
        for seed in series.course.values():
            by_round.plot(*zip(*seed, strict=True), color=colour, linewidth=0.8, alpha=0.4, linestyle=dash)
            for when, value in seed:
                points.setdefault(when, []).append(value)
        means = sorted((when, sum(values) / len(values)) for when, values in points.items())
        by_round.plot(*zip(*means, strict=True), color=colour, linewidth=2, linestyle=dash, label=series.label)
        by_bytes.plot(
            *zip(*series.last.values(), strict=True), marker=marker, color=colour, **DOT_STYLE | {"alpha": 0.9}
        )
    by_round.set_xlabel("round")
    by_round.set_ylabel("personal accuracy, %, mean of clients")
    by_bytes.set_xlabel("busiest node, MB a round")
    megabytes = [point[0] for series in found for point in series.last.values()]
    if min(megabytes) > 0 and max(megabytes) > 30 * min(megabytes):  # else one system pushes all others together
        by_bytes.set_xscale("log")
        by_bytes.xaxis.set_major_formatter("{x:g}")
    by_bytes.set_ylabel("last personal accuracy, %, mean of clients")
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    return figure


def spent(found: Mapping[str, Mapping[int, Sequence[tuple[float, float, float]]]]) -> Figure:
    """Accuracy of the received model by ε and by megabytes: a dot is a round, the mean of its seeds."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for number, (label, rounds) in enumerate(found.items()):
        means = [[sum(values) / len(values) for values in zip(*seeds, strict=True)] for seeds in rounds.values()]
        epsilon, megabytes, received = zip(*means, strict=True)
        for panel, planned_releases in zip(panels, (epsilon, megabytes), strict=True):
            panel.plot(
                planned_releases, received, marker="o", markersize=4, color=COLOURS[number % len(COLOURS)], label=label
            )
    panels[0].set_xlabel("largest ε of a client")
    panels[1].set_xlabel("MB of training, both ways")
    panels[0].set_ylabel("received model, accuracy, %")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
    return figure


def drawn_from(figure: Figure) -> str:
    """A digest of all that is drawn, by which a file tells whether it is up to date."""
    said: list[Any] = []
    for panel in figure.axes:
        ticks = [label.get_text() for label in panel.get_yticklabels()] if panel.get_title(loc="left") else []
        said.append([panel.get_title(loc="left"), panel.get_xlabel(), panel.get_ylabel(), panel.get_xscale(), ticks])
        for line in panel.lines:
            points = [[round(float(value), 6) for value in axis] for axis in (line.get_xdata(), line.get_ydata())]
            said.append([points, line.get_color(), line.get_linestyle(), line.get_marker(), line.get_label()])
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def save(figure: Figure, path: Path) -> None:
    """Write a figure, with the digest of what is drawn in its description."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None, "Creator": None, "Description": drawn_from(figure)})
