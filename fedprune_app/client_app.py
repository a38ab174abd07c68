"""The ClientApp: unpack a message, call the system's client, pack the reply."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp

from clients.base import with_letters
from clients.node import Node, payload_names
from fedprune_app.config import Config, ConfigError, parse_config
from fedprune_app.core.payload import Payload
from fedprune_app.data.errors import FileError
from fedprune_app.engine import wire
from fedprune_app.engine.ray_actors import adapt_simulation
from fedprune_app.registry import SYSTEMS, check_names
from fedprune_app.run_folder import client_state_folder

log = logging.getLogger("flwr.fedprune")
adapt_simulation()  # Flower loads this module before it makes the actors
app = ClientApp()


NODE_KEYS = ("partition-id", "num-partitions", "capacity", "data-dir", "state-dir")
OWN = ("image-folder", "text")
"""Datasets that a client may have to itself."""


def node_settings(run_config: Mapping[str, Any], node_config: Mapping[str, Any]) -> Config:
    """The run's configuration as this node has it: a node's operator says where its data and state are, not the run.

    Raises :class:`ConfigError` for an unknown key of the node-config, or a path that is not absolute.
    """
    for key in node_config:
        if key not in NODE_KEYS:
            raise ConfigError(f"node-config has {key}={node_config[key]!r}, allowed: {', '.join(NODE_KEYS)}")
    own = {key: node_config[key] for key in ("data-dir", "state-dir") if key in node_config}
    for key, value in own.items():
        if not (isinstance(value, str) and Path(value).is_absolute()):
            raise ConfigError(f"node-config has {key}={value!r}, allowed: an absolute path")
    return check_names(parse_config({**run_config, **own}))


def make_client(context: Context, message: Message, kind: type[Node] | None = None) -> Node:
    """The client that answers: of the system's class, or of another ``kind``."""
    config = node_settings(context.run_config, context.node_config)
    torch.set_num_threads(config.num_threads)
    fields = wire.fields_of(message.content)
    partition, num_partitions = place_of(context.node_config, fields, config.dataset)
    run_key = str(fields.get("run-key"))
    folder = client_state_folder(config, context.run_id, run_key)
    capacity = context.node_config.get("capacity")
    kind = kind or SYSTEMS[config.system].client
    return kind(config, partition, num_partitions, folder, check_capacity(capacity), run_key)


def place_of(node_config: Mapping[str, Any], fields: wire.Fields, dataset: str) -> tuple[int, int]:
    """A client's number and how many share the data: what its operator says; else it has data of its own, shared by 0.

    The server then gives it its number with each message. Raises :class:`ConfigError` for what cannot be.
    """
    partition, num_partitions = (node_config.get(key) for key in ("partition-id", "num-partitions"))
    if "partition-id" not in node_config and "num-partitions" not in node_config:
        if "data-dir" not in node_config:
            allowed = "partition-id and num-partitions, or a data-dir of its own"
            raise ConfigError(f"node-config has neither partition-id nor data-dir, allowed: {allowed}")
        if dataset not in OWN:
            raise ConfigError(f"dataset is {dataset!r}, allowed on a node without partition-id: {', '.join(OWN)}")
        return int(wire.number(fields, "partition", 0, 2**31)), 0
    if not isinstance(partition, int) or not isinstance(num_partitions, int) or not 0 <= partition < num_partitions:
        given = f"partition-id={partition!r}, num-partitions={num_partitions!r}"
        raise ConfigError(f"node-config has {given}, allowed: whole numbers, 0 <= partition-id < num-partitions")
    return partition, num_partitions


def check_capacity(value: object) -> float | None:
    """The density a node can bear, of ``node-config capacity``, or None; :class:`ConfigError` for anything else."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ConfigError(f"node-config has capacity={value!r}, allowed: a number above 0 and at most 1")
    return float(value)


def _unpack(message: Message, client: Node) -> tuple[list[Any], dict[str, Any]]:
    """Flower's arrays and config: the payload, then the letters under names of their own (see ``clients.base``)."""
    payload = wire.payload_of(message.content, client.message_schema().max_bytes)
    letters, refused = wire.peer_updates_of(message.content, client.letter_schema())
    everything = with_letters(payload, letters)
    fields: dict[str, Any] = {**wire.fields_of(message.content), "refused": refused}
    return everything.to_ndarrays(), {**fields, **payload_names(everything)}


@contextmanager
def _discreet(context: Context) -> Iterator[None]:
    """On a node with data of its own the log alone names files: errors go to the server."""
    try:
        yield
    except FileError as error:
        if "partition-id" in context.node_config:
            raise
        log.error("%s", error)
        raise ValueError(error.unnamed) from None


@app.query()
def query(message: Message, context: Context, kind: type[Node] | None = None) -> Message:
    """Who is there: the answer to the server's first message. Before a run is resumed, also what is lost there."""
    with _discreet(context):
        client, fields = make_client(context, message, kind), wire.fields_of(message.content)
        asked = fields.get("states")
        told = client.get_properties(fields) if asked is None else client.lost_states(map(int, asked))
    return Message(wire.pack(None, told), reply_to=message)


@app.train()
def train(message: Message, context: Context, kind: type[Node] | None = None) -> Message:
    """One local update."""
    with _discreet(context):
        client = make_client(context, message, kind)
        arrays, num_examples, metrics = client.fit(*_unpack(message, client))
    names = metrics.pop("tensor-names"), metrics.pop("mask-names")
    payload = Payload.from_ndarrays(arrays, *names)
    encoded: ArrayRecord | None = wire.to_arrays(payload) if payload.tensors else None
    return Message(wire.pack(encoded, {**metrics, "num-examples": num_examples}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context, kind: type[Node] | None = None) -> Message:
    """Accuracies on the client's own data."""
    with _discreet(context):
        client = make_client(context, message, kind)
        _, num_examples, metrics = client.evaluate(*_unpack(message, client))
    return Message(wire.pack(None, {**metrics, "num-examples": num_examples}), reply_to=message)
