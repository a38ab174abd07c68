"""A test run that ends, however it ends, leaves no process behind that one of its tests has started.

All that tests start inherits a mark in the environment; processes that outlived their parents are found by it, too.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from types import FrameType

import psutil
import pytest

MARK = "FEDPRUNE_TESTS_OF"


def started_by(run: str) -> Iterator[psutil.Process]:
    """Yield the processes other than this one that carry the mark of a test run."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(MARK) == run:
                yield process


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # the workers of pytest-xdist inherit the mark
        os.environ[MARK] = f"{os.getpid()}:{psutil.Process().create_time()}"
        signal.signal(signal.SIGTERM, _interrupt)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        for process in started_by(os.environ[MARK]):
            with suppress(psutil.Error):
                process.kill()
