"""What a client's training costs in floating-point operations."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fedprune_app.config import Config
from fedprune_app.core.flops import training_flops
from fedprune_app.data.dataset import Dataset
from fedprune_app.learning.sgd import SGD
from fedprune_app.models.initial import layer_flops, trains_on_one


def sgd(config: Config, dataset: Dataset, learning_rate: float, **fields: Any) -> SGD:
    """Return the run's settings of SGD with this learning rate; ``fields`` are others."""
    can_train_on_one = trains_on_one(config.model, config.dataset, dataset.image_shape, dataset.num_classes)
    steps = config.steps_per_epoch
    return SGD(
        learning_rate, batch_size=config.batch_size, steps_per_epoch=steps, skips_lone=not can_train_on_one, **fields
    )


class Costs:
    """The costs of a client with so many examples to train on."""

    def __init__(self, config: Config, dataset: Dataset, num_examples: int) -> None:
        self.config, self.dataset, self.num_examples = config, dataset, num_examples

    @property
    def by_layer(self) -> Mapping[str, int]:
        config, dataset = self.config, self.dataset
        return layer_flops(config.model, config.dataset, dataset.image_shape, dataset.num_classes)

    def training(self, masks: Mapping[str, Tensor] | None = None, epochs: int | None = None) -> float:
        """Return the FLOPs of training for so many epochs, by default a round's, under these masks."""
        return training_flops(self.by_layer, self.examples(epochs), masks)

    def examples(self, epochs: int | None = None) -> int:
        """Return how many examples so many epochs take, by default a round's, counting one as often as it is taken.

        The batches of a private step differ in size. Their expected size is counted, which is public.
        """
        config, settings = self.config, sgd(self.config, self.dataset, self.config.learning_rate)
        per_epoch = settings.examples_per_epoch(self.num_examples)
        if config.dp.enabled:
            per_epoch = settings.steps_of(self.num_examples) * min(config.batch_size, self.num_examples)
        return per_epoch * (config.local_epochs if epochs is None else epochs)
