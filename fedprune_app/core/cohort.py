"""Cohorts: clients of one process that train together; a client ready to train waits for all others.

Each client of a cohort runs in a thread of its own, as if it were alone. One thread runs at a time, until it has to
train or is done. Once all remaining clients wait, they are trained together and resume. So no system has to know of
cohorts. On a CPU a client's result does not depend on the others of its cohort.
"""

import ctypes
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextvars import ContextVar, copy_context
from typing import Any, Generic, TypeVar

import torch

from fedprune_app.core.named import Values

Request = TypeVar("Request")
Result = TypeVar("Result")
# The default largest cohorts. Larger ones gain little on a CPU; on a GPU, a client in a cohort of 32 (LeNet-5) takes a
# third of the time of one in a cohort of eight.
LARGEST_COHORT, LARGEST_ON_GPU = 8, 32


def train_in_cohort(
    request: Request, train_cohort: Callable[[Sequence[Request]], list[Result | Exception]], waits: bool = True
) -> Result:
    """Train with the other clients of this thread's cohort, or alone where there is none; return this client's result.

    ``waits`` is False for a client that cannot train with others and so need not wait. Raises this client's result if
    it is an exception.
    """
    member = _member.get() if waits else None
    result = train_cohort([request])[0] if member is None else member.train(request, train_cohort)
    if isinstance(result, Exception):
        raise result
    return result


def run_cohort(works: Sequence[Callable[[], Result]]) -> Iterator[tuple[int, Result]]:
    """Run the works of several clients as a cohort; yield each one's number and result once it is done.

    The works handle their own errors: an exception ends the cohort.
    """
    if len(works) == 1:
        yield 0, works[0]()
        return
    members = {number: _Member(work) for number, work in enumerate(works)}
    while members:
        for member in members.values():
            member.resume()
        for number in [number for number, member in members.items() if member.is_done]:
            yield number, members.pop(number).outcome()
        participants = list(members.values())
        if participants:
            results = participants[0].train_cohort([member.request for member in participants])
            for member, result in zip(participants, results, strict=True):
                member.result = result


def messages_per_worker(num_messages: int, num_workers: int, max_size: int) -> int:
    """Return how many of ``num_messages`` each idle worker gets now, from 1 to ``max_size``.

    Where the workers need several turns, the turns are of equal size, so that all workers end together.
    """
    times = max(1, math.ceil(num_messages / (num_workers * max_size)))
    return max(1, math.ceil(num_messages / (num_workers * times)))


def largest_cohort(run_config: Values) -> int:
    """Return how many clients a run trains together at most."""
    on_gpu = run_config.get("device", "cpu") != "cpu" and torch.cuda.is_available()
    return int(run_config.get("cohort", 0)) or (LARGEST_ON_GPU if on_gpu else LARGEST_COHORT)


class _Member(Generic[Result]):
    """One client's work in its own thread, which runs while :meth:`resume` waits, until it is done or has to train."""

    request: Any
    result: Any = None
    train_cohort: Callable[[Sequence[Any]], list[Any]]

    def __init__(self, work: Callable[[], Result]) -> None:
        self.is_done = False
        self._work = work
        self._outcome: Future[Result] = Future()
        self._may_go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=copy_context().run, args=(self._run,), daemon=True)

    def resume(self) -> None:
        try:
            if self._thread.ident is None:
                self._thread.start()
            else:
                self._may_go.release()
            self._stopped.acquire()
        except KeyboardInterrupt:  # a thread that is inside torch when the process ends would abort it
            thread, raised = ctypes.c_ulong(self._thread.ident or 0), ctypes.py_object(KeyboardInterrupt)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, raised)
            self._stopped.acquire(timeout=10)
            raise

    def outcome(self) -> Result:
        self._thread.join()
        return self._outcome.result()

    def train(self, request: Any, train_cohort: Callable[[Sequence[Any]], list[Any]]) -> Any:
        """Block until the cohort has trained, and return this member's result; called from the member's own thread."""
        self.request, self.train_cohort = request, train_cohort
        self._stopped.release()
        self._may_go.acquire()
        result, self.request, self.result = self.result, None, None
        return result

    def _run(self) -> None:
        _member.set(self)
        try:
            self._outcome.set_result(self._work())
        except BaseException as error:
            self._outcome.set_exception(error)
        self.is_done = True
        self._stopped.release()


_member: ContextVar[_Member[Any] | None] = ContextVar("_member", default=None)
