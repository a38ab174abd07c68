"""Fed-SPA, the client half: DP-SGD on a random set of coordinates, all others stay where the server has them.

Hu, Gong, Guo, IJCAI 2021. Each example's gradient is cut down to the set before it is clipped, and noise falls on the
set alone. Nothing is pruned: the client computes with, and receives, the whole network.
"""

from clients.base import Update
from clients.fedavg import FedAvgClient
from clients.task import Task
from fedprune_app.core.masks import packed, random_coordinates
from fedprune_app.core.named import TensorDict
from fedprune_app.core.payload import Payload
from fedprune_app.engine import wire
from fedprune_app.engine.store import State, grouped
from fedprune_app.models import vision


class FedSPAClient(FedAvgClient):
    """A Fed-SPA client sends the values of its round's coordinates, in their order; the server has drawn the same."""

    not_private = ""  # coordinates follow from a number of the server's, which has only what was released

    def coordinates(self, task: Task) -> TensorDict:
        """Return the round's set of coordinates. Raises ``ValueError`` for a seed that cannot be."""
        seed = int(wire.number(task.fields, "coordinates", 0, 2**63 - 1))
        tensors = vision.named_tensors(self.model)
        return random_coordinates({name: tensors[name].shape for name in self.shared}, self.config.fedspa.share, seed)

    def local_update(self, task: Task, state: State) -> Update:
        coordinates = self.coordinates(task)
        active = {name: mask for name, mask in coordinates.items() if name in self.sizes}
        result, tensors = self.train_from_start(task, state, active=active)
        payload = Payload(packed({name: tensors[name] for name in self.shared}, coordinates))
        return Update(payload, State(grouped(weights=tensors)), result, self.costs.training())
