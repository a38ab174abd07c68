"""What a run costs over the number of its clients: the start, a round of 100 of them, an evaluation, memory and disk.

LeNet-5, 50 images each, of noise that is written to a temporary folder in MNIST's format; Sub-FedAvg in one process,
one thread, one epoch of batch 10. Each number of clients is a process of its own (Linux only). "Memory" is what the
process holds of its own after each round, data files that are mapped not counted. A client's part is what one more
client adds.

Example: ``python benchmarks/many_clients.py --clients 1000 10000``. It takes 1.6 GB of disk for 10,000 clients.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from fedprune_app import client_app, server_app
from fedprune_app.config import parse_config
from fedprune_app.engine.simulated_grid import run_in_process
from fedprune_app.federation import registration
from fedprune_app.results.recorder import Recorder

_IMAGES_EACH = 50
_AT_ONCE = 10_000


def write_noise(folder: Path, num_images: int) -> None:
    """Images and labels as MNIST's files are: the training set, and a test set of 1,000."""
    folder = folder / "MNIST" / "raw"
    folder.mkdir(parents=True)
    draw = np.random.default_rng(0)
    for prefix, count in (("train", num_images), ("t10k", 1000)):
        with (folder / f"{prefix}-labels-idx1-ubyte").open("wb") as file:
            file.write(struct.pack(">II", 2049, count) + draw.integers(0, 10, count, dtype=np.uint8).tobytes())
        with (folder / f"{prefix}-images-idx3-ubyte").open("wb") as file:
            file.write(struct.pack(">IIII", 2051, count, 28, 28))
            for start in range(0, count, _AT_ONCE):
                file.write(draw.integers(0, 256, (min(_AT_ONCE, count - start), 784), dtype=np.uint8).tobytes())


def own_bytes() -> int:
    """The memory of this process that is no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def measure(num_clients: int, num_rounds: int, at_a_time: int) -> dict[str, Any]:
    """A run in this process: seconds of its start, its rounds and its evaluations; bytes of memory and disk."""
    torch.set_num_threads(1)
    memory: list[int] = []
    recorded, registered = Recorder.round, registration.register_clients
    started = 0.0

    def round(self: Recorder, row: dict[str, Any]) -> None:
        recorded(self, row)
        memory.append(own_bytes())

    def register(*arguments: Any, **more: Any) -> Any:
        nonlocal started
        began = time.perf_counter()
        found = registered(*arguments, **more)
        started = time.perf_counter() - began
        return found

    Recorder.round = round  # type: ignore[method-assign]
    server_app.register_clients = register  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_noise(folder / "data", num_clients * _IMAGES_EACH)
        settings = {
            "dataset": "mnist",
            "data-dir": str(folder / "data"),
            "model": "lenet5",
            "system": "subfedavg",
            "partition": "iid",
            "samples-per-client": _IMAGES_EACH,
            "test-split": "holdout",
            "num-server-rounds": num_rounds,
            "fraction-train": at_a_time / num_clients,
            "local-epochs": 1,
            "evaluate-every": 1,
            "evaluate-clients": at_a_time,
            "out-dir": str(folder / "run"),
        }
        run_in_process(server_app.app, client_app.app, num_clients, parse_config(settings).to_dict())
        rows = [json.loads(line) for line in (folder / "run" / "rounds.jsonl").read_text().splitlines()]
        files = [path.stat().st_blocks * 512 for path in (folder / "run").rglob("*")]
        trained = len({path.parent for path in (folder / "run" / "clients").rglob("*.safetensors")})
    return {
        "start": started,
        "rounds": [row["seconds"] for row in rows],
        "evaluations": [row["evaluation_seconds"] for row in rows],
        "memory": memory,
        "disk": sum(files),
        "trained": trained,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--at-a-time", type=int, default=100, help="clients that train, and are evaluated, in a round")
    parser.add_argument("--in-process", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.in_process:
        print(json.dumps(measure(arguments.in_process, arguments.rounds, arguments.at_a_time)))
        return
    table = Table(
        *("clients", "start: ms a client", "round: ms a client", "evaluation: ms a client", "the last, of all: s"),
        *("memory MB, by round", "disk KB a trained client"),
        title=f"{arguments.at_a_time} clients a round, LeNet-5, {_IMAGES_EACH} images each",
        box=box.SIMPLE,
    )
    for num_clients in arguments.clients:
        options = ["--rounds", str(arguments.rounds), "--at-a-time", str(arguments.at_a_time)]
        command = [sys.executable, __file__, "--in-process", str(num_clients), *options]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "FEDPRUNE_LOG": "ERROR"})
        if done.returncode:
            raise SystemExit(f"{num_clients} clients: {done.stderr}")
        found = json.loads(done.stdout.splitlines()[-1])
        each, (*evaluations, last) = arguments.at_a_time, found["evaluations"]
        table.add_row(
            f"{num_clients:,}",
            f"{1e3 * found['start'] / num_clients:.1f}",
            f"{1e3 * sorted(found['rounds'])[len(found['rounds']) // 2] / each:.1f}",
            f"{1e3 * sorted(evaluations)[len(evaluations) // 2] / each:.1f}",
            f"{last:.1f}",
            ", ".join(f"{size / 1e6:.0f}" for size in found["memory"]),
            f"{found['disk'] / 1e3 / found['trained']:.0f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
