"""Sub-FedAvg (Un), the client half: train the received model under the client's mask, then prune further if allowed.

Vahidian, Morafah, Lin, "Personalized Federated Learning by Structured and Unstructured Pruning under Data
Heterogeneity", ICDCS workshops 2021, Algorithm 1, lines 11 to 18. Where the text and the released code differ, this
follows the code, except for the gate: the code decides on test data, this on validation data
(``subfedavg.gate-split``).
"""

from collections.abc import Iterable
from dataclasses import replace

import torch

from clients.base import ImageClient, Update
from clients.privacy import PlannedReleases
from clients.task import Task
from fedprune_app.config import Config
from fedprune_app.core.masks import full_masks, mask_distance, prune_percent
from fedprune_app.core.named import TensorDict, Tensors
from fedprune_app.core.payload import Payload
from fedprune_app.engine.store import State, grouped
from fedprune_app.models import vision


def pruned(tensors: Tensors, masks: Tensors) -> TensorDict:
    """Return the masked tensors, zero where their mask is False."""
    return {name: torch.where(mask, tensors[name], 0.0) for name, mask in masks.items()}


class SubFedAvgClient(ImageClient):
    """Train under a mask for each convolution and linear weight, all ones at first.

    Biases and norms are never pruned.
    """

    not_summed = ""
    sends_parts = True

    @classmethod
    def why_not_private(cls, config: Config) -> str:
        """Masks come from private weights; the gate reads held-out data, so it needs its own noise."""
        gate = config.subfedavg.gate_split
        if gate == "test" and config.test_split != "holdout":
            return (
                "subfedavg.gate-split is 'test', allowed with dp.enabled and test-split "
                f"{config.test_split!r}: 'none', 'validation'; one example may change which test images there are"
            )
        if gate == "none" or config.dp.count_scale > 0:  # without a target too: a node's capacity sets one
            return ""
        return (
            f"subfedavg.gate-split is {gate!r}, allowed with dp.enabled: 'none', or with dp.count-scale above 0 "
            "(the gate then asks for a noised count of correct predictions, which is charged)"
        )

    def planned_releases(self) -> PlannedReleases:
        """Add the gate's count, at most one in a round."""
        return replace(super().planned_releases(), round_counts=int(self.config.subfedavg.gate_split != "none"))

    def masks(self, task: Task, state: State) -> TensorDict:
        parameters = dict(self.model.named_parameters())
        return state.group("masks") or full_masks({name: parameters[name].shape for name in self.prunable})

    def begin(self, task: Task, state: State) -> TensorDict:
        """Return ``θ_g ⊙ m_k``, with biases as received."""
        start = super().begin(task, state)
        return start | pruned(start, self.masks(task, state))

    def local_update(self, task: Task, state: State) -> Update:
        options = self.config.subfedavg
        mask = self.masks(task, state)
        mask_first_epoch = mask

        def after_epoch(epoch: int) -> None:
            nonlocal mask_first_epoch
            if epoch == 0:
                mask_first_epoch = prune_percent(self.weights(mask), mask, options.prune_step)  # m^{fe}, line 5

        result, tensors = self.train_from_start(task, state, masks=mask, after_epoch=after_epoch)

        mask_last_epoch = prune_percent(self.weights(mask), mask, options.prune_step)  # m^{le}, line 6
        distance = mask_distance(mask_first_epoch, mask_last_epoch)  # Δ, line 13; 0 with one local epoch
        percent_pruned = self._percent_pruned(mask)
        mask_kept = mask
        # line 14: far enough apart, target not yet reached, and accurate enough with the new mask
        if distance > options.mask_distance and percent_pruned < self.target_rate:
            new_mask = self.mask_towards_target(mask, mask_last_epoch, percent_pruned)
            candidate = tensors | pruned(tensors, new_mask)
            vision.load_state_tensors(self.model, candidate)
            if self.is_accurate_enough(task):
                tensors, mask_kept = candidate, new_mask  # line 15: θ ⊙ m^{le}
        payload = Payload({name: tensors[name] for name in self.shared}, mask_kept)
        return Update(payload, State(grouped(weights=tensors, masks=mask_kept)), result, self.costs.training(mask))

    @property
    def target_rate(self) -> float:
        """The percentage of all parameters to prune in the end; a node's ``capacity`` takes precedence."""
        return self.config.subfedavg.target_rate if self.context.capacity is None else 100 * (1 - self.context.capacity)

    def _percent_pruned(self, mask: TensorDict) -> float:
        """Return the pruned percentage of all parameters, biases included, as the released code counts."""
        num_pruned = sum(int((~m).sum()) for name, m in mask.items() if name in self.sizes)
        return 100 * num_pruned / sum(self.sizes.values())

    def weights(self, names: Iterable[str]) -> TensorDict:
        tensors = vision.state_tensors(self.model)
        return {name: tensors[name] for name in names}

    def is_accurate_enough(self, task: Task) -> bool:
        """Return whether the loaded model's accuracy is above the gate's threshold; true without a gate."""
        if self.config.subfedavg.gate_split == "none":
            return True
        split = self.config.subfedavg.gate_split
        if not self.images.sizes[split]:
            task.notes.append(f"it has no {split} images to decide by, so it does not prune")
            return False
        accuracy = self.accuracy(task, split, decides=True)
        # tolerance for rounding: 100 * (7 / 100) is more than 7
        return accuracy is not None and 100 * accuracy - self.config.subfedavg.accuracy_threshold > 1e-9

    def mask_towards_target(self, mask: TensorDict, full_step: TensorDict, percent_pruned: float) -> TensorDict:
        """Return the mask of a full step, or of the smaller last step before the target."""
        missing = self.target_rate - percent_pruned
        if missing >= self.config.subfedavg.prune_step:
            return full_step
        return prune_percent(self.weights(mask), mask, self.last_step(missing, percent_pruned))

    def last_step(self, missing: float, percent_pruned: float) -> float:
        """Return the percentage of the remaining weights that the last step prunes: up to the target or the cap."""
        return min(missing / (100 - percent_pruned) * 100, self.config.subfedavg.final_step_cap)
