"""Flower's simulation on Ray is adapted: dead clients are replaced, and as many train at a time as there are actors.

When a client dies, Flower puts its Ray actor back into the pool. The actor then fails every message at once, and so
spoils the round. Here a new actor takes its place. The client whose work ended the process is reported as failed, and
its message is not tried again.

A thread of Flower's waits for each client that is at work. Flower takes Python's default number of threads for that,
which is at most 32 and follows the CPUs of this machine, whatever the cluster has. Here the number of actors decides.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from flwr.app import Context, Message

from fedprune_app.engine import flower_private


class _UnlimitedExecutor(ThreadPoolExecutor):
    """The executor starts a thread for each task that comes while all others are busy, however many there are."""

    def __init__(self) -> None:
        super().__init__(max_workers=sys.maxsize)


def adapt_simulation() -> None:
    """Change what the actor pool does, in Flower's simulation process before the pool exists; elsewhere do nothing."""
    if flower_private.if_imported("_run_simulation") is None:
        return
    from ray.exceptions import RayActorError

    from fedprune_app.engine.flower_private import BasicActorPool

    flower_private.replace("ThreadPoolExecutor", _UnlimitedExecutor)
    fetch = BasicActorPool.fetch_result_and_return_actor_to_pool

    def fetch_or_replace(self: BasicActorPool, future: Any) -> tuple[Message, Context]:
        try:
            return fetch(self, future)
        except RayActorError:
            # Flower's caller now returns this future's actor to the pool: let it be a new one
            self._future_to_actor[future] = self.create_actor_fn()  # type: ignore[no-untyped-call]
            raise

    BasicActorPool.fetch_result_and_return_actor_to_pool = fetch_or_replace  # type: ignore[method-assign]
