"""A run started by ``fedprune run`` ends when that process does, even if it was killed with -9.

Flower's simulation process outlives the SuperLink that started it and would go on writing into the run folder, against
the run that resumes it. So the launcher's identity travels in the environment, and the ServerApp watches it.
"""

from __future__ import annotations

import os
import threading
import time

import psutil

LAUNCHER_VARIABLE = "FEDPRUNE_LAUNCHER"
_CHECK_SECONDS = 0.5


def launcher_identity() -> str:
    """This process, as a value of :data:`LAUNCHER_VARIABLE`; the time tells it from a later process of its number."""
    return f"{os.getpid()}:{psutil.Process().create_time()}"


def end_with_launcher() -> None:
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
