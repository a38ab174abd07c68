"""This Flower Grid runs the ClientApp in this process: for breakpoints, for tests, and for machines without Ray.

Only the transport differs from that of other engines: it is a dictionary. Clients work when their
replies are asked for.
"""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from flwr.app import Message
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from fedprune_app.core.cohort import share_of
from fedprune_app.engine.flower_private import set_answered_id
from fedprune_app.engine.simulated_grid import SimulatedGrid, answers


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


class InProcessGrid(SimulatedGrid):
    """The clients of this grid answer in this process, when their replies are asked for."""

    def __init__(self, client_app: ClientApp, num_clients: int, run_config: Mapping[str, Any]) -> None:
        super().__init__(num_clients, run_config)
        self._client_app = client_app

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Run the clients whose replies are asked for, cohort by cohort as the result is iterated."""
        pending_ids = [message_id for message_id in message_ids if message_id in self._pending]
        size = share_of(len(pending_ids), 1, self._largest_cohort)
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


def run_in_process(
    server_app: ServerApp, client_app: ClientApp, num_clients: int, run_config: Mapping[str, Any]
) -> None:
    """Run a federation to its end in this process; whatever the ServerApp raises is raised."""
    InProcessGrid(client_app, num_clients, run_config).serve(server_app)
