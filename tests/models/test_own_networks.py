"""Networks as users make them: what can be trained is made as it is, what cannot is refused before a run starts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import fedprune_app
from fedprune_app.config import ConfigError
from fedprune_app.models.vision import architecture
from fedprune_app.preflight.can_start import warnings
from fedprune_app.preflight.inputs import Placement, RunInputs
from fedprune_app.preflight.prepare import prepare
from tests.examples import full

SHAPE = (1, 8, 8)
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),  # torch.compile imports what warns
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning"),
]


def plain(shape, classes, *, inner=()):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), *inner, nn.ReLU(), nn.Linear(8, classes))


def compiled(shape, classes):
    return torch.compile(plain(shape, classes))


def compiled_part(shape, classes):
    network = plain(shape, classes)
    network[1] = torch.compile(network[1])
    return network


def compiled_in_place(shape, classes):
    network = plain(shape, classes)
    network.compile()
    return network


@pytest.mark.parametrize("build", [compiled, full(compiled_part), full(compiled_in_place)])
def test_a_network_is_trained_without_what_is_wrapped_around_it(build):
    network = architecture("mine", SHAPE, 10, build)
    assert list(network.state_dict()) == list(plain(SHAPE, 10).state_dict())
    assert not hasattr(network, "_compiled_call_impl") or network._compiled_call_impl is None
    assert not any("OptimizedModule" in type(part).__name__ for part in network.modules())


def test_a_network_whose_copies_compute_with_its_own_weights_is_refused():
    class Held(nn.Module):
        def __init__(self, classes):
            super().__init__()
            self.first, self.last = nn.Linear(64, 8), nn.Linear(8, classes)
            self.hidden = lambda images: self.first(images.flatten(1)).relu()

        def forward(self, images):
            return self.last(self.hidden(images))

    network = Held(10)
    before = network.first.weight.clone()
    with pytest.raises(ValueError, match="computes with the network it was made in, also in copies"):
        architecture("mine", SHAPE, 10, lambda *_: network)
    assert torch.equal(network.first.weight, before)


def test_a_network_is_made_once_as_its_function_makes_it():
    def build(shape, classes):
        network = plain(shape, classes, inner=[nn.Dropout(torch.linspace(0, 0.2, 3)[1].item())]).to("cpu")
        with torch.no_grad():
            network[1].weight.copy_(torch.from_numpy(np.full((8, 64), 0.25)))
        return network

    assert bool((architecture("mine", SHAPE, 10, build)[1].weight == 0.25).all())


FILE = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def plain(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, classes))


class TupleInTraining(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.inner = plain(classes)

    def forward(self, x):
        return (self.inner(x), 0) if self.training else self.inner(x)


def in_training(shape, classes):
    return TupleInTraining(classes)


def scripted(shape, classes):
    return torch.jit.script(plain(classes))


@torch.jit.script
def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


class WithScript(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.inner, self.doubled = plain(classes), doubled

    def forward(self, x):
        return self.inner(self.doubled(x))


def script_inside(shape, classes):
    return WithScript(classes)


def with_nothing(shape, classes):
    network = plain(classes)
    network.register_parameter("nothing", nn.Parameter(torch.empty(0, 3)))
    network.register_buffer("constant", torch.ones(2, dtype=torch.float64))
    return network


def normed(shape, classes):
    network = plain(classes)
    network[1] = nn.utils.parametrizations.weight_norm(network[1])
    return network


class Attention(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.first, self.attention = nn.Linear(8, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.last = nn.Linear(8, classes)

    def forward(self, x):
        x = self.first(x.flatten(1, 2))
        return self.last(self.attention(x, x, x, need_weights=False)[0].mean(1))


def attention(shape, classes):
    return Attention(classes)


class ChannelsLast(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 16, 3, padding=1), nn.Linear(1024, classes)

    def forward(self, x):
        return self.fc(torch.relu(self.conv(x)).permute(0, 2, 3, 1).flatten(1))


def channels_last(shape, classes):
    return ChannelsLast(classes)


class Skips(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.first, self.blocks = nn.Linear(64, 32), nn.ModuleList([nn.Linear(32, 32) for _ in range(2)])
        self.last = nn.Linear(32, classes)

    def forward(self, x):
        x = self.first(x.flatten(1))
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return self.last(x)


def skips(shape, classes):
    return Skips(classes)


class Checkpointed(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(64, 8), nn.Linear(8, 8), nn.Linear(8, classes)

    def forward(self, x):
        x = self.first(x.flatten(1))
        return self.last(checkpoint(lambda x: torch.relu(self.second(x)), x, use_reentrant=True))


def checkpointed(shape, classes):
    return Checkpointed(classes)


class Recurrent(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.cells = nn.GRU(8, 8, batch_first=True)
        self.last = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, classes))

    def forward(self, x):
        return self.last(self.cells(x.flatten(1, 2))[0][:, -1])


def recurrent(shape, classes):
    return Recurrent(classes)


def norm_at_the_end(shape, classes):
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, classes, 1), nn.BatchNorm2d(classes),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )


class NormThenRecurrent(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.conv, self.norm, self.rest = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), Recurrent(classes)

    def forward(self, x):
        return self.rest(self.norm(self.conv(x)).mean(1, keepdim=True))


def norm_then_recurrent(shape, classes):
    return NormThenRecurrent(classes)
"""


@pytest.fixture
def check(tmp_path, no_plugins):
    (tmp_path / "mine.py").write_text(FILE)

    def checked(name, **settings):
        values = {"out-dir": str(tmp_path / "run"), "model": f"{tmp_path / 'mine.py'}:{name}", "system": "fedavg"}
        return warnings(prepare(RunInputs({**values, **settings})).config, Placement("inprocess", 3))

    return checked


PRIVATE = {"dp.enabled": True, "dp.noise-multiplier": 1.0}
ORDERED = {"system": "fedp3", "fedp3.local": "ordered-dropout"}


@pytest.mark.filterwarnings("ignore:Unwrapped parameters detected")  # torch-pruning's
@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("in_training", {}, "must be Tensor, not tuple"),
        ("in_training", PRIVATE, "got tuple"),
        ("scripted", {}, "allowed: torch.nn.Module, no TorchScript"),
        ("script_inside", {}, "^model '.*:script_inside' cannot be made .*ScriptFunction cannot be pickled"),
        ("channels_last", {"system": "fjord"}, "with fewer units it computes something else"),
        ("channels_last", ORDERED, "with fewer units it computes something else"),
        ("skips", ORDERED, "the model cannot be made smaller"),
        ("attention", {"system": "fjord"}, "the model cannot be made smaller"),
        ("norm_then_recurrent", {"system": "subfedavg-hy"}, "torch-pruning cannot follow the model's channels"),
        ("normed", PRIVATE, "the gradient of '1.parametrizations.weight.original0' is not what its layer's rule finds"),
    ],
)
def test_a_network_that_fails_in_round_1_is_refused_before(check, name, settings, reason):
    with pytest.raises(ConfigError, match=reason) as caught:
        check(name, **settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "settings"), [("with_nothing", {}), ("with_nothing", PRIVATE), ("normed", {}), ("attention", {})]
)
def test_a_network_that_can_be_trained_may_start(check, name, settings):
    assert [line for line in check(name, **settings) if "told with noise" not in line] == []


def test_a_convolution_whose_norm_is_the_last_layer_keeps_its_channels(check):
    assert check("norm_at_the_end", system="subfedavg-hy") == []


@pytest.mark.full
def test_matrices_that_stay_dense_count_towards_dispfls_density_and_a_density_below_them_is_told(
    check, tmp_path, no_plugins
):
    settings = {"system": "dispfl", "model": f"{tmp_path / 'mine.py'}:recurrent", "num-server-rounds": 1}
    run = fedprune_app.run(settings, clients=3, engine="inprocess", out=tmp_path / "run")
    assert run.last("density_mean") == pytest.approx(0.5, abs=2e-3)
    assert check("recurrent", system="dispfl") == []
    told = check("recurrent", system="dispfl", density=0.2)
    assert told == ["density 0.2 cannot be reached: 23% of the model is in no convolution or linear layer"]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(("name", "system"), [("skips", "fjord"), ("checkpointed", "dispfl")])
def test_a_run_of_a_network_that_is_no_chain_completes(tmp_path, no_plugins, name, system):
    (tmp_path / "mine.py").write_text(FILE)
    settings = {"system": system, "model": f"{tmp_path / 'mine.py'}:{name}", "num-server-rounds": 2, "partition": "iid"}
    run = fedprune_app.run(settings, clients=3, engine="inprocess", out=tmp_path / "run")
    assert run.info["status"] == "completed"
