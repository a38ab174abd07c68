"""The client half that all image systems share: local training, and evaluation of what is personal and received.

A system overrides what differs: where training starts (:meth:`ImageClient.begin`), what happens between epochs and
after the last (:meth:`ImageClient.local_update`), and for which model the client answers
(:meth:`ImageClient.personal_model`). Each of them is given the task, which says what is asked, and the client's state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from clients.images import ImageNode
from clients.node import Place
from clients.reply_fields import ReplyFields
from clients.scores import Scores, remember_scores, remembered_scores
from clients.task import Task
from fedprune_app.config import OPTIONS, Config, has_effect
from fedprune_app.core import rng
from fedprune_app.core.flops import sparse_flops
from fedprune_app.core.payload import Payload
from fedprune_app.engine.store import State, grouped
from fedprune_app.learning.device import recorder_of
from fedprune_app.learning.train import HowToTrain, train
from fedprune_app.learning.training import TrainingResult
from fedprune_app.models import vision


@dataclass(frozen=True)
class Update:
    """An update is the outcome of a local update: what is sent, what is kept, and how training went."""

    payload: Payload
    state: State
    training: TrainingResult
    flops: float  # of the whole local phase
    metrics: Mapping[str, Any] = field(default_factory=dict)  # more to tell the server


class LocalTraining(HowToTrain, total=False):
    """These are the arguments of :meth:`ImageClient.train` beside the task, for systems that pass them on."""

    role: str
    epochs: int | None
    learning_rate: float | None
    depends_on: object


class ImageClient(ImageNode[Update]):
    """An image client trains a network on its own images, and answers for one personal model."""

    validates = "personal"  # whose validation accuracy picks the best round: "personal", "received" or "global"
    declares: ClassVar = ReplyFields(
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

    def __init__(self, config: Config, place: Place) -> None:
        super().__init__(config, place)
        self.open_privacy()

    # --- what a system says -------------------------------------------------------------------------------------

    def begin(self, task: Task, state: State) -> dict[str, Tensor]:
        """Return the tensors that local training starts from.

        They are what was received, and what is the client's own (local norms).
        """
        return {**state.group("weights"), **task.payload.tensors}

    def masks(self, task: Task, state: State) -> dict[str, Tensor]:
        """Return the client's masks; dense systems have none."""
        return {}

    def local_update(self, task: Task, state: State) -> Update:
        """Train from :meth:`begin`, send the shared tensors, and keep all of them."""
        return self.dense_update(task, state, self.shared)

    def uploaded(self, task: Task, sent: Payload, before: Mapping[str, Tensor]) -> Payload:
        """Return what was sent in the coordinates of the model, as an onlooker reads it who knows the task.

        Masks say which coordinates were sent. The others are as in ``before``, the model before training. By default
        it is what was sent.
        """
        return sent

    def personal_model(self, task: Task, state: State) -> dict[str, Tensor]:
        """Return the model for which the client answers.

        It is its last local one, or where training would start if the client never trained.
        """
        return state.group("weights") or self.begin(task, state)

    @classmethod
    def names_from_server(
        cls, config: Config, names: Iterable[str], prunable: Iterable[str], trained_in: int
    ) -> list[str]:
        """Return the names of a personal model's tensors that are the server's; by default there are none."""
        return []

    def received_scores(self, task: Task, state: State) -> Scores:
        """Return accuracies of what was received: as this client would start from it, and as it is for all."""
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

    def trial(self) -> HowToTrain:
        """Say what is particular about the system's steps, for the one step that is tried before a run."""
        return {}

    def evaluation_counts(self) -> int:
        """Count personal, received and validation accuracy, and the global one where masks make it another."""
        return 3 + (type(self).masks is not ImageClient.masks)

    # --- local work ---------------------------------------------------------------------------------------------

    def dense_update(self, task: Task, state: State, sent: Iterable[str], **how: Unpack[LocalTraining]) -> Update:
        """Train from :meth:`begin`, send the tensors named in ``sent``, and keep all tensors."""
        result, tensors = self.train_from_start(task, state, **how)
        payload = Payload({name: tensors[name] for name in sent})
        return Update(payload, State(grouped(weights=tensors)), result, self.training_flops())

    def train_from_start(
        self, task: Task, state: State, **how: Unpack[LocalTraining]
    ) -> tuple[TrainingResult, dict[str, Tensor]]:
        """Train from :meth:`begin`, and return how training went and all tensors after it."""
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
        **how: Unpack[HowToTrain],
    ) -> TrainingResult:
        """Train the model as it is, with the run's settings and the randomness of this role, client and round.

        ``depends_on`` is what else the training depends on, beside the payloads of the task. Private noise is other
        noise where this is other.
        """
        config = self.config
        sgd = self.sgd(
            config.learning_rates[task.round] if learning_rate is None else learning_rate,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            epochs=config.local_epochs if epochs is None else epochs,
            max_grad_norm=config.max_grad_norm or None,
        )
        draw = rng.generator(config.seed, role, self.client_id, task.round)
        images, labels = self.data.train_images.to(self.device), self.data.train_labels
        augment = self.augmentation(images)
        private = None
        if self.privacy is not None:
            begin = vision.state_tensors(self.model, include_buffers=True)
            public = grouped(begin=begin, masks=how.get("masks") or how.get("active") or {})
            settings = f"{sgd} {task.digest()} {depends_on}{self._own_settings}"
            private = self.privacy.dpsgd(sgd.epochs, role, task.round, public, settings)
        result = train(
            self.model,
            images,
            labels,
            sgd,
            rng=draw,
            augment=augment,
            private=private,
            device=self.device,
            precision=config.precision,
            recorder=recorder_of(config, self.device),
            **how,
        )
        if self.privacy is not None:
            self.privacy.charge_steps(result.num_steps, f"{role}, round {task.round}")
        return result

    @cached_property
    def _own_settings(self) -> str:
        """These are the settings of systems that are not at their default: seeded noise is other noise with others."""
        found = {
            key: value
            for key, value in self.config.to_dict().items()
            if "." in key
            and not key.startswith("dp.")
            and value != (option := OPTIONS[key]).default
            and option.changes_results
            and not option.resumable  # a resumed run may have another value, and ends as if it had always had it
            and has_effect(key, self.config)
        }
        return f" {sorted(found.items())}" if found else ""

    # --- what is told -------------------------------------------------------------------------------------------

    def report(self, task: Task, update: Update) -> dict[str, Any]:
        """Tell the loss, or what privacy cost, and density and FLOPs.

        Raises ``ValueError`` when training diverged.
        """
        if update.training.diverged:
            loss = "" if update.training.loss_mean is None else f" (loss {update.training.loss_mean})"
            raise ValueError(f"training diverged{loss}; try a lower learning-rate")
        told = {"loss": update.training.loss_mean} if self.privacy is None else self.privacy.report(task.round)
        return {**told, "density": self.density(self.masks(task, update.state)), "flops": update.flops}

    def evaluation(self, task: Task, state: State) -> tuple[int, dict[str, Any]]:
        """Tell accuracies of the personal, received and global model, on this client's own data."""
        masks = self.masks(task, state)
        personal = Payload(self.personal_model(task, state), masks)
        own = {name for name in (*self.sizes, *vision.buffer_names(self.model)) if name not in self.unshared}
        if lacking := sorted(own - personal.tensors.keys()):  # what the network holds by chance would be tested
            raise ValueError(
                f"{type(self).__name__}.personal_model() lacks tensor {lacking[0]!r}, allowed: all tensors"
            )
        for name, mask in masks.items():  # else the record would tell of a sparse model, and a dense one would answer
            if bool(personal.tensors[name].masked_select(~mask.to(personal.tensors[name].device)).any()):
                raise ValueError(
                    f"{type(self).__name__}.masks() says that weights of {name!r} are pruned, and personal_model() has "
                    "others than 0 there; allowed: to train with masks=..."
                )
        told: dict[str, Any] = {"digest": personal.digest(), "density": self.density(masks)}
        for name in self.prunable:
            told[f"density/{name}"] = float(masks[name].double().mean()) if name in masks else 1.0
        told["inference-flops"] = sparse_flops(self.layer_flops(), masks)
        scores = self._personal_scores(task, personal)
        if task.payload.tensors:
            scores |= self.received_scores(task, state)
        scores = {name: score for name, score in scores.items() if score is not None}
        told |= scores
        if self.privacy is not None:
            if scores and self.config.dp.accuracies == "noised" and len(self.data.test_labels):
                told["accuracy-noise"] = self.privacy.share_noise(len(self.data.test_labels))
            # which labels a client holds may decide how many test examples it has
            return 0, told | self.privacy.report(task.round)
        return len(self.data.test_labels), told

    def _scores_by_class(self) -> Scores:
        """Return the accuracy of the model that was just tested, by those classes that the test data have."""
        totals = torch.bincount(self.data.test_labels).tolist()
        counts = enumerate(zip(self.tested.correct_by_class, totals, strict=False))
        return {f"accuracy-of-class/{label}": correct / total for label, (correct, total) in counts if total}

    def _personal_scores(self, task: Task, personal: Payload) -> Scores:
        """Return the personal model's accuracies, from disk if model and data are those of the last test."""
        digest = f"{personal.digest()} {self.data_config} {self.place.share[1]}"
        path = self.store.folder / "scores.json"
        scores = remembered_scores(path, digest)
        if scores is None:
            scores = {"accuracy-personal": self.test_accuracy(task, personal.tensors, personal.masks)}
            if self.privacy is None:
                scores |= self._scores_by_class()
            if self.validates == "personal":  # a private client pays for every accuracy
                scores["accuracy-validation"] = self.accuracy(task, "validation")
            remember_scores(path, digest, scores)
        return scores
