"""Every release of Flower gives the same models: five systems on four engines, and a run that changes its release.

``make flower-releases`` makes an environment for each release and runs this with FEDPRUNE_FLOWER_ENVIRONMENTS, their
folder. What was equal is printed, as docs/deploy.md says it. The release that is installed here is the first one;
its hashes in one process are what all others are compared with.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.models.tiny_llm import text_folder, tiny_byte_model

VARIABLE = "FEDPRUNE_FLOWER_ENVIRONMENTS"
ROOT = Path(__file__).parents[2]
CLIENTS = 3
ENGINES = {"inprocess": "in one process", "ray": "Ray", "flower": "Flower's simulation", "nodes": "nodes over TLS"}
QUICK = {
    "num-server-rounds": 2,
    "local-epochs": 1,
    "fraction-train": 1.0,
    "evaluate-every": 0,
    "min-clients": CLIENTS,
    "min-replies": CLIENTS,
    "deadline-seconds": 1000.0,
    "startup-seconds": 1000.0,
}
SYSTEMS = {
    "subfedavg": {"subfedavg.accuracy-threshold": 0.0, "subfedavg.mask-distance": 0.0},
    "dispfl": {"dispfl.neighbours": 2, "dispfl.annealing-rounds": 2},
    "fedp3": {},
    "fedltp": {
        "steps-per-epoch": 4,
        "fedltp.tickets": 1,
        "fedltp.ticket-iterations": 10,
        "dp.enabled": True,
        "dp.noise-multiplier": 1.0,
        "dp.count-scale": 20.0,
    },
    "fedspallm": {
        "dataset": "text",
        "fedspallm.segments": 2,
        "fedspallm.segment-length": 24,
        "fedspallm.window": 32,
        "fedspallm.block-size": 8,
    },
}


def environments() -> dict[str, Path]:
    """The Pythons of other releases, by the names of their folders."""
    named = os.environ.get(VARIABLE)
    return {path.parents[1].name: path for path in sorted(Path(named).glob("*/bin/python"))} if named else {}


OTHERS = environments()
HERE = {"here": Path(sys.executable)}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(not OTHERS, reason=f"{VARIABLE} names no folder with environments: make flower-releases"),
]


def release_of(python: Path) -> str:
    command = [python, "-c", "from importlib.metadata import version; print(version('flwr'))"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout.strip()


@pytest.fixture(scope="module")
def settings_of(tmp_path_factory) -> Callable[[str], dict]:
    folder = tmp_path_factory.mktemp("texts")
    texts = {"data-dir": str(text_folder(folder / "data")), "model": str(tiny_byte_model(folder / "model", "llama"))}

    def settings(system: str) -> dict:
        return {**QUICK, "system": system, **SYSTEMS[system], **(texts if system == "fedspallm" else {})}

    return settings


def hashes(python: Path, engine: str, folder: Path, runs: dict[str, dict], deployment: str = "") -> dict[str, str]:
    """``final_sha256`` of each run, in the environment of this Python."""
    task = {"engine": engine, "clients": CLIENTS, "deployment": deployment, "runs": runs}
    folder.mkdir(exist_ok=True)
    (folder / "task.json").write_text(json.dumps(task))
    command = [python, "-m", "tests.e2e.release_runs", folder / "task.json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=7000)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"run"')]
    return {line["run"]: line["sha256"] for line in lines}


@pytest.fixture(scope="module")
def expected(settings_of, tmp_path_factory) -> dict[str, str]:
    """The hashes of the installed release, in one process."""
    folder = tmp_path_factory.mktemp("expected")
    runs = {system: {**settings_of(system), "out-dir": str(folder / system)} for system in SYSTEMS}
    return hashes(Path(sys.executable), "inprocess", folder, runs)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", [*HERE, *OTHERS])
def test_a_release_gives_the_same_models_on_an_engine(settings_of, expected, tmp_path, transcript, name, engine):
    python = {**HERE, **OTHERS}[name]
    runs = {system: {**settings_of(system), "out-dir": str(tmp_path / system)} for system in SYSTEMS}
    found = hashes(python, engine, tmp_path / "task", runs)
    assert found == expected
    cut = ", ".join(f"{system} {found[system][:8]}" for system in SYSTEMS)
    transcript(f"Flower {release_of(python)}, {ENGINES[engine]}: {cut}")


@pytest.mark.parametrize("engine", ["inprocess", "ray", "nodes"])
@pytest.mark.parametrize("name", OTHERS)
def test_a_run_that_was_begun_here_is_resumed_under_another_release(
    settings_of, expected, tmp_path, transcript, name, engine
):
    """The SuperLink's database, the nodes' keys and states, and the run folder are those of the first part."""
    deployment = str(tmp_path / "deployment") if engine == "nodes" else ""
    out = str(tmp_path / "run")
    begun = {**settings_of("dispfl"), "num-server-rounds": 1, "out-dir": out}
    first = hashes(Path(sys.executable), engine, tmp_path / "first", {"dispfl": begun}, deployment)
    resumed = {**settings_of("dispfl"), "out-dir": out, "resume-from": out}
    second = hashes(OTHERS[name], engine, tmp_path / "second", {"dispfl": resumed}, deployment)
    assert first["dispfl"] != second["dispfl"] == expected["dispfl"]
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    before, after = release_of(Path(sys.executable)), release_of(OTHERS[name])
    assert (info["versions"]["flwr"], info["versions_since"]) == (before, [{"round": 1, "flwr": after}])
    changed = f"begun under Flower {before}, resumed under {after}"
    transcript(f"{changed}, {ENGINES[engine]}: dispfl {second['dispfl'][:8]}")


@pytest.mark.parametrize("name", OTHERS)
def test_the_engine_s_own_tests_pass_under_another_release(name):
    command = [OTHERS[name], "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/engine"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=7000)
    assert done.returncode == 0, done.stdout[-2000:]
