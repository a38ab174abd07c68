"""Simulated clients whose process dies are replaced.

Flower puts the Ray actor of a client that died back into its pool, where it fails every message it is given at once,
and so eats the round. Here a new actor takes its place. The client whose work ended the process is reported as failed;
its message is not tried again.
"""

from __future__ import annotations

import sys
from typing import Any

from flwr.app import Context, Message


def replace_dead_actors() -> None:
    """In Flower's simulation process, before its pool exists, teach the pool to replace. Elsewhere, nothing."""
    if "flwr.simulation.app" not in sys.modules:
        return
    from flwr.simulation.ray_transport.ray_actor import BasicActorPool
    from ray.exceptions import RayActorError

    fetch = BasicActorPool.fetch_result_and_return_actor_to_pool

    def fetch_or_replace(self: BasicActorPool, future: Any) -> tuple[Message, Context]:
        try:
            return fetch(self, future)
        except RayActorError:
            # Flower's caller now returns this future's actor to the pool: let it be a new one
            self._future_to_actor[future] = self.create_actor_fn()  # type: ignore[no-untyped-call]
            raise

    BasicActorPool.fetch_result_and_return_actor_to_pool = fetch_or_replace  # type: ignore[method-assign]
