"""An audit is a real run in which one client's data hold canaries, and a look at every noised sum of that client.

A canary takes the place of one of the client's examples, or of a group with ``dp.unit`` "group". An independent fair
coin says whether it is in. A canary that is out is a blank. One that is in has a gradient along a coordinate of its
own, so large that it is clipped to the clipping norm. All else is the system's own code: how steps are drawn, how
gradients are summed and clipped, how noise is made and charged. In FedSpaLLM a canary is text of one token, whose
second moments no other canary has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, cast

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from torch.nn import functional as F

from clients.base import ImageClient
from clients.fedspallm import FedSpaLLMClient
from clients.images import Images
from clients.node import Node
from clients.privacy import ClientPrivacy
from fedprune_app import client_app, server_app
from fedprune_app.config import ConfigError, written_below
from fedprune_app.core import hessians, rng
from fedprune_app.core.named import TensorDict, Tensors, Values
from fedprune_app.core.payload import Payload
from fedprune_app.core.texts import one_line
from fedprune_app.data.splits import ClientData
from fedprune_app.engine.simulated_grid import quiet, run_in_process
from fedprune_app.errors import LaunchError
from fedprune_app.files import scratch_folder
from fedprune_app.models.layer_pruning import input_matrices
from fedprune_app.preflight.prepare import Prepared
from fedprune_app.privacy.accounting import Spent, Steps, epsilon
from fedprune_app.privacy.audit import Finding, Tally
from fedprune_app.privacy.dpsgd import DPSGD, Step, check_private
from fedprune_app.privacy.noise import Noise

_IGNORED = -100  # the label that cross entropy ignores
_FIRST_PIXEL = 2.0**20  # of the images of canary 0; no other image has such pixels
_STRENGTH = 10  # of a canary's gradient, in units of the clipping norm
_COORDINATES = "canaries.bias"
_LEAST_OWN = 0.6  # the part of a canary's second moments that must be along a direction of its own


@dataclass(frozen=True)
class Question:
    """What to ask of a configuration; 0 for ``canaries`` takes all that there is."""

    canaries: int = 0
    delta: float = 0.0  # 0: dp.delta
    confidence: float = 0.95
    client: int = 0  # the client whose data hold the canaries
    noise_share: float = 1.0  # of the noise that is charged


@dataclass
class Watch:
    """The canaries' coins (m,), True for in, and counts of what was seen of the sums."""

    question: Question
    seed: int
    tally: Tally = field(default_factory=Tally)
    coins: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    privacy: ClientPrivacy | None = None  # of the client as it answered last
    failure: Exception | None = None  # the first error; the server takes it for a failed client

    def toss(self, num_units: int) -> Tensor:
        """Toss the coins of the canaries, which are among so many examples or groups; they are the same each time."""
        number = self.question.canaries or num_units
        if not 1 <= number <= num_units:
            raise ConfigError("--canaries", number, f"1 to {num_units}, what the client has to train on")
        self.coins = torch.rand(number, generator=rng.generator(self.seed, "audit coins")) < 0.5
        return self.coins


class WatchedPrivacy(ClientPrivacy):
    """Privacy whose steps are observed, and have the noise that the question asks for."""

    watch: ClassVar[Watch]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.watch.privacy = self

    def noise(self, role: str, round: int, public: Tensors, settings: str) -> Noise:
        return Weaker(super().noise(role, round, public, settings), self.watch.question.noise_share)

    def dpsgd(self, *arguments: Any, **named: Any) -> DPSGD:
        return WatchedDPSGD(**vars(super().dpsgd(*arguments, **named)), watch=self.watch)


class Weaker:
    """A ``share`` of the noise that is charged; samples are drawn as with all of it."""

    def __init__(self, noise: Noise, share: float) -> None:
        self._noise, self._share = noise, share
        self.uniform, self.seed, self.discrete_gaussian = noise.uniform, noise.seed, noise.discrete_gaussian

    def gaussian(self, size: int, device: torch.device | str = "cpu") -> Tensor:
        return self._noise.gaussian(size, device) * self._share

    def laplace(self, scale: float) -> float:
        return self._noise.laplace(scale * self._share)


# --- images -----------------------------------------------------------------------------------------------------------


class WatchedImages(ImageClient):
    """Puts canaries into the images of a system's client, whose class comes after it in the order of classes."""

    watch: ClassVar[Watch]

    def local_images(self) -> Images:
        local = super().local_images()
        data = local.data
        images, labels = data.train_images, data.train_labels
        units = local.groups.get("train", torch.arange(len(labels)))
        coins = self.watch.toss(len(units.bincount()))
        is_canary = units < len(coins)
        images, labels = images.clone(), labels.clone()
        pixels = _FIRST_PIXEL + units[is_canary]
        images[is_canary.to(images.device)] = pixels.to(images).view(-1, *[1] * (images.dim() - 1))
        labels[is_canary] = torch.where(coins[units[is_canary]], 0, _IGNORED)
        local.data = ClientData(
            images,
            labels,
            data.validation_images,
            data.validation_labels,
            data.test_images,
            data.test_labels,
        )
        return local


class WithCanaries(nn.Module):
    """The network with a coordinate for each canary.

    A canary's gradient is along its coordinate alone, and other examples have none there. All other parameters have the
    network's names after "network.".
    """

    def __init__(self, network: nn.Module, canaries: int, norm: float, device: torch.device) -> None:
        super().__init__()
        self.network, self.norm = network, norm
        self.canaries = nn.Linear(1, canaries, device=device)  # of zeros, so that its weight has no gradient
        self.canaries.weight.requires_grad_(False)
        self.canaries.bias.grad = torch.zeros_like(self.canaries.bias)

    def forward(self, images: Tensor, network: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        firsts = images.flatten(1)[:, 0] - _FIRST_PIXEL
        is_canary = firsts >= 0
        logits = (network or self.network)(torch.where(_column(is_canary, images), 0, images))
        units = firsts.clamp(min=0).long()[:, None]
        pulls = self.canaries(images.new_zeros(len(images), 1)).gather(1, units)
        # classes are equally likely, so the loss at the first one has this share of its logit's slope
        slope = self.norm / (1 - 1 / logits.shape[1])
        pulled = F.pad(slope * (pulls.detach() - pulls), (0, logits.shape[1] - 1))
        return torch.where(_column(is_canary, logits), pulled, logits)

    def extended(self, tensors: Tensors, own: Tensor) -> TensorDict:
        """Return tensors of the network's parameters by their names here, and the canaries' own one."""
        return {**{f"network.{name}": tensor for name, tensor in tensors.items()}, _COORDINATES: own}


def _column(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *[1] * (like.dim() - 1))


@dataclass(frozen=True)
class WatchedStep(Step):
    """A step on a part of the network has the canaries' coordinates as well."""

    model: WithCanaries

    def of_part(self, network: Callable[[Tensor], Tensor], gradients: Tensors, kept: Tensors) -> Step:
        return super().of_part(
            partial(self.model, network=network),
            self.model.extended(gradients, self.gradients[_COORDINATES]),
            self.model.extended(kept, self.kept[_COORDINATES]),
        )


@dataclass(frozen=True, kw_only=True)
class WatchedDPSGD(DPSGD):
    """DP-SGD on a network with coordinates for canaries."""

    watch: Watch
    drawn: list[Tensor] = field(default_factory=list)  # the units of the step under way

    def batches(self, num_examples: int) -> Iterator[Tensor]:
        for batch in super().batches(num_examples):
            self.drawn[:] = [batch if self.groups is None else self.groups[batch]]
            yield batch

    @contextmanager
    def attached(
        self, model: nn.Module, gradients: Tensors, kept: Tensors, example_shape: Sequence[int] | None = None
    ) -> Iterator[Step]:
        if example_shape is not None:
            check_private(model, example_shape, list(gradients), self.grad_sample)
        device = next(iter(gradients.values())).device
        audited = WithCanaries(model, len(self.watch.coins), _STRENGTH * self.clip_norm, device)
        own = audited.canaries.bias.grad
        assert own is not None
        pair = audited.extended(gradients, own), audited.extended(kept, torch.ones_like(own))
        with super().attached(audited, *pair) as step:
            yield WatchedStep(**vars(step), model=audited)

    def add_noise(self, gradients: Tensors, kept: Tensors, expected_batch: float) -> None:
        super().add_noise(gradients, kept, expected_batch)
        own, coins = gradients[_COORDINATES], self.watch.coins
        is_drawn = torch.zeros_like(coins)
        is_drawn[self.drawn[0][self.drawn[0] < len(coins)]] = True
        chances = is_drawn if self.sample_rate < 1 else is_drawn[:0]
        self.watch.tally.add(own.cpu() * expected_batch / self.clip_norm, is_drawn & coins, chances)
        own.zero_()


# --- text -------------------------------------------------------------------------------------------------------------


class WatchedText(FedSpaLLMClient):
    """Canaries are segments, or all segments of some documents, of one token each."""

    watch: ClassVar[Watch]
    is_released = False  # whether text that is out is left out: a blank is not made

    def segments(self, count: int = 0) -> tuple[Tensor, list[str]]:
        tokens, documents = super().segments(count)
        self.units = torch.arange(len(tokens))
        if self.protects_documents:
            numbers = {document: number for number, document in enumerate(dict.fromkeys(documents))}
            self.units = torch.tensor([numbers[document] for document in documents])
        coins = self.watch.toss(len(self.units.unique()))  # type: ignore[no-untyped-call]
        tokens = torch.where((self.units < len(coins))[:, None], self.units[:, None], tokens)
        if not self.is_released:
            return tokens, documents
        places = self.stays.nonzero().flatten().tolist()
        return tokens[self.stays], [documents[i] for i in places] if self.protects_documents else documents

    @property
    def stays(self) -> Tensor:
        """Which segments are released: no canary that is out."""
        coins = self.watch.coins
        return (self.units >= len(coins)) | coins[self.units.clamp(max=len(coins) - 1)]

    def _private_moments(
        self, privacy: ClientPrivacy, layer: int, module: nn.Module, hidden: Tensor, meta: Values, round: int
    ) -> Payload:
        self.is_released = True
        try:
            released = hidden[self.stays.to(hidden.device)]
            payload = super()._private_moments(privacy, layer, module, released, meta, round)
        finally:
            self.is_released = False
        coins, size, clip_norm = self.watch.coins, self.config.batch_size, self.config.dp.clip_norm
        parts = [hidden[(self.units == unit).to(hidden.device)] for unit in range(int(self.units.max()) + 1)]
        kind = partial(hessians.ClippedMoments, clip_norm=clip_norm)
        alone = [input_matrices(self.model, module, self.observed_matrices, part, size, kind) for part in parts]
        for name, matrix in alone[0].items():
            vectors = [hessians.isometric(m[name].double()) / len(part) for m, part in zip(alone, parts, strict=True)]
            mean = hessians.unpacked(payload.tensors[hessians.HESSIAN + name].double(), len(matrix))
            others = torch.stack([*vectors[len(coins) :], torch.zeros_like(vectors[0])]).sum(0)
            total = hessians.isometric(mean) * self.num_examples - others
            self._look(total / clip_norm, torch.stack(vectors[: len(coins)], dim=1) / clip_norm, coins)
        return payload

    def _look(self, released: Tensor, directions: Tensor, coins: Tensor) -> None:
        """Look along the orthonormal directions that are closest to the canaries' own; other canaries are taken out."""
        left, sizes, right = torch.linalg.svd(directions, full_matrices=False)
        parts = right.T @ (sizes[:, None] * right)  # of each canary along each direction
        own = parts.diagonal()
        signal = right.T @ (left.T @ released) - parts @ coins.double() + own * coins
        is_clear = own > _LEAST_OWN
        self.watch.tally.add((signal / own)[is_clear], coins[is_clear], coins[:0])


# --- the run ----------------------------------------------------------------------------------------------------------


def audit(prepared: Prepared, question: Question) -> Finding:
    """Run a federation in this process and look at one client's noised sums.

    Only a temporary folder is written to: ledgers that the configuration names are not charged. Raises
    :class:`ConfigError` for a question that cannot be asked, and :class:`LaunchError` where the run or the audited
    client fails.
    """
    config, kind, clients = prepared.config, prepared.system.client, prepared.placement.clients
    if not config.dp.enabled:
        raise ConfigError("dp.enabled", config.dp.enabled, "true", condition="with audit")
    if config.dp.noise_shared_by > 1:
        raise ConfigError("dp.noise-shared-by", config.dp.noise_shared_by, "1", condition="with audit")
    if not 0 <= question.client < clients:
        raise ConfigError("--client", question.client, f"0 to {clients - 1}")
    if not 0 < question.confidence < 1:
        raise ConfigError("--confidence", question.confidence, "above 0 and below 1")
    if not 0 <= question.delta < 1:
        raise ConfigError("--delta", question.delta, "at least 0 and below 1")
    watch = Watch(question, config.seed)
    privacy = type("Watched", (WatchedPrivacy, kind.privacy_kind), {"watch": watch})
    mixin = WatchedImages if issubclass(kind, ImageClient) else WatchedText
    watched = type(f"Watched{kind.__name__}", (mixin, kind), {"watch": watch, "privacy_kind": privacy})
    with quiet(), scratch_folder() as folder:
        local_config = replace(written_below(folder, config), tracking="none")
        try:
            run_in_process(server_app.app, _app(watch, cast(type[Node], watched)), clients, local_config.to_dict())
        except ConfigError as error:
            error.mark = ""
            raise
        except Exception as error:
            watch.failure = watch.failure or error
        if isinstance(watch.failure, ConfigError):
            raise watch.failure
        if watch.failure is not None:
            raise LaunchError(one_line(watch.failure)) from watch.failure
        if not watch.tally.steps or watch.privacy is None:
            raise LaunchError(f"client {question.client} released nothing in {config.num_server_rounds} rounds")
        delta, spent = question.delta or config.dp.delta, watch.privacy.ledger.spent
    sums: Spent = {release: count for release, count in spent.items() if isinstance(release, Steps)}
    claim = epsilon(sums, delta)  # counts of predictions are not attacked
    return Finding(len(watch.coins), claim, delta, question.confidence, watch.tally)


def _app(watch: Watch, watched: type[Node]) -> ClientApp:

    def answer(name: str, message: Message, context: Context) -> Message:
        handler = getattr(client_app, name)
        if context.node_config["partition-id"] != watch.question.client:
            reply: Message = handler(message, context)
            return reply
        try:
            reply = handler(message, context, watched)
        except Exception as error:
            watch.failure = watch.failure or error
            raise
        return reply

    app = ClientApp()
    for name, register in {"query": app.query, "train": app.train, "evaluate": app.evaluate}.items():
        register()(partial(answer, name))
    return app
