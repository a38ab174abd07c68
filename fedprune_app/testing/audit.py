"""An audit is a real run in which one client's data hold canaries, and an attack on what that client sends.

A canary is a noise image with a random label. It takes the place of one of the client's training examples. An
independent fair coin says whether a canary is in. A canary that is out keeps its place under a label that cross entropy
ignores, so its gradient is zero. So the number of examples, which is public, tells nothing of the coins. All else is
the system's own code: server, clients, messages. The attack sees what the client sent, and where its training started,
which follows from what it received and sent before. The attack knows all of the client's data but the coins. See
:mod:`fedprune_app.privacy.audit`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Unpack, cast

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor
from torch.nn import functional as F

from clients.base import ImageClient, LocalTraining
from clients.context import NodeContext
from clients.images import Images
from clients.privacy import ClientPrivacy
from clients.task import Task
from fedprune_app import client_app, server_app
from fedprune_app.config import Config, ConfigError, written_below
from fedprune_app.core import rng
from fedprune_app.core.named import TensorDict, Tensors
from fedprune_app.core.payload import Payload
from fedprune_app.core.texts import one_line
from fedprune_app.data.splits import ClientData, client_data, data_config
from fedprune_app.engine import wire
from fedprune_app.engine.simulated_grid import quiet, run_in_process
from fedprune_app.errors import LaunchError
from fedprune_app.files import scratch_folder
from fedprune_app.learning.training import TrainingResult
from fedprune_app.models import vision
from fedprune_app.preflight.prepare import Prepared
from fedprune_app.privacy.audit import Evidence, Finding
from fedprune_app.privacy.noise import Noise

MOST_CANARIES = 1000  # unless --canaries asks for more
PIXELS, AMPLITUDE = 1 / 16, 4.0  # of a canary: the share of pixels that is not 0, and its deviation
_IGNORED = -100  # the label that cross entropy ignores
_MOST_OTHERS = 1000  # examples, not canaries, whose part in the upload is found one by one
_LARGEST = 100_000_000  # about so many numbers are in memory at a time


@dataclass(frozen=True)
class Question:
    """A question says what to ask of a configuration; 0 for ``canaries`` or ``guesses`` takes half of what there is."""

    canaries: int = 0
    guesses: int = 0
    delta: float = 0.0  # 0: dp.delta
    confidence: float = 0.95
    client: int = 0  # the client whose data hold the canaries
    without_noise: bool = False


@dataclass(frozen=True)
class _Training:
    """One training of the client went from its model ``before`` to its model ``after``; the attack may know both."""

    task: Task
    before: TensorDict
    after: TensorDict
    masks: Tensors


@dataclass
class _Watch:
    client: int
    seed: int
    canaries: int
    evidence: Evidence
    trainings: list[_Training] = field(default_factory=list)  # since the last message
    newest: Watched | None = None  # the client as it answered last
    uploads: int = 0
    failure: Exception | None = None  # the first error; the server takes it for a failed client


class Watched(ImageClient):
    """A watched client has canaries among its data, and notes each of its trainings.

    This class comes before the class of the system's client in the order of classes.
    """

    watch: ClassVar[_Watch]

    def __init__(self, config: Config, place: NodeContext) -> None:
        super().__init__(config, place)
        self.watch.newest = self

    def local_images(self) -> Images:
        local = super().local_images()
        data, num_classes = local.data, local.dataset.num_classes
        number = self.watch.canaries
        images, labels = canaries(self.watch.seed, number, data.train_images.shape[1:], num_classes)
        self.canary_images, self.canary_labels, self.coins = images, labels, coins(self.watch.seed, number)
        self.real = data.train_images[number:].cpu(), data.train_labels[number:]
        local.data = ClientData(
            torch.cat([images.to(data.train_images.device), data.train_images[number:]]),
            torch.cat([torch.where(self.coins, labels, _IGNORED), data.train_labels[number:]]),
            data.validation_images,
            data.validation_labels,
            data.test_images,
            data.test_labels,
        )
        return local

    def train(self, task: Task, **options: Unpack[LocalTraining]) -> TrainingResult:
        before = vision.state_tensors(self.model)
        result = super().train(task, **options)
        after = vision.state_tensors(self.model)
        self.watch.trainings.append(
            _Training(task, before, after, dict(options.get("masks") or options.get("active") or {}))
        )
        return result


class Silent:
    """Silent noise is zero; samples are drawn as with noise."""

    def __init__(self, noise: Noise) -> None:
        self._noise = noise

    def uniform(self, size: int) -> Tensor:
        return self._noise.uniform(size)

    def gaussian(self, size: int, device: torch.device | str = "cpu") -> Tensor:
        return torch.zeros(size, dtype=torch.float64, device=device)

    def laplace(self, scale: float) -> float:
        return 0.0

    def seed(self) -> int:
        return self._noise.seed()


class WithoutNoise(ClientPrivacy):
    """A client without noise clips, samples and charges as if it added noise."""

    def noise(self, role: str, round: int, public: Tensors, settings: str) -> Noise:
        return Silent(super().noise(role, round, public, settings))


def canaries(seed: int, number: int, shape: tuple[int, ...], num_classes: int) -> tuple[Tensor, Tensor]:
    """Return images (number, *shape) of a few noise pixels each, and their labels (number,).

    The pixels are in units of normalised images. Few pixels make gradients of different canaries nearly orthogonal.
    Large pixels make gradients reach the clipping norm.
    """
    draw = rng.generator(seed, "canaries")
    lit = torch.rand((number, *shape), generator=draw) < PIXELS
    images = torch.where(lit, AMPLITUDE * torch.randn((number, *shape), generator=draw), 0.0)
    return images, torch.randint(num_classes, (number,), generator=draw)


def coins(seed: int, number: int) -> Tensor:
    """Return fair coins (number,), True for "in".

    The coins are independent of one another and of all else that the seed determines.
    """
    return torch.rand(number, generator=rng.generator(seed, "audit coins")) < 0.5


def audit(prepared: Prepared, question: Question) -> Finding:
    """Run a federation in this process and attack one client's releases.

    Only a temporary folder is written to: ledgers that the configuration names are not charged. Raises
    :class:`ConfigError` for a question that cannot be asked, and :class:`LaunchError` where the run or the audited
    client fails.
    """
    config, kind, clients = prepared.config, prepared.system.client, prepared.placement.clients
    if not issubclass(kind, ImageClient):
        raise ConfigError("system", config.system, "a system that trains on images", condition="with audit")
    if not config.dp.enabled:
        raise ConfigError("dp.enabled", config.dp.enabled, "true", condition="with audit")
    if config.dp.unit != "example":  # canaries are single examples
        raise ConfigError("dp.unit", config.dp.unit, "example", condition="with audit")
    number, guesses = _numbers(config, question, clients)
    examples = client_data(data_config(config), question.client, clients).num_examples
    rows = min(examples, number + _MOST_OTHERS)
    watch = _Watch(question.client, config.seed, number, Evidence(rows))
    privacy = {"privacy_kind": WithoutNoise} if question.without_noise else {}
    watched = type(f"Watched{kind.__name__}", (Watched, kind), {"watch": watch, **privacy})
    with quiet(), scratch_folder() as folder:
        local_config = replace(written_below(folder, config), tracking="none")
        app = _app(watch, cast(type[ImageClient], watched))
        try:
            run_in_process(server_app.app, app, clients, local_config.to_dict())
        except ConfigError as error:
            error.mark = ""
            raise
        except Exception as error:
            watch.failure = watch.failure or error
    if watch.failure is not None:
        raise LaunchError(one_line(watch.failure)) from watch.failure
    client = watch.newest
    if client is None or client.privacy is None or not watch.uploads:
        raise LaunchError(f"client {question.client} sent no model in {config.num_server_rounds} rounds")
    delta = question.delta or config.dp.delta
    claim = client.privacy.ledger.epsilon(delta)
    return Finding.of(watch.evidence.scores[:number], client.coins, guesses, delta, question.confidence, claim)


def _numbers(config: Config, question: Question, clients: int) -> tuple[int, int]:
    """Return the numbers of canaries and guesses.

    Raises :class:`ConfigError` for a question that cannot be asked.
    """
    if not 0 <= question.client < clients:
        raise ConfigError("--client", question.client, f"0 to {clients - 1}")
    if not 0 < question.confidence < 1:
        raise ConfigError("--confidence", question.confidence, "above 0 and below 1")
    if not 0 <= question.delta < 1:
        raise ConfigError("--delta", question.delta, "at least 0 and below 1")
    examples = client_data(data_config(config), question.client, clients).num_examples
    number = question.canaries or min(examples // 2, MOST_CANARIES)
    if not 2 <= number <= examples:
        raise ConfigError("--canaries", number, f"2 to {examples}, the client's training examples")
    guesses = question.guesses or 2 * max(number // 4, 1)
    if guesses % 2 or not 2 <= guesses <= number:
        raise ConfigError("--guesses", guesses, f"an even number from 2 to {number}, the canaries")
    return number, guesses


def _app(watch: _Watch, watched: type[ImageClient]) -> ClientApp:

    def answer(name: str, message: Message, context: Context) -> Message:
        handler = getattr(client_app, name)
        if context.node_config["partition-id"] != watch.client:
            reply: Message = handler(message, context)
            return reply
        watch.trainings.clear()
        try:
            reply = handler(message, context, watched)
            if name == "train" and watch.newest is not None:
                upload = wire.payload_of(reply.content, watch.newest.message_schema().max_bytes)
                watch.uploads += consider(watch.evidence, watch.newest, watch.trainings, upload)
        except Exception as error:
            watch.failure = watch.failure or error
            raise
        return reply

    app = ClientApp()
    for name, register in {"query": app.query, "train": app.train, "evaluate": app.evaluate}.items():
        register()(partial(answer, name))
    return app


# --- the attack -------------------------------------------------------------------------------------------------------


def consider(evidence: Evidence, client: Watched, trainings: list[_Training], upload: Payload) -> bool:
    """Add one upload to the evidence: the examples along whose gradients it lies from where its training started.

    The result is False where nothing trained was sent. Of several trainings the one counts whose outcome is closest to
    the upload.
    """
    if not trainings:
        return False
    upload = client.uploaded(trainings[0].task, upload, trainings[0].before)
    parameters = [name for name in vision.parameter_names(client.model) if name in upload.tensors]
    if not parameters:
        return False
    training = min(trainings, key=lambda training: _distance(training.after, upload, parameters))
    masks = {**training.masks, **upload.masks}

    def flat(tensors: Tensors) -> Tensor:
        return torch.cat([(tensors[n] * masks[n] if n in masks else tensors[n]).flatten() for n in parameters])

    update = flat(training.before) - flat(upload.tensors)
    kept = torch.cat([masks.get(n, torch.ones_like(upload.tensors[n])).flatten() != 0 for n in parameters])
    images = torch.cat([client.canary_images, client.real[0]])
    labels = torch.cat([client.canary_labels, client.real[1]])
    rows = evidence.rows
    coordinates = _coordinates(kept, rows)
    directions, totals = torch.zeros(rows, len(coordinates)), []
    after = {**training.before, **upload.tensors}
    for share in (0.0, 0.5, 1.0):  # before the training, half way and after it: gradients change on the way
        model = {n: torch.lerp(t, after[n], share) for n, t in training.before.items()}
        total = torch.zeros(2, len(coordinates))  # row 0: the canaries, row 1: the others
        for start, gradients in _clipped_gradients(client, model, images, labels, training.masks, parameters):
            part = gradients[:, coordinates]
            num_canaries = max(len(client.coins) - start, 0)  # how many examples of this part are canaries
            total += torch.stack([part[:num_canaries].sum(0), part[num_canaries:].sum(0)])
            directions[start : start + len(part)] += part[: max(rows - start, 0)]
        totals += list(total)
    evidence.add(update[coordinates], directions, totals)
    return True


def _distance(model: Tensors, upload: Payload, names: list[str]) -> float:
    squares = {name: (model[name] - upload.tensors[name]).square() for name in names}
    return sum(
        float((squares[name] * upload.masks[name] if name in upload.masks else squares[name]).sum()) for name in names
    )


def _coordinates(kept: Tensor, rows: int) -> Tensor:
    """Return the kept coordinates (d,).

    If ``rows`` times as many numbers do not fit into memory, random ones of them are returned, as many as fit.
    """
    indices = kept.nonzero().squeeze(1)
    limit = max(_LARGEST // rows, 1)
    order = torch.randperm(len(indices), generator=rng.generator(0, "audited"))
    return indices[order[:limit]] if len(indices) > limit else indices


def _clipped_gradients(
    client: Watched,
    tensors: Tensors,
    images: Tensor,
    labels: Tensor,
    masks: Tensors,
    names: list[str],
) -> Iterator[tuple[int, Tensor]]:
    """Yield each part of the examples: the place where it begins, and its rows of the gradients (n, d).

    The gradients are those of the tensors ``names``, under the masks, clipped by the norm over all tensors.
    """
    model = client.model
    leaves = {name: tensors[name] for name in vision.parameter_names(model)}
    size = sum(leaf.numel() for leaf in leaves.values())

    def loss(values: Tensors, image: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, dict(values), (image[None],)), label[None])

    per_example = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))
    step = max(1, min(128, _LARGEST // size))
    was_training = model.training
    model.eval()
    for start in range(0, len(labels), step):
        gradients = per_example(leaves, images[start : start + step], labels[start : start + step])
        gradients = {n: (g * masks[n] if n in masks else g).flatten(1) for n, g in gradients.items()}
        norms = torch.stack([g.square().sum(1) for g in gradients.values()]).sum(0).sqrt()
        factors = (client.config.dp.clip_norm / (norms + 1e-6)).clamp(max=1).nan_to_num(0.0)
        yield start, torch.cat([gradients[n] for n in names], dim=1).nan_to_num(0.0) * factors[:, None]
    model.train(was_training)
