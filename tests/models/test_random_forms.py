"""Random networks of strangers: cut, exported and loaded, or made in another process, they compute what they did."""

from __future__ import annotations

import copy
import hashlib
import random
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedprune_app.core.payload import Payload
from fedprune_app.core.structured import shrink
from fedprune_app.exports.file import ExportInfo, encode_export, load_model
from fedprune_app.models.initial import channel_groups
from fedprune_app.models.vision import architecture, named_tensors, outputs, probe
from tests.learning.test_strange_networks import CLASSES, SHAPE, Network

SEED = 7  # of what a builder draws


class Residual(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return torch.relu(x + self.layers(x))


class Branches(Residual):
    def forward(self, x):
        return torch.cat([self.layers(x), x], 1)


class Mixed(nn.Module):
    """Channels in another order: by a permutation, by groups, or from behind."""

    def __init__(self, order):
        super().__init__()
        self.order = order

    def forward(self, x):
        return x[:, self.order]


class Gated(nn.Module):
    def forward(self, x):
        return F.glu(x, 1)


class LastFirst(nn.Module):
    def forward(self, x):
        return x.permute(0, 2, 3, 1)


def normed(inputs, outs, size=3, **how):
    return [nn.Conv2d(inputs, outs, size, padding=size // 2, **how), nn.BatchNorm2d(outs)]


class Ranked(nn.Sequential):
    """A random network whose BatchNorms rank its channels."""

    def __init__(self, seed: int) -> None:
        draw, depth = random.Random(seed), 4
        layers = [*normed(SHAPE[0], depth), nn.ReLU()]
        for _ in range(draw.randint(1, 3)):
            usual = ("plain", "nested", "residual")
            kind = draw.choice(usual if seed % 2 else (*usual, "branches", "grouped", "mixed", "gated", "prelu"))
            if kind == "plain":
                layers += [*normed(depth, 6), nn.ReLU()]
                depth = 6
            elif kind == "nested":
                layers.append(nn.Sequential(nn.Sequential(*normed(depth, depth)), nn.ReLU(), nn.Identity()))
            elif kind == "residual":
                layers.append(Residual(*normed(depth, 4), nn.ReLU(), *normed(4, depth)))
            elif kind == "branches":
                layers.append(Branches(*normed(depth, 4, 1), nn.ReLU()))
                depth += 4
            elif kind == "grouped":
                layers += [*normed(depth, depth, groups=draw.choice((2, depth))), nn.ReLU()]
            elif kind == "mixed":
                layers.append(Mixed([*range(depth)][:: draw.choice((1, -1))]))
            elif kind == "gated":
                layers += [*normed(depth, 8), Gated()]
                depth = 4
            else:
                layers += [*normed(depth, depth), nn.PReLU(depth)]
        tail = [nn.AdaptiveAvgPool2d(2), *([LastFirst()] if seed % 5 == 0 else []), nn.Flatten()]
        super().__init__(*layers, *tail, nn.Linear(4 * depth, CLASSES))


def ranked(seed: int) -> nn.Module:
    """Such a network with scales, shifts and statistics of its own."""
    torch.manual_seed(seed)
    model = Ranked(seed).eval()
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            for tensor in (norm.weight.data, norm.running_var):
                tensor.uniform_(0.5, 1.5)
            for tensor in (norm.bias.data, norm.running_mean):
                tensor.uniform_(-0.5, 0.5)
    return model


def check_cut_form(seed: int) -> bool:
    """Compare a network without some channels with the one where they are 0; return whether it can be cut at all."""
    model, images = ranked(seed), torch.randn(6, *SHAPE)
    try:
        groups = channel_groups(model, SHAPE)
    except ValueError:
        return False
    for number in range(3):
        draw = torch.Generator().manual_seed(number)
        kept = {group.name: torch.rand(group.size, generator=draw) < 0.6 for group in groups}
        for mask in kept.values():
            mask[0] |= not mask.any()
        masked = copy.deepcopy(model)
        for group in groups:
            for scale in group.scales:
                norm = masked.get_submodule(scale.removesuffix(".weight"))
                norm.weight.data[~kept[group.name]] = norm.bias.data[~kept[group.name]] = 0
        small = shrink(copy.deepcopy(model), groups, kept)
        torch.testing.assert_close(outputs(small, images), outputs(masked, images), rtol=1e-4, atol=1e-5)
    return True


@pytest.mark.parametrize(
    ("first", "last"), [(0, 8), *(pytest.param(n, n + 40, marks=pytest.mark.full) for n in (8, 48, 88))]
)
def test_a_random_network_is_cut_right_or_refused(first, last):
    can_be_cut = []
    for seed in range(first, last):
        try:
            can_be_cut.append(check_cut_form(seed))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {Ranked(seed)}") from error
    assert any(can_be_cut)  # or the test would show little
    assert not all(can_be_cut)


def made(seed: int) -> nn.Module:
    return architecture("mine", SHAPE, CLASSES, lambda *_: Network(seed), seed=SEED).eval()


@pytest.mark.parametrize(("first", "last"), [(0, 8), pytest.param(8, 60, marks=pytest.mark.full)])
def test_a_random_network_is_loaded_as_it_was_exported(tmp_path, first, last):
    path = tmp_path / "model.safetensors"
    for seed in range(first, last):
        model, images = made(seed), torch.randn(3, *SHAPE, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1)  # trained
        tensors = {name: tensor.detach() for name, tensor in named_tensors(model).items()}
        info = ExportInfo(
            "fedavg", None, 1, "mine", SHAPE, CLASSES, (0.0,) * 2, (1.0,) * 2, 1.0, {}, seed=SEED,
            logits=probe(model, SHAPE),
        )  # fmt: skip
        path.write_bytes(encode_export(info, Payload(tensors, {})))
        loaded = load_model(path, build=lambda *_, seed=seed: Network(seed))
        assert torch.equal(outputs(loaded, images), outputs(model, images)), seed


def digest(seeds: range) -> str:
    total = hashlib.sha256()
    for seed in seeds:
        model = made(seed)
        for tensor in (*model.state_dict().values(), outputs(model, torch.ones(2, *SHAPE))):
            total.update(tensor.numpy().tobytes())
    return total.hexdigest()


@pytest.mark.full
def test_random_networks_are_the_same_in_another_process():
    code = "import tests.conftest; from tests.models.test_random_forms import digest; print(digest(range(30)))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == digest(range(30))
