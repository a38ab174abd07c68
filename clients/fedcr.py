"""FedCR, the client half: a variational encoder shared with all, a head of its own.

Zhang, Li, Zhuo, Lin, ICML 2023, as in the released code: a batch's loss is the cross entropy, averaged over draws of
the codes, plus β times the mean divergence KL(prior ‖ encoder) from the label's prior, which is not the usual
direction. In the last epoch the encoders of each class's images are multiplied; the products are sent.

Deviations: the released code ends with a round in which all clients train their heads for ten epochs, and it tests the
mean logits over draws, where this one tests the mean prediction.
"""

from dataclasses import replace
from typing import Unpack

import torch
from torch import Tensor
from torch.nn import functional as F

from clients.base import LocalTraining, Update
from clients.context import NodeContext
from clients.fedp3 import FedP3Client
from clients.node import never_private
from clients.task import Task
from fedprune_app.config import Config, FedP3Options
from fedprune_app.core import rng
from fedprune_app.core.payload import Payload
from fedprune_app.engine.store import State
from fedprune_app.learning.parts import Network
from fedprune_app.learning.training import TrainingResult
from fedprune_app.models.names import chosen_name
from fedprune_app.models.variational import Variational, experts_by_class, kl_divergence


class FedCRClient(FedP3Client):
    """State: as FedP3's, with a personal head."""

    headless = frozenset({"prior.mean", "prior.std"})
    not_summed = "its server reads each client's Gaussians"

    @classmethod
    def why_not_private(cls, config: Config) -> str:
        return never_private(config, "it sends products over the examples of each class")

    def __init__(self, config: Config, context: NodeContext) -> None:
        super().__init__(config, context)
        if not isinstance(self.model, Variational):
            name = chosen_name(config.model, config.dataset)
            raise ValueError(
                f"model is {name!r}, which has no Gaussian code, allowed with system 'fedcr': one whose name "
                "ends in -cr"
            )
        self.network: Variational = self.model

    @property
    def options(self) -> FedP3Options:
        return self.config.fedcr.as_fedp3(self.config.fedp3)

    def local_update(self, task: Task, state: State) -> Update:
        classes, latent = self.network.prior.mean.shape
        self.experts = [torch.zeros(classes, latent, dtype=torch.float64) for _ in range(2)]
        update = super().local_update(task, state)
        precision, weighted = (total.cpu() for total in self.experts)
        tensors = {**update.payload.tensors, "experts.precision": precision, "experts.weighted-mean": weighted}
        return replace(update, payload=Payload(tensors))

    def train(self, task: Task, **how: Unpack[LocalTraining]) -> TrainingResult:
        options, network = self.config.fedcr, self.network
        draw = rng.generator(self.config.seed, "codes", self.client_id, task.round)
        latent = network.prior.mean.shape[1]
        epochs_done = 0

        def after_epoch(epoch: int) -> None:
            nonlocal epochs_done
            epochs_done = epoch + 1

        def objective(_: Network, images: Tensor, labels: Tensor) -> Tensor:
            mean, std = network.encode(images)
            noise = torch.randn(options.train_draws, len(labels), latent, generator=draw).to(mean.device)
            logits = network.classify(mean + std * noise)  # (draws, batch, classes)
            target = labels.expand(options.train_draws, -1)
            prior = network.prior.mean[labels], network.prior.std[labels]
            if epochs_done == self.config.local_epochs - 1:
                products = experts_by_class(mean.detach(), std.detach(), labels, len(network.prior.mean))
                self.experts = [total + part.cpu() for total, part in zip(self.experts, products, strict=True)]
            divergence = kl_divergence(*prior, mean, std).mean()
            return F.cross_entropy(logits.flatten(0, 1), target.flatten()) + options.beta * divergence

        how["objective"], how["after_epoch"] = objective, after_epoch
        return super().train(task, **how)

    def accuracy(self, task: Task, split: str, *, decides: bool = False) -> float | None:
        """Return the accuracy of the mean prediction over draws of the code, the same draws each time."""
        draw = rng.generator(self.config.seed, "codes to test", self.client_id)
        shape = self.config.fedcr.test_draws, self.network.prior.mean.shape[1]
        self.network.noise = torch.randn(shape, generator=draw)
        try:
            return super().accuracy(task, split)
        finally:
            self.network.noise = None
