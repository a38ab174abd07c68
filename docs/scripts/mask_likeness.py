"""The data behind Dis-PFL's Figure 5: do clients with alike labels get alike masks?

    python docs/scripts/mask_likeness.py add runs/figure5/*    # rows of completed runs, each once
    python docs/scripts/mask_likeness.py write                 # the table of docs/systems/dispfl.md, and the figure

A run is a row of docs/data/dispfl_masks.csv: the correlation, over all pairs of clients, of the cosine of their label
counts with the Hamming distance of their masks. A claim holds if Student's t interval of the seeds' correlations lies
below 0.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean

import _evidence_figures as drawn
from _rows import append_rows, read_rows, with_tables
from matplotlib.figure import Figure

from fedprune_app.results.differences import difference
from fedprune_app.results.reader import load_run
from fedprune_app.results.similarity import Comparison, compare

ROOT = Path(__file__).parents[2]
DATA, PAGE = ROOT / "docs" / "data" / "dispfl_masks.csv", ROOT / "docs" / "systems" / "dispfl.md"
FIGURE = ROOT / "docs" / "assets" / "dispfl-masks.svg"
GROWTHS = {"gradient": "by gradient, as in the text", "random": "at random, as in the released scripts"}
SEEDS = 5
"""The seeds of a claim, decided on before the first run."""
SHOWN_SEED = 0
"""The figure has the runs of this seed."""


def add(folders: Iterable[Path]) -> int:
    """Add the rows of completed runs that are not there yet, draw the runs of one seed, and count the rows."""
    known = {(row["growth"], row["seed"]) for row in read_rows(DATA)}
    rows, shown = [], dict[str, Comparison]()
    for folder in folders:
        run = load_run(folder)
        growth, compared = run.config["dispfl.growth"], compare(run)
        if run.flaw or compared is None:
            raise ValueError(f"{folder} is {run.flaw or 'without masks'}, allowed: a completed run of Dis-PFL")
        if run.seed == SHOWN_SEED:
            shown[growth] = compared
        if (growth, str(run.seed)) not in known:
            correlations = {"pearson": f"{compared.pearson:.4f}", "spearman": f"{compared.spearman:.4f}"}
            origin = {"final_sha256": run.info["final_sha256"], "git_hash": run.info["git_hash"] or ""}
            rows.append({"growth": growth, "seed": run.seed, **correlations, **origin})
    if rows:
        append_rows(DATA, rows)
    if len(shown) == len(GROWTHS):
        figure(shown).savefig(FIGURE, metadata={"Date": None})
    return len(rows)


def table() -> str:
    """The correlations by growth, with the seeds' interval and what it says."""
    lines = [
        "| growth | correlation of label cosine and mask distance | 95 % | by seed | alike labels, alike masks? |",
        "| --- | ---: | --- | --- | --- |",
    ]
    for growth, words in GROWTHS.items():
        found = {int(row["seed"]): float(row["pearson"]) for row in read_rows(DATA) if row["growth"] == growth}
        apart = difference(
            {(seed, 0): value for seed, value in found.items()}, {(seed, 0): 0.0 for seed in found}, of_other_seeds=True
        )
        if apart is None or len(found) < SEEDS:
            lines.append(f"| {words} | – | – | – | open: {len(found)} of {SEEDS} seeds |")
            continue
        verdict = "shown" if apart.high < 0 else "does not hold here" if apart.low > 0 else "open"
        seeds = ", ".join(f"{value:+.2f}" for value in apart.by_seed)
        lines.append(
            f"| {words} | {fmean(found.values()):+.2f} | {apart.low:+.2f} to {apart.high:+.2f} | {seeds} | {verdict} |"
        )
    return "\n".join(lines)


def figure(shown: dict[str, Comparison]) -> Figure:
    """One dot for each pair of clients: the cosine of their labels and the distance of their masks."""
    drawing = Figure(figsize=(7.5, 2.8), layout="constrained")
    for axes, (growth, words), colour in zip(
        drawing.subplots(1, 2, sharey=True), GROWTHS.items(), drawn.COLOURS, strict=False
    ):
        found = shown[growth]
        pairs = [(i, j) for i in range(len(found.clients)) for j in range(i)]
        labels, masks = ([matrix[pair] for pair in pairs] for matrix in (found.label_cosine, found.mask_distance))
        axes.plot(labels, masks, color=colour, **drawn.DOT_STYLE, marker="o")
        axes.set(title=words, xlabel="cosine of label counts")
    drawing.axes[0].set(ylabel="distance of masks")
    return drawing


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    adding = commands.add_parser("add", help="add rows of completed runs, then write the page")
    adding.add_argument("folders", type=Path, nargs="+")
    commands.add_parser("write", help="write the table of the page")
    arguments = parser.parse_args()
    if arguments.command == "add":
        print(f"{add(folder for folder in arguments.folders if (folder / 'run.json').exists())} rows added")
    PAGE.write_text(with_tables(PAGE.read_text(), "masks", lambda name: table()))


if __name__ == "__main__":
    main()
