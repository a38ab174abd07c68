"""A Flower Grid that passes messages to Ray actors directly: no SuperLink, no database, no polling.

An actor runs the ClientApp on a cohort of messages at a time, and returns each reply as it is ready. An actor that dies
is replaced. If one client had not replied yet, its process died. If several had not, the cause is unknown: each of them
gets its message again, alone. Its state is that before the round, so its reply is the same.
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pkgutil import resolve_name
from typing import Any

import ray
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedprune_app.core.cohort import messages_per_worker
from fedprune_app.core.named import ValueDict, Values
from fedprune_app.engine.background import error_reply
from fedprune_app.engine.flower_private import set_answered_id
from fedprune_app.engine.simulated_grid import SimulatedGrid, answers


@ray.remote
class SimulatedClients:
    """A process that runs clients, any of the grid's."""

    def __init__(self, client_app: str, shares_disk: bool) -> None:
        self._app: ClientApp = resolve_name(client_app)
        self._shares_disk = shares_disk

    def answer(self, requests: list[tuple[Message, Context]]) -> Iterator[tuple[int, Message] | None]:
        """Yield None once this process has started, and then the number of each message and its reply."""
        yield None
        yield from answers(self._app, requests, self._shares_disk)


@dataclass
class _Cohort:
    """Messages that a worker is processing; ``pending`` are those without a reply yet."""

    worker: Any
    ids: list[str]
    pending: dict[str, Message] = field(default_factory=dict)
    start_time: float = 0.0  # of the cohort, or of its last reply; 0 until its process has started


class RayGrid(SimulatedGrid):
    """Simulated clients in Ray actors, as many at a time as fit with the actors' ``resources``.

    ``client_app`` names the ClientApp. Ray must be initialised; ``one_machine`` is whether it runs on this machine
    alone. Raises ``ValueError`` if not even one actor fits.
    """

    def __init__(
        self,
        client_app: str,
        num_clients: int,
        run_config: Values,
        resources: Mapping[str, float],
        one_machine: bool,
    ) -> None:
        super().__init__(num_clients, run_config)
        worker: Any = SimulatedClients  # Ray's decorator has no types
        self._new_worker = partial(worker.options(**resources).remote, client_app, one_machine)
        self._idle = [self._new_worker() for _ in range(_room_for(resources))]
        self._at_work: dict[Any, _Cohort] = {}  # by the generator of replies
        self._suspects: dict[str, Message] = {}  # messages of cohorts that died; each is processed alone
        self._replies: dict[str, Message] = {}
        self._forgotten: set[str] = set()  # messages in progress whose replies are no longer needed

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Start as many clients as possible, and return the replies that have arrived."""
        self._start()
        self._collect(seconds=0)
        return [self._replies.pop(message_id) for message_id in message_ids if message_id in self._replies]

    def begun(self) -> dict[str, float]:
        """Return when the working clients began, by message id, on the clock of ``time.monotonic``.

        Clients of a cohort may work one after the other: the time of the remaining ones starts at the last reply. A
        cohort whose process has not started yet is not working.
        """
        cohorts = [cohort for cohort in self._at_work.values() if cohort.start_time]
        return {message_id: cohort.start_time for cohort in cohorts for message_id in cohort.pending}

    def discard(self, message_ids: Iterable[str]) -> None:
        """Cancel these messages: queued ones are removed, and later replies are dropped."""
        for message_id in message_ids:
            messages = [queue.pop(message_id, None) for queue in (self._suspects, self._pending, self._replies)]
            if not any(messages):
                self._forgotten.add(message_id)

    def wait_for_reply(self, seconds: float) -> None:
        self._start()
        self._collect(0 if self._replies else seconds)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        message_ids = list(self.push_messages(messages))
        deadline = time.monotonic() + (math.inf if timeout is None else timeout)
        replies: list[Message] = []
        while len(replies) < len(message_ids) and time.monotonic() < deadline:
            self.wait_for_reply(1.0)
            replies += self.pull_messages(message_ids)
        return replies

    def _start(self) -> None:
        """Assign messages to idle workers: a suspect alone, the others in cohorts of equal size."""
        while self._idle and self._suspects:
            self._assign(self._suspects, 1)
        if self._idle and self._pending:
            size = messages_per_worker(len(self._pending), len(self._idle) + len(self._at_work), self._largest_cohort)
            while self._idle and self._pending:
                self._assign(self._pending, size)

    def _assign(self, queue: dict[str, Message], size: int) -> None:
        """Assign up to ``size`` messages of the queue to a worker."""
        ids = list(queue)[:size]
        cohort = _Cohort(self._idle.pop(0), ids, {message_id: queue.pop(message_id) for message_id in ids})
        requests = [(message, self._context(message)) for message in cohort.pending.values()]
        for message, _ in requests:
            message.metadata.created_at = time.time()  # its time to live starts now, not in the queue
        self._at_work[cohort.worker.answer.options(num_returns="streaming").remote(requests)] = cohort

    def _collect(self, seconds: float) -> None:
        # all that have arrived; if none, the first that arrives within these seconds
        while self._at_work:
            ready, _ = ray.wait(list(self._at_work), timeout=seconds)
            if not ready:
                return
            for stream in ready:
                self._collect_next(stream)
            seconds = 0

    def _collect_next(self, replies: Any) -> None:
        """Process the next reply of a cohort, or its end."""
        cohort = self._at_work[replies]
        try:
            answer = ray.get(next(replies))
        except StopIteration:
            del self._at_work[replies]
            self._idle.append(cohort.worker)
            return
        except Exception as error:  # the process died, or could not start
            del self._at_work[replies]
            self._idle.append(self._new_worker())
            if len(cohort.pending) > 1:
                self._suspects |= cohort.pending
                return
            for message_id, message in cohort.pending.items():
                self._arrive(message_id, error_reply(error, message))
            return
        cohort.start_time = time.monotonic()
        if answer is None:
            return
        number, reply = answer
        del cohort.pending[cohort.ids[number]]
        self._arrive(cohort.ids[number], reply)

    def _arrive(self, message_id: str, reply: Message) -> None:
        if message_id in self._forgotten:
            self._forgotten.discard(message_id)
            return
        set_answered_id(reply, message_id)
        self._replies[message_id] = reply


def _room_for(resources: Mapping[str, float]) -> int:
    """Return how many actors with these ``resources`` fit into Ray; an actor runs on one machine."""
    needs = {{"num_cpus": "CPU", "num_gpus": "GPU"}[key]: count for key, count in resources.items() if count}
    machines: list[ValueDict] = ray.nodes()  # type: ignore[no-untyped-call]
    capacities = [machine["Resources"] for machine in machines]
    room = sum(min(int(capacity.get(name, 0) / count) for name, count in needs.items()) for capacity in capacities)
    if not room:
        raise ValueError(f"Ray has no room for a process of clients, which takes {needs} of {capacities}")
    return room
