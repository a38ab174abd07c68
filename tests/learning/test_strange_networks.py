"""Networks as strangers may write them: however they are trained, they are trained as PyTorch trains them."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedprune_app.core import cohort
from fedprune_app.core.flops import forward_flops
from fedprune_app.core.modules import computation_key
from fedprune_app.core.rng import generator, global_draws_of
from fedprune_app.learning import training
from fedprune_app.learning.evaluate import dense_gradient, evaluate
from fedprune_app.learning.grouped import NoGroupedForm, grouped_form
from fedprune_app.learning.sgd import SGD
from fedprune_app.learning.train import train
from fedprune_app.privacy.dpsgd import DPSGD, check_private
from fedprune_app.privacy.noise import KeyedNoise

SHAPE, CLASSES, EXAMPLES = (2, 8, 8), 3, 5
Value = torch.Tensor
Part = Callable[[Value, list[Value]], Value]  # of the value at hand and all earlier ones


class Network(nn.Module):
    """A random chain of layers and functions: images first, vectors then."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.draw = random.Random(seed)
        self.usual = seed % 3 > 0  # of the parts that have a form for groups, mostly
        self.parts: list[tuple[str, nn.Module | Part]] = []
        value = torch.zeros(2, *SHAPE)
        for _ in range(self.draw.randint(1, 6)):
            value = self.grown(value, self.draw.choice(IMAGE_PARTS))
        self.grown(value, self.draw.choice(FLATTENINGS[: 2 if self.usual else 5]))
        for _ in range(self.draw.randint(0, 4)):
            value = self.grown(self.forward(torch.zeros(2, *SHAPE)), self.draw.choice(VECTOR_PARTS))
        self.head = nn.Linear(self.forward(torch.zeros(2, *SHAPE)).shape[1], CLASSES, bias=self.draw.random() < 0.8)
        self.draw.choice(EXTRAS)(self)

    def grown(self, value: Value, make) -> Value:
        """The value after a part that is made for it; a part that does not fit is left out."""
        part = make(self, value)
        name = f"part{len(self.parts)}"
        if isinstance(part, nn.Module):
            self.add_module(name, part)
        self.parts.append((name, part))
        try:
            with torch.no_grad():
                return self.forward(torch.zeros(2, *SHAPE))
        except (RuntimeError, ValueError, IndexError):
            self.parts.pop()
            if isinstance(part, nn.Module):
                delattr(self, name)
            return value

    def forward(self, images: Value) -> Value:
        x, earlier = images, []
        for name, part in self.parts:
            earlier.append(x)
            x = getattr(self, name)(x) if isinstance(part, nn.Module) else part(x, earlier)
        return self.head(x) if hasattr(self, "head") else x


def conv(network: Network, x: Value) -> nn.Module:
    draw, depth = network.draw, x.shape[1]
    kernel, groups = draw.choice((1, 3)), draw.choice((1, 1, 1, 2))
    if network.usual:
        return nn.Conv2d(depth, draw.choice((2, 4, 6)), kernel, draw.choice((1, 1, 2)), kernel // 2)
    return nn.Conv2d(
        depth, draw.choice((2, 4, 6)), kernel, draw.choice((1, 1, 2)), draw.choice((0, kernel // 2)), 1,
        groups if depth % groups == 0 else 1, draw.random() < 0.7, draw.choice(("zeros", "zeros", "zeros", "circular")),
    )  # fmt: skip


def norm(network: Network, x: Value) -> nn.Module:
    kinds = [
        nn.GroupNorm(1, x.shape[1]),
        nn.GroupNorm(x.shape[1] // 2 or 1, x.shape[1]),
        nn.GroupNorm(2, x.shape[1], affine=False) if x.shape[1] % 2 == 0 else nn.GroupNorm(1, x.shape[1]),
        nn.LayerNorm(list(x.shape[1:])),
        nn.InstanceNorm2d(x.shape[1], affine=True),
    ]
    return network.draw.choice(kinds[:2] if network.usual else kinds)


def activation(network: Network, x: Value) -> nn.Module | Part:
    in_place = network.draw.random() < 0.4
    kinds = [
        nn.ReLU(in_place),
        nn.SiLU(in_place),
        nn.Tanh(),
        nn.GELU("tanh"),
        nn.LeakyReLU(0.3, in_place),
        lambda x, _: F.relu(x, inplace=in_place),
        lambda x, _: torch.relu(x),
        lambda x, _: x.relu_() if in_place else x.relu(),
        lambda x, _: F.elu(x, 0.5),
    ]
    return network.draw.choice(kinds[:7] if network.usual else kinds)


def pool(network: Network, x: Value) -> nn.Module | Part:
    draw = network.draw
    kinds = [
        nn.MaxPool2d(2, ceil_mode=draw.random() < 0.5),
        nn.AvgPool2d(3, 1, 1, count_include_pad=draw.random() < 0.5),
        nn.AvgPool2d(2, divisor_override=draw.choice((None, 3))),
        nn.AdaptiveAvgPool2d(draw.choice((2, 4))),
        lambda x, _: F.max_pool2d(x, 2),
    ]
    return draw.choice(kinds[:4] if network.usual else kinds)


def skip(network: Network, x: Value) -> Part:
    back, draw = network.draw.randint(1, 3), network.draw

    def added(x: Value, earlier: list[Value]) -> Value:
        return x + earlier[-1 - back]

    def in_place(x: Value, earlier: list[Value]) -> Value:
        x += earlier[-1 - back]
        return x

    def scaled(x: Value, earlier: list[Value]) -> Value:
        return torch.add(x, earlier[-1 - back], alpha=2)

    return draw.choice([added, added, scaled, in_place][: 3 if network.usual else 4])


class Centre(nn.Module):
    """A buffer that the forward pass changes, and a count of the passes that is no tensor."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(depth))
        self.passes = 0

    def forward(self, x: Value) -> Value:
        self.passes += 1
        if self.training:
            with torch.no_grad():
                self.centre.mul_(0.9).add_(x.transpose(0, 1).flatten(1).mean(1), alpha=0.1)
        return x - self.centre.view(-1, *[1] * (x.dim() - 2))


class Drawn(nn.Module):
    """Numbers that the three generators drew when the network was made, and no parameter holds."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.scale = 1 + 0.1 * np.random.randn() + 0.1 * random.random()
        self.register_buffer("order", torch.randperm(depth))

    def forward(self, x: Value) -> Value:
        return self.scale * x[:, self.order]


def with_clipped_view(x: Value, _: list[Value]) -> Value:
    """In place on a flattened view: the images change with it, as they lie in memory."""
    F.relu(torch.flatten(x, 1), inplace=True)
    return x


def sorted_by_size(x: Value, _: list[Value]) -> Value:
    """Examples in another order and back, as experts take them; what follows each is its neighbour's, a little."""
    order = x.flatten(1).sum(1).argsort()
    y = x[order]
    return torch.empty_like(x).index_copy(0, order, y + 0.1 * y.roll(1, 0))


def habit(network: Network, x: Value) -> nn.Module | Part:
    kinds = [
        Centre(x.shape[1]),
        Drawn(x.shape[1]),
        nn.Sequential(nn.Sequential(Drawn(x.shape[1]), nn.ReLU()), nn.Identity()),
        lambda x, _: x.mul_(0.5).add_(0.1),
        with_clipped_view,
        sorted_by_size,
        lambda x, _: F.dropout(x, 0.2),
        lambda x, _: x.flip(1),
        lambda x, _: torch.cat([x, x.tanh()], 1),
    ]
    return network.draw.choice(kinds)


def odd(network: Network, x: Value) -> nn.Module | Part:
    if not network.usual and network.draw.random() < 0.7:
        return habit(network, x)
    kinds = [
        nn.Identity(),
        nn.Linear(x.shape[-1], x.shape[-1]),  # on the last dimension, as mixers have it
        Twice(x.shape[1]) if x.dim() == 4 else nn.Identity(),
        lambda x, _: x.transpose(-1, -2),
        lambda x, _: x * 0.5,
        lambda x, _: x - x.mean(-1, keepdim=True),
    ]
    return network.draw.choice(kinds[:2] if network.usual else kinds)


class Twice(nn.Module):
    """One layer that is used twice."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(depth, depth, 1)

    def forward(self, x: Value) -> Value:
        return self.conv(torch.relu(self.conv(x)))


def vector_norm(network: Network, x: Value) -> nn.Module:
    return network.draw.choice([nn.GroupNorm(1, x.shape[1]), nn.LayerNorm(x.shape[1])])


def linear(network: Network, x: Value) -> nn.Module | Part:
    layer = nn.Linear(x.shape[1], network.draw.choice((4, 6)), bias=network.draw.random() < 0.7)
    return layer if network.usual or network.draw.random() < 0.8 else Cosine(layer)


class Cosine(nn.Module):
    """A layer whose weight is used by a function."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Value) -> Value:
        return F.linear(x, F.normalize(self.layer.weight))


IMAGE_PARTS = [conv, conv, conv, norm, activation, activation, pool, skip, skip, odd]
VECTOR_PARTS = [linear, linear, activation, activation, vector_norm, skip, odd]
FLATTENINGS = [
    lambda *_: nn.Flatten(),
    lambda *_: lambda x, _: torch.flatten(x, 1),
    lambda *_: lambda x, _: x.flatten(1),
    lambda *_: lambda x, _: x.view(len(x), -1),
    lambda *_: lambda x, _: x.reshape(len(x), -1),
]
EXTRAS = [
    lambda network: None,
    lambda network: None,
    lambda network: network.register_parameter("scale", nn.Parameter(torch.tensor(1.0))),
    lambda network: network.register_parameter("nothing", nn.Parameter(torch.empty(0, 3))),
    lambda network: network.add_module("unused", nn.Linear(2, 2)),
    lambda network: nn.init.zeros_(network.head.weight),
]


def network_of(seed: int) -> nn.Module:
    with global_draws_of(seed):
        return Network(seed).double()


def examples(client: int) -> tuple[Value, Value]:
    draw = generator(client, "examples")
    images = torch.randn(EXAMPLES, *SHAPE, generator=draw, dtype=torch.float64)
    return images, torch.randint(0, CLASSES, (EXAMPLES,), generator=draw)


def of_client(model: nn.Module, client: int) -> nn.Module:
    """The network with weights of the client's own, none of which is 0."""
    own, draw = copy.deepcopy(model), generator(client, "weights")
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype) * 0.1)
    return own


SETTINGS = SGD(0.05, momentum=0.5, batch_size=EXAMPLES, epochs=2)


def plain(model: nn.Module, client: int) -> nn.Module:
    """The same training in PyTorch's own words."""
    images, labels = examples(client)
    optimiser = torch.optim.SGD(model.train().parameters(), 0.05, momentum=0.5)
    order = generator(client, "order")
    with global_draws_of(order.initial_seed()):
        for _ in range(2):
            batch = torch.randperm(EXAMPLES, generator=order)
            optimiser.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimiser.step()
    return model


def assert_same(one: nn.Module, other: nn.Module, what: str) -> None:
    tensors = dict(other.named_parameters())
    for name, parameter in one.named_parameters():
        told = functools.partial("{}, {}: {}".format, what, name)
        torch.testing.assert_close(parameter.data, tensors[name].data, rtol=1e-5, atol=1e-7, msg=told)


def trained(model: nn.Module, client: int) -> nn.Module:
    images, labels = examples(client)
    train(model, images, labels, SETTINGS, rng=generator(client, "order"))
    return model


def by_example(model: nn.Module, images: Value, labels: Value, clip: float) -> dict[str, Value]:
    """The slow reference of a clipped sum: an example at a time, by autograd."""
    sums = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for image, label in zip(images, labels, strict=True):
        model.zero_grad()
        F.cross_entropy(model(image[None].clone()), label[None]).backward()
        found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
        norm = float(torch.sqrt(sum(g.square().sum() for g in found.values())))
        for name, gradient in found.items():
            sums[name] += gradient * min(1.0, clip / (norm + 1e-6))
    model.zero_grad()
    return sums


def clipped(model: nn.Module, images: Value, labels: Value, clip: float) -> dict[str, Value]:
    sums = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    ones = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    with DPSGD(0.0, clip, 1.0, 1, KeyedNoise(bytes(32))).attached(model, sums, ones, SHAPE) as step:
        step.add(images, labels)
    return sums


def assert_a_test_leaves_everything(model: nn.Module) -> None:
    """Tests, gradients, counts of operations and traces: the same each time, and nothing of the network changes."""
    images, labels = examples(0)
    tested, used = images.clone(), copy.deepcopy(model)
    with torch.no_grad(), global_draws_of(0):
        expected = F.cross_entropy(copy.deepcopy(model).eval()(images.clone()), labels)
    for _ in range(2):
        assert evaluate(used, tested, labels).loss_mean == pytest.approx(float(expected), rel=1e-5)  # in float32
        gradients = dense_gradient(used, tested, labels)
        forward_flops(used, SHAPE)
        computation_key(used)
    again = dense_gradient(model, images, labels)
    assert all(torch.equal(gradient, again[name]) for name, gradient in gradients.items())
    assert torch.equal(tested, images)
    assert all(map(torch.equal, used.state_dict().values(), model.state_dict().values()))
    passes = [[part.passes for part in each.modules() if isinstance(part, Centre)] for each in (used, model)]
    assert passes[0] == passes[1]


def draws(model: nn.Module, images: Value) -> bool:
    outputs = []
    for seed in (0, 1):
        with global_draws_of(seed), torch.no_grad():
            outputs.append(copy.deepcopy(model)(images.clone()))
    return not torch.equal(*outputs)


def check_training(seed: int) -> str:
    """Train a network in each way; return in which ways it can be trained, of those that can be refused."""
    model = network_of(seed)
    own = [of_client(model, client) for client in range(2)]
    try:
        expected = [plain(copy.deepcopy(each), client) for client, each in enumerate(own)]
    except RuntimeError:  # PyTorch itself does not train it: something is overwritten
        with pytest.raises(RuntimeError):
            trained(own[0], 0)
        return "none"
    assert_a_test_leaves_everything(own[0])
    alone = trained(copy.deepcopy(own[0]), 0)
    assert_same(alone, expected[0], "alone")
    works = [functools.partial(trained, copy.deepcopy(each), client) for client, each in enumerate(own)]
    for client, each in cohort.run_cohort(works):
        assert_same(each, expected[client], f"client {client} of a cohort")
    for one, other in zip(alone.buffers(), expected[0].buffers(), strict=True):
        torch.testing.assert_close(one, other)
    ways = "own"
    try:
        grouped_form(model, SHAPE)
        ways += " grouped"
    except NoGroupedForm:
        pass
    names = [name for name, _ in model.named_parameters()]
    try:
        check_private(model.train(), SHAPE, names, "auto")
    except ValueError:
        return ways
    images, labels = examples(0)
    if draws(own[0].train(), images):
        return ways + " private"  # each example draws for itself, so there is no sum to compare with
    reference = by_example(own[0].train(), images, labels, 0.5)
    for name, total in clipped(own[0], images, labels, 0.5).items():
        told = functools.partial("private, {}: {}".format, name)
        torch.testing.assert_close(total, reference[name], rtol=1e-6, atol=1e-8, msg=told)
    return ways + " private"


@pytest.mark.parametrize(
    ("first", "last"),
    [
        (0, 3),
        pytest.param(3, 30, marks=pytest.mark.full),
        *(pytest.param(first, first + 30, marks=pytest.mark.slow) for first in range(30, 390, 30)),
    ],
)
def test_random_networks_are_trained_as_pytorch_trains_them_in_each_way(first, last, monkeypatch):
    monkeypatch.setattr(training, "MOST_PARAMETERS", 10**9)
    monkeypatch.setattr(training, "MOST_FLOPS", 10**12)
    ways = []
    for seed in range(first, last):
        try:
            ways.append(check_training(seed))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {network_of(seed)}") from error
    few = (last - first) // 6
    assert sum("grouped" in way for way in ways) >= few  # or the test would show little
    assert sum("private" in way for way in ways) >= few
    assert last - first < 20 or any("private" not in way for way in ways)
