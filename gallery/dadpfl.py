"""DA-DPFL: Dis-PFL in which clients wait for neighbours of the same round, and whose models become sparser.

Long, Wang, Anagnostopoulos, Bi, "Decentralized Personalized Federated Learning Based on a Conditional
'Sparse-to-Sparser' Scheme", IEEE TNNLS 2025, arXiv 2404.15943. A client averages this round's models of neighbours that
train before it. Once half of the models hardly move, clients prune, in rounds whose gaps shrink by 1.3 each. How many
weights of a layer go follows from its PQ index (Diao et al., ICLR 2023; p = 0.5, q = 1, η = 0, γ = 1, at most 90 %). A
move is the change of the distance from the pruned initial model, relative to the first distance. Constants are those of
the released script for CIFAR-10, with ``dispfl.prune-rate = 0.3``, ``dispfl.neighbours = 10`` and ``density = 0.5``.

Deviations: in the released code clients train in the order of their numbers, and of its N neighbours with the lowest
numbers a client takes this round's models; N falls from 10 to 0. Here clients are dealt at random into ``dadpfl.waves``
waves. Initial masks are each client's own, in the script one for all. Weights grow by the gradient of one batch
(``dispfl.growth = "gradient"``), in the script by the mean of as many batches as the client has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedprune_app import extend as fp

Named = Mapping[str, Tensor]


@dataclass(frozen=True)
class DADPFLOptions(fp.Table):
    """Waves, and when clients prune; Dis-PFL's options are in its own table."""

    waves: int = fp.option(3, "How many waves a round's clients are dealt into; with 1 nobody waits.", least=1)
    threshold: float = fp.option(0.02, "Pruning begins when half of the models change by at most this (δ).", least=0)
    least_density: float = fp.option(0.2, "Clients prune while their weights are denser than this.", least=0, most=1)

    def fixed_on_resume(self, common: object) -> Mapping[str, str]:
        return {"num-server-rounds": "dispfl.prune-rate falls over them"}


class DADPFL(fp.DisPFL):
    """The server deals the waves, and keeps the round in which pruning began."""

    began = 0

    def waves(self, round: fp.Round) -> list[tuple[int, ...]]:
        """Deal the participants into waves."""
        order = fp.rng.numpy_generator(self.config.seed, "waves", round=round.number).permutation(round.participants)
        parts = np.array_split(order, self.config.table(DADPFLOptions).waves)
        return [tuple(sorted(map(int, part))) for part in parts if len(part)]

    def pruning_rounds(self) -> list[int]:
        """Return in which rounds clients prune: the first one, and those after 20 gaps that shrink."""
        rounds, gap = [self.began], self.began - 2  # the first gap is the code's number of the round that decided
        for _ in range(20):
            gap = round(gap / 1.3)
            rounds.append(rounds[-1] + gap)
        return rounds

    def train(self, round: fp.Round) -> None:
        """Train the waves one after the other; each is sent what those before it have published."""
        for wave in self.waves(round):
            self.release_updates()
            super().train(replace(round, participants=wave))

    def send(self, round: fp.Round) -> Iterator[fp.OutgoingMessage]:
        for message in super().send(round):
            yield replace(message, fields={"prunes": round.number in self.pruning_rounds()})

    def end(self, round: fp.Round) -> None:
        threshold, rows = self.config.table(DADPFLOptions).threshold, round.log.clients.values()
        settled_rows = [row for row in rows if row.get("change") is not None and row["change"] <= threshold]
        if not self.began and 2 * len(settled_rows) >= len(round.participants):
            self.began = round.number + 1

    def state(self) -> fp.State:
        return replace(state := super().state(), meta={**state.meta, "began": self.began})

    def restore(self, state: fp.State) -> None:
        super().restore(state)
        self.began = int(state.meta["began"])


class DADPFLClient(fp.DisPFLClient):
    """State: as Dis-PFL's, and the model's ``first`` and ``last`` distance from the initial one."""

    why_not_private = fp.ImageClient.why_not_private  # nobody has examined what it releases

    sparser = False  # whether this message's round prunes

    def local_update(self, task: fp.Task, state: fp.State) -> fp.Update:
        initial = fp.Payload.pruned(self.own_model(fp.State()), self.initial_masks).tensors
        self.sparser = bool(task.fields["prunes"])
        update = super().local_update(task, state)
        distance = sum(float((t - initial[name]).norm()) for name, t in update.state.group("weights").items())
        first, last = state.meta.get("first", distance), state.meta.get("last")
        change = {} if last is None or not first else {"change": abs(distance - last) / first}
        meta, metrics = {"first": first, "last": distance}, {**update.metrics, **change}
        return replace(update, state=fp.State(update.state.tensors, meta), metrics=metrics)

    def search(self, tensors: Named, masks: Named, share: float, round: int) -> dict[str, Tensor]:
        """Prune, where the round prunes, and then look for a better mask of that density."""
        num_kept, num_weights = sum(int(m.sum()) for m in masks.values()), sum(m.numel() for m in masks.values())
        if self.sparser and num_kept / num_weights > self.config.table(DADPFLOptions).least_density:
            masks = {name: without_smallest(tensors[name], mask) for name, mask in masks.items()}
        return super().search(tensors, masks, share, round)


def without_smallest(weight: Tensor, mask: Tensor) -> Tensor:
    """Return a layer's mask without the weights that its PQ index says it can spare, the smallest ones."""
    magnitude, num_kept = weight[mask].double().abs(), int(mask.sum())
    bound = float(magnitude.sqrt().sum()) ** 2 / max(float(magnitude.sum()), 1e-300)  # d (1 − PQI), for this p and q
    num_left = num_kept - int(num_kept * min(1 - math.ceil(bound - 1e-9) / max(num_kept, 1), 0.9))
    return fp.masks.magnitude_masks({"": torch.where(mask, weight, 0)}, num_left / mask.numel())[""] & mask


fp.register_system(
    "dadpfl",
    strategy=DADPFL,
    client=DADPFLClient,
    summary="DA-DPFL: Dis-PFL in waves, whose models become sparser",
    options=DADPFLOptions,
    uses=("density", "dispfl"),
    metrics=[fp.SystemMetric("change", "Change of the distance", least=0, decimals=3)],
)
