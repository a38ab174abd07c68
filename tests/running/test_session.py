"""A prepared run is executed as it is, and nothing about it is checked any more."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from fedprune_app.preflight.given import Given, Placement
from fedprune_app.preflight.prepare import prepare
from fedprune_app.running import Session

QUICK = {"system": "fedavg", "num-server-rounds": 1, "local-epochs": 1}


def test_a_run_checks_nothing_that_was_prepared_and_its_record_has_the_prepared_settings(tmp_path, monkeypatch):
    prepared = prepare(Given(on_command_line=QUICK, out=tmp_path / "run"), Placement("inprocess", 2))
    for name in ("can_start.doubts", "prepare.check_out"):
        monkeypatch.setattr(f"fedprune_app.preflight.{name}", lambda *_: pytest.fail("checked twice"))
    told = io.StringIO()
    with Session(Console(file=told)) as session:
        info = session.run(replace(prepared, notes=("mine",)), tmp_path / "run")
        session.tell(["mine"])
    assert info["config"] == prepared.config.to_dict()
    assert told.getvalue().count("note: mine") == 1
