"""Which client of a run a node is, and what its operator gives it."""

from dataclasses import dataclass
from pathlib import Path

from fedprune_app.config import NO_POLICY, Policy


@dataclass(frozen=True)
class NodeContext:
    """A place says which client of a run a node is, and what its operator gives it.

    * ``client_id``: the client's number.
    * ``num_clients``: how many clients share the data. It is 0 where the client has data of its own.
    * ``state_dir``: the folder below which the client keeps its state.
    * ``capacity``: the density that the node can bear, where its operator says so.
    * ``run_key``: the name of the run that the client is in.
    * ``policy``: what its operator asks of every run.
    """

    client_id: int
    num_clients: int
    state_dir: Path
    capacity: float | None = None
    run_key: str = ""
    policy: Policy = NO_POLICY

    @property
    def has_own_data(self) -> bool:
        """Say whether the client has data of its own, all of which it takes."""
        return self.num_clients == 0

    @property
    def share(self) -> tuple[int, int]:
        """The part of the data that the client has: k and n, for part k of n."""
        return (0, 1) if self.has_own_data else (self.client_id, self.num_clients)
