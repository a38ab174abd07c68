"""A cohort is several clients of one process that train together: one that wants to train waits until all others do.

Each client of a cohort does its work in a thread of its own, as if it were alone. One thread works at a time, until it
wants to train or is done. When no other is left to work, all that want to train are trained together, and go on. So
no system has to know of cohorts. On a CPU a client's result does not depend on who trains beside it.
"""

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
# So many clients are trained together at most, if the configuration does not say. More gain little on a CPU; on a GPU
# 32 of LeNet-5 take a third of the time of eight per client.
LARGEST_COHORT, LARGEST_ON_GPU = 8, 32


def train_in_cohort(
    request: Request, train_cohort: Callable[[Sequence[Request]], list[Result | Exception]], waits: bool = True
) -> Result:
    """Train with the other clients of this thread's cohort, or alone where there is none; return this one's result.

    A client with which nobody can train has no reason to wait for the others: ``waits`` is then False. Raises the
    exception that is this one's result.
    """
    member = _member.get() if waits else None
    result = train_cohort([request])[0] if member is None else member.train(request, train_cohort)
    if isinstance(result, Exception):
        raise result
    return result


def run_cohort(works: Sequence[Callable[[], Result]]) -> Iterator[tuple[int, Result]]:
    """Do several clients' works as a cohort; yield the number of each and what it returned, once it is done.

    The works handle their errors themselves: one that raises ends the cohort.
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
    """Return how many of ``num_messages`` each worker without work gets now, from 1 to ``max_size``.

    Where the workers have to go several times, each time is as long as the others, so that all end together.
    """
    times = max(1, math.ceil(num_messages / (num_workers * max_size)))
    return max(1, math.ceil(num_messages / (num_workers * times)))


def largest_cohort(run_config: Values) -> int:
    """Return how many clients a run trains together at most."""
    on_gpu = run_config.get("device", "cpu") != "cpu" and torch.cuda.is_available()
    return int(run_config.get("cohort", 0)) or (LARGEST_ON_GPU if on_gpu else LARGEST_COHORT)


class _Member(Generic[Result]):
    """A member works in a thread of its own while :meth:`go_on` waits, until it is done or wants to train."""

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
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._may_go.release()
        self._stopped.acquire()

    def outcome(self) -> Result:
        self._thread.join()
        return self._outcome.result()

    def train(self, request: Any, train_cohort: Callable[[Sequence[Any]], list[Any]]) -> Any:
        """Stop until the cohort has trained, and return this member's result; its own thread calls this."""
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
