"""Flower's simulation on Ray, adapted: dead clients are replaced, and as many train at a time as there are actors.

Flower puts the Ray actor of a client that died back into its pool, where it fails every message it is given at once,
and so eats the round. Here a new actor takes its place. The client whose work ended the process is reported as failed;
its message is not tried again.

A thread of Flower's waits for each client that is at work. Flower takes Python's default number of threads for that,
which is at most 32 and follows the CPUs of this machine, whatever the cluster has. Here the number of actors decides.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from flwr.app import Context, Message


class _UnlimitedExecutor(ThreadPoolExecutor):
    """A thread for each task that comes while all others are busy, however many."""

    def __init__(self) -> None:
        super().__init__(max_workers=sys.maxsize)


def adapt_simulation() -> None:
    """In Flower's simulation process, before its pool exists, change what the pool does. Elsewhere, nothing."""
    if "flwr.simulation.run_simulation" not in sys.modules:
        return
    from flwr.server.superlink.fleet.vce import vce_api
    from flwr.simulation.ray_transport.ray_actor import BasicActorPool
    from ray.exceptions import RayActorError

    vce_api.ThreadPoolExecutor = _UnlimitedExecutor  # type: ignore[attr-defined, assignment]
    fetch = BasicActorPool.fetch_result_and_return_actor_to_pool

    def fetch_or_replace(self: BasicActorPool, future: Any) -> tuple[Message, Context]:
        try:
            return fetch(self, future)
        except RayActorError:
            # Flower's caller now returns this future's actor to the pool: let it be a new one
            self._future_to_actor[future] = self.create_actor_fn()  # type: ignore[no-untyped-call]
            raise

    BasicActorPool.fetch_result_and_return_actor_to_pool = fetch_or_replace  # type: ignore[method-assign]
