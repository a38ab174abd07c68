"""A run started by ``fedprune run`` ends when that process does, even if it was killed with -9.

Flower's simulation process outlives the SuperLink that started it and would go on writing into the run folder, against
the run that resumes it. So the launcher's identity travels in the environment, and the ServerApp watches it.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

from fedprune_app.files import replace_file

LAUNCHER_VARIABLE = "FEDPRUNE_LAUNCHER"
_CHECK_SECONDS = 0.5
_REFUSAL = ".refusal"


def launcher_identity() -> str:
    """This process, as a value of :data:`LAUNCHER_VARIABLE`; the time tells it from a later process of its number."""
    return f"{os.getpid()}:{psutil.Process().create_time()}"


def watch_launcher() -> None:
    """If a launcher is named in the environment, end this process at once when it is gone; Ray ends with it."""
    identity = os.environ.get(LAUNCHER_VARIABLE)
    if identity is None:
        return
    pid, _, created = identity.partition(":")
    if int(pid) == os.getpid():
        return

    def alive() -> bool:
        try:
            process = psutil.Process(int(pid))
            return process.create_time() == float(created) and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def watch() -> None:
        while alive():
            time.sleep(_CHECK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()


def tell_launcher(folder: Path, refusal: str) -> None:
    """If a launcher waits, leave word for it why the settings or the run folder are refused.

    run.json is not the place: a run that is not resumed stays as it was. Flower keeps 300 characters of an error.
    """
    if LAUNCHER_VARIABLE in os.environ:
        with suppress(OSError):
            replace_file(folder / _REFUSAL, refusal.encode())


def take_refusal(folder: Path) -> str:
    """What :func:`tell_launcher` left in a run folder, which then is as it was before; empty if nothing."""
    with suppress(OSError):
        text = (folder / _REFUSAL).read_text()
        (folder / _REFUSAL).unlink()
        return text
    return ""
