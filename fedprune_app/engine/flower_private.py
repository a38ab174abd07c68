"""All names of Flower outside its documented API, and the differences between its releases.

Flower's public modules are ``flwr.app``, ``flwr.serverapp``, ``flwr.clientapp`` and ``flwr.client``, which are imported
directly. Every other name may move with any release. So only this module imports such names from Flower: :data:`PLACES`
lists the module of each. A test checks each name, and reports which one moved.

A name is imported on first use. So a command that needs no Flower does not import Flower, and a ClientApp imports only
the few names that it needs.

Releases differ in how SuperNodes reach the SuperLink:

* Up to 1.39 nodes speak gRPC, at a port of their own.
* From 1.40 on nodes speak HTTP, at the port of the Control API and the Runtime API.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the names in PLACES used in annotations or as base classes; the others are Any
    from flwr.app import Message
    from flwr.supercore.auth.typing import AccountInfo as AccountInfo
    from flwr.supercore.run import Run as Run
    from flwr.superlink.auth_plugin import ControlAuthnPlugin as ControlAuthnPlugin
    from flwr.superlink.grid import HttpGrid as HttpGrid

_FIRST, _LAST = "1.39", "1.42"  # as in pyproject.toml

_OBJECTS = "flwr.supercore.inflatable.inflatable_object"
_FETCHING = "flwr.supercore.inflatable.inflatable_utils"
# the module of each private name
PLACES = {
    "ACCESS_TOKEN_KEY": "flwr.common.constant",
    "ACCESS_TOKEN_STORE_KEY": "flwr.cli.constant",
    "AUTHN_TYPE_STORE_KEY": "flwr.cli.constant",
    "AccountInfo": "flwr.supercore.auth.typing",
    "ArrayChunk": "flwr.app.message.arraychunk",
    "AuthnType": "flwr.common.constant",
    "ConfirmMessageReceivedRequest": "flwr.proto.message_pb2",
    "ControlAuthnPlugin": "flwr.superlink.auth_plugin",
    "EventType": "flwr.supercore.telemetry",
    "HttpGrid": "flwr.superlink.grid",
    "NOOP_ACCOUNT_NAME": "flwr.common.constant",
    "NOOP_FEDERATION_ID": "flwr.supercore.constant",
    "NOOP_FLWR_AID": "flwr.common.constant",
    "ObjectPullError": _FETCHING,
    "ObjectPushError": _FETCHING,
    "PullAppMessagesRequest": "flwr.proto.runtime_pb2",
    "REFRESH_TOKEN_STORE_KEY": "flwr.cli.constant",
    "Run": "flwr.supercore.run",
    "SUPERLINK_NODE_ID": "flwr.common.constant",
    "TaskIdentity": "flwr.supercore.task_identity",
    "_run_simulation": "flwr.simulation.run_simulation",
    "add_exit_handler": "flwr.supercore.exit",
    "flower_superlink": "flwr.superlink.cli.flower_superlink",
    "get_object_body": _OBJECTS,
    "get_object_head_values_from_object_content": _OBJECTS,
    "inflate_object_from_contents": _FETCHING,
    "iterate_object_tree": _OBJECTS,
    "load_control_authn_plugin": "flwr.superlink.cli.flower_superlink",
    "make_pull_object_fn_protobuf": "flwr.supercore.inflatable.inflatable_protobuf_utils",
    "pull_objects": _FETCHING,
    "recorddict_to_proto": "flwr.common.serde",
}


def __getattr__(name: str) -> Any:
    if (module := PLACES.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        attribute = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        problem = f"Flower {version('flwr')} has no {name} in {module}"
        raise ImportError(f"{problem}, allowed: Flower {_FIRST} to {_LAST} ({error})") from error
    globals()[name] = attribute
    return attribute


def if_imported(name: str) -> Any:
    """Return the object called ``name`` if its module was already imported, else None; imports nothing."""
    return getattr(sys.modules.get(PLACES[name]), name, None)


def replace(name: str, new: object) -> None:
    """Replace an existing ``name`` in Flower's own module by ``new``."""
    __getattr__(name)
    setattr(import_module(PLACES[name]), name, new)


def has_fleet_port() -> bool:
    """Return whether nodes connect to the SuperLink at a separate port; otherwise they use the Control API's port."""
    major, minor = version("flwr").split(".")[:2]
    return (int(major), int(minor)) < (1, 40)


def set_message_id(message: Message, message_id: str) -> None:
    """Set a message's id, as a SuperLink does."""
    message.metadata.__dict__["_message_id"] = message_id


def set_answered_id(reply: Message, message_id: str) -> None:
    """Set the message id that a reply answers, instead of the one that the reply itself names."""
    reply.metadata.__dict__["_reply_to_message_id"] = message_id
