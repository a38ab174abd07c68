"""This Flower Grid runs the ClientApp in this process: for breakpoints, for tests, and for machines without Ray.

The same ServerApp and ClientApp objects run, and messages are encoded as on any other engine. Only the transport
differs: it is a dictionary. Clients run one after the other, each when its reply is asked for.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedprune_app.core.rng import derive_seed
from fedprune_app.engine.simulated import answering_in_process

_RUN_ID = 1


@contextmanager
def quiet() -> Iterator[None]:
    """Let Flower log errors alone until the block ends, since a progress bar shows what matters.

    The environment variable FEDPRUNE_LOG names another level to log from.
    """
    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(os.environ.get("FEDPRUNE_LOG", "ERROR"))
    try:
        yield
    finally:
        logger.setLevel(level)


class InProcessGrid(Grid):
    """The grid has ``num_clients`` nodes with partition ids 0, 1, ...; node ids are arbitrary, as Flower's are."""

    def __init__(self, client_app: ClientApp, num_clients: int, run_config: Mapping[str, Any]) -> None:
        if num_clients < 1:
            raise ValueError(f"num-supernodes is {num_clients}, allowed: at least 1")
        self._client_app = client_app
        self._contexts = {}
        for client in range(num_clients):
            node_id = derive_seed(client, "node-id")
            node_config: dict[str, Any] = {"partition-id": client, "num-partitions": num_clients}
            self._contexts[node_id] = Context(_RUN_ID, node_id, node_config, RecordDict(), dict(run_config))
        self._pending: dict[str, Message] = {}
        self._ids = itertools.count(1)

    def set_run(self, run: Run) -> None:
        """Do nothing, since there is only one run."""

    @property
    def run(self) -> Run:
        return Run.create_empty(_RUN_ID)

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
        accepted = []
        for message in messages:
            message_id = str(next(self._ids))
            message.metadata.__dict__["_message_id"] = message_id
            self._pending[message_id] = message
            accepted.append(message_id)
        return accepted

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Run the clients whose replies are asked for, one by one as the result is iterated."""
        for message_id in message_ids:
            message = self._pending.pop(message_id, None)
            if message is not None:
                reply = self._answer(message)
                reply.metadata.__dict__["_reply_to_message_id"] = message_id  # whichever message the reply itself names
                yield reply

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return list(self.pull_messages(self.push_messages(messages)))

    def _answer(self, message: Message) -> Message:
        context = self._contexts[message.metadata.dst_node_id]
        try:
            with answering_in_process():
                return self._client_app(message, context)
        except Exception as error:  # as on the other engines: a client's failure is a reply
            code = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
            return Message(Error(code, f"{type(error).__name__}: {error}"), reply_to=message)


def run_in_process(
    server_app: ServerApp, client_app: ClientApp, num_clients: int, run_config: Mapping[str, Any]
) -> None:
    """Run a federation to its end in this process; whatever the ServerApp raises is raised."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = _RUN_ID, SUPERLINK_NODE_ID, _RUN_ID
    grid = InProcessGrid(client_app, num_clients, run_config)
    context = Context(_RUN_ID, SUPERLINK_NODE_ID, {}, RecordDict(), dict(run_config))
    server_app(grid, context)
