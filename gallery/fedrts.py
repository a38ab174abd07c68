"""FedRTS: one sparse model, whose mask the server draws anew by what clients said of each weight so far.

Huang, Yang, Chen, Ye, Wu, "FedRTS: Federated Robust Pruning via Combinatorial Thompson Sampling", NeurIPS 2025, arXiv
2501.19122. Each weight has a Beta(α, β) distribution, at first Beta(1, 1). A layer keeps K weights (ERK), of which κ
are its core. In every round a kept weight has the outcome 1 from each client among whose κ largest it is, and from the
mean model likewise. In every ΔT-th round a pruned weight has the outcome 1 from each client among whose K − κ largest
gradients it is, and 0.5 from the mean. Clients send where these are, not the gradients. The outcomes together are
``X = γ X_mean + (1 − γ) Σ p_n X_n``, by numbers of examples p_n; ``α += λ X`` and ``β += λ (1 − X)``. The K weights
with the largest draws from their distributions stay. K − κ falls by a cosine from the share ``fedrts.adjusted`` of K.

From the released code (FedPruning): λ = 10, γ = 0.5, when masks move and when no more (300 of 500 rounds), the initial
mask by magnitude, and the gradient of one batch after the local epochs. The share is 0.2 there and 0.4 in the paper,
and α and β begin anew after each move there. There, too, K − κ kept weights leave by one draw and as many enter by
another, the prior is their share, and the mean of dense gradients votes. Deviations: the mask travels with each model
down; what clients send is values alone, and in the rounds that move the mask one mask more. Weights that grow begin at
0. After the last move outcomes are counted no more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedprune_app import extend as fp


@dataclass(frozen=True)
class FedRTSOptions(fp.Table):
    """When and how masks move; ``density`` is that of the weights of convolutions and linear layers."""

    rounds_between: int = fp.option(10, "After every so many rounds the mask moves (ΔT).", least=1)
    adjusted: float = fp.option(0.4, "The share of a layer's kept weights that are not its core, at first.", most=1)
    scale: float = fp.option(10.0, "How much an outcome counts in the distributions (λ).", above=0)
    trust: float = fp.option(0.5, "How much the mean model's outcome counts beside the clients' (γ).", least=0, most=1)

    def fixed_on_resume(self, common: object) -> Mapping[str, str]:
        return {"num-server-rounds": "masks move in the first 60 % of them"}


def last_move(config: fp.Config) -> int:
    """Return after how many rounds the mask no longer moves."""
    return max(1, round(0.6 * config.num_server_rounds))


def moves(config: fp.Config, number: int) -> bool:
    """Return whether the mask moves after a round."""
    return 0 < number - 1 <= last_move(config) and (number - 1) % config.table(FedRTSOptions).rounds_between == 0


def num_adjusted(config: fp.Config, number: int, mask: Tensor) -> int:
    """Return K − κ of a layer in a round: at most as many weights as it has pruned."""
    end, adjusted = last_move(config), config.table(FedRTSOptions).adjusted
    share = fp.schedules.cosine_fraction(adjusted, number - 1, end) if number <= end else 0.0
    return min(int(share * int(mask.sum())), int((~mask).sum()))


def largest(scores: Tensor, among: Tensor, count: int) -> Tensor:
    """Return the mask of so many of the largest scores among those that may be."""
    allowed = torch.where(among, scores.abs() + 1e-30, 0)  # a score of 0 is before what may not be
    return fp.masks.magnitude_masks({"": allowed}, count / among.numel())[""]


class FedRTS(fp.FedAvg):
    """The server has one sparse model, its masks, and α and β of each weight as ``wins`` and ``losses``."""

    paper_formula = "32 bits per kept weight, both ways, and per voted index"

    def __init__(self, context: fp.RunContext, model: Mapping[str, Tensor], prunable: frozenset[str]) -> None:
        super().__init__(context, model, prunable)
        weights = {name: model[name] for name in model if name in prunable}
        self.densities = fp.masks.erk_densities({name: t.shape for name, t in weights.items()}, self.config.density)
        self.masks = self.kept(weights)
        self.wins = {name: torch.ones(t.shape, dtype=torch.float64) for name, t in weights.items()}
        self.losses = {name: torch.ones(t.shape, dtype=torch.float64) for name, t in weights.items()}
        self.model = dict(fp.Payload.pruned(self.model, self.masks).tensors)

    def kept(self, scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the masks of the largest scores of each layer."""
        return {n: fp.masks.magnitude_masks({n: scores[n]}, share)[n] for n, share in self.densities.items()}

    def send(self, round: fp.Round) -> Iterator[fp.OutgoingMessage]:
        return fp.OutgoingMessage.to_each(round.participants, fp.Payload(self.model, self.masks))

    def send_to_evaluate(self, round: fp.Round) -> Iterator[fp.OutgoingMessage]:
        return fp.OutgoingMessage.to_each(self.clients, fp.Payload(self.model, self.masks))

    def expect(self, round: fp.Round, client: int) -> fp.Schema:
        votes = self.masks if moves(self.config, round.number) else {}
        names = frozenset(fp.grouped(votes=votes))
        return fp.Schema.like(fp.grouped(model=fp.masks.packed(self.model, self.masks), votes=votes), masked=names)

    def begin(self, round: fp.Round) -> None:
        super().begin(round)
        self.sizes = {name: num_adjusted(self.config, round.number, mask) for name, mask in self.masks.items()}
        self.votes = {name: torch.zeros(mask.shape, dtype=torch.int64) for name, mask in self.masks.items()}
        self.num_voters = 0

    def core(self, model: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the masks of a model's κ largest weights in each layer."""
        counts = {name: int(mask.sum()) - self.sizes[name] for name, mask in self.masks.items()}
        return {name: largest(model[name], mask, counts[name]) for name, mask in self.masks.items()}

    def receive(self, round: fp.Round, reply: fp.Reply) -> None:
        parts = fp.State(reply.update.tensors)
        grown = parts.group("votes")
        for name, votes in grown.items():
            if bool((votes & self.masks[name]).any()) or int(votes.sum()) > self.sizes[name]:
                raise ValueError(f"votes for {name!r} are {int(votes.sum())}, allowed: {self.sizes[name]} pruned ones")
        reply.update = fp.Payload(fp.masks.unpacked(parts.group("model"), self.masks, self.model))
        super().receive(round, reply)
        weight = self.weight_of(reply.client)
        for name, core in self.core(reply.update.tensors).items():
            self.votes[name] += weight * (core | grown[name] if name in grown else core)
        self.num_voters += weight

    def end(self, round: fp.Round) -> None:
        super().end(round)
        if round.number - 1 > last_move(self.config):
            return
        options, core = self.config.table(FedRTSOptions), self.core(self.model)
        moving = moves(self.config, round.number)
        for name, mask in self.masks.items():
            of_mean = torch.where(mask, core[name].double(), 0.5)
            outcome = options.trust * of_mean + (1 - options.trust) * self.votes[name] / self.num_voters
            counted = torch.ones_like(mask) if moving else mask
            self.wins[name] += options.scale * torch.where(counted, outcome, 0)
            self.losses[name] += options.scale * torch.where(counted, 1 - outcome, 0)
        if moving:
            draw = fp.rng.numpy_generator(self.config.seed, "thompson", round=round.number)
            drawn = {n: torch.from_numpy(draw.beta(self.wins[n], self.losses[n])) for n in self.densities}
            self.masks = self.kept(drawn)
            self.model = dict(fp.Payload.pruned(self.model, self.masks).tensors)

    def paper_bytes(self, round: fp.Round) -> tuple[float, float]:
        num_kept, num_votes = fp.Payload(self.model, self.masks).num_kept(), sum(self.sizes.values())
        sent = num_kept + (num_votes if moves(self.config, round.number) else 0)
        return 4.0 * len(round.participants) * num_kept, 4.0 * round.log.replies * sent

    def state(self) -> fp.State:
        state = super().state()
        own = fp.grouped(masks=self.masks, wins=self.wins, losses=self.losses)
        return fp.State({**state.tensors, **own}, state.meta)

    def restore(self, state: fp.State) -> None:
        super().restore(state)
        self.masks, self.wins, self.losses = (state.group(name) for name in ("masks", "wins", "losses"))


class FedRTSClient(fp.ImageClient):
    """State: the last local ``weights`` and the ``masks`` under which they were trained."""

    validates = "received"

    def masks(self, task: fp.Task, state: fp.State) -> dict[str, Tensor]:
        return state.group("masks") or dict(task.payload.masks)

    def local_update(self, task: fp.Task, state: fp.State) -> fp.Update:
        masks, votes = dict(task.payload.masks), dict[str, Tensor]()
        result, tensors = self.train_from_start(task, state, masks=masks)
        flops = self.costs.training(masks)
        if moves(self.config, task.round) and not result.diverged:
            draw = fp.rng.generator(self.config.seed, "votes", self.client_id, task.round)
            batch = torch.randperm(self.num_examples, generator=draw)[: self.config.batch_size]
            images, labels = self.data.train_images[batch], self.data.train_labels[batch]
            slope = fp.dense_gradient(self.model, images, labels, device=self.device)
            counts = {name: num_adjusted(self.config, task.round, mask) for name, mask in masks.items()}
            votes = {name: largest(slope[name], ~mask, counts[name]) for name, mask in masks.items()}
            flops += self.costs.gradient(len(labels))
        values = fp.masks.packed({name: tensors[name] for name in self.shared}, masks)
        sent = fp.Payload(fp.grouped(model=values, votes=votes), fp.grouped(votes=votes))
        return fp.Update(sent, fp.State(fp.grouped(weights=tensors, masks=masks)), result, flops)


summary = "FedRTS: one sparse model, whose mask is drawn by Thompson sampling from clients' votes"
uses = ("density",)
fp.register_system("fedrts", strategy=FedRTS, client=FedRTSClient, summary=summary, options=FedRTSOptions, uses=uses)
