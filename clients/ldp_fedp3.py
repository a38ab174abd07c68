"""LDP-FedP3, the client half: train with noise in every local step, and send one of n random parts of the result.

Yi, Gazagnadou, Richtárik, Lyu, "FedP3", ICLR 2024, Algorithm 5, lines 5 to 9. Where the text cannot hold as written:

* Line 8 adds the noise to the weights after the step, without the step size γ, though σ is for the mean gradient: too
  large by 1/γ. The proof (appendix D.2) has the step ``w - γ (g - ζ)``, which is DP-SGD; so is this one. With several
  local steps ("maybe multiple") each has its own noise.
* The text does not bound an example's gradient: Assumption 2 is about a client's. Here each example's is clipped to
  ``dp.clip-norm``.
* Batches are Poisson samples of expected size ``batch-size``, as the accountant assumes, not of a fixed size b.
* Theorem 2's σ² has log(1/ε), below 0 for ε > 1; its proof, equation 18, has log(1/δ). The constant c is not given. So
  neither is used: the noise is ``dp.noise-multiplier``, or found by an accountant for ``dp.target-epsilon``.
* "Differ by one entry" would be one example replaced. Here one example is zeroed out, and the number of examples is
  known.

The training is charged as if all of ũ were sent: the sketch does not depend on data, so it neither costs nor saves. A
server that fakes a round of one client and receives all of ũ learns no more than was charged.
"""

import torch
from torch import Tensor

from clients.base import ImageClient, Update
from clients.context import NodeContext
from clients.task import Task
from fedprune_app.config import Config
from fedprune_app.core import rng
from fedprune_app.core.fedp3 import perm_k_owners
from fedprune_app.core.layers import layers_of
from fedprune_app.core.payload import Payload
from fedprune_app.engine.store import State, grouped
from fedprune_app.models.names import chosen_name


class LDPFedP3Client(ImageClient):
    """State: ``weights``, which are ũ_i before the sketch."""

    validates = "received"

    not_private = ""  # only a part of the privately trained model is sent, chosen without data

    def __init__(self, config: Config, context: NodeContext) -> None:
        super().__init__(config, context)
        if untrained_names := [name for name in self.shared if name not in self.sizes]:
            raise ValueError(
                f"model is {chosen_name(config.model, config.dataset)!r}, allowed with system 'ldp-fedp3': one whose "
                f"tensors are all trained, and {untrained_names[0]!r} is not"
            )
        layers = layers_of(self.shared, self.prunable)
        self.order = [name for names in layers.values() for name in names]
        self.dimension = sum(self.sizes[name] for name in self.order)

    def local_update(self, task: Task, state: State) -> Update:
        num_clients, is_own = self.sketch(task)
        result, tensors = self.train_from_start(task, state)  # lines 5 to 8
        vector = torch.cat([tensors[name].flatten() for name in self.order])
        payload = Payload({"part": num_clients * vector[is_own]})  # line 9: S_i ũ_i without its zeros
        return Update(payload, State(grouped(weights=tensors)), result, self.costs.training())

    def sketch(self, task: Task) -> tuple[int, Tensor]:
        """Return n, and which coordinates are this client's: bool (d,).

        Raises ``ValueError`` for an impossible n or place. A client with data of its own does not know the number of
        clients; the number of coordinates limits it.
        """
        num_clients, position = task.fields["clients"], task.fields["place"]
        max_clients = self.dimension if self.context.has_own_data else self.context.num_clients
        are_whole = type(num_clients) is int and type(position) is int
        if not (are_whole and 1 <= num_clients <= max_clients and 0 <= position < num_clients):
            allowed = f"1 to {max_clients} clients, and a place below their number"
            raise ValueError(f"clients is {num_clients!r} and place {position!r}, allowed: {allowed}")
        draw = rng.generator(self.config.seed, "sketch", round=task.round)
        owners = perm_k_owners(self.dimension, num_clients, draw)
        return num_clients, owners == position
