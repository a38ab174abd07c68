"""HeteroFL: each client trains the leading units that it can bear. FedRolex: a window of as many, which rolls on.

Diao, Ding, Tarokh, "HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients",
ICLR 2021, Algorithm 1. Each coordinate is averaged over the clients that have it, and one that nobody has stays
(equations 1 to 4). While a client of width r trains, the output of each hidden layer is divided by r (the Scaler), and
the logits of classes that it has no example of are 0 (masked cross entropy).

Alam, Liu, Yan, Zhang, "FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction", NeurIPS
2022, Algorithm 1. In round j the window of a layer of K units begins at unit ``(j − 1) mod K`` and goes on at the first
unit behind the last one. The server rolls its model so that the window's units lead, and rolls the average back: to
order hidden units anew changes nothing that a network computes. So the client is HeteroFL's.

Deviations: a client's width comes from ``fjord.widths``, or from its node's ``capacity``, and is fixed. BatchNorm's
statistics are averaged like weights, where the paper asks all clients for them after training (static BatchNorm). All
rows of the last layer are averaged, those of classes that a client lacks as they came. A client also answers for its
own width, with its Scaler, so its model is not exported; the paper tests the whole model alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedprune_app import extend as fp


class HeteroFL(fp.FjORD):
    """FjORD's server with equal weights of all clients."""

    by_examples = False


class FedRolex(HeteroFL):
    """The server has one model of full width; ``first`` is the first unit of this round's windows."""

    first = 0

    def rolled(self, tensors: Mapping[str, Tensor], shift: int) -> dict[str, Tensor]:
        """Return the model with the units of all hidden layers moved on by so many places."""
        result = dict(tensors)
        for group in self.groups:
            for piece in group.slices:
                result[piece.tensor] = result[piece.tensor].roll(shift * piece.repeat, piece.dim)
        return result

    def begin(self, round: fp.Round) -> None:
        super().begin(round)
        self.first = round.number - 1

    def sub_network(self, client: int) -> dict[str, Tensor]:
        reach = self.extents_of(client)
        model = self.rolled(self.model, -self.first)
        return {n: fp.structured.leading_block(t, reach.get(n)).contiguous() for n, t in model.items()}

    def send_to_evaluate(self, round: fp.Round) -> Iterator[fp.OutgoingMessage]:
        """Send the model as the next round does, whose window leads."""
        payload = fp.Payload(self.rolled(self.model, -round.number))
        for client in self.clients:
            yield fp.OutgoingMessage(client, payload, fields={"width": self.width(client)})

    def end(self, round: fp.Round) -> None:
        self.model = self.rolled(self.mean.mean(self.rolled(self.model, -self.first)), self.first)


class HeteroFLClient(fp.FjORDClient):
    """Every step trains the client's whole width."""

    why_not_private = fp.ImageClient.why_not_private  # nobody has examined what it releases

    def __init__(self, config: fp.Config, place: fp.NodeContext) -> None:
        super().__init__(config, place)
        self.width = 1.0
        self.present = torch.bincount(self.data.train_labels, minlength=self.dataset.num_classes) > 0
        for group in self.groups:
            self.model.get_submodule(group.name).register_forward_hook(self.scaled)

    def scaled(self, layer: nn.Module, _: object, output: Tensor) -> Tensor:
        """Return the output of a hidden layer as the Scaler leaves it."""
        return output / self.width

    def test_accuracy(
        self, task: fp.Task, tensors: Mapping[str, Tensor], masks: Mapping[str, Tensor] | None = None
    ) -> float | None:
        """Test a model of the client's width as it is trained, and the whole model, which has no masks, unscaled."""
        self.width = float(task.fields["width"]) if masks else 1.0
        return super().test_accuracy(task, tensors, masks)

    def shares(self, width: float) -> list[float]:
        self.width = width
        return [width]

    def train_from_start(
        self, task: fp.Task, state: fp.State, **how: Unpack[fp.LocalTraining]
    ) -> tuple[fp.TrainingResult, dict[str, Tensor]]:
        is_absent = ~self.present.to(self.device)

        def masked_cross_entropy(network: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(network(images).masked_fill(is_absent, 0.0), labels)

        how["objective"] = masked_cross_entropy
        return super().train_from_start(task, state, **how)


fp.register_system(
    "heterofl",
    strategy=HeteroFL,
    client=HeteroFLClient,
    summary="HeteroFL: each client trains the leading units that it can bear",
    uses=("fjord.widths",),
)
fp.register_system(
    "fedrolex",
    strategy=FedRolex,
    client=HeteroFLClient,
    summary="FedRolex: each client trains a rolling window of units",
    uses=("fjord.widths",),
)
