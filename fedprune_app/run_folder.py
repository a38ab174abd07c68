"""Where a run's files are, agreed by server and clients from the configuration and the run's id alone."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from fedprune_app.config import Config

_KEY = re.compile(r"[0-9a-f]{16}")


def run_folder(config: Config, run_id: int) -> Path:
    """``out-dir``, or the folder resumed from, or ``~/fedprune-runs/<run id>``."""
    chosen = config.out_dir or config.resume_from
    return Path(chosen) if chosen else Path.home() / "fedprune-runs" / str(run_id)


def new_run_key() -> str:
    """A name for a new run that no other has."""
    return secrets.token_hex(8)


def client_state_folder(config: Config, run_id: int, run_key: str) -> Path:
    """``clients`` in the run folder; or in ``state-dir``, which may serve many runs, a folder of this run's own.

    ``run_key`` is drawn when a run starts and kept when it resumes, unlike Flower's run id. The server sends it, so it
    is checked: ``ValueError`` for anything but 16 hexadecimal digits.
    """
    if not _KEY.fullmatch(run_key):
        raise ValueError(f"run-key is {run_key!r}, allowed: 16 hexadecimal digits")
    return Path(config.state_dir) / run_key if config.state_dir else run_folder(config, run_id) / "clients"
