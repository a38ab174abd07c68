"""The bytes that a run says it exchanged, against what the kernel counted on the connections of its nodes.

A deployment on this machine (SuperLink with TLS, three SuperNodes). Counted: ``bytes_down`` and ``bytes_up`` of
rounds.jsonl, the serialised contents of the messages. On the wire: what TCP carried between the SuperLink's port for
nodes and the SuperNodes, both directions, from ``ss -ti`` (tcp_info's bytes_acked and bytes_received), so with TLS,
HTTP/2, gRPC and Flower's own messages, without TCP/IP headers. What the nodes exchange while nothing runs (they ask for
work every few seconds) is measured first and shown apart. A round ends when its record is on disk.

Example: ``python benchmarks/wire_bytes.py --models mlp3 --rounds 4``.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from fedprune_app.config import Scalar, parse_config
from fedprune_app.launching import processes, simulation
from fedprune_app.launching.local import Deployment, local_deployment

_SAMPLE_SECONDS = 0.2
_MARK_SECONDS = 0.02


@dataclass(frozen=True)
class Bytes:
    """As the nodes see it."""

    down: float
    up: float

    def __sub__(self, other: Bytes) -> Bytes:
        return Bytes(self.down - other.down, self.up - other.up)

    def __mul__(self, factor: float) -> Bytes:
        return Bytes(self.down * factor, self.up * factor)


class Meter:
    """Adds up what the connections of one listening port have carried, those that have closed too."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._seen: dict[str, Bytes] = {}  # by the peer's address
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Meter:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def read(self) -> Bytes:
        with self._lock:
            for peer, carried in self._connections():
                self._seen[peer] = carried
            return Bytes(sum(c.down for c in self._seen.values()), sum(c.up for c in self._seen.values()))

    @property
    def num_connections(self) -> int:
        return len(self._seen)

    def _connections(self) -> Iterator[tuple[str, Bytes]]:
        command = ["ss", "-tinOH", "state", "established", "sport", "=", f":{self._port}"]
        for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
            found = {key: int(value) for key, value in re.findall(r"(bytes_acked|bytes_received):(\d+)", line)}
            yield line.split()[3], Bytes(found.get("bytes_acked", 0), found.get("bytes_received", 0))

    def _watch(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            self.read()


def rows_of(folder: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    except (FileNotFoundError, ValueError):
        return []


def measure(
    deployment: Deployment, app: Path, folder: Path, meter: Meter, settings: dict[str, Scalar]
) -> list[tuple[dict[str, Any], Bytes, float]]:
    """(record, wire, seconds) of each round that follows another."""
    config = parse_config({**settings, "out-dir": str(folder)})
    run_id = processes.submit(deployment.link, app, config.to_dict())
    marks: list[tuple[float, Bytes]] = []
    stop = threading.Event()

    def mark() -> None:  # at once: nodes fetch the next round's messages within seconds
        while not stop.wait(_MARK_SECONDS):
            if len(rows_of(folder)) > len(marks):
                marks.append((time.monotonic(), meter.read()))

    marker = threading.Thread(target=mark, daemon=True)
    marker.start()
    outcome = processes.follow(deployment.link, run_id, folder, lambda: None)
    stop.set()
    marker.join()
    if outcome != "finished:completed":
        raise SystemExit(f"{settings}: {outcome}: {processes.failure(deployment.link, run_id)}")
    rows = rows_of(folder)
    return [
        (rows[i], marks[i][1] - marks[i - 1][1], marks[i][0] - marks[i - 1][0])
        for i in range(1, len(marks))
        if not rows[i].get("evaluation_bytes_down")  # the last round evaluates: other messages
    ]


def main(num_nodes: int, num_rounds: int, systems: list[str], models: list[str], idle_seconds: float) -> None:
    table = Table(box=box.MARKDOWN)
    for column in (
        "system, model", "round", "counted down", "wire down", "more", "counted up", "wire up", "more", "idle, in both",
    ):  # fmt: skip
        table.add_column(column, justify="left" if column.startswith("system") else "right")
    with tempfile.TemporaryDirectory(prefix="fedprune-wire-") as name:
        folder = Path(name)
        app = simulation.stage_app(folder / "app")
        nodes = [{"partition-id": k, "num-partitions": num_nodes} for k in range(num_nodes)]
        with (
            local_deployment(folder / "deployment", nodes) as deployment,
            Meter(int(deployment.node_address.split(":")[1])) as meter,
        ):
            before = meter.read()
            time.sleep(idle_seconds)
            idle = (meter.read() - before) * (1 / idle_seconds)
            for system in systems:
                for model in models:
                    settings: dict[str, Scalar] = {"system": system, "model": model, "num-server-rounds": num_rounds}
                    settings |= {"fraction-train": 1.0, "local-epochs": 1, "evaluate-every": 0}
                    for row, wire, seconds in measure(deployment, app, folder / f"{system}-{model}", meter, settings):
                        quiet = idle * seconds
                        down, up = row["bytes_down"], row["bytes_up"]
                        table.add_row(
                            f"{system}, {model}",
                            str(row["round"]),
                            f"{down:,}",
                            f"{wire.down:,.0f}",
                            f"{100 * ((wire.down - quiet.down) / down - 1):.2f} %",
                            f"{up:,}",
                            f"{wire.up:,.0f}",
                            f"{100 * ((wire.up - quiet.up) / up - 1):.2f} %",
                            f"{quiet.down:,.0f} + {quiet.up:,.0f}",
                        )
            connections = meter.num_connections
    console = Console(width=150)
    console.print(table)
    console.print(
        f"{num_nodes} nodes, {connections} connections; idle: {idle.down:,.0f} bytes/s down and {idle.up:,.0f} up, "
        "which 'more' leaves out"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=3, help="SuperNodes")
    parser.add_argument("--rounds", type=int, default=4, help="rounds of a run; the first and the last are left out")
    parser.add_argument("--systems", nargs="+", default=["fedavg", "dispfl"])
    parser.add_argument("--models", nargs="+", default=["cnn-small", "mlp3"])
    parser.add_argument("--idle", type=float, default=30, help="seconds of measuring idle nodes")
    options = parser.parse_args()
    main(options.nodes, options.rounds, options.systems, options.models, options.idle)
