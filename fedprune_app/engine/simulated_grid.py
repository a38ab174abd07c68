"""A Grid of simulated clients knows their contexts and holds messages until they are answered; engines differ in where.

The same ServerApp and ClientApp objects run as anywhere, and messages are encoded as on any other engine.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedprune_app.core.cohort import largest_cohort, work_in_cohort
from fedprune_app.core.rng import derive_seed
from fedprune_app.engine.flower_private import (
    SUPERLINK_NODE_ID,
    Run,
    TaskIdentity,
    set_message_id,
)
from fedprune_app.engine.simulated import answering_in_simulation

RUN_ID = 1
# the code of an error that a client raised, the one that Flower has for it
RAISED = 2


class SimulatedGrid(Grid):
    """The grid has ``num_clients`` nodes with partition ids 0, 1, ...; node ids are arbitrary, as Flower's are."""

    def __init__(self, num_clients: int, run_config: Mapping[str, Any]) -> None:
        self.num_nodes = num_clients  # that there will ever be
        self._run_config = dict(run_config)
        self._contexts = {}
        for client in range(num_clients):
            node_id = derive_seed(client, "node-id")
            node_config: dict[str, Any] = {"partition-id": client, "num-partitions": num_clients}
            self._contexts[node_id] = Context(RUN_ID, node_id, node_config, RecordDict(), self._run_config)
        self._largest_cohort = largest_cohort(run_config)
        self._pending: dict[str, Message] = {}
        self._ids = itertools.count(1)

    def serve(self, server_app: ServerApp) -> None:
        """Run a federation to its end on this grid; whatever the ServerApp raises is raised."""
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = RUN_ID, RUN_ID, SUPERLINK_NODE_ID
        server_app(self, Context(RUN_ID, SUPERLINK_NODE_ID, {}, RecordDict(), self._run_config))

    def set_run(self, run: Run) -> None:
        """Do nothing, since there is only one run."""

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


def error_reply(error: Exception, message: Message) -> Message:
    return Message(Error(RAISED, f"{type(error).__name__}: {error}"), reply_to=message)


def answers(
    app: ClientApp, requests: Sequence[tuple[Message, Context]], beside_server: bool = True
) -> Iterator[tuple[int, Message]]:
    """Yield the number of each message and the reply to it; the clients work as a cohort.

    As on the other engines, a client's failure is a reply. ``beside_server`` says whether the server is on the same
    machine.
    """

    def answer(message: Message, context: Context) -> Message:
        try:
            with answering_in_simulation(beside_server):
                return app(message, context)
        except Exception as error:
            return error_reply(error, message)

    works = [lambda request=request: answer(*request) for request in requests]
    yield from work_in_cohort(works)
