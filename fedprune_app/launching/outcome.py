"""What became of a run, as its folder tells."""

import json
import time
from pathlib import Path
from typing import Any

_LINGER_SECONDS = 10.0


class RecordedEnd:
    """What run.json says, while the run is waited for: whether the run is over, since when, and how it ended."""

    def __init__(self, run_file: Path) -> None:
        self._file = run_file
        self._before = outcome_of(run_file)  # the outcome of an earlier part, if the run is resumed
        self._outcome: tuple[str, int] | None = None
        self._since = 0.0

    def read(self) -> None:
        was_over = self.is_over
        outcome = outcome_of(self._file)
        self._outcome = outcome if outcome != self._before else None
        if self.is_over and not was_over:
            self._since = time.monotonic()

    @property
    def is_over(self) -> bool:
        return self._outcome is not None

    @property
    def is_completed(self) -> bool:
        return self._outcome is not None and self._outcome[0] == "completed"

    @property
    def has_lingered(self) -> bool:
        """Whether the file has said for a few seconds that the run is over."""
        return self.is_over and time.monotonic() - self._since > _LINGER_SECONDS


def outcome_of(run_file: Path) -> tuple[str, int] | None:
    """Return how the run in a folder ended, and the time at which the file said so, or None while the run goes on."""
    status = read_json(run_file).get("status", "running")
    return None if status == "running" else (str(status), run_file.stat().st_mtime_ns)


def read_json(path: Path) -> dict[str, Any]:
    """Return the table in a JSON file, which is empty where the file is not there or not whole."""
    try:
        table = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return table if isinstance(table, dict) else {}
