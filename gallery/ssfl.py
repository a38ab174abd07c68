"""SSFL, salient sparse federated learning: one mask for all clients, found before round 1 by everybody's saliency.

Ohib, Thapaliya, Dziugaite, Liu, Calhoun, Plis, "SSFL: Discovering Sparse Unified Subnetworks at Initialization for
Efficient Federated Learning", arXiv 2405.09037, Algorithm 1. Each client scores the weights of the common initial
model by SNIP's saliency ``|w ∂L/∂w|`` on its own data. The server averages the scores by numbers of examples, and keeps
the largest of all layers together. From then on it is FedAvg on the kept weights, which alone are trained and sent.

Deviations: a client's score is of all its training images at once, where the released code takes one batch. The mask
travels with each model that the server sends, so that a client which missed a round needs no memory of it; what
clients send are values alone. A client's score counts among its operations in the first round in which it trains.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from fedprune_app import extend as fp


class SSFL(fp.FedAvg):
    """The server has one sparse model. Its masks are chosen once."""

    paper_formula = "32 bits per kept weight, both ways"

    def __init__(self, context: fp.RunContext, model: Mapping[str, Tensor], prunable: frozenset[str]) -> None:
        super().__init__(context, model, prunable)
        self.masks: dict[str, Tensor] = {}

    def train(self, round: fp.Round) -> None:
        if round.number == 1:
            self.choose_mask(round)
        super().train(round)

    def choose_mask(self, round: fp.Round) -> None:
        """Ask all members for scores, and choose the mask."""
        scores = {name: tensor for name, tensor in self.model.items() if name in self.prunable}
        most = max(self.clients[client].num_examples for client in self.members)
        mean = fp.aggregate.MaskedMean(len(self.members), most)
        outgoing = fp.OutgoingMessage.to_each(self.members, fp.Payload(self.model))
        for reply in fp.request_payloads(round, "saliency", outgoing, fp.Schema.like(scores), mean):
            with round.log.rejecting(reply):
                mean.add(reply.update, reply.num_examples)
        self.masks = fp.masks.magnitude_masks_across(mean.mean(scores), self.config.density)
        self.model = dict(fp.Payload.pruned(self.model, self.masks).tensors)

    def sparse(self) -> fp.Payload:
        """Return the model with its masks."""
        return fp.Payload(self.model, self.masks)

    def send(self, round: fp.Round) -> Iterator[fp.OutgoingMessage]:
        return fp.OutgoingMessage.to_each(round.participants, self.sparse())

    def send_to_evaluate(self, round: fp.Round) -> Iterator[fp.OutgoingMessage]:
        return fp.OutgoingMessage.to_each(self.clients, self.sparse())

    def expect(self, round: fp.Round, client: int) -> fp.Schema:
        """Expect the values of the kept weights; the server knows their places."""
        return fp.Schema.like(fp.masks.packed(self.model, self.masks))

    def end(self, round: fp.Round) -> None:
        values = self.mean.mean(fp.masks.packed(self.model, self.masks))
        self.model = fp.masks.unpacked(values, self.masks, self.model)

    def paper_bytes(self, round: fp.Round) -> tuple[float, float]:
        num_bytes = 4.0 * len(round.participants) * self.sparse().num_kept()
        return num_bytes, num_bytes

    def state(self) -> fp.State:
        state = super().state()
        return fp.State({**state.tensors, **fp.grouped(masks=self.masks)}, state.meta)

    def restore(self, state: fp.State) -> None:
        super().restore(state)
        self.masks = state.group("masks")


class SSFLClient(fp.ImageClient):
    """State: the last local ``weights``; each message has the mask."""

    not_summed = ""
    validates = "received"

    def answer(self, task: fp.Task, state: fp.State) -> fp.Payload:
        """Return the saliency of each weight of the received model."""
        fp.load_state_tensors(self.model, self.begin(task, state))
        slope = fp.dense_gradient(self.model, self.data.train_images, self.data.train_labels, device=self.device)
        return fp.Payload({name: (task.payload.tensors[name] * slope[name]).abs() for name in self.prunable})

    def masks(self, task: fp.Task, state: fp.State) -> dict[str, Tensor]:
        return dict(task.payload.masks)

    def local_update(self, task: fp.Task, state: fp.State) -> fp.Update:
        masks = self.masks(task, state)
        result, tensors = self.train_from_start(task, state, masks=masks)
        values = fp.masks.packed({name: tensors[name] for name in self.shared}, masks)
        scoring_flops = 0.0 if state.tensors else self.costs.gradient(self.num_examples)
        flops = self.costs.training(masks) + scoring_flops
        return fp.Update(fp.Payload(values), fp.State(fp.grouped(weights=tensors)), result, flops)


fp.register_system(
    "ssfl",
    strategy=SSFL,
    client=SSFLClient,
    summary="SSFL: one mask for all, by all clients' saliency before round 1",
    uses=("density",),
)
