"""A node's place in a run: its client number, its folders, and its operator's settings."""

from dataclasses import dataclass
from pathlib import Path

from fedprune_app.config import NO_POLICY, Policy


@dataclass(frozen=True)
class NodeContext:
    """Which client of a run a node is, and its operator's settings.

    * ``client_id``: the client's number.
    * ``num_clients``: the number of clients that share the data; 0 if the client has data of its own.
    * ``state_dir``: the folder below which the client keeps its state.
    * ``capacity``: the largest density that the node can train, if its operator sets one.
    * ``run_key``: the name of the client's run.
    * ``policy``: the operator's rules for every run.
    """

    client_id: int
    num_clients: int
    state_dir: Path
    capacity: float | None = None
    run_key: str = ""
    policy: Policy = NO_POLICY

    @property
    def has_own_data(self) -> bool:
        """Return whether the client has data of its own, all of which it uses."""
        return self.num_clients == 0

    @property
    def share(self) -> tuple[int, int]:
        """The client's part of the data: (k, n) for part k of n."""
        return (0, 1) if self.has_own_data else (self.client_id, self.num_clients)
