"""Ditto, the client half: some epochs on the global model, which is sent, and some on the personal one, which is not.

Li, Hu, Beirami, Smith, ICML 2021, Algorithm 1. As in Dis-PFL's released code the pull is decoupled from the step: first
SGD on the local loss (clipped, decayed), then ``v ← v − η λ (v − w)`` with the updated v and the received w.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from clients.base import FederatedClient, Update
from fedprune_app.config import Config
from fedprune_app.core.payload import Payload
from fedprune_app.engine.store import State, grouped
from fedprune_app.models import vision


class DittoClient(FederatedClient):
    """State: ``weights`` are the personal model's; ``local`` what of the global model stays here (local norms)."""

    @classmethod
    def why_not_private(cls, config: Config) -> str:
        """Both models are trained privately, and both are charged: the personal one is evaluated."""
        return ""

    def round_epochs(self) -> int:
        return self.config.ditto.global_epochs + self.config.ditto.personal_epochs

    def begin(self, received: Payload, state: State) -> dict[str, Tensor]:
        return {**state.group("local"), **received.tensors}

    def personal_model(self, received: Payload, state: State) -> dict[str, Tensor]:
        return self.own_model(state)

    def local_update(self, received: Payload, state: State, round: int) -> Update:
        options = self.config.ditto
        personal = self.personal_model(received, state)
        vision.load_state_tensors(self.model, self.begin(received, state))
        trained_global = self.train(round, epochs=options.global_epochs)
        tensors = vision.state_tensors(self.model, include_buffers=True)
        payload = Payload({name: tensors[name] for name in self.shared})

        vision.load_state_tensors(self.model, personal)
        anchor = {name: received.tensors.get(name, tensor).to(self.device) for name, tensor in tensors.items()}
        step = self.config.learning_rates[round] * options.pull

        def pull(values: Mapping[str, Tensor]) -> None:
            torch._foreach_lerp_(list(values.values()), [anchor[name] for name in values], step)

        result = self.train(round, role="train personal", epochs=options.personal_epochs, after_step=pull)
        weights = vision.state_tensors(self.model, include_buffers=True)
        local = {name: tensor for name, tensor in tensors.items() if name not in self.shared}
        return Update(
            payload,
            State(grouped(weights=weights, local=local)),
            trained_global if trained_global.diverged else result,
            self.training_flops(epochs=options.global_epochs + options.personal_epochs),
        )
