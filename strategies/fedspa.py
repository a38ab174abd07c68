"""Fed-SPA, the server half: clients train a random set of coordinates, the server takes an accelerated step.

Hu, Gong, Guo, "Federated Learning with Sparsification-Amplified Privacy and Adaptive Optimization", IJCAI 2021, as
Fed-LTP (Shi et al.) compares with it. The client half is ``clients/fedspa.py``.

* Each client draws in each round ``⌊p d⌋`` of all d coordinates, biases included. Only the seed is sent; the client
  returns the values in the set's order.
* The mean is over all participants; a coordinate outside a client's set counts as unchanged there.
* Fed-LTP's text names an acceleration without its formula. Here: none (default, chosen on validation data), the
  running mean of mean updates (damped momentum: undamped momentum of 1/2 doubles the step, and the noise in it), or
  Adam (Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2).
* Only parameters are accelerated. BatchNorm's running statistics are averaged: an accelerated step could make a
  variance negative.
* ε is that of plain subsampled Gaussians with sensitivity C: the paper's amplification by sparsification assumes that
  sparsified gradients are shorter, which clipping to C does not guarantee.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property

import torch
from torch import Tensor

from fedprune_app.config import ConfigError, FedSPAOptions
from fedprune_app.core import rng
from fedprune_app.core.bounds import rounded_down_text
from fedprune_app.core.masks import keep_count, packed, random_coordinates, unpacked
from fedprune_app.core.payload import Payload
from fedprune_app.engine.store import State, grouped
from fedprune_app.engine.wire import Schema
from fedprune_app.federation.clients import ImageClientInfo
from fedprune_app.federation.round import OutgoingMessage, Reply, Round, RunContext
from fedprune_app.models.names import chosen_name
from fedprune_app.models.vision import architecture, buffer_names
from strategies.dpfed import DPFed

# the server's momentum; for Adam alone, the decay of its second moment and the term added to its root
BETA1, BETA2, EPSILON = 0.5, 0.99, 1e-3


class FedSPA(DPFed):
    """The server computes ``θ^{t+1} = θ^t + step(1/K Σ_i Δ_i^t)`` with sparse Δ_i; statistics are averaged."""

    paper_formula = "32 bits per parameter down, per chosen parameter up"

    def __init__(self, context: RunContext, model: Mapping[str, Tensor], prunable: frozenset[str]) -> None:
        super().__init__(context, model, prunable)
        size = sum(tensor.numel() for tensor in self.model.values())
        if keep_count(size, self.options.share) < 1:
            raise ConfigError(
                "fedspa.share",
                self.options.share,
                f"at least {rounded_down_text(1 / size)}, so that a client has one",
                condition=f"with a model of {size:,} coordinates",
            )

    @property
    def options(self) -> FedSPAOptions:
        return self.config.fedspa

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """Return the names of the shared tensors that are parameters, without running statistics."""
        first = next(iter(self.clients.values()))
        assert isinstance(first, ImageClientInfo)
        name = chosen_name(self.config.model, self.config.dataset)
        statistics = set(buffer_names(architecture(name, first.image_shape, first.num_classes)))
        return tuple(name for name in self.model if name not in statistics)

    # --- what is sent -----------------------------------------------------------------------------------------------

    def seed_of(self, round: Round, client: int) -> int:
        return rng.derive_seed(self.config.seed, "coordinates", client, round.number)

    def coordinates(self, round: Round, client: int) -> dict[str, Tensor]:
        """Draw the coordinates that the client updates in this round: a mask per tensor."""
        shapes = {name: tensor.shape for name, tensor in self.model.items()}
        return random_coordinates(shapes, self.options.share, self.seed_of(round, client))

    def send(self, round: Round) -> Iterator[OutgoingMessage]:
        payload = Payload(self.model)
        for client in round.participants:
            yield OutgoingMessage(client, payload, fields={"coordinates": self.seed_of(round, client)})

    # --- what comes back --------------------------------------------------------------------------------------------

    def expect(self, round: Round, client: int) -> Schema:
        return Schema.like(packed(self.model, self.coordinates(round, client)))

    def begin(self, round: Round) -> None:
        super().begin(round)
        if round.number == 1:
            self.momentum = {name: torch.zeros_like(self.model[name]) for name in self.parameters}
            self.variance = {name: torch.zeros_like(self.model[name]) for name in self.parameters}

    def receive(self, round: Round, reply: Reply) -> None:
        coordinates = self.coordinates(round, reply.client)
        reply.update = Payload(unpacked(reply.update.tensors, coordinates, self.model))
        super().receive(round, reply)

    def end(self, round: Round) -> None:
        mean = self.mean.mean(self.model)
        step = self.step({name: mean[name] - self.model[name] for name in self.parameters})
        self.model = {
            name: old + self.options.server_learning_rate * step[name] if name in step else mean[name]
            for name, old in self.model.items()
        }

    def step(self, change: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the step for a mean update, with the moments of earlier rounds (momentum or Adam)."""
        if self.options.acceleration == "none":
            return change
        self.momentum = {name: BETA1 * self.momentum[name] + (1 - BETA1) * delta for name, delta in change.items()}
        if self.options.acceleration == "momentum":
            return self.momentum
        self.variance = {name: BETA2 * self.variance[name] + (1 - BETA2) * delta**2 for name, delta in change.items()}
        return {name: m / (self.variance[name].sqrt() + EPSILON) for name, m in self.momentum.items()}

    def paper_bytes(self, round: Round) -> tuple[float, float]:
        size, clients = sum(tensor.numel() for tensor in self.model.values()), len(round.participants)
        return 4.0 * clients * size, 4.0 * clients * keep_count(size, self.options.share)

    # --- resume -----------------------------------------------------------------------------------------------------

    def state(self) -> State:
        state = super().state()
        return State({**state.tensors, **grouped(momentum=self.momentum, variance=self.variance)}, state.meta)

    def restore(self, state: State) -> None:
        super().restore(state)
        momentum, variance = state.group("momentum"), state.group("variance")
        self.momentum = {name: momentum[name] for name in self.parameters}
        self.variance = {name: variance[name] for name in self.parameters}
