"""The ClientApp: it unpacks a message, calls the system's client, and packs the reply."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from clients.context import NodeContext
from clients.node import Node
from fedprune_app import plugins
from fedprune_app.config import PolicyError
from fedprune_app.engine import wire
from fedprune_app.engine.printable import keep_logs_printable
from fedprune_app.engine.store import client_state_folder
from fedprune_app.learning.device import prepare_torch
from fedprune_app.preflight.node import check_capacity, node_settings, number_of
from fedprune_app.registry import SYSTEMS

log = logging.getLogger("flwr.fedprune")
app = ClientApp()


def make_client(context: Context, message: Message, kind: type[Node] | None = None) -> Node:
    """Create the client that answers a message: of the system's class, or of ``kind``, for an audit."""
    keep_logs_printable()
    config, policy = node_settings(context.run_config, context.node_config)
    prepare_torch(config)
    fields = wire.fields_of(message.content)
    client_id, num_clients = number_of(context.node_config, fields, config.dataset)
    run_key, capacity = str(fields.get("run-key")), check_capacity(context.node_config.get("capacity"))
    now, then = (client_id, capacity), (fields.get("partition"), fields.get("capacity"))
    if "state-round" in fields and now != then:  # it is not the registration
        raise ValueError(f"partition-id and capacity of the node are {now}, allowed: {then}, as the run began")
    place = NodeContext(
        client_id,
        num_clients,
        client_state_folder(config, context.run_id, run_key),
        capacity,
        run_key,
        policy,
    )
    kind = kind or SYSTEMS[config.system].client
    with _redacted_logs(context):
        return kind(config, place)


@contextmanager
def _redacted_logs(context: Context) -> Iterator[None]:
    """Reduce errors to one fixed line on a node with its own data, once these may have been read.

    Errors are sent to the server, which chooses what is done with the data. A policy's error depends on disclosed
    settings alone.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        if "partition-id" in context.node_config or isinstance(error, PolicyError):
            raise
        log.error("%s", plugins.error_line(error))
        raise ValueError("the node cannot do this with data of its own; the node's log says why") from None


@app.query()
def query(message: Message, context: Context, kind: type[Node] | None = None) -> Message:
    """Answer the server's registration message.

    Before a run is resumed, also report which versions of the client's state are lost.
    """
    with plugins.located():
        client = make_client(context, message, kind)
        with _redacted_logs(context):
            fields = wire.fields_of(message.content)
            versions = fields.get("states")
            answer = client.get_properties(fields) if versions is None else client.lost_states(map(int, versions))
            return client.pack(message, "registration", answer)


@app.train()
@app.evaluate()
def answer(message: Message, context: Context, kind: type[Node] | None = None) -> Message:
    with plugins.located():
        client = make_client(context, message, kind)
        with _redacted_logs(context):
            return client.reply_to(message)


train = evaluate = answer  # one name per type of message
