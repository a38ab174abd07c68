"""The client half all image systems share: local training, evaluation of what is personal and received.

A system overrides what differs: where training starts (:meth:`begin`), what
happens between epochs and after the last (:meth:`local_update`), what model it answers for (:meth:`personal_model`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clients.node import NDArrays, Node, payload_names, received_payload
from clients.privacy import ClientPrivacy
from fedprune_app.config import Config
from fedprune_app.core import rng
from fedprune_app.core.flops import sparse_flops, training_flops
from fedprune_app.core.layers import layers_of
from fedprune_app.core.payload import Payload
from fedprune_app.core.seals import check_json, sealed_json
from fedprune_app.data.augmentation import CropFlip, augmentation
from fedprune_app.data.splits import ClientData, client_data, data_config, dataset_of, label_counts
from fedprune_app.engine.store import State, grouped
from fedprune_app.engine.wire import Schema
from fedprune_app.files import replace_file
from fedprune_app.learning.evaluate import evaluate
from fedprune_app.learning.sgd import SGD
from fedprune_app.learning.train import TrainingResult, train
from fedprune_app.models import vision
from fedprune_app.models.initial import initial_model, layer_flops, shared_names


@dataclass(frozen=True)
class Update:
    """The outcome of a local update: what is sent, what is kept, and how training went."""

    payload: Payload
    state: State
    training: TrainingResult
    flops: float  # of the whole local phase
    metrics: Mapping[str, Any] = field(default_factory=dict)  # more to tell the server


class FederatedClient(Node):
    """A client that classifies images.

    The initial model is the same on every client and the server: it is drawn from the run's seed alone.
    """

    validates = "personal"  # which model's validation accuracy picks the best round: "personal" or "received"
    privacy_kind: type[ClientPrivacy] = ClientPrivacy

    def __init__(
        self,
        config: Config,
        partition: int,
        num_partitions: int,
        state_dir: Path,
        capacity: float | None = None,
        run_key: str = "",
    ) -> None:
        super().__init__(config, partition, num_partitions, state_dir, capacity, run_key)
        self.data_config = data_config(config, self.has_own_data)
        self.dataset = dataset_of(self.data_config)
        self.data = self.local_data()
        shape, num_classes = self.dataset.image_shape, self.dataset.num_classes
        self.model = initial_model(config.model, config.dataset, shape, num_classes, init=config.init, seed=config.seed)
        self.sizes = {name: parameter.numel() for name, parameter in self.model.named_parameters()}
        self.shared = shared_names(self.model, config.batch_norm)
        self.prunable = vision.prunable_names(self.model)
        self.privacy: ClientPrivacy | None = None  # what dp.enabled adds
        if config.dp.enabled:
            plan = self.planned_epochs(), self.round_epochs()
            whose = f"{partition:05d}"
            if self.has_own_data:  # its number may be another in the next run
                whose = f"own-{hashlib.sha256(config.data_dir.encode()).hexdigest()[:16]}"
            folder = self.store.folder
            self.privacy = self.privacy_kind(
                config, partition, self.num_examples, *plan, folder, whose, self.round_counts(), self.planned_counts()
            )

    def local_data(self) -> ClientData:
        """What the client learns from, decides by and is tested on."""
        return client_data(self.data_config, *self.share)

    @property
    def num_examples(self) -> int:
        return len(self.data.train_labels)

    def message_schema(self) -> Schema:
        return Schema.like(vision.named_tensors(self.model))

    # --- what a system says -------------------------------------------------------------------------------------

    def begin(self, received: Payload, state: State) -> dict[str, Tensor]:
        """The tensors local training starts from: what was received, and what is the client's own (local norms)."""
        return {**state.group("weights"), **received.tensors}

    def round_epochs(self) -> int:
        """How many epochs of training the local part of one round has."""
        return self.config.local_epochs

    def round_counts(self) -> int:
        """How many counts of correct predictions every round asks for; with ``dp.enabled`` they are noised."""
        return 0

    def evaluation_counts(self) -> int:
        """At most how many an evaluation asks for, with that of what a client starts from before it trains."""
        return 4 + (self.validates == "received")  # personal, received and global model, and what is validated

    def planned_counts(self) -> int:
        """At most how many noised counts a client is planned to tell in the whole run, for ``dp.target-epsilon``."""
        noised = self.config.dp.accuracies == "noised"
        evaluations = self.evaluations * self.evaluation_counts() if noised else 0
        return self.planned_rounds() * self.round_counts() + evaluations

    def planned_rounds(self) -> int:
        """How many rounds a client is planned to join."""
        return self.config.dp.planned_rounds or self.config.num_server_rounds

    @property
    def evaluations(self) -> int:
        """How often all clients are evaluated, in a run that has all its rounds."""
        rounds, every = self.config.num_server_rounds, self.config.evaluate_every
        return -(-rounds // every) if every else 1

    def planned_epochs(self) -> int:
        """How many epochs of training a client is planned to have in the whole run, for ``dp.target-epsilon``."""
        return self.planned_rounds() * self.round_epochs()

    def masks(self, state: State) -> dict[str, Tensor]:
        """The client's masks; none for dense systems."""
        return {}

    def local_update(self, received: Payload, state: State, round: int) -> Update:
        """Train from :meth:`begin`, send the shared tensors, keep all of them."""
        vision.load_state_tensors(self.model, self.begin(received, state))
        result = self.train(round)
        tensors = vision.state_tensors(self.model, include_buffers=True)
        payload = Payload({name: tensors[name] for name in self.shared})
        return Update(payload, State(grouped(weights=tensors)), result, self.training_flops())

    def uploaded(self, sent: Payload, before: Mapping[str, Tensor]) -> Payload:
        """An upload of this round in the coordinates of the model, as an onlooker reads it who knows the model before.

        Masks say which coordinates were sent; the others are as ``before``. By default the payload itself.
        """
        return sent

    def personal_model(self, received: Payload, state: State) -> dict[str, Tensor]:
        """The model the client answers for: its last local one, or where training would start if it never trained."""
        return state.group("weights") or self.begin(received, state)

    @classmethod
    def names_from_server(
        cls, config: Config, names: Iterable[str], prunable: Iterable[str], trained_in: int
    ) -> list[str]:
        """Which tensors of the personal model are the server's, for a client that last trained in this round: none."""
        return []

    def received_scores(self, received: Payload, state: State) -> dict[str, float | None]:
        """Accuracies of what was received: as this client would start from it, and as it is for all."""
        begin, masks = self.begin(received, state), self.masks(state)
        scores = {"accuracy-received": self.test_accuracy(begin, masks)}
        if self.validates == "received":
            scores["accuracy-validation"] = self.accuracy("validation")
        pruned = any(not bool(mask.all()) for mask in masks.values())
        dense = {**begin, **received.tensors}
        scores["accuracy-global"] = self.test_accuracy(dense) if pruned else scores["accuracy-received"]
        return scores

    def shared_schema(self, masked: Iterable[str] = ()) -> Schema:
        """A payload of the shared tensors, with masks for these."""
        tensors = vision.named_tensors(self.model)
        return Schema.like({name: tensors[name] for name in self.shared}, frozenset(masked))

    def own_model(self, state: State) -> dict[str, Tensor]:
        """The client's own model as it was left, at first the common initial one (the network still holds it)."""
        return state.group("weights") or vision.state_tensors(self.model, include_buffers=True)

    def refuse(self, sender: int, error: ValueError) -> None:
        """Note that another client's payload, well formed as it is, cannot be used."""
        self.request["refused"].append(f"letter/{sender} is left out: {error}")

    # --- local work ---------------------------------------------------------------------------------------------

    def train(
        self,
        round: int,
        *,
        role: str = "train",
        epochs: int | None = None,
        learning_rate: float | None = None,
        **how: Any,
    ) -> TrainingResult:
        """The one local training loop, with this run's settings and randomness of this (role, client, round)."""
        config = self.config
        sgd = SGD(
            learning_rate=config.learning_rates[round] if learning_rate is None else learning_rate,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            batch_size=config.batch_size,
            epochs=config.local_epochs if epochs is None else epochs,
            max_grad_norm=config.max_grad_norm or None,
            steps_per_epoch=config.steps_per_epoch,
        )
        draw = rng.generator(config.seed, role, self.partition, round)
        images, labels = self.data.train_images.to(self.device), self.data.train_labels
        augment = self.augmentation(images)
        private = None
        if self.privacy is not None:
            begin = vision.state_tensors(self.model, include_buffers=True)
            public = grouped(begin=begin, masks=how.get("masks") or how.get("active") or {})
            settings = f"{sgd} {self.received.digest()} {self.request.get('precision')}"
            private = self.privacy.dpsgd(sgd.epochs, role, round, public, settings)
        result = train(
            self.model, images, labels, sgd, rng=draw, device=self.device, augment=augment, private=private, **how
        )
        if self.privacy is not None:
            self.privacy.charge_steps(result.num_steps, f"{role}, round {round}")
        return result

    def augmentation(self, images: Tensor) -> CropFlip | None:
        """What ``augmentation`` asks for, of these training images."""
        black = torch.tensor([-mean / std for mean, std in zip(self.dataset.mean, self.dataset.std, strict=True)])
        return augmentation(self.config.augmentation, images, black)

    def but_the_last(self) -> list[str]:
        """Names of the parameters of all layers but the last."""
        *hidden, _ = layers_of(list(self.sizes), self.prunable).values()
        return [name for names in hidden for name in names]

    def training_flops(self, masks: Mapping[str, Tensor] | None = None, epochs: int | None = None) -> float:
        """FLOPs of training for so many epochs under these masks."""
        return training_flops(self.layer_flops(), self.examples_trained(epochs), masks)

    def examples_trained(self, epochs: int | None = None) -> int:
        """How many examples so many epochs take, by default a round's, counting one as often as it is taken."""
        config = self.config
        sgd = SGD(config.learning_rate, batch_size=config.batch_size, steps_per_epoch=config.steps_per_epoch)
        return sgd.examples_per_epoch(self.num_examples) * (config.local_epochs if epochs is None else epochs)

    def layer_flops(self) -> Mapping[str, int]:
        """FLOPs of one example's forward pass, by layer."""
        config, shape = self.config, self.dataset.image_shape
        return layer_flops(config.model, config.dataset, shape, self.dataset.num_classes)

    def accuracy(self, split: str, *, decides: bool = False) -> float | None:
        """Accuracy in [0, 1] of the model as it is on ``validation`` or ``test``; None for an empty split.

        ``decides``: something that is released depends on it. With ``dp.enabled`` it is then always a noised count,
        and charged; a mere evaluation is what ``dp.accuracies`` says, and None where the budget does not bear it.
        """
        if self.privacy is not None and not decides and self.config.dp.accuracies == "none":
            return None
        images, labels = getattr(self.data, f"{split}_images"), getattr(self.data, f"{split}_labels")
        result = evaluate(self.model, images, labels, device=self.device)
        if not result.total:
            return None
        if self.privacy is None or (not decides and self.config.dp.accuracies == "open"):
            return result.accuracy
        public = vision.state_tensors(self.model, include_buffers=True)
        count = self.privacy.noised_count if decides else self.privacy.affordable_count
        return count(result.correct, result.total, split, int(self.request["round"]), public)

    def density(self, masks: Mapping[str, Tensor]) -> float:
        """Kept share of all parameters, unpruned biases and norms included."""
        kept = sum(int(masks[name].sum()) if name in masks else size for name, size in self.sizes.items())
        return kept / sum(self.sizes.values())

    def channel_density(self, state: State) -> float | None:
        """Kept share of the convolution channels, in systems that remove channels."""
        return None

    # --- Flower's NumPyClient -----------------------------------------------------------------------------------

    def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
        """Who this client is: its partition, its data's shape and label counts; of its own data, the classes too."""
        private = self.privacy is not None  # how many of which class is nobody's business then
        counts = {} if private else label_counts(self.data_config, *self.share)
        own = {"classes": list(self.dataset.classes), "data-dir": self.config.data_dir} if self.has_own_data else {}
        return {
            **self.introduction(),
            "image-shape": list(self.dataset.image_shape),
            "num-classes": self.dataset.num_classes,
            **own,
            **{f"labels-{part}": [int(n) for n in values] for part, values in counts.items()},
        }

    def fit(self, parameters: NDArrays, config: dict[str, Any]) -> tuple[NDArrays, int, dict[str, Any]]:
        """As every client's; a private one declines, without a payload, what its budget does not bear to the end."""
        if self.privacy is None:
            return super().fit(parameters, config)
        from fedprune_app.privacy.ledger import Overspent

        try:
            self.privacy.ledger.require(self.privacy.round_cost)
            return super().fit(parameters, config)
        except Overspent as error:
            told = self.privacy.declined(int(config["round"]), error)
            return [], self.num_examples, {**told, **payload_names(Payload({}))}

    def report(self, update: Update) -> dict[str, Any]:
        """Loss, or what privacy cost, density and FLOPs. Raises ``ValueError`` when training diverged."""
        if update.training.diverged:
            loss = "" if update.training.loss_mean is None else f" (loss {update.training.loss_mean})"
            raise ValueError(f"training diverged{loss}; try a lower learning-rate")
        told = {"loss": update.training.loss_mean}
        if self.privacy is not None:
            told = self.privacy.report(int(self.request["round"]))
        return {
            **told,
            "density": self.density(self.masks(update.state)),
            "flops": update.flops,
        }

    def evaluate(self, parameters: NDArrays, config: dict[str, Any]) -> tuple[float, int, dict[str, Any]]:
        """Accuracies of the personal, received and global model, on this client's own data."""
        self.request = config
        self.received = received = received_payload(parameters, config)
        state, lost = self._state(config, before=int(config["round"]) + 1)
        masks = self.masks(state)
        personal = Payload(self.personal_model(received, state), masks)
        metrics: dict[str, Any] = {"digest": personal.digest(), "density": self.density(masks)}
        metrics |= self._note(lost, config)
        for name in self.prunable:
            metrics[f"density/{name}"] = float(masks[name].double().mean()) if name in masks else 1.0
        metrics["inference-flops"] = sparse_flops(self.layer_flops(), masks)
        scores = {"channel-density": self.channel_density(state), **self._personal_scores(personal)}
        if received.tensors:
            scores |= self.received_scores(received, state)
        metrics |= {name: score for name, score in scores.items() if score is not None}
        if self.privacy is not None:
            metrics |= self.privacy.report(int(config["round"]))
        # which labels a client holds may decide how many test examples it has
        return 0.0, 0 if self.privacy is not None else len(self.data.test_labels), metrics

    def kept_state(self, update: Update) -> State:
        """How much was charged so far is remembered apart from the ledger, which must not shrink."""
        if self.privacy is None:
            return update.state
        return State(update.state.tensors, {**update.state.meta, "charges": self.privacy.charges})

    def _state(self, config: Mapping[str, Any], before: int) -> tuple[State, str]:
        state, lost = super()._state(config, before)
        if self.privacy is not None:
            self.privacy.require_memory(int(state.meta.get("charges", 0)), float(config.get("epsilon", 0.0)))
        return state, lost

    def test_accuracy(self, tensors: Mapping[str, Tensor], masks: Mapping[str, Tensor] | None = None) -> float | None:
        """Accuracy in [0, 1] on the client's test data, with these tensors loaded into the model.

        ``masks`` say where the tensors are 0, for systems that then compute with a smaller network.
        """
        vision.load_state_tensors(self.model, tensors)
        return self.accuracy("test")

    def _personal_scores(self, personal: Payload) -> dict[str, float | None]:
        """Scores of the personal model, from disk if neither it nor the data has changed since it was last tested."""
        digest = f"{personal.digest()} {self.data_config} {self.share[1]}"
        cache = self.store.folder / "scores.json"
        try:
            known = json.loads(cache.read_text())
            check_json(known)
            if known["digest"] == digest:
                return dict(known["scores"])
        except (OSError, ValueError, KeyError, TypeError):
            pass  # not tested yet, or the file is damaged: test
        scores = {
            "accuracy-personal": self.test_accuracy(personal.tensors, personal.masks),
            "accuracy-validation": self.accuracy("validation"),
        }
        with suppress(OSError):  # it only saves time: a full disk need not cost the evaluation
            replace_file(cache, json.dumps(sealed_json({"digest": digest, "scores": scores})).encode())
        return scores


def with_letters(payload: Payload, letters: Mapping[int, Payload]) -> Payload:
    """One payload for Flower's list of arrays: those of client 3 are named ``letter/3/conv1.weight``."""
    tensors, masks = dict(payload.tensors), dict(payload.masks)
    for partition, letter in letters.items():
        tensors |= {f"letter/{partition}/{name}": tensor for name, tensor in letter.tensors.items()}
        masks |= {f"letter/{partition}/{name}": mask for name, mask in letter.masks.items()}
    return Payload(tensors, masks)


def split_letters(received: Payload) -> tuple[Payload, dict[int, Payload]]:
    """The inverse of :func:`with_letters`."""
    tensors: dict[int | None, dict[str, Tensor]] = {None: {}}
    masks: dict[int | None, dict[str, Tensor]] = {}
    for parts, found in ((tensors, received.tensors), (masks, received.masks)):
        for full_name, tensor in found.items():
            sender, name = None, full_name
            if full_name.startswith("letter/"):
                _, number, name = full_name.split("/", 2)
                sender = int(number)
            parts.setdefault(sender, {})[name] = tensor
    payloads = {sender: Payload(each, masks.get(sender, {})) for sender, each in tensors.items()}
    own = payloads.pop(None)
    return own, {sender: letter for sender, letter in payloads.items() if sender is not None}
