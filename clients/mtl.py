"""MTL, the client half: SGD on the local loss and on this client's part of the regulariser of ``strategies/mtl.py``."""

from clients.base import ImageClient, Update
from clients.task import Task
from fedprune_app.core.named import TensorDict
from fedprune_app.engine.store import State
from fedprune_app.learning.training import proximal


class MTLClient(ImageClient):
    """Train the client's own model; other models affect it only through the anchor."""

    not_private = ""  # the regulariser is made of released models

    def begin(self, task: Task, state: State) -> TensorDict:
        return self.own_model(state)

    def local_update(self, task: Task, state: State) -> Update:
        precision = task.fields.get("precision")
        strength = self.config.mtl.strength * float(precision or 0.0)
        anchor = {name: tensor.to(self.device) for name, tensor in task.payload.tensors.items()}
        pull = proximal(anchor, strength) if anchor else None
        return self.dense_update(task, state, self.shared, adjust_gradients=pull, depends_on=precision)
