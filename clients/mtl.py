"""MTL, the client half: SGD on the local loss and on this client's part of the regulariser of ``strategies/mtl.py``."""

from __future__ import annotations

from torch import Tensor

from clients.base import FederatedClient, Update
from fedprune_app.config import Config
from fedprune_app.core.payload import Payload
from fedprune_app.engine.store import State, grouped
from fedprune_app.learning.hooks import proximal
from fedprune_app.models import vision


class MTLClient(FederatedClient):
    """Goes on from its own model; others' reach it through the anchor alone."""

    @classmethod
    def why_not_private(cls, config: Config) -> str:
        """The regulariser is made of what others released."""
        return ""

    def begin(self, received: Payload, state: State) -> dict[str, Tensor]:
        return self.own_model(state)

    def local_update(self, received: Payload, state: State, round: int) -> Update:
        vision.load_state_tensors(self.model, self.begin(received, state))
        strength = self.config.mtl.strength * float(self.request.get("precision", 0.0))
        anchor = {name: tensor.to(self.device) for name, tensor in received.tensors.items()}
        result = self.train(round, adjust_gradients=proximal(anchor, strength) if anchor else None)
        tensors = vision.state_tensors(self.model, include_buffers=True)
        payload = Payload({name: tensors[name] for name in self.shared})
        return Update(payload, State(grouped(weights=tensors)), result, self.training_flops())
