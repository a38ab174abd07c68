"""Shared fixtures: real federations in this process, on the embedded digits."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from flwr.clientapp import ClientApp
from hypothesis import settings

from fedprune_app import cli, client_app, registry, server_app
from fedprune_app.config import config as configuration
from fedprune_app.config import parse_config
from fedprune_app.core.torchvision_shim import prepare_torchvision
from fedprune_app.data import names as data_names
from fedprune_app.engine.simulated_grid import run_in_process
from fedprune_app.learning import training
from fedprune_app.learning.device import prepare_torch
from fedprune_app.models import names as model_names
from fedprune_app.plugins import loading, registering
from fedprune_app.testing import FinishedRun as Finished
from tests import leftovers
from tests.examples import PROFILE, examples
from tests.leftovers import pytest_unconfigure

__all__ = ["Finished", "pytest_unconfigure"]
# How long an example takes depends on what else the machine does.
settings.register_profile(PROFILE, settings(), deadline=None, max_examples=examples(100))
settings.load_profile(PROFILE)
prepare_torchvision()  # for what tests import themselves
torch.set_num_threads(1)  # as in a run; two threads of one operation wait for each other where other work goes on
Tamper = Callable[[Message, Message, int], Message]  # (request, honest reply, partition) -> what is sent

SMALL = {
    "num-server-rounds": 3,
    "local-epochs": 2,
    "fraction-train": 0.5,
    "evaluate-every": 1,
    "shards-per-client": 2,
}
"""Settings of the quick runs: 6 clients of 240 digits each."""


def wrapped_app(train: Callable[..., Message]) -> ClientApp:
    """The real ClientApp, but training messages go to ``train(message, context, honest)``."""
    app = ClientApp()
    app.query()(client_app.query)
    app.evaluate()(client_app.evaluate)
    app.train()(lambda message, context: train(message, context, client_app.train))
    return app


def honest(request: Message, reply: Message, partition: int) -> Message:
    """Tampers with nothing."""
    return reply


def tampered_app(train: Tamper = honest, query: Tamper = honest, evaluate: Tamper = honest) -> ClientApp:
    """The real ClientApp whose replies, to each kind of message, pass through these on their way out."""
    app = ClientApp()

    def tampered(tamper: Tamper, real: Callable[[Message, Any], Message]) -> Callable[[Message, Any], Message]:
        return lambda message, context: tamper(message, real(message, context), context.node_config["partition-id"])

    app.query()(tampered(query, client_app.query))
    app.train()(tampered(train, client_app.train))
    app.evaluate()(tampered(evaluate, client_app.evaluate))
    return app


MEMORY = Path("/dev/shm")


def pytest_configure(config: pytest.Config) -> None:
    """Temporary folders are in memory where there is room: a run syncs a hundred files to its disk."""
    leftovers.pytest_configure(config)
    if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 4 * 2**30:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadscope`` tests that share fixtures share a process: those of a file, and of a system's laws.

    Groups by marks (``--dist loadgroup``) are none with pytest 9.2 and xdist 3.8: each test goes to either process.
    """
    if config.getoption("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Sharing(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return sharing(nodeid)

    return Sharing(config, log)


def sharing(nodeid: str) -> str:
    """Return the name of the group of tests that share a process."""
    path, _, test = nodeid.partition("::")
    case = test.partition("[")[2]
    systems = [name for name in registry.SYSTEMS if case.startswith(name)] if "/conformance/" in path else []
    return max(systems, key=len, default=path)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that wait for programs come first, so that no process is left waiting for them alone in the end."""
    items.sort(key=lambda item: "e2e" not in item.path.parts)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests of a GPU compute in float32, as runs do; PyTorch's own convolutions would take TF32."""
    if item.get_closest_marker("gpu"):
        prepare_torch(parse_config({"device": "cuda"}))


@pytest.fixture(autouse=True)
def loggers_that_speak() -> None:
    """Flower's loggers are as at the start: its database, when it is made, silences all loggers of the process."""
    for name in ("flwr", "flwr.fedprune"):
        logger = logging.getLogger(name)
        logger.disabled, logger.propagate = False, True
    logging.getLogger("flwr").setLevel(logging.DEBUG)


REGISTRIES: tuple[dict[Any, Any], ...] = (
    *(registry.SYSTEMS, data_names.DATASETS, data_names.LOADERS, data_names.PARTITIONS, data_names.DEALERS),
    *(model_names.MODELS, model_names.BUILDERS, model_names.AUTO),
    *(configuration._OPTIONS, loading._files, registering.origins),
)


@pytest.fixture
def no_plugins() -> Iterator[None]:
    """The plug-ins that a test loads are not there in another test."""
    before = [dict(each) for each in REGISTRIES]
    yield
    for each, content in zip(REGISTRIES, before, strict=True):
        each.clear()
        each.update(content)
    registering.clear_caches()


@pytest.fixture
def own_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks are trained as they are: their grouped form rounds otherwise."""
    monkeypatch.setattr(training, "MOST_FLOPS", 0)


@pytest.fixture
def federate(tmp_path: Path) -> Callable[..., Finished]:
    """``federate(name="run", clients=6, app=None, **settings)`` runs and returns the folder."""

    def run(name: str = "run", clients: int = 6, app: ClientApp | None = None, **settings: Any) -> Finished:
        folder = tmp_path / name
        values = {**SMALL, "out-dir": str(folder), **{key.replace("_", "-"): v for key, v in settings.items()}}
        config = parse_config(values)
        run_in_process(server_app.app, app or client_app.app, clients, config.to_dict())
        return Finished(folder)

    return run


@pytest.fixture
def fedprune(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[int, str]]:
    """``fedprune(*arguments)`` in this process and in ``tmp_path``: the exit code, and what it said on stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str | Path) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["fedprune", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0), capsys.readouterr().err

    return call


class SmallDisk:
    """A file system of its own, of ``kilobytes``: what does not fit, the kernel refuses. To mount it takes root."""

    def __init__(self, folder: Path, kilobytes: int) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"a small file system cannot be mounted here: {done.stderr.strip()}")

    def fill(self, left: int = 0) -> None:
        """Leave so many bytes, in whole pages of 4096."""
        found = os.statvfs(self.folder)
        with (self.folder / ".filler").open("ab") as file:
            file.write(bytes(max(0, found.f_bavail * found.f_frsize - left)))

    def free(self) -> None:
        (self.folder / ".filler").unlink(missing_ok=True)

    def unmount(self) -> None:
        subprocess.run(["umount", "--lazy", str(self.folder)], check=True)


@pytest.fixture
def small_disk() -> Iterator[Callable[[Path, int], SmallDisk]]:
    """``small_disk(folder, kilobytes)`` mounts one there until the test is over."""
    disks: list[SmallDisk] = []

    def make(folder: Path, kilobytes: int) -> SmallDisk:
        disks.append(SmallDisk(folder, kilobytes))
        return disks[-1]

    yield make
    for disk in disks:
        disk.unmount()
