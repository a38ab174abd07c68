"""The Ray actors of Flower's simulation answer cohorts of messages; :mod:`.ray_actors` puts them there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ray
from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp

from fedprune_app.engine.flower_private import BasicActorPool, ErrorCode
from fedprune_app.engine.simulated_grid import answers

Asked = tuple[Message, Context]


@ray.remote
class ClientsOfFlower:
    """These are the clients that a process answers for, whichever they are."""

    def answer(
        self, load: Callable[[], ClientApp], asked: Sequence[Asked], server: str
    ) -> Iterator[tuple[int, Message]]:
        """Yield the number of each message and the reply to it; Ray's node of the server has the id ``server``."""
        yield from answers(load(), asked, _node_id() == server)

    def terminate(self) -> None:
        """End this process, as Flower asks at the end of a simulation."""
        ray.actor.exit_actor()  # type: ignore[no-untyped-call]


def answered(backend: Any, asked: Sequence[Asked]) -> Iterator[Message]:
    """Yield the reply to each message that an idle actor of Flower's ``backend`` is asked.

    If the actor dies, a new one takes its place. If one client had not answered yet, its process died, and its reply is
    an error. If several had not, nobody knows whose fault it was: each of them is asked again, alone. Its state is that
    before the round, so it answers the same.
    """
    pool: BasicActorPool = backend.pool
    actor: Any = pool.pool.pop()
    left = dict(enumerate(asked))
    try:
        for each in actor.answer.options(num_returns="streaming").remote(backend.app_fn, asked, _node_id()):
            number, reply = ray.get(each)
            del left[number]
            yield reply
    except Exception as error:  # the process died, or never could begin
        pool.pool.append(pool.create_actor_fn())  # type: ignore[no-untyped-call]
        reason = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, f"{type(error).__name__}: {error}")
    else:
        pool.pool.append(actor)
        return
    if len(left) == 1:
        ((message, _),) = left.values()
        yield Message(reason, reply_to=message)
        return
    for each in left.values():
        yield from answered(backend, [each])


def _node_id() -> str:
    """Return the id of Ray's node on which this process is."""
    found: str = ray.get_runtime_context().get_node_id()
    return found
