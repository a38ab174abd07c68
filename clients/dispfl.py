"""Dis-PFL, the client half: train a sparse model under a fixed mask, then look for a better mask.

Dai, Shen, He, Tian, Tao, "DisPFL: Towards Communication-Efficient Personalized Federated Learning via Decentralized
Sparse Training", ICML 2022: Algorithm 1, lines 7 to 15, and Algorithm 2. Where the text and the released code differ:

* All clients start from one common model, as in the code; the text draws one for each.
* With ``max-grad-norm`` the dense gradient is clipped, then masked, as in the code. The text does not clip.
* Growth is by gradient, as in the text; all released scripts use ``dispfl.growth = "random"``.
* The prune rate is annealed over ``num-server-rounds``, or over ``dispfl.annealing-rounds`` if set; after them masks no
  longer change.
* Biases and norm scales are never pruned. ERK leaves them dense at every density that the paper tests.
"""

from functools import cached_property

import torch

from clients.base import Update
from clients.gossip import GossipClient
from clients.task import Task
from fedprune_app.config import Config
from fedprune_app.core import rng
from fedprune_app.core.masks import dense_share, erk_densities, prune_and_grow, random_masks
from fedprune_app.core.named import TensorDict, Tensors
from fedprune_app.core.payload import Payload
from fedprune_app.core.schedules import cosine_fraction
from fedprune_app.engine.store import State, grouped
from fedprune_app.learning.evaluate import dense_gradient
from fedprune_app.models import vision


class DisPFLClient(GossipClient):
    """Train sparsely, with a mask for each convolution and linear weight, of constant density."""

    prunes = True

    @classmethod
    def why_not_private(cls, config: Config) -> str:
        """Exclude growth by gradient, whose masks come from raw gradients, not from draws and private weights."""
        growth = config.dispfl.growth
        if growth == "random":
            return ""
        return (
            f"dispfl.growth is {growth!r}, allowed with dp.enabled: 'random' (where weights grow tells raw gradients)"
        )

    def target_density(self) -> float:
        """Return the node's ``capacity``, else the client's entry of ``dispfl.densities``, else ``density``."""
        return self.context.capacity or self.config.dispfl.density_of(self.client_id, self.config.density)

    @cached_property
    def initial_masks(self) -> TensorDict:
        """Draw positions (line 2) at random, their number per layer by ERK.

        Matrices that are not of a convolution or linear layer stay dense, and the others are so much sparser.
        """
        shapes = {name: parameter.shape for name, parameter in self.model.named_parameters()}
        share = dense_share(shapes, self.prunable)
        density = max(0.0, (self.target_density() - share) / (1 - share or 1))
        densities = erk_densities({n: s for n, s in shapes.items() if len(s) < 2 or n in self.prunable}, density)
        draw = rng.generator(self.config.seed, "initial masks", self.client_id)
        return random_masks({name: shapes[name] for name in self.prunable}, densities, draw)

    def masks(self, task: Task, state: State) -> TensorDict:
        return state.group("masks") or self.initial_masks

    def start_masks(self, task: Task, state: State) -> TensorDict:
        return state.group("next-masks") or self.initial_masks

    def local_update(self, task: Task, state: State) -> Update:
        masks = self.start_masks(task, state)  # m_{k,t}
        metrics = self.test_start(task, self.begin(task, state))  # lines 7 and 8
        result = self.train(task, masks=masks)  # lines 9 to 13
        tensors = vision.state_tensors(self.model, include_buffers=True)
        # line 15; the weights keep their old support until the next average, which may fill the grown coordinates
        share = self.share_replaced(task.round)
        next_masks = masks if result.diverged else self.search(tensors, masks, share, task.round)
        payload = Payload({name: tensors[name] for name in self.shared}, masks)
        state = State(grouped(weights=tensors, **{"masks": masks, "next-masks": next_masks}))
        # only growth by gradient needs the dense gradient's FLOPs
        needs_gradient = share and self.config.dispfl.growth == "gradient"
        search_flops = self.costs.gradient(self._search_batch()) if needs_gradient else 0.0
        return Update(payload, state, result, self.costs.training(masks) + search_flops, metrics)

    def share_replaced(self, round: int) -> float:
        """Return α_t, the share of each layer's weights that the search replaces after this round."""
        horizon = self.config.dispfl.annealing_rounds or self.config.num_server_rounds
        return cosine_fraction(self.config.dispfl.prune_rate, round - 1, horizon) if round <= horizon else 0.0

    def search(self, tensors: Tensors, masks: Tensors, share: float, round: int) -> TensorDict:
        """Algorithm 2: prune the smallest α_t of each layer's weights, and grow as many by the largest gradients."""
        if not share:
            return {name: mask.clone() for name, mask in masks.items()}  # the state holds no tensor twice
        config = self.config
        draw = rng.generator(config.seed, "mask search", self.client_id, round)
        if config.dispfl.growth == "random":
            scores = {name: torch.rand(mask.shape, generator=draw) for name, mask in masks.items()}
        else:
            images, labels = self.data.train_images, self.data.train_labels
            batch = torch.randperm(len(labels), generator=draw)[: self._search_batch()]
            augment = self.images.augmentation(images)
            inputs = images[batch] if augment is None else augment(augment.draws(batch, draw).to(images.device))
            scores = dense_gradient(self.model, inputs, labels[batch], device=self.device)
        return prune_and_grow({name: tensors[name] for name in masks}, scores, masks, share)

    def _search_batch(self) -> int:
        return min(self.config.batch_size, len(self.data.train_labels))
