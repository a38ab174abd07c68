"""docs/data/tables/gallery-digits.csv: each method of the gallery beside the baselines, on the digits, three seeds.

    python docs/scripts/gallery_rows.py            # the runs without a row, some seconds each, and the table
    python docs/scripts/gallery_rows.py --seeds 1  # those of one seed
    python docs/scripts/gallery_rows.py --seeds    # the table alone

Nothing is tuned: all methods have the same learning rate, rounds and local epochs, and their own settings are those of
their configurations in gallery/. A run is a row of docs/data/gallery.csv, with its hash and commit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from _rows import append_rows, as_csv, read_rows

import fedprune_app

ROOT = Path(__file__).parents[2]
ROWS, TABLE = (ROOT / "docs" / "data" / name for name in ("gallery.csv", "tables/gallery-digits.csv"))
SEEDS, CLIENTS = (0, 1, 2), 20
SETTING = {
    "num-server-rounds": 20,
    "evaluate-every": 20,
    "local-epochs": 3,
    "learning-rate": 0.05,
    "momentum": 0.0,
    "fraction-train": 1.0,
}
"""The digits in two shards a client, as quickstart deals them: 20 clients of about 65 images to train on."""
NORMED = {"model": "cnn-small-bn"}
BASELINES: dict[str, dict[str, Any]] = {
    "standalone": {"system": "standalone"},
    "fedavg-ft": {"system": "fedavg-ft"},
    "fedavg-ft, cnn-small-bn": {"system": "fedavg-ft", **NORMED},
    "dispfl": {"system": "dispfl", "density": 0.2},
}


def configurations() -> dict[str, dict[str, Any]]:
    """The settings of each row: the baselines, a method for each file, FedRep, and narrow clients without norms."""
    found = dict(BASELINES)
    for file in sorted((ROOT / "gallery").glob("*.toml")):
        settings = tomllib.loads(file.read_text())
        method = "heterofl" if file.stem == "fedrolex" else file.stem  # one file for both
        found[file.stem] = {**settings, "plugins": str(file.with_name(f"{method}.py"))}
        if file.stem == "fedper":
            found["fedrep"] = {**found["fedper"], "fedper": {"personal-layers": 1, "head-epochs": 3}}
        if file.stem in ("heterofl", "fedrolex"):
            found[f"{file.stem}, cnn-small"] = {**found[file.stem], "model": "cnn-small"}
    return found


def measure(seeds: Sequence[int]) -> None:
    """Run what has no row yet, seed after seed."""
    known = {(row["method"], row["seed"]) for row in read_rows(ROWS)}
    commit = ["git", "describe", "--always", "--dirty", "--exclude", "*", "--abbrev=40"]
    hashed = subprocess.run(commit, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    for seed in seeds:
        for method, settings in configurations().items():
            if (method, str(seed)) in known:
                continue
            with tempfile.TemporaryDirectory() as folder:
                values = {**settings, **SETTING, "seed": seed}
                run = Path(folder) / "run"
                fedprune_app.run(values, out=run, clients=CLIENTS, engine="inprocess", progress=False)
                append_rows(ROWS, [{"method": method, "seed": seed, **row_of(run), "commit": hashed}])


def row_of(run: Path) -> dict[str, Any]:
    """What a finished run's row says."""
    rounds = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    info, last = json.loads((run / "run.json").read_text()), rounds[-1]

    def percent(name: str) -> str:
        return "" if last.get(name) is None else f"{100 * last[name]:.2f}"

    megabytes = sum(row["bytes_up"] + row["bytes_down"] for row in rounds) / 1e6
    return {
        "personal": percent("accuracy_personal_mean"),
        "received": percent("accuracy_received_mean"),
        "global": percent("accuracy_global"),
        "density": f"{last['density_mean']:.4f}",
        "megabytes": f"{megabytes:.3f}",
        "teraflops": f"{sum(row['flops'] for row in rounds) / 1e12:.5f}",
        "minutes": f"{info['seconds'] / 60:.2f}",
        "final_sha256": info["final_sha256"],
    }


def table() -> str:
    """The means over seeds, with their standard deviations."""
    lines = ["| method | personal accuracy, % | received, % | density | MB | TFLOP |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: |")
    by_method: dict[str, list[dict[str, str]]] = {}
    for row in read_rows(ROWS):
        by_method.setdefault(row["method"], []).append(row)
    for method in configurations():
        rows = by_method.get(method, [])
        if len(rows) != len(SEEDS):
            continue
        cells = [spread([row[name] for row in rows]) for name in ("personal", "received")]
        numbers = [fmean(float(row[name]) for row in rows) for name in ("density", "megabytes", "teraflops")]
        lines.append(f"| {method} | {' | '.join(cells)} | {numbers[0]:.2f} | {numbers[1]:.1f} | {numbers[2]:.3f} |")
    return "\n".join(lines)


def spread(values: list[str]) -> str:
    """The mean and standard deviation of accuracies; a dash where a method has none."""
    if not all(values):
        return "–"
    numbers = [float(value) for value in values]
    return f"{fmean(numbers):.1f} ± {stdev(numbers):.1f}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="*", type=int, default=SEEDS, help="run these alone")
    measure(parser.parse_args().seeds)
    TABLE.write_text(as_csv(table()), encoding="utf-8")
