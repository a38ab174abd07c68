"""Where a run's files are, agreed by server and clients from the configuration and the run's id alone."""

from __future__ import annotations

from pathlib import Path

from fedprune_app.config import Config


def run_folder(config: Config, run_id: int) -> Path:
    """``out-dir``, or the folder resumed from, or ``~/fedprune-runs/<run id>``."""
    chosen = config.out_dir or config.resume_from
    return Path(chosen) if chosen else Path.home() / "fedprune-runs" / str(run_id)


def client_state_folder(config: Config, run_id: int) -> Path:
    """``state-dir``, or ``clients`` in the run folder."""
    return Path(config.state_dir) if config.state_dir else run_folder(config, run_id) / "clients"
