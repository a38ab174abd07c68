"""A run that ``fedprune run`` started ends when that process does, even if the process was killed with -9.

Flower's simulation process could outlive the process that started it. It would then go on writing into the run folder,
against the run that resumes it. So the launcher's identity is put into the environment, and the ServerApp watches the
launcher.
"""

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

from fedprune_app.files import replace_file

# a launcher says in this variable of the environment how many clients its simulation has
CLIENTS_VARIABLE = "FEDPRUNE_CLIENTS"
LAUNCHER_VARIABLE = "FEDPRUNE_LAUNCHER"
_CHECK_SECONDS = 0.5
_SAME_START = 2.0  # seconds; no number is used again so soon
_REFUSAL = ".refusal"


def launcher_identity() -> str:
    """Return this process as a value of :data:`LAUNCHER_VARIABLE`.

    The value has the process's start time, which tells it from a later process with the same number.
    """
    return f"{os.getpid()}:{psutil.Process().create_time()}"


def watch_launcher() -> None:
    """End this process as soon as the launcher that the environment names is gone; Ray ends with this process.

    Without a launcher in the environment nothing is watched.
    """
    identity = os.environ.get(LAUNCHER_VARIABLE)
    if identity is None:
        return
    pid, _, start = identity.partition(":")
    if int(pid) == os.getpid():
        return

    def watch() -> None:
        with suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(int(pid))
            if abs(launcher.create_time() - float(start)) < _SAME_START:
                while launcher.is_running() and launcher.status() != psutil.STATUS_ZOMBIE:
                    time.sleep(_CHECK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()


def tell_launcher(folder: Path, refusal: str) -> None:
    """Tell a launcher that waits why the settings or the run folder are refused.

    run.json is not the place for that: a run that is not resumed stays as it was. Flower keeps only 300 characters of
    an error.
    """
    if LAUNCHER_VARIABLE in os.environ:
        with suppress(OSError):
            replace_file(folder / _REFUSAL, refusal.encode())


def take_refusal(folder: Path) -> str:
    """Return what :func:`tell_launcher` left in a run folder and remove it there, or return an empty text."""
    with suppress(OSError):
        text = (folder / _REFUSAL).read_text()
        (folder / _REFUSAL).unlink()
        return text
    return ""
