"""A run's files are where server and clients both find them, from the configuration and the run's id alone."""

import re
import secrets
from pathlib import Path

from fedprune_app.config import Config
from fedprune_app.engine.store import state_folder

_KEY = re.compile(r"[0-9a-f]{16}")


def run_folder(config: Config, run_id: int) -> Path:
    """Return ``out-dir``, or the folder that is resumed from, or ``~/fedprune-runs/<run id>``."""
    folder = config.out_dir or config.resume_from
    return Path(folder) if folder else Path.home() / "fedprune-runs" / str(run_id)


def new_run_key() -> str:
    return secrets.token_hex(8)


def client_state_folder(config: Config, run_id: int, run_key: str) -> Path:
    """Return the folder of all clients' states: ``clients`` in the run folder, or this run's part of ``state-dir``.

    ``state-dir`` may serve many runs. ``run_key`` is drawn when a run starts and stays when the run resumes, unlike
    Flower's run id. The server sends the key, so it is checked: ``ValueError`` for anything but 16 hexadecimal digits.
    """
    if not _KEY.fullmatch(run_key):
        raise ValueError(f"run-key is {run_key!r}, allowed: 16 hexadecimal digits")
    return state_folder(run_folder(config, run_id), config.state_dir, run_key)
