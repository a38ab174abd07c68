"""Fed-SPA, the client half: DP-SGD on a random set of coordinates; all others keep the server's values.

Hu, Gong, Guo, IJCAI 2021. Each example's gradient is restricted to the set before it is clipped, and only the set gets
noise. Nothing is pruned: the client receives the whole network and computes with it.
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
    """Train and send the round's coordinates, in their order; the server draws the same ones."""

    not_summed = "its clients send different coordinates"
    not_private = ""  # coordinates follow from the server's seed, which does not depend on private data

    def coordinates(self, task: Task) -> TensorDict:
        """Return the round's set of coordinates. Raises ``ValueError`` for an invalid seed."""
        seed = int(wire.number(task.fields, "coordinates", 0, 2**63 - 1))
        tensors = vision.named_tensors(self.model)
        return random_coordinates({name: tensors[name].shape for name in self.shared}, self.config.fedspa.share, seed)

    def local_update(self, task: Task, state: State) -> Update:
        coordinates = self.coordinates(task)
        active = {name: mask for name, mask in coordinates.items() if name in self.sizes}
        result, tensors = self.train_from_start(task, state, active=active)
        payload = Payload(packed({name: tensors[name] for name in self.shared}, coordinates))
        return Update(payload, State(grouped(weights=tensors)), result, self.costs.training())
