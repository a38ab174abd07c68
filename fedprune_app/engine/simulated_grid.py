"""The Grid of simulated clients: it has their contexts, and holds messages until they are answered, in this process.

The ServerApp and ClientApp objects are those of every engine, and messages are encoded as on any other engine.
"""

import itertools
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid

from fedprune_app.core.cohort import largest_cohort, messages_per_worker, run_cohort
from fedprune_app.core.named import ValueDict, Values
from fedprune_app.core.rng import derive_seed
from fedprune_app.engine.background import background, begin_work, error_reply, hold
from fedprune_app.engine.flower_private import (
    SUPERLINK_NODE_ID,
    Run,
    TaskIdentity,
    set_answered_id,
    set_message_id,
)

# Flower's apps, or equivalent functions
ClientApp = Callable[[Message, Context], Message]
ServerApp = Callable[[Grid, Context], None]
_shares_disk: ContextVar[bool | None] = ContextVar("_shares_disk", default=None)  # None outside our simulations


@contextmanager
def simulated_client(shares_disk: bool) -> Iterator[None]:
    """Make :func:`is_simulated` return True within the context, which only simulations enter.

    ``shares_disk`` is whether the server is on the same machine.
    """
    token = _shares_disk.set(shares_disk)
    try:
        yield
    finally:
        _shares_disk.reset(token)


def shares_disk_with_server() -> bool:
    """Return whether the current client certainly shares the server's machine, so that the server syncs its files."""
    return _shares_disk.get() is True


def is_simulated() -> bool:
    """Return whether the current client is simulated: by our engines, or by Flower's, whose clients are Ray actors.

    Everything else counts as a node of a deployment, independent of the run's configuration: a node is a process of its
    own, which no message turns into an actor.
    """
    return _shares_disk.get() is not None or _is_ray_actor()


def _is_ray_actor() -> bool:
    ray = sys.modules.get("ray")  # an actor has imported it; a node does not import it just for this check
    return ray is not None and ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None


# --- the grid ---------------------------------------------------------------------------------------------------------


RUN_ID = 1


class SimulatedGrid(Grid):
    """A Grid whose ``num_clients`` nodes have partition ids 0, 1, ..., and arbitrary node ids, as Flower's."""

    def __init__(self, num_clients: int, run_config: Values) -> None:
        self.num_nodes = num_clients  # fixed: no node joins later
        self._run_config = dict(run_config)
        self._contexts = {}
        for client in range(num_clients):
            node_id = derive_seed(client, "node-id")
            node_config: ValueDict = {"partition-id": client, "num-partitions": num_clients}
            self._contexts[node_id] = Context(RUN_ID, node_id, node_config, RecordDict(), self._run_config)
        self._largest_cohort = largest_cohort(run_config)
        self._pending: dict[str, Message] = {}
        self._ids = itertools.count(1)

    def serve(self, server_app: ServerApp) -> None:
        """Run a federation to its end on this grid; exceptions of the ServerApp are passed on."""
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = RUN_ID, RUN_ID, SUPERLINK_NODE_ID
        server_app(self, Context(RUN_ID, SUPERLINK_NODE_ID, {}, RecordDict(), self._run_config))

    def set_run(self, run: Run) -> None:
        """Do nothing, because there is only one run."""

    @property
    def run(self) -> Run:
        return Run.create_empty(RUN_ID)

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        message_ids = []
        for message in messages:
            message_id = str(next(self._ids))
            set_message_id(message, message_id)
            self._pending[message_id] = message
            message_ids.append(message_id)
        return message_ids

    def _context(self, message: Message) -> Context:
        return self._contexts[message.metadata.dst_node_id]


def answers(
    app: ClientApp, requests: Sequence[tuple[Message, Context]], shares_disk: bool = True
) -> Iterator[tuple[int, Message]]:
    """Yield the number of each message and the reply to it; the clients run as a cohort.

    As on the other engines, a client's failure is a reply. ``shares_disk`` is whether the server is on the same
    machine. Replies may be unfinished, see :func:`fedprune_app.engine.background.finished`.
    """

    def answer(message: Message, context: Context) -> Message:
        begin_work()
        try:
            with simulated_client(shares_disk):
                reply = app(message, context)
        except Exception as error:
            reply = error_reply(error, message)
        hold(reply, message)
        return reply

    works = [lambda request=request: answer(*request) for request in requests]
    yield from run_cohort(works)


@contextmanager
def quiet() -> Iterator[None]:
    """Make Flower log only errors within the context, because a progress bar is shown.

    The environment variable FEDPRUNE_LOG sets another level.
    """
    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(os.environ.get("FEDPRUNE_LOG", "ERROR"))
    try:
        yield
    finally:
        logger.setLevel(level)


# --- in this process --------------------------------------------------------------------------------------------------


class InProcessGrid(SimulatedGrid):
    """Simulated clients in this process, which run when their replies are pulled.

    It is for breakpoints, for tests, and for machines without Ray. Only the transport differs: it is a dictionary.
    """

    def __init__(self, client_app: ClientApp, num_clients: int, run_config: Values) -> None:
        super().__init__(num_clients, run_config)
        self._client_app = client_app

    def serve(self, server_app: ServerApp) -> None:
        with background():
            super().serve(server_app)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Run the clients with these messages, cohort by cohort as the result is iterated."""
        pending_ids = [message_id for message_id in message_ids if message_id in self._pending]
        size = messages_per_worker(len(pending_ids), 1, self._largest_cohort)
        for start in range(0, len(pending_ids), size):
            ids = pending_ids[start : start + size]
            messages = [self._pending.pop(message_id) for message_id in ids]
            requests = [(message, self._context(message)) for message in messages]
            del messages
            for number, reply in answers(self._client_app, requests):
                set_answered_id(reply, ids[number])
                yield reply

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return list(self.pull_messages(self.push_messages(messages)))


def run_in_process(server_app: ServerApp, client_app: ClientApp, num_clients: int, run_config: Values) -> None:
    """Run a federation to its end in this process; exceptions of the ServerApp are passed on."""
    InProcessGrid(client_app, num_clients, run_config).serve(server_app)
