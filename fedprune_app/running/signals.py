"""Signals end a run as Ctrl-C does, or leave the run going."""

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGHUP)


class Left(BaseException):
    """A signal came that ends this process, but not the run."""


def leave(number: int, frame: FrameType | None) -> None:
    raise Left(f"{signal.Signals(number).name} came")


def interrupt(number: int, frame: FrameType | None) -> None:
    """End a run as Ctrl-C does, so that nothing is left running."""
    raise KeyboardInterrupt


@contextmanager
def on_signals(numbers: Iterable[int], handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Handle the signals ``numbers`` with ``handler`` until the block ends.

    A signal that this process was started to ignore (nohup) stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handled_numbers = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    earlier_handlers = {number: signal.signal(number, handler) for number in handled_numbers}
    try:
        yield
    finally:
        for number, previous in earlier_handlers.items():
            signal.signal(number, previous)
