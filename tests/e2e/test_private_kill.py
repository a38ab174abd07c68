"""kill -9 in the middle of a private run: no ledger has less than what was released, and the resumed run goes on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from fedprune_app.privacy.accounting import Steps
from fedprune_app.privacy.ledger import Ledger

SETTINGS = [
    *("system=fedavg", "shard-size=40", "num-server-rounds=6", "local-epochs=1", "fraction-train=1.0"),
    *("evaluate-every=0", "dp.enabled=true", "dp.noise-multiplier=1.0", "steps-per-epoch=8"),
]
ROUND_STEPS = 8


def command(folder: Path, *more: str) -> list[str]:
    engine = ["--engine", "inprocess", "--clients", "2", "--out", str(folder)]
    return [sys.executable, "-m", "fedprune_app.cli", "run", *SETTINGS, *more, *engine]


def charged(folder: Path) -> list[int]:
    """The steps in each client's ledger; the counts of the last evaluation are there besides."""
    spent = [Ledger(folder / "clients" / f"{k:05d}" / "ledger.jsonl").spent for k in range(2)]
    return [sum(count for release, count in of.items() if isinstance(release, Steps)) for of in spent]


def test_a_killed_run_has_charged_what_it_released_and_charges_repeated_rounds_again(tmp_path):
    folder = tmp_path / "run"
    process = subprocess.Popen(command(folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    rounds = folder / "rounds.jsonl"
    try:
        while process.poll() is None and not (rounds.exists() and rounds.read_bytes().count(b"\n") >= 2):
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert process.returncode == -signal.SIGKILL, "it was killed, it did not end"
    recorded = rounds.read_bytes().count(b"\n")
    before = charged(folder)
    assert all(steps >= recorded * ROUND_STEPS for steps in before)

    subprocess.run([*command(folder), "--resume"], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    info = json.loads((folder / "run.json").read_text())
    assert (info["status"], info["rounds_completed"]) == ("completed", 6)
    for steps, earlier in zip(charged(folder), before, strict=True):
        assert steps == earlier + (6 - info["resumed_after_rounds"][0]) * ROUND_STEPS
        assert steps >= 6 * ROUND_STEPS
