"""A prepared run is executed as it is, and nothing about it is checked any more."""

from __future__ import annotations

import io
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from fedprune_app.preflight.inputs import Placement, RunInputs
from fedprune_app.preflight.prepare import prepare
from fedprune_app.running import Session, _default_workers

QUICK = {"system": "fedavg", "num-server-rounds": 1, "local-epochs": 1}


def test_a_run_checks_nothing_that_was_prepared_and_its_record_has_the_prepared_settings(tmp_path, monkeypatch):
    prepared = prepare(RunInputs(on_command_line=QUICK, out=tmp_path / "run"), Placement("inprocess", 2))
    for name in ("can_start.warnings", "prepare.check_out"):
        monkeypatch.setattr(f"fedprune_app.preflight.{name}", lambda *_: pytest.fail("checked twice"))
    told = io.StringIO()
    with Session(Console(file=told)) as session:
        info = session.run(replace(prepared, notes=("mine",)), tmp_path / "run")
        session.show_notes(["mine"])
    assert info["config"] == prepared.config.to_dict()
    assert told.getvalue().count("note: mine") == 1


@pytest.mark.parametrize(
    ("system", "gpus", "expected"),
    [("dispfl", 0, 16), ("dispfl", 1, 8), ("dispfl", 4, 16), ("fedspallm", 0, 16), ("fedspallm", 2, 2)],
)
def test_processes_share_a_gpu_but_for_language_models(monkeypatch, system, gpus, expected):
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    config = SimpleNamespace(system=system)
    assert _default_workers(config, gpus) == expected
