"""Networks that pass something of an example on to others, or to the rows of others, are refused; no others are."""

from __future__ import annotations

import copy
import math
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedprune_app.privacy.dpsgd import check_private

SHAPE, WIDTH = (1, 8, 8), 24


class Network(nn.Module):
    """Vectors of an image go through ``between``, which has a layer of its own, on their way to the classes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.inner = nn.Linear(64, WIDTH), nn.Linear(WIDTH, 3), nn.Linear(WIDTH, WIDTH)
        self.last, self.drop = nn.Linear(WIDTH, 4), nn.Dropout(0.0)

    def forward(self, images):
        return self.last(self.drop(self.between(F.relu(self.first(images.flatten(1))))))

    def between(self, x):
        raise NotImplementedError

    def names(self):
        used = {"first", "last"} | ({"gate"} if self.has_gradient_of_gate else set()) | {"inner"}
        return [name for name, _ in self.named_parameters() if name.split(".")[0] in used]

    has_gradient_of_gate = False


class SortedExperts(Network):
    def between(self, x):
        order = torch.argsort(self.gate(x).argmax(-1), stable=True)
        y = F.relu(self.inner(x[order]))
        return x + torch.empty_like(y).index_copy(0, order, y)


class Capacity(Network):
    """An expert takes so many examples of a batch, and the others pass it by."""

    def capacity(self, size):
        return math.ceil(size / 3)

    def between(self, x):
        chosen = F.one_hot(self.gate(x).argmax(-1), 3)
        has_place = ((chosen.cumsum(0) <= self.capacity(len(x))) & chosen.bool()).any(1, keepdim=True)
        return x + F.relu(self.inner(x)) * has_place


class FixedCapacity(Capacity):
    def capacity(self, size):
        return 30


class AttentionOverTheBatch(Network):
    def between(self, x):
        order = x.sum(1).argsort()
        weights = torch.softmax(x[order] @ x[order].T, 1)
        return self.inner(x) + (weights @ x[order])[order.argsort()]


class FlippedBatch(Network):
    def between(self, x):
        return self.inner(x.flip(0)).flip(0)


class ByPlace(Network):
    def between(self, x):
        return self.inner(x) * (1 + torch.arange(len(x)).view(-1, 1) / len(x))


class RunningSum(Network):
    def between(self, x):
        return self.inner(x) + x.cumsum(0) - x


class Largest(Network):
    def between(self, x):
        return self.inner(x) / x.amax()


class Neighbour(Network):
    def between(self, x):
        return self.inner(x) + 0.01 * x.roll(1, 0).detach()


class WithoutDuplicates(Network):
    def forward(self, images):
        images, inverse = torch.unique(images.flatten(1), dim=0, return_inverse=True)
        return self.last(F.relu(self.inner(F.relu(self.first(images)))))[inverse]


class GradientAlone(Network):
    """The outputs are an example's own, but not their gradient. Its sum is another one too."""

    def between(self, x):
        y = self.inner(x)
        return y + y.mean(0) - y.mean(0).detach()


class NotYet(Network):
    """What comes of the others has a factor that is 0 at first."""

    def __init__(self):
        super().__init__()
        nn.init.zeros_(self.inner.weight)
        nn.init.zeros_(self.inner.bias)

    def between(self, x):
        return x + self.inner(x).cumsum(0)


class OnlyWhenLarge(Network):
    def between(self, x):
        return self.inner(x - x.mean(0) if len(x) > 10 else x)


MIXING = [
    SortedExperts, Capacity, FixedCapacity, AttentionOverTheBatch, FlippedBatch, ByPlace, RunningSum, Largest,
    Neighbour, WithoutDuplicates, GradientAlone, NotYet, OnlyWhenLarge,
]  # fmt: skip


class Plain(Network):
    def between(self, x):
        return self.inner(x)


class SortedByItself(Network):
    def between(self, x):
        return self.inner(x.sort(1).values.flip(1))


class SoftExperts(Network):
    has_gradient_of_gate = True

    def between(self, x):
        outputs = self.inner(x).view(len(x), 3, -1) * self.gate(x).softmax(1).unsqueeze(2)
        return torch.cat(outputs.unbind(1), 1)


class OwnExpert(Network):
    def between(self, x):
        return self.inner(x) * (1 + self.gate(x).argmax(1, keepdim=True))


class AttentionByItself(Network):
    def between(self, x):
        tokens = x.view(len(x), 4, -1)
        return (F.scaled_dot_product_attention(tokens, tokens, tokens) + self.inner(x).view(len(x), 4, -1)).flatten(1)


class Noisy(Network):
    def between(self, x):
        return F.dropout(self.inner(x) + 0.1 * torch.randn_like(x), 0.3)


class DrawsRarely(Network):
    """Few of the examples go without a layer, so that two passes are mostly alike."""

    def between(self, x):
        return x + self.inner(x) * (torch.rand(len(x), 1) < 0.99)


class DrawnElsewhere(Network):
    """One draw of Python's and one of NumPy's generator for a batch."""

    def between(self, x):
        return self.inner(x) * (1 + random.random()) + np.random.rand()


RIGHT = [Plain, SortedByItself, SoftExperts, OwnExpert, AttentionByItself, Noisy, DrawsRarely, DrawnElsewhere]


def made(kind, drops=0.0):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = kind().train()
    network.drop.p = drops
    return network


REFUSED = r"^the network (mixes|reorders or joins) the examples of a batch|^the gradient of 'first.weight' is not"


@pytest.mark.parametrize("method", ["one-pass", "hooks"])
@pytest.mark.parametrize("kind", MIXING)
def test_a_network_in_which_examples_meet_is_refused_on_one_line(kind, method):
    network = made(kind)
    with pytest.raises(ValueError, match=REFUSED) as caught:
        check_private(network, SHAPE, network.names(), method)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [kind for kind in MIXING if kind not in (ByPlace, OnlyWhenLarge)])
def test_it_is_refused_too_where_it_draws(kind):
    network = made(kind, 0.3)
    with pytest.raises(ValueError, match=REFUSED):
        check_private(network, SHAPE, network.names(), "one-pass")


@pytest.mark.parametrize("method", ["one-pass", "hooks"])
@pytest.mark.parametrize("drops", [0.0, 0.3])
@pytest.mark.parametrize("kind", RIGHT)
def test_a_network_in_which_each_example_goes_its_own_way_is_trained_and_left_as_it_is(kind, drops, method):
    network = made(kind, drops)
    before, state = copy.deepcopy(network.state_dict()), torch.random.get_rng_state()
    check_private(network, SHAPE, network.names(), method)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
