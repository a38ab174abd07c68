"""A client is simulated where a simulation's own code lets it answer: a Grid of ours, or an actor on Ray.

Everything else counts as a node of a deployment, whatever the run's configuration says.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_answers_in_simulation: ContextVar[bool] = ContextVar("_answers_in_simulation", default=False)
_is_beside_server: ContextVar[bool] = ContextVar("_is_beside_server", default=False)


@contextmanager
def answering_in_simulation(beside_server: bool) -> Iterator[None]:
    """Let :func:`is_simulated` return True until the block ends; only simulations enter it.

    ``beside_server`` says whether the server is on the same machine.
    """
    tokens = _answers_in_simulation.set(True), _is_beside_server.set(beside_server)
    try:
        yield
    finally:
        _answers_in_simulation.reset(tokens[0])
        _is_beside_server.reset(tokens[1])


def is_beside_server() -> bool:
    """Return whether the client at work shares the server's machine for certain, so that the server syncs its files."""
    return _is_beside_server.get()


def is_simulated() -> bool:
    """Return whether the client at work is one of a simulation: of ours, or of Flower's, whose clients are Ray actors.

    A node of a deployment is a process of its own, which no message makes an actor.
    """
    return _answers_in_simulation.get() or _is_ray_actor()


def _is_ray_actor() -> bool:
    ray = sys.modules.get("ray")  # in an actor it is there; a node does not import it for this question
    return ray is not None and ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None
