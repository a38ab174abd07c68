"""Whole runs are killed at random moments, resumed and killed again, until they complete: are the models the same?

Each run is a program of its own, ``fedprune run``, with Ray's or Flower's processes where the engine has them, or a
deployment of three nodes with gRPC and TLS. SIGKILL ends the program and its process group; the others see that and
end. The moment is up to a round's time after one of the rounds that are left, each of which is as likely. A line of the
table is one system on one engine, and is added as soon as it is known. Ten systems train six clients of digits, or
three nodes, for eight rounds or ``--rounds``. Times are not measured, so the machine may be busy.

Example: ``python benchmarks/kills.py --table kills.csv --kills 10``, kills for each of 30 pairs of system and engine.
``--engines nodes`` adds deployments. There a round takes a quarter of a minute, so ``--rounds 3`` is enough.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedprune_app import __version__

_ENGINES = ("inprocess", "ray", "flower", "nodes")
_PRIVATE = ("dp.enabled=true", "dp.noise-multiplier=1.0", "dp.delta=1e-3")
_SYSTEMS: dict[str, tuple[str, ...]] = {
    "subfedavg": (),
    "dispfl": ("dispfl.neighbours=2",),
    "fedp3": (),
    "ldp-fedp3": _PRIVATE,
    "fedltp": (*_PRIVATE, "fedltp.tickets=1", "fedltp.ticket-iterations=10", "dp.count-scale=20.0"),
    "fedavg": (),
    "ditto": ("ditto.global-epochs=1", "ditto.personal-epochs=1"),
    "dpsgd-ft": ("dpsgd.neighbours=2",),
    "fedfomo": (),
    "subfedavg-hy": ("model=cnn-small-bn", "local-epochs=2"),
}
_SETTINGS = ("fraction-train=1.0", "evaluate-every=2", "shard-size=20")


def _started(folder: Path, system: str, engine: str, rounds: int) -> subprocess.Popen[bytes]:
    """Start a run, or go on with the run that is in the folder."""
    resume = ["--resume"] if (folder / "run.json").exists() else []
    own = _SYSTEMS[system]
    epochs = () if any("epochs=" in setting for setting in own) else ("local-epochs=1",)
    settings = (f"system={system}", f"num-server-rounds={rounds}", *_SETTINGS, *epochs, *own)
    kind, where = ["run"], ["--engine", engine, "--clients", "6"]
    if engine == "nodes":
        kind, where = ["deploy", "local"], ["--nodes", "3"]
    command = [sys.executable, "-m", "fedprune_app.cli", *kind, *settings, *where, "--out", str(folder), *resume]
    with (folder.parent / f"{folder.name}.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def _written(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def _await(path: Path, before: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until the process writes the file, which was written last at the time ``before``."""
    while _written(path) == before and process.poll() is None:
        time.sleep(0.005)


def _failed(folder: Path, system: str, engine: str) -> str:
    log = (folder.parent / f"{folder.name}.log").read_text().strip().splitlines() or [""]
    return f"the run of {system} on {engine} failed: {log[-1]}"


def _whole(folder: Path, system: str, engine: str, rounds: int) -> tuple[dict[str, Any], float]:
    """Run without a kill; return run.json, and the seconds from its first line to the end."""
    process = _started(folder, system, engine, rounds)
    _await(folder / "run.json", 0, process)
    began = time.monotonic()
    if process.wait():
        sys.exit(_failed(folder, system, engine))
    return json.loads((folder / "run.json").read_text()), time.monotonic() - began


def _recorded(folder: Path) -> int:
    """Return the rounds that a run has recorded."""
    path = folder / "rounds.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _killed(
    folder: Path, system: str, engine: str, rounds: int, draw: random.Random | None, round_seconds: float
) -> int | None:
    """Start a run and kill it at a random moment; return the rounds that it had recorded, or None if it completed.

    The moment is up to ``round_seconds`` after a random one of the rounds that are left; without a ``draw`` there is
    none.
    """
    before = _written(folder / "run.json")
    process = _started(folder, system, engine, rounds)
    _await(folder / "run.json", before, process)
    if draw is None:
        process.wait()
    else:
        last = draw.randint(_recorded(folder), rounds)
        while _recorded(folder) < last and process.poll() is None:
            time.sleep(0.005)
        with suppress(subprocess.TimeoutExpired):
            process.wait(draw.uniform(0, round_seconds))
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return _recorded(folder)
    if process.returncode:
        sys.exit(_failed(folder, system, engine))
    return None


def _pairs(
    folder: Path, kills: int, seed: int, num_rounds: int, systems: list[str], engines: list[str]
) -> Iterator[dict[str, Any]]:
    for system in systems:
        for engine in engines:
            draw = random.Random(f"{seed} {system} {engine}")
            whole, seconds = _whole(folder / f"{system}-{engine}", system, engine, num_rounds)
            rounds: list[int] = []
            same = resumed = 0
            while len(rounds) < kills:
                run = folder / f"{system}-{engine}-{resumed}"
                found: int | None = 0
                while found is not None:
                    left = draw if len(rounds) < kills else None
                    found = _killed(run, system, engine, num_rounds, left, seconds / num_rounds)
                    rounds += [] if found is None else [found]
                resumed += 1
                info = json.loads((run / "run.json").read_text())
                same += (info["status"], info["final_sha256"]) == ("completed", whole["final_sha256"])
            yield {
                "version": __version__,
                "system": system,
                "engine": engine,
                "kills": len(rounds),
                "rounds_when_killed": " ".join(map(str, rounds)),
                "resumed": resumed,
                "same_models": same,
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, help="a CSV file to which lines are added")
    parser.add_argument("--kills", type=int, default=2, help="how many for each system and engine")
    parser.add_argument("--rounds", type=int, default=8, help="how many rounds a run has")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--systems", nargs="+", default=list(_SYSTEMS), choices=_SYSTEMS)
    parser.add_argument("--engines", nargs="+", default=list(_ENGINES[:3]), choices=_ENGINES)
    given = parser.parse_args()
    is_same = True
    with tempfile.TemporaryDirectory(prefix="fedprune-kills-") as folder:
        for row in _pairs(Path(folder), given.kills, given.seed, given.rounds, given.systems, given.engines):
            print(*list(row.values())[1:], sep="  ", flush=True)
            is_same &= row["same_models"] == row["resumed"]
            if given.table:
                is_new = not given.table.exists()
                with given.table.open("a", newline="") as file:
                    writer = csv.DictWriter(file, list(row), lineterminator="\n")
                    if is_new:
                        writer.writeheader()
                    writer.writerow(row)
    sys.exit(0 if is_same else 1)


if __name__ == "__main__":
    main()
