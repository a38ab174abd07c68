"""Runs on one engine, in the Python of another Flower release: ``python -m tests.e2e.release_runs FILE``.

FILE is JSON. It names the ``engine`` (``inprocess``, ``ray``, ``flower`` or ``nodes``), the number of ``clients``, the
folder of a ``deployment`` or nothing, and by name the settings of ``runs``, each with its ``out-dir``. When a run is
over, a line of JSON is printed: its name and its ``final_sha256``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console

from fedprune_app.preflight.inputs import Placement, RunInputs
from fedprune_app.preflight.prepare import prepare
from fedprune_app.running import Session


def placement(engine: str, clients: int, deployment: str, data: str) -> Placement:
    if engine != "nodes":
        return Placement(engine, clients, num_workers=2)
    # a node's own random numbers would be other ones in every run of a private system
    shared = {"num-partitions": clients, "secure-rng": False, **({"data-dir": data} if data else {})}
    nodes = tuple({"partition-id": k, **shared} for k in range(clients))
    return Placement(num_clients=clients, nodes=nodes, deployment=Path(deployment) if deployment else None)


def main(task: dict) -> None:
    data = next((settings["data-dir"] for settings in task["runs"].values() if "data-dir" in settings), "")
    place = placement(task["engine"], task["clients"], task["deployment"], data)
    with Session(Console(stderr=True, quiet=True)) as session:
        for name, settings in task["runs"].items():
            info = session.run(prepare(RunInputs(settings), place), Path(settings["out-dir"]))
            print(json.dumps({"run": name, "sha256": info["final_sha256"]}), flush=True)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
