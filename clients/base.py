"""The client half that all image systems share: local training, its costs, and the evaluation of its models.

A system overrides what differs: the start of training (:meth:`ImageClient.begin`), the training and the update
(:meth:`ImageClient.local_update`), and the model that the client evaluates (:meth:`ImageClient.personal_model`). Each
method has the message as a :class:`Task`, and the client's state.
"""

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from clients.context import NodeContext
from clients.images import SAID_OF_IMAGES, Images
from clients.node import Node, ReplyFields
from clients.privacy import Dependencies, PlannedReleases, own_settings
from clients.task import Task
from fedprune_app.config import Config
from fedprune_app.core import rng
from fedprune_app.core.aggregate import MaskedMean
from fedprune_app.core.digests import check_json, json_with_digest
from fedprune_app.core.flops import sparse_flops, training_flops
from fedprune_app.core.holders import HELD, HOLDERS, Holders
from fedprune_app.core.masks import packed
from fedprune_app.core.named import TensorDict, Values
from fedprune_app.core.payload import Payload
from fedprune_app.data.dataset import Dataset
from fedprune_app.engine.store import State, grouped
from fedprune_app.engine.wire import Schema
from fedprune_app.files import replace_file
from fedprune_app.learning.device import recorder_of
from fedprune_app.learning.evaluate import Evaluation, evaluate
from fedprune_app.learning.sgd import SGD
from fedprune_app.learning.train import TrainingSettings, train
from fedprune_app.learning.training import TrainingResult
from fedprune_app.models import vision
from fedprune_app.models.initial import initial_model, layer_flops, shared_names, trains_on_one


def sgd(config: Config, dataset: Dataset, learning_rate: float, **fields: Any) -> SGD:
    """Return the run's settings of SGD with this learning rate and other ``fields``."""
    can_train_on_one = trains_on_one(config.model, config.dataset, dataset.image_shape, dataset.num_classes)
    steps = config.steps_per_epoch
    return SGD(
        learning_rate, batch_size=config.batch_size, steps_per_epoch=steps, skips_lone=not can_train_on_one, **fields
    )


class Costs:
    """Computing costs of a client with ``num_examples`` examples to train on."""

    def __init__(self, config: Config, dataset: Dataset, num_examples: int) -> None:
        self.config, self.dataset, self.num_examples = config, dataset, num_examples

    @property
    def by_layer(self) -> Mapping[str, int]:
        config, dataset = self.config, self.dataset
        return layer_flops(config.model, config.dataset, dataset.image_shape, dataset.num_classes)

    def training(self, masks: Mapping[str, Tensor] | None = None, epochs: int | None = None) -> float:
        """Return the FLOPs of training for ``epochs``, by default a round's, under these masks."""
        return training_flops(self.by_layer, self.examples(epochs), masks)

    def gradient(self, num_examples: int) -> float:
        """Return the FLOPs of one dense gradient of ``num_examples`` examples."""
        return training_flops(self.by_layer, num_examples)

    def examples(self, epochs: int | None = None) -> int:
        """Return the number of examples in ``epochs``, by default a round's; a repeated example counts each time.

        Sizes of private batches vary, so their expected size counts, which is public. A group counts as
        ``dp.group-limit`` examples, since its size is private.
        """
        config, settings = self.config, sgd(self.config, self.dataset, self.config.learning_rate)
        per_epoch = settings.examples_per_epoch(self.num_examples)
        if config.dp.enabled:
            per_epoch = settings.steps_of(self.num_examples) * min(config.batch_size, self.num_examples)
            per_epoch *= config.dp.most_per_unit
        return per_epoch * (config.local_epochs if epochs is None else epochs)


# --- the client -------------------------------------------------------------------------------------------------------


Scores = dict[str, float | None]


def remembered_scores(path: Path, digest: str) -> Scores | None:
    """Return the scores in a file; None if its digest differs, or if it is damaged."""
    try:
        content = json.loads(path.read_text())
        check_json(content)
        return dict(content["scores"]) if content["digest"] == digest else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def remember_scores(path: Path, digest: str, scores: Mapping[str, float | None]) -> None:
    """Write scores to a file. A full disk leaves the file unchanged, since it must not stop an evaluation."""
    with suppress(OSError):
        content = json.dumps(json_with_digest({"digest": digest, "scores": dict(scores)})).encode()
        replace_file(path, content, durable=False, private=True)


@dataclass(frozen=True)
class Update:
    """Outcome of local training: the payload to send, the state to keep, and the training's result and cost."""

    payload: Payload
    state: State
    training: TrainingResult
    flops: float  # of the whole local phase
    metrics: Mapping[str, Any] = field(default_factory=dict)  # further fields of the reply


class LocalTraining(TrainingSettings, total=False):
    """Keyword arguments of :meth:`ImageClient.train`, for systems that pass them on."""

    role: str
    epochs: int | None
    learning_rate: float | None
    depends_on: object


class ImageClient(Node):
    """Base class of clients that train a network on their own images and evaluate one personal model.

    * ``data``: the client's part of ``dataset``, for training, validation and test; ``images`` describes it.
    * ``model``: the network whose tensors are loaded now. At first it is the run's initial model, the same on every
      client and on the server, since only the run's seed draws it.
    * ``origin``: the network's name, and the dataset's name, image shape and number of classes.
    * ``shared``: the names of the tensors that travel; ``prunable``: those of convolutions' and linear layers' weights.
    * ``sizes``: the number of elements of each parameter, by name.
    * ``costs``: the computing costs of training.
    """

    state_waits_for_checkpoint = True
    # the model whose validation accuracy selects the best round: "personal", "received" or "global"
    validates = "personal"
    declares: ClassVar = SAID_OF_IMAGES | ReplyFields(
        training=frozenset({"density", "flops", "loss"}),
        evaluation=frozenset(
            {
                *("digest", "density", "density/", "inference-flops"),
                *("accuracy-personal", "accuracy-validation", "accuracy-received", "accuracy-global", "accuracy-noise"),
                "accuracy-of-class/",
            }
        ),
        withheld_when_private=frozenset({"loss", "accuracy-of-class/"}),
        only_when_private=frozenset({"accuracy-noise"}),
    )

    def __init__(self, config: Config, context: NodeContext) -> None:
        super().__init__(config, context)
        self.images = self.local_images()
        self.dataset, self.data = self.images.dataset, self.images.data
        self.kept_properties = self.images.properties_to_keep()
        shape, num_classes = self.dataset.image_shape, self.dataset.num_classes
        self.origin = config.model, config.dataset, shape, num_classes
        self.model = initial_model(*self.origin, init=config.init, seed=config.seed)
        self.sizes = {name: parameter.numel() for name, parameter in self.model.named_parameters()}
        self.shared = shared_names(self.model, config.batch_norm)
        initial = vision.state_tensors(self.model, include_buffers=True)
        self.unshared = {name: tensor for name, tensor in initial.items() if name not in self.shared}
        self.prunable = vision.prunable_names(self.model)
        self.costs = Costs(config, self.dataset, self.num_examples)
        self.tested = Evaluation(0, 0, 0.0)  # the last evaluation, before noise
        self.privacy = self.open_privacy(self.images.record_digests, config.partition)

    def local_images(self) -> Images:
        """Return the client's data for training, validation and test."""
        return Images(self.config, self.context, self.device)

    @property
    def num_examples(self) -> int:
        return self.images.sizes["train"]

    def registration(self) -> dict[str, Any]:
        return {**super().registration(), **self.images.registration()}

    def message_schema(self) -> Schema:
        """Return the schema of a dense model."""
        return Schema.like(vision.named_tensors(self.model))

    def shared_schema(self, masked: Iterable[str] = ()) -> Schema:
        """Return the schema of the shared tensors, with masks for the tensors in ``masked``."""
        tensors = vision.named_tensors(self.model)
        return Schema.like({name: tensors[name] for name in self.shared}, frozenset(masked))

    def check_kept(self, meta: Values) -> None:
        super().check_kept(meta)
        self.images.check_parts(meta)

    # --- what a system overrides --------------------------------------------------------------------------------

    def begin(self, task: Task, state: State) -> dict[str, Tensor]:
        """Return the tensors that local training starts from: the received ones and the client's own (local norms)."""
        return {**state.group("weights"), **task.payload.tensors}

    def masks(self, task: Task, state: State) -> dict[str, Tensor]:
        """Return the client's masks; dense systems have none."""
        return {}

    def local_update(self, task: Task, state: State) -> Update:
        """Train from :meth:`begin`, send the shared tensors, and keep all tensors."""
        return self.dense_update(task, state, self.shared)

    def personal_model(self, task: Task, state: State) -> dict[str, Tensor]:
        """Return the client's own model: its last local one, or the start of training if it never trained."""
        return state.group("weights") or self.begin(task, state)

    @classmethod
    def names_from_server(
        cls, config: Config, names: Iterable[str], prunable: Iterable[str], trained_in: int
    ) -> list[str]:
        """Return the names of a personal model's tensors that come from the server; by default none."""
        return []

    def received_scores(self, task: Task, state: State) -> Scores:
        """Return accuracies of the received model: as this client would start from it, and unchanged."""
        begin, masks = {**self.local_norms(state), **self.begin(task, state)}, self.masks(task, state)
        scores = {"accuracy-received": self.test_accuracy(task, begin, masks)}
        if self.validates == "received":
            scores["accuracy-validation"] = self.accuracy(task, "validation")
        pruned = any(not bool(mask.all()) for mask in masks.values())
        dense = {**begin, **task.payload.tensors}
        scores["accuracy-global"] = self.test_accuracy(task, dense) if pruned else scores["accuracy-received"]
        if self.validates == "global":
            scores["accuracy-validation"] = self.accuracy(task, "validation")
        return scores

    def planned_releases(self) -> PlannedReleases:
        """Plan personal, received and validation accuracy, and the global one if masks make it different."""
        return PlannedReleases(
            self.config.local_epochs, evaluation_counts=3 + (type(self).masks is not ImageClient.masks)
        )

    def integers(self, task: Task, payload: Payload, terms: Mapping[str, int]) -> TensorDict:
        if HOLDERS in terms:
            return Holders.integers(payload, int(terms[HOLDERS]))
        most = int(terms["max-weight"])
        weight = 1 if self.sends_parts else min(self.num_examples, most)
        sums = MaskedMean(int(terms["max-addends"]), most).integers(payload, weight)
        return packed(sums, task.payload.masks) if task.fields.get("asks") == HELD else sums

    # --- local work ---------------------------------------------------------------------------------------------

    def dense_update(self, task: Task, state: State, sent: Iterable[str], **how: Unpack[LocalTraining]) -> Update:
        """Train from :meth:`begin`, send the tensors named in ``sent``, and keep all tensors."""
        result, tensors = self.train_from_start(task, state, **how)
        payload = Payload({name: tensors[name] for name in sent})
        return Update(payload, State(grouped(weights=tensors)), result, self.costs.training())

    def train_from_start(
        self, task: Task, state: State, **how: Unpack[LocalTraining]
    ) -> tuple[TrainingResult, dict[str, Tensor]]:
        """Train from :meth:`begin`, and return the training's result and all tensors after it."""
        vision.load_state_tensors(self.model, self.begin(task, state))
        result = self.train(task, **how)
        return result, vision.state_tensors(self.model, include_buffers=True)

    def train(
        self,
        task: Task,
        *,
        role: str = "train",
        epochs: int | None = None,
        learning_rate: float | None = None,
        depends_on: object = None,
        **how: Unpack[TrainingSettings],
    ) -> TrainingResult:
        """Train the loaded model with the run's settings and the randomness of this role, client and round.

        ``depends_on`` is anything else that determines the training besides the task's payloads. Seeded private noise
        differs if it differs.
        """
        config = self.config
        settings = sgd(
            config,
            self.dataset,
            config.learning_rates[task.round] if learning_rate is None else learning_rate,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            epochs=config.local_epochs if epochs is None else epochs,
            max_grad_norm=config.max_grad_norm or None,
        )
        draw = rng.generator(config.seed, role, self.client_id, task.round)
        images, labels = self.data.train_images.to(self.device), self.data.train_labels
        private = None
        if self.privacy is not None:
            begin = vision.state_tensors(self.model, include_buffers=True)
            public = grouped(begin=begin, masks=how.get("masks") or how.get("active") or {})
            dependencies = Dependencies(
                settings,
                task.digest(),
                depends_on,
                own_settings(config),
                self.privacy.noise_multiplier,
                config.dp.clip_norm,
                self.privacy.sample_rate,
            )
            groups = self.images.groups.get("train")
            private = self.privacy.dpsgd(settings.epochs, role, task.round, public, dependencies, groups)
        result = train(
            self.model,
            images,
            labels,
            settings,
            rng=draw,
            augment=self.images.augmentation(images),
            private=private,
            device=self.device,
            precision=config.precision,
            # on a GPU a cohort's bits depend on its clients, and these on which client comes first
            grouped=config.training_form == "grouped" and not (config.deterministic and self.device.type == "cuda"),
            recorder=recorder_of(config, self.device),
            **how,
        )
        if self.privacy is not None:
            self.privacy.charge_steps(result.num_steps, f"{role}, round {task.round}")
        return result

    def accuracy(self, task: Task, split: str, *, decides: bool = False) -> float | None:
        """Return the loaded model's accuracy in [0, 1] on ``validation`` or ``test``; None without images.

        ``decides`` means that a release depends on the accuracy: with ``dp.enabled`` it is then always a noised count,
        and charged. Otherwise ``dp.accuracies`` applies, and the result is None where the budget cannot pay for it.
        """
        if self.privacy is not None and not decides and self.config.dp.accuracies == "none":
            return None
        self.tested = result = self.evaluated(split)
        if self.privacy is None or (not decides and self.config.dp.accuracies == "open"):
            return result.accuracy if result.total else None
        total = self.images.sizes[split]
        if not total:
            return None
        public = vision.state_tensors(self.model, include_buffers=True)
        count = self.privacy.noised_count if decides else self.privacy.affordable_count
        return count(result.correct, total, split, task.round, public)

    def evaluated(self, split: str) -> Evaluation:
        """Evaluate the loaded model on ``validation`` or ``test``."""
        images, labels = getattr(self.data, f"{split}_images"), getattr(self.data, f"{split}_labels")
        precision, groups = self.config.precision, self.images.groups.get(split)
        return evaluate(self.model, images, labels, device=self.device, precision=precision, groups=groups)

    def test_accuracy(
        self, task: Task, tensors: Mapping[str, Tensor], masks: Mapping[str, Tensor] | None = None
    ) -> float | None:
        """Load ``tensors`` into the model, and return its accuracy in [0, 1] on the client's test data.

        ``masks`` mark where the tensors are 0, for systems that then compute with a smaller network.
        """
        vision.load_state_tensors(self.model, tensors)
        return self.accuracy(task, "test")

    # --- its own model --------------------------------------------------------------------------------------------

    def own_model(self, state: State) -> dict[str, Tensor]:
        """Return the client's own model after its last training; at first the initial one, which is still loaded."""
        return state.group("weights") or vision.state_tensors(self.model, include_buffers=True)

    def local_norms(self, state: State) -> dict[str, Tensor]:
        """Return the tensors that never travel (``batch-norm=local``): the client's own, at first the initial ones.

        A test of a received model needs them, since the network holds those of the model tested before.
        """
        weights = state.group("weights")
        return {name: weights.get(name, initial) for name, initial in self.unshared.items()}

    def density(self, masks: Mapping[str, Tensor]) -> float:
        """Return the kept share of all parameters, unpruned biases and norms included."""
        num_kept = sum(int(masks[name].sum()) if name in masks else size for name, size in self.sizes.items())
        return num_kept / sum(self.sizes.values())

    # --- replies ------------------------------------------------------------------------------------------------

    def report(self, task: Task, update: Update) -> dict[str, Any]:
        """Report the loss, or the privacy charged, and density and FLOPs.

        Raises ``ValueError`` when training diverged.
        """
        if update.training.diverged:
            loss = "" if update.training.loss_mean is None else f" (loss {update.training.loss_mean})"
            raise ValueError(f"training diverged{loss}; try a lower learning-rate")
        report = {"loss": update.training.loss_mean} if self.privacy is None else self.privacy.report(task.round)
        return {**report, "density": self.density(self.masks(task, update.state)), "flops": update.flops}

    def evaluation(self, task: Task, state: State) -> tuple[int, dict[str, Any]]:
        """Report accuracies of the personal, received and global model on this client's own data."""
        masks = self.masks(task, state)
        personal = Payload(self.personal_model(task, state), masks)
        own_names = {name for name in (*self.sizes, *vision.buffer_names(self.model)) if name not in self.unshared}
        # else whatever the network holds there would be tested
        if missing_names := sorted(own_names - personal.tensors.keys()):
            raise ValueError(
                f"{type(self).__name__}.personal_model() lacks tensor {missing_names[0]!r}, allowed: all tensors"
            )
        for name, mask in masks.items():  # else a sparse model would be recorded, and a dense one evaluated
            if bool(personal.tensors[name].masked_select(~mask.to(personal.tensors[name].device)).any()):
                raise ValueError(
                    f"{type(self).__name__}.masks() says that weights of {name!r} are pruned, and personal_model() has "
                    "others than 0 there; allowed: to train with masks=..."
                )
        fields: dict[str, Any] = {"digest": personal.digest(), "density": self.density(masks)}
        for name in self.prunable:
            fields[f"density/{name}"] = float(masks[name].double().mean()) if name in masks else 1.0
        fields["inference-flops"] = sparse_flops(self.costs.by_layer, masks)
        scores = self._personal_scores(task, personal)
        if task.payload.tensors:
            scores |= self.received_scores(task, state)
        scores = {name: score for name, score in scores.items() if score is not None}
        fields |= scores
        if self.privacy is not None:
            if scores and self.config.dp.accuracies == "noised" and (num_tests := self.images.sizes["test"]):
                # the standard deviation of the noise in each share
                fields["accuracy-noise"] = self.config.dp.noise_of_accuracy(num_tests)
            # the number of test examples may depend on the client's labels
            return 0, fields | self.privacy.report(task.round)
        return len(self.data.test_labels), fields

    def _personal_scores(self, task: Task, personal: Payload) -> Scores:
        """Return the personal model's accuracies, from disk if neither model nor data have changed."""
        digest = f"{personal.digest()} {self.images.data_config} {self.context.share[1]}"
        path = self.store.folder / "scores.json"
        scores = remembered_scores(path, digest)
        if scores is None:
            scores = {"accuracy-personal": self.test_accuracy(task, personal.tensors, personal.masks)}
            if self.privacy is None:
                totals = torch.bincount(self.data.test_labels).tolist()
                counts = enumerate(zip(self.tested.correct_by_class, totals, strict=False))
                scores |= {f"accuracy-of-class/{label}": correct / n for label, (correct, n) in counts if n}
            # a private client pays for every accuracy; after a last phase all others validate what is then tested
            if self.validates == "personal" or (self.privacy is None and self.config.last_phase):
                scores["accuracy-validation"] = self.accuracy(task, "validation")
            remember_scores(path, digest, scores)
        return scores
