"""Decentralised systems, the client half: start from the average with the neighbours, train, publish the result."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from clients.base import FederatedClient, split_letters
from fedprune_app.core.aggregate import MaskedMean
from fedprune_app.core.payload import Payload
from fedprune_app.engine.store import State
from fedprune_app.engine.wire import Schema
from fedprune_app.models import vision


class GossipClient(FederatedClient):
    """State: ``weights`` are those published last, ``masks`` those they were trained under."""

    def letter_schema(self) -> Schema:
        """What a neighbour publishes: the shared tensors, the prunable ones masked where the system prunes."""
        return self.shared_schema(self.prunable if self.prunes else ())

    @property
    @abstractmethod
    def prunes(self) -> bool:
        """Whether the prunable tensors are masked."""

    @abstractmethod
    def start_masks(self, state: State) -> dict[str, Tensor]:
        """The masks to train under in this round."""

    def begin(self, received: Payload, state: State) -> dict[str, Tensor]:
        """``w_{k,t+1/2}``: the average of what the neighbours and this client published, under this round's masks.

        Whoever has nothing to average with goes on from its own model, at first the common initial one.
        """
        mixed, letters = split_letters(received)
        own, start = state.group("weights"), self.own_model(state)
        tensors: Mapping[str, Tensor] = mixed.tensors
        if letters:
            if own:
                letters[self.partition] = Payload({name: own[name] for name in self.shared}, state.group("masks"))
            mean = MaskedMean(len(letters))
            for sender, letter in letters.items():
                try:
                    mean.add(letter)
                except ValueError as error:  # finite, but too large to be summed
                    self.refuse(sender, error)
            tensors = mean.mixed()
        masks = self.start_masks(state)
        start = {**start, **tensors}
        return {name: torch.where(masks[name], t, 0) if name in masks else t for name, t in start.items()}

    def personal_model(self, received: Payload, state: State) -> dict[str, Tensor]:
        return state.group("weights") or self.begin(Payload({}), state)

    def received_scores(self, received: Payload, state: State) -> dict[str, float | None]:
        """Of a consensus model, where the system has one; what a client starts from is tested when it starts."""
        scores = {"accuracy-global": self.test_accuracy(received.tensors)}
        if self.validates == "received":
            scores["accuracy-validation"] = self.accuracy("validation")
        return scores

    def test_start(self, start: Mapping[str, Tensor]) -> dict[str, Any]:
        """Load what training starts from, and in rounds that end with an evaluation test it first."""
        vision.load_state_tensors(self.model, start)
        score = self.accuracy("test") if self.request.get("evaluates") else None
        return {} if score is None else {"accuracy-received": score}
