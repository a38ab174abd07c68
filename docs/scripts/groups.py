"""What it costs to protect a school in place of a pupil: the table of docs/privacy.md.

    python docs/scripts/groups.py run DIR      # the runs that are missing; DIR has Chem97 as train.csv, see below
    python docs/scripts/groups.py write        # the table of docs/privacy.md

The data are the grades of 31,022 pupils of 2,280 schools and 131 authorities in A-level chemistry, England 1997
(``Chem97`` of the R package mlmRev, Debian's r-cran-mlmrev). The columns of DIR/train.csv are ``gender`` (1 for F),
``age`` (divided by 10), ``gcse`` (gcsescore - 6.3, divided by 0.8), ``label`` ("upper" for a score of 6 and more, else
"lower"), ``school``, and ``part``, "part" with the remainder of ``lea`` divided by 4. A part is a client.

Settings were chosen by seed 100 at an epsilon of 2, and these claims were written before the runs of the table:

* At an epsilon of 1, protecting pupils costs less than a point of accuracy.
* At an epsilon of 1, protecting schools costs less than two points more.
* At an epsilon of 0.2, protecting schools costs more than protecting pupils.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import fmean

from _rows import append_rows, read_rows, with_tables
from safetensors.torch import load_file

from fedprune_app import cli
from fedprune_app.config import parse_config
from fedprune_app.data.splits import client_data, data_config
from fedprune_app.learning.evaluate import evaluate
from fedprune_app.models import vision
from fedprune_app.models.initial import initial_model
from fedprune_app.results.differences import difference
from fedprune_app.results.reader import load_run

ROOT = Path(__file__).parents[2]
DATA, PAGE = ROOT / "docs" / "data" / "groups.csv", ROOT / "docs" / "privacy.md"
SEEDS, CLIENTS = range(5), 4
SHARED = (
    *("system=fedavg", "dataset=table", "owner-column=part", "group-column=school", "partition=owners"),
    *("test-split=holdout", "num-server-rounds=10", "fraction-train=1", "local-epochs=1", "learning-rate=0.1"),
    *("evaluate-every=0", "--clients", str(CLIENTS), "--engine", "inprocess"),
)
PRIVATE = ("dp.enabled=true", "dp.delta=1e-4", "dp.accuracies=none")
UNITS = {"pupil": ("batch-size=100",), "school": ("batch-size=40", "dp.unit=group")}
SETTINGS = {("nobody", ""): ("batch-size=50",)} | {
    (unit, epsilon): (*PRIVATE, f"dp.target-epsilon={epsilon}", *more)
    for epsilon in ("1", "0.2")
    for unit, more in UNITS.items()
}


def accuracy(folder: Path) -> float:
    """The share of all clients' test pupils whose grade the global model of a run predicts."""
    config = parse_config(load_run(folder).info["config"])
    parts = [client_data(data_config(config), number, CLIENTS) for number in range(CLIENTS)]
    shape = tuple(parts[0].test_images.shape[1:])
    model = initial_model(config.model, config.dataset, shape, 2, init=config.init, seed=config.seed)
    vision.load_state_tensors(model, load_file(folder / "models" / "global.safetensors"))
    tests = [evaluate(model, part.test_images, part.test_labels) for part in parts]
    return sum(test.correct for test in tests) / sum(test.total for test in tests)


def run_missing(data_dir: Path) -> None:
    """Make the runs that have no row yet, each in a folder of its own that is then gone."""
    known = {(row["unit"], row["epsilon"], row["seed"]) for row in read_rows(DATA)}
    for seed in SEEDS:
        for (unit, epsilon), settings in SETTINGS.items():
            if (unit, epsilon, str(seed)) in known:
                continue
            with tempfile.TemporaryDirectory() as folder:
                run = Path(folder) / "run"
                given = ["run", *SHARED, *settings, f"data-dir={data_dir}", f"seed={seed}", "--out", str(run)]
                cli.app(given, standalone_mode=False)
                found = {"accuracy": f"{accuracy(run):.4f}", "final_sha256": load_run(run).info["final_sha256"]}
            append_rows(DATA, [{"unit": unit, "epsilon": epsilon, "seed": seed, **found}])


def table() -> str:
    """The accuracies, and what each protection costs against none, with Student's t interval over the seeds."""
    lines = ["| protected | ε | test accuracy (%) | cost (points, 95 %) |", "| --- | ---: | ---: | ---: |"]
    found = {
        setting: {(int(row["seed"]), 0): float(row["accuracy"]) for row in read_rows(DATA) if _setting(row) == setting}
        for setting in SETTINGS
    }
    for (unit, epsilon), accuracies in found.items():
        cost = difference(found["nobody", ""], accuracies, of_other_seeds=True)
        told = "–"
        if epsilon and cost is not None:
            told = f"{100 * cost.mean:.2f} ({100 * cost.low:.2f} to {100 * cost.high:.2f})"
        lines.append(f"| {unit} | {epsilon or '–'} | {100 * fmean(accuracies.values()):.2f} | {told} |")
    return "\n".join(lines)


def _setting(row: dict[str, str]) -> tuple[str, str]:
    return row["unit"], row["epsilon"]


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="make the runs that are missing")
    running.add_argument("data_dir", type=Path)
    commands.add_parser("write", help="write the table of the page")
    arguments = parser.parse_args()
    if arguments.command == "run":
        run_missing(arguments.data_dir.absolute())
    PAGE.write_text(with_tables(PAGE.read_text(), "groups", lambda name: table()))


if __name__ == "__main__":
    main()
