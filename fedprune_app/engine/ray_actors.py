"""Flower's simulation on Ray is adapted: clients train together in its actors, and dead ones are replaced.

Flower gives one message at a time to an actor, so each client would train alone. Here an actor answers a cohort of
messages, as those of our own Grid do. A client that dies is reported as failed, and a new actor takes the place of the
one that it ended. Flower would give that actor the next messages too, and each of them would fail at once.

A thread of Flower's waits for each actor. Flower takes Python's default number of threads for that, which is at most 32
and follows the CPUs of this machine, whatever the cluster has. Here the number of actors decides.
"""

from __future__ import annotations

import os
import shlex
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import Empty, Queue
from typing import TYPE_CHECKING, Any

from flwr.app import Context, Message

from fedprune_app.core.cohort import largest_cohort, share_of
from fedprune_app.engine import flower_private

if TYPE_CHECKING:
    from fedprune_app.engine.flower_private import InMemoryGrid

_PATIENCE_SECONDS = 1.0
"""How long workers wait for the next message of a push, and how often they look whether the simulation has ended."""


class _UnlimitedExecutor(ThreadPoolExecutor):
    """The executor starts a thread for each task that comes while all others are busy, however many there are."""

    def __init__(self) -> None:
        super().__init__(max_workers=sys.maxsize)


class Dealer:
    """The dealer shares messages out between the threads that wait for actors, in cohorts of equal size.

    Messages that the server sends together reach Flower's ``queue`` one by one. The server announces how many there
    will be, so that the dealer knows when all are there.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of the messages; held by a thread that waits for some
        self._waiting: deque[Message] = deque()
        self._shares: deque[list[Message]] = deque()  # one for each thread that has no work
        self._counting = threading.Lock()  # of the counts, never held for long
        self._announced = self._at_work = 0

    def announce(self, num_messages: int) -> None:
        """Take note that the server is about to send so many messages."""
        with self._counting:
            self._announced += num_messages

    def share(
        self, queue: Queue[Message], workers: int, largest: Callable[[Message], int], ended: threading.Event
    ) -> list[Message]:
        """Return the next messages for one of so many ``workers``; none if none came in a while.

        They are as many as are ``largest`` for the first of them, or fewer. The worker calls :meth:`done` when they are
        answered.
        """
        with self._lock:
            if not self._shares and not ended.is_set():
                self._fetch(queue)
                if self._waiting:
                    self._deal(workers, largest(self._waiting[0]))
            if not self._shares:
                return []
            with self._counting:
                self._at_work += 1
            return self._shares.popleft()

    def done(self) -> None:
        """Take note that a worker has answered its messages."""
        with self._counting:
            self._at_work -= 1

    def _fetch(self, queue: Queue[Message]) -> None:
        """Take what is in the queue, and wait for all that is announced; with nothing at all, wait for something."""
        while self._announced > 0 or not self._waiting or not queue.empty():
            try:
                self._waiting.append(queue.get(timeout=_PATIENCE_SECONDS))
            except Empty:
                with self._counting:
                    self._announced = 0  # the SuperLink refused some of them
                return
            with self._counting:
                self._announced = max(0, self._announced - 1)

    def _deal(self, workers: int, largest: int) -> None:
        size = share_of(len(self._waiting), workers, largest)
        for _ in range(workers - self._at_work):
            if self._waiting:
                self._shares.append([self._waiting.popleft() for _ in range(min(size, len(self._waiting)))])


def _work(
    dealer: Dealer,
    messageins_queue: Queue[Message],
    messageres_queue: Queue[Message],
    node_info_store: Mapping[int, Any],
    backend: Any,
    f_stop: threading.Event,
    metrics: Any,
) -> None:
    """Answer messages of the first queue into the second one until ``f_stop``; the arguments are Flower's."""
    from fedprune_app.engine.flower_actor import answered

    def context_of(message: Message) -> Context:
        found: Context = node_info_store[message.metadata.dst_node_id].retrieve_context(run_id=message.metadata.run_id)
        return found

    def largest(message: Message) -> int:
        return largest_cohort(context_of(message).run_config)

    while not f_stop.is_set():
        messages = dealer.share(messageins_queue, backend.num_workers, largest, f_stop)
        if not messages:
            continue
        started = time.perf_counter()
        for reply in answered(backend, [(message, context_of(message)) for message in messages]):
            flower_private.set_message_id(reply, str(uuid.uuid4()))
            messageres_queue.put(reply)
        metrics.add_clientapp_runtime(time.perf_counter() - started)
        dealer.done()


def with_this_python(environment: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return Ray's runtime environment with this Python as a shell takes it.

    Ray hands the path of Python to a shell as it is. So its processes never start where the path has a space or a
    bracket, and Ray waits for them without end. A cluster has a Python of its own.
    """
    quoted = shlex.quote(sys.executable)
    needed = quoted != sys.executable and os.environ.get("RAY_ADDRESS", "local") == "local"
    return {**({"py_executable": quoted} if needed else {}), **(environment or {})}


def adapt_simulation() -> None:
    """Change how clients are given to actors, in Flower's simulation process before those exist; elsewhere do nothing.

    The ServerApp is in the same process.
    """
    if flower_private.if_imported("_run_simulation") is None:
        return
    from fedprune_app.engine.flower_actor import ClientsOfFlower
    from fedprune_app.engine.flower_private import InMemoryGrid

    dealer = Dealer()
    push = InMemoryGrid.push_messages

    def announced_push(self: InMemoryGrid, messages: Iterable[Message]) -> Iterable[str]:
        together = list(messages)
        dealer.announce(len(together))
        return push(self, together)

    InMemoryGrid.push_messages = announced_push  # type: ignore[method-assign]
    flower_private.replace("ThreadPoolExecutor", _UnlimitedExecutor)
    flower_private.replace("ClientAppActor", ClientsOfFlower)
    os.environ.setdefault("RAY_RUNTIME_ENV_HOOK", f"{__name__}.{with_this_python.__name__}")  # Ray calls it
    flower_private.replace("worker", partial(_work, dealer))
