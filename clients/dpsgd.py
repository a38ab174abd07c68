"""D-PSGD, the client half: average, then train local epochs, dense or under a fixed random mask.

Lian et al., NeurIPS 2017, with local epochs, as in Dis-PFL. The fixed mask is that of Dis-PFL's Table 3: every layer at
one density. The paper leaves open whether clients share one mask; here they do.
"""

from clients.base import Update
from clients.gossip import GossipClient
from clients.task import Task
from fedprune_app.core import rng
from fedprune_app.core.masks import random_masks, uniform_densities
from fedprune_app.core.named import TensorDict
from fedprune_app.core.payload import Payload
from fedprune_app.engine.store import State, grouped
from fedprune_app.models import vision


class DPSGDClient(GossipClient):
    """Evaluate the client's own model, and validate the consensus model."""

    validates = "received"

    not_private = ""  # a fixed mask does not depend on data

    @property
    def prunes(self) -> bool:
        return self.config.dpsgd.density < 1

    def masks(self, task: Task, state: State) -> TensorDict:
        options = self.config.dpsgd
        if not self.prunes:
            return {}
        parameters = dict(self.model.named_parameters())
        shapes = {name: parameters[name].shape for name in self.prunable}
        draw = rng.generator(self.config.seed, "initial masks", 0)
        return state.group("masks") or random_masks(shapes, uniform_densities(shapes, options.density), draw)

    def start_masks(self, task: Task, state: State) -> TensorDict:
        return self.masks(task, state)

    def local_update(self, task: Task, state: State) -> Update:
        masks = self.masks(task, state)
        metrics = self.test_start(task, self.begin(task, state))
        result = self.train(task, masks=masks)
        tensors = vision.state_tensors(self.model, include_buffers=True)
        payload = Payload({name: tensors[name] for name in self.shared}, masks)
        state = State(grouped(weights=tensors, masks=masks))
        return Update(payload, state, result, self.costs.training(masks), metrics)
