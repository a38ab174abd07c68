"""A client is simulated where a simulation's own code lets it answer: a Grid of ours, or an actor on Ray.

Everything else counts as a node of a deployment, whatever the run's configuration says.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_beside_server: ContextVar[bool | None] = ContextVar("_beside_server", default=None)  # None: in no simulation of ours


@contextmanager
def answering_in_simulation(beside_server: bool) -> Iterator[None]:
    """Let :func:`is_simulated` return True until the block ends; only simulations enter it.

    ``beside_server`` says whether the server is on the same machine.
    """
    token = _beside_server.set(beside_server)
    try:
        yield
    finally:
        _beside_server.reset(token)


def is_beside_server() -> bool:
    """Return whether the client at work shares the server's machine for certain, so that the server syncs its files."""
    return _beside_server.get() is True


def is_simulated() -> bool:
    """Return whether the client at work is one of a simulation: of ours, or of Flower's, whose clients are Ray actors.

    A node of a deployment is a process of its own, which no message makes an actor.
    """
    return _beside_server.get() is not None or _is_ray_actor()


def _is_ray_actor() -> bool:
    ray = sys.modules.get("ray")  # in an actor it is there; a node does not import it for this question
    return ray is not None and ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None
