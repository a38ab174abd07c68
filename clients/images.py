"""The network and the data of a client that classifies images, and plain questions about them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from clients.budgeted import BudgetedNode
from clients.node import AnUpdate, Place
from clients.reply_fields import ReplyFields
from clients.task import Task
from fedprune_app.config import Config
from fedprune_app.core.flops import training_flops
from fedprune_app.core.layers import layers_of
from fedprune_app.data.augmentation import CropFlip, augmentation
from fedprune_app.data.data_config import data_config
from fedprune_app.data.splits import ClientData, client_data, content_sha256, dataset_of, label_counts, record_digests
from fedprune_app.engine.store import State
from fedprune_app.engine.wire import Schema
from fedprune_app.learning.evaluate import Evaluation, evaluate
from fedprune_app.learning.sgd import SGD
from fedprune_app.models import vision
from fedprune_app.models.initial import initial_model, layer_flops, shared_names, trains_on_one

_LABELS = frozenset({"labels-train", "labels-validation", "labels-test"})
_NORMALISATION = frozenset({"normalisation-mean", "normalisation-std"})
_FEATURES = frozenset({"features", "features-digest"})
_CONTENT = frozenset({"data-sha256"})


class ImageNode(BudgetedNode[AnUpdate]):
    """An image node has images to learn from, and ``model``, the network that is at work.

    At first ``model`` is the run's initial model. It is the same on every client and on the server, since it is drawn
    from the run's seed alone.
    """

    declares: ClassVar = ReplyFields(
        introduction=_LABELS
        | _NORMALISATION
        | {"image-shape", "num-classes", "classes", "data-dir"}
        | _FEATURES
        | _CONTENT,
        # how many of which class is nobody's business then, and the others may follow from the images
        withheld_when_private=_LABELS | _NORMALISATION | _CONTENT,
    )

    state_waits_for_checkpoint = True

    def __init__(self, config: Config, place: Place) -> None:
        super().__init__(config, place)
        self.data_config = data_config(config, place.has_own_data, self.split_secret())
        self.dataset = dataset_of(self.data_config, self.place.share[1])
        self.data = self.local_data()
        shape, num_classes = self.dataset.image_shape, self.dataset.num_classes
        self.model = initial_model(config.model, config.dataset, shape, num_classes, init=config.init, seed=config.seed)
        self.sizes = {name: parameter.numel() for name, parameter in self.model.named_parameters()}
        self.shared = shared_names(self.model, config.batch_norm)
        names = vision.parameter_names(self.model) + vision.buffer_names(self.model)
        initial = {} if names == self.shared else vision.state_tensors(self.model, include_buffers=True)
        self.unshared = {name: tensor for name, tensor in initial.items() if name not in self.shared}
        self.prunable = vision.prunable_names(self.model)
        self.tested = Evaluation(0, 0, 0.0)  # the last test of a model, as it was counted

    # --- data ---------------------------------------------------------------------------------------------------

    def local_data(self) -> ClientData:
        """Return what the client learns from, decides by and is tested on."""
        return client_data(self.data_config, *self.place.share, self.device)

    def record_digests(self) -> list[bytes]:
        """Return a digest of each of the client's images."""
        return record_digests(self.data_config, *self.place.share)

    @property
    def num_examples(self) -> int:
        """The number of training images."""
        return len(self.data.train_labels)

    def introduction(self) -> dict[str, Any]:
        """Tell the shape of the client's images and its label counts, and the classes if they have names.

        The columns of a dealt table are told, too. Of a client's own table only a digest of their names is told. How
        images are normalised, and a digest of all data, is told of dealt data, of which all clients have the same. For
        a client's own images this stays with the client.
        """
        counts = {} if self.config.dp.enabled else label_counts(self.data_config, *self.place.share)
        names = list(self.dataset.classes)
        told = self.place.has_own_data or names != [str(number) for number in range(len(names))]
        return {
            **super().introduction(),
            "image-shape": list(self.dataset.image_shape),
            "num-classes": self.dataset.num_classes,
            **({"classes": names} if told else {}),
            **self._told_features(),
            **({"data-dir": self.config.data_dir} if self.place.has_own_data else {}),
            **{f"labels-{part}": [int(n) for n in values] for part, values in counts.items()},
            **({} if self.config.dp.enabled or self.place.has_own_data else self._told_of_all()),
        }

    def _normalisation(self) -> dict[str, list[float]]:
        """Return the mean and the standard deviation by channel that the client's images are normalised with."""
        depth, dataset = self.dataset.image_shape[0], self.dataset
        both = {"mean": dataset.mean, "std": dataset.std}
        return {name: np.broadcast_to(np.asarray(values, float), depth).tolist() for name, values in both.items()}

    def _told_of_all(self) -> dict[str, Any]:
        normalisation = {f"normalisation-{name}": values for name, values in self._normalisation().items()}
        return {**normalisation, "data-sha256": content_sha256(self.data_config)}

    def _told_features(self) -> dict[str, Any]:
        if not self.dataset.features:
            return {}
        if self.place.has_own_data:
            return {"features-digest": self.dataset.features_digest}
        return {"features": list(self.dataset.features)}

    def kept_state(self, update: AnUpdate) -> State:
        """Remember in the state what an export of its model tells of the data, which may have changed by then.

        This is how images were normalised, and the columns of a table.
        """
        state = super().kept_state(update)
        features = {"features": list(self.dataset.features)} if self.dataset.features else {}
        return State(state.tensors, {**state.meta, "normalisation": self._normalisation(), **features})

    def augmentation(self, images: Tensor) -> CropFlip | None:
        """Return what the key ``augmentation`` asks for, of these training images."""
        black = torch.tensor([-mean / std for mean, std in zip(self.dataset.mean, self.dataset.std, strict=True)])
        return augmentation(self.config.augmentation, images, black)

    # --- the network --------------------------------------------------------------------------------------------

    def message_schema(self) -> Schema:
        """Describe a dense model."""
        return Schema.like(vision.named_tensors(self.model))

    def shared_schema(self, masked: Iterable[str] = ()) -> Schema:
        """Describe a payload of the shared tensors, with masks for the tensors in ``masked``."""
        tensors = vision.named_tensors(self.model)
        return Schema.like({name: tensors[name] for name in self.shared}, frozenset(masked))

    def own_model(self, state: State) -> dict[str, Tensor]:
        """Return the client's own model as it was left: at first the initial one, which the network still holds."""
        return state.group("weights") or vision.state_tensors(self.model, include_buffers=True)

    def local_norms(self, state: State) -> dict[str, Tensor]:
        """Return the tensors that never travel (``batch-norm=local``): the client's own, at first the initial ones.

        A test of a received model needs them: the network holds those of the model that it tested before.
        """
        own = state.group("weights")
        return {name: own.get(name, initial) for name, initial in self.unshared.items()}

    def hidden_parameters(self) -> list[str]:
        """Return the names of the parameters of all layers but the last."""
        *hidden, _ = layers_of(list(self.sizes), self.prunable).values()
        return [name for names in hidden for name in names]

    def density(self, masks: Mapping[str, Tensor]) -> float:
        """Return the kept share of all parameters, unpruned biases and norms included."""
        kept = sum(int(masks[name].sum()) if name in masks else size for name, size in self.sizes.items())
        return kept / sum(self.sizes.values())

    # --- work ---------------------------------------------------------------------------------------------------

    def layer_flops(self) -> Mapping[str, int]:
        """Return the FLOPs of one example's forward pass, by layer."""
        config, shape = self.config, self.dataset.image_shape
        return layer_flops(config.model, config.dataset, shape, self.dataset.num_classes)

    def training_flops(self, masks: Mapping[str, Tensor] | None = None, epochs: int | None = None) -> float:
        """Return the FLOPs of training for so many epochs, by default a round's, under these masks."""
        return training_flops(self.layer_flops(), self.examples_trained(epochs), masks)

    def sgd(self, learning_rate: float, **more: Any) -> SGD:
        """Return the run's settings of SGD with this learning rate; ``more`` are other fields."""
        config, data = self.config, self.dataset
        one = trains_on_one(config.model, config.dataset, data.image_shape, data.num_classes)
        return SGD(
            learning_rate,
            batch_size=config.batch_size,
            steps_per_epoch=config.steps_per_epoch,
            skips_lone=not one,
            **more,
        )

    def examples_trained(self, epochs: int | None = None) -> int:
        """How many examples so many epochs take, by default a round's, counting one as often as it is taken.

        The batches of a private step differ in size. Their expected size is counted, which is public.
        """
        config, sgd = self.config, self.sgd(self.config.learning_rate)
        per_epoch = sgd.examples_per_epoch(self.num_examples)
        if self.privacy is not None:
            per_epoch = sgd.steps_of(self.num_examples) * min(config.batch_size, self.num_examples)
        return per_epoch * (config.local_epochs if epochs is None else epochs)

    # --- accuracy -----------------------------------------------------------------------------------------------

    def accuracy(self, task: Task, split: str, *, decides: bool = False) -> float | None:
        """Return the accuracy in [0, 1] of the model as it is on ``validation`` or ``test``; None without images.

        ``decides`` says that something that is released depends on the accuracy. With ``dp.enabled`` it is then always
        a noised count, and charged. A mere evaluation is what ``dp.accuracies`` says, and None where the budget does
        not bear it.
        """
        if self.privacy is not None and not decides and self.config.dp.accuracies == "none":
            return None
        images, labels = getattr(self.data, f"{split}_images"), getattr(self.data, f"{split}_labels")
        result = evaluate(self.model, images, labels, device=self.device, precision=self.config.precision)
        self.tested = result
        if not result.total:
            return None
        if self.privacy is None or (not decides and self.config.dp.accuracies == "open"):
            return result.accuracy
        public = vision.state_tensors(self.model, include_buffers=True)
        count = self.privacy.noised_count if decides else self.privacy.affordable_count
        return count(result.correct, result.total, split, task.round, public)

    def test_accuracy(
        self, task: Task, tensors: Mapping[str, Tensor], masks: Mapping[str, Tensor] | None = None
    ) -> float | None:
        """Load ``tensors`` into the model, and return its accuracy in [0, 1] on the client's test data.

        ``masks`` say where the tensors are 0, for systems that then compute with a smaller network.
        """
        vision.load_state_tensors(self.model, tensors)
        return self.accuracy(task, "test")
