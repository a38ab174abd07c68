"""DP-SGD on masked models: what an example can do is bounded, the noise is what and where it should be."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from fedprune_app.config import OPTIONS
from fedprune_app.core.layers import layers_of
from fedprune_app.core.rng import generator
from fedprune_app.core.structured import extents, hidden_groups, leading_masks
from fedprune_app.learning.parts import Part
from fedprune_app.learning.sgd import SGD
from fedprune_app.learning.train import train
from fedprune_app.models.names import MODELS
from fedprune_app.models.vision import architecture, build_model, prunable_names
from fedprune_app.privacy.accounting import ACCOUNTANTS
from fedprune_app.privacy.clipped_sums import clip_factors, windows
from fedprune_app.privacy.dpsgd import DPSGD, check_independence, check_model, check_private
from fedprune_app.privacy.noise import KeyedNoise, Noise
from tests.examples import in_test

METHODS = ("one-pass", "hooks")
UNUSED = ("unused.weight", "unused.bias")
SMALLEST = {"cnn-small": (1, 8, 8), "cnn-gn": (3, 16, 16), "resnet18-gn": (3, 8, 8), "vgg11-gn": (3, 32, 32)}


def keyed(number: int) -> Noise:
    return KeyedNoise(number.to_bytes(32, "little"))


def network(name: str = "cnn-small", shape=(1, 8, 8)) -> nn.Module:
    return build_model(name, shape, 10, rng=generator(0, "init"))


def data(count: int, shape=(1, 8, 8)) -> tuple[torch.Tensor, torch.Tensor]:
    draw = generator(1, "data")
    return torch.randn(count, *shape, generator=draw) * 3, torch.randint(0, 10, (count,), generator=draw)


def half_masks(model: nn.Module) -> dict[str, torch.Tensor]:
    draw, parameters = generator(2, "masks"), dict(model.named_parameters())
    return {name: torch.rand(parameters[name].shape, generator=draw) < 0.5 for name in prunable_names(model)}


def dp(sigma: float = 1.0, clip: float = 1.0, rate: float = 0.1, steps: int = 1, **more) -> DPSGD:
    return DPSGD(sigma, clip, rate, steps, more.pop("noise", None) or keyed(3), **more)


def gradients_of(model: nn.Module, how: DPSGD, images, labels, masks=None, frozen=()) -> dict[str, torch.Tensor]:
    """What the method adds up for these examples."""
    trained = {name: p for name, p in model.named_parameters() if name not in frozen}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    sums = {name: torch.zeros_like(p) for name, p in trained.items()}
    kept = {name: torch.ones_like(p) for name, p in trained.items()} | {n: m.float() for n, m in (masks or {}).items()}
    with how.attached(model, sums, kept) as step:
        step.add(images, labels)
    return sums


def one_by_one(model: nn.Module, clip: float, images, labels, masks=None, frozen=()) -> list[dict[str, torch.Tensor]]:
    """The slow reference: one example at a time, plain autograd, then mask, then clip."""
    found = []
    for image, label in zip(images, labels, strict=True):
        model.zero_grad()
        F.cross_entropy(model(image[None]), label[None]).backward()
        each = {n: p.grad.clone() * (masks or {}).get(n, 1) for n, p in model.named_parameters() if n not in frozen}
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in each.values()))
        found.append({name: g * min(1.0, clip / norm) for name, g in each.items()})
    model.zero_grad()
    return found


def assert_every_method_clips_one_by_one(model: nn.Module, images, labels, masks=None) -> None:
    """Some examples' gradients are below the clipping norm and some above."""
    whole = one_by_one(model, math.inf, images, labels, masks)
    norms = sorted(math.sqrt(sum(float(g.square().sum()) for g in each.values())) for each in whole)
    clip = (norms[len(norms) // 2 - 1] + norms[len(norms) // 2]) / 2
    reference = one_by_one(model, clip, images, labels, masks)
    for method in METHODS:
        for key, total in gradients_of(model, dp(clip=clip, grad_sample=method), images, labels, masks).items():
            expected = sum(each[key] for each in reference)
            told = f"{method}, {key}: "
            torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-5, msg=lambda text, told=told: told + text)


def admitted(name: str) -> bool:
    try:
        check_model(architecture(name, (3, 32, 32), 10), name)
    except ValueError:
        return False
    return True


PRIVATE_MODELS = [name for name in MODELS if admitted(name)]


@pytest.mark.parametrize(("kernel", "stride", "padding", "dilation"), [(5, 1, 0, 1), ((3, 2), (2, 1), (1, 0), (1, 2))])
def test_windows_are_those_of_unfold(kernel, stride, padding, dilation):
    layer = nn.Conv2d(3, 4, kernel, stride, padding, dilation)
    inputs = torch.randn(5, 3, 12, 11, generator=generator(0, "inputs"))
    assert torch.equal(windows(layer, inputs), F.unfold(inputs, layer.kernel_size, dilation, padding, stride))


def test_models_are_refused_for_their_batch_norm_alone():
    assert {name for name in MODELS if name not in PRIVATE_MODELS} == {name for name in MODELS if "-bn" in name}


@pytest.mark.parametrize("name", in_test(PRIVATE_MODELS, "lenet5", "cnn5", "cnn-gn", "mlp3"))
def test_every_method_is_clipping_one_example_at_a_time_for_every_model(name):
    shape = SMALLEST.get(name, (1, 28, 28))
    images, labels = data(2, shape)
    images[0] *= 0.05
    assert_every_method_clips_one_by_one(network(name, shape), images, labels)


@pytest.mark.parametrize(
    ("name", "shape"), [("cnn-small", (1, 8, 8)), ("cnn-gn", (3, 16, 16)), ("lenet5", (3, 32, 32))]
)
def test_every_method_is_masking_then_clipping_one_example_at_a_time(name, shape):
    model = network(name, shape)
    images, labels = data(6, shape)
    images[:3] *= 0.05
    assert_every_method_clips_one_by_one(model, images, labels, half_masks(model))


class OwnNetwork(nn.Module):
    """A network as somebody may write it: a layer that is not used, and operations in place."""

    def __init__(self, act: Callable[[torch.Tensor], torch.Tensor] = nn.functional.relu) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, padding=1)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.unused = nn.Linear(3, 3)
        self.dropout = nn.Dropout(0.0, inplace=True)
        self.fc = nn.Linear(4 * 64, 10)
        self.act = act

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.conv1(images))
        x = self.act(self.conv2(x)) + x
        return self.dropout(self.fc(x.flatten(1)))


def own_network(act: Callable[[torch.Tensor], torch.Tensor] = nn.functional.relu) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return OwnNetwork(act)


def test_modules_that_work_in_place_are_made_harmless_for_the_time_of_a_private_training():
    model, (images, labels) = own_network(), data(4)
    model.unused.requires_grad_(False)
    images[:2] *= 0.05
    for method in METHODS:
        total = gradients_of(model, dp(clip=0.5, grad_sample=method), images, labels, frozen=UNUSED)
        assert model.relu.inplace
        assert model.dropout.inplace
        reference = one_by_one(model, 0.5, images, labels, frozen=UNUSED)
        for key, found in total.items():
            torch.testing.assert_close(found, sum(each[key] for each in reference), rtol=1e-4, atol=1e-5)


def add_one_later(x: torch.Tensor) -> torch.Tensor:
    x += 1
    return x


class Overwriter(OwnNetwork):
    """What the second convolution took is overwritten afterwards."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.conv1(images))
        y = self.conv2(x)
        x.mul_(0.5)
        return self.fc((y + x).flatten(1))


class CosineHead(nn.Module):
    """The weight of the head is used by a function, and the layer is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 8), nn.Linear(8, 10, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return F.linear(self.body(images.flatten(1)).relu(), F.normalize(self.head.weight))


class PixelsAsExamples(nn.Module):
    """The layers see the rows of an image as if they were examples, so clipping would bound a row's part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(images.reshape(-1, 8)).relu()).view(len(images), -1, 10).mean(1)


def shared_weight() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 10))
    model[3].weight = model[1].weight
    return model


STRANGE = {
    "relu_": lambda: own_network(nn.functional.relu_),
    "+=": lambda: own_network(add_one_later),
    "view": lambda: own_network(lambda x: x.view(-1).tanh_().view(x.shape)),
    "input": Overwriter,
    "cosine head": CosineHead,
    "rows": PixelsAsExamples,
    "shared": shared_weight,
    "own layer": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10), Scaled()),
}


class Scaled(nn.Module):
    """A layer that torch does not have, with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", STRANGE)
def test_a_network_is_refused_or_every_method_clips_one_example_at_a_time(name, method):
    """Some methods can do more than others; none is wrong in silence."""
    model, (images, labels) = STRANGE[name](), data(4)
    images[:2] *= 0.05
    names = [key for key, _ in model.named_parameters() if key not in UNUSED]
    refusal = ""
    try:
        check_private(model.train(), (1, 8, 8), names, method)
    except ValueError as error:
        refusal = str(error)
    if refusal:
        assert "\n" not in refusal
        return
    reference = one_by_one(model, 0.5, images, labels, frozen=UNUSED)
    for key, total in gradients_of(model, dp(clip=0.5, grad_sample=method), images, labels, frozen=UNUSED).items():
        torch.testing.assert_close(total, sum(each[key] for each in reference), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "parameter"), [("relu_", "conv2.weight"), ("cosine head", "head.weight"), ("shared", "1.weight")]
)
def test_a_refused_network_is_told_by_its_layer(name, parameter):
    model = STRANGE[name]().train()
    names = [key for key, _ in model.named_parameters() if key not in UNUSED]
    with pytest.raises(ValueError, match=f"the gradient of '{parameter}' is not what its layer's rule finds"):
        check_private(model, (1, 8, 8), names, "one-pass")


def test_a_network_whose_last_layer_is_zero_at_first_is_compared_all_the_same():
    model = CosineHead().train()
    with torch.no_grad():
        model.body.weight.zero_()
    with pytest.raises(ValueError, match=r"head\.weight"):
        check_private(model, (1, 8, 8), ["body.weight", "body.bias", "head.weight"], "one-pass")


@pytest.mark.parametrize("method", METHODS)
def test_a_layer_that_the_network_does_not_use_has_no_gradient(method):
    model, (images, labels) = own_network(), data(3)
    sums = gradients_of(model, dp(clip=1e6, grad_sample=method), images, labels)
    assert not bool(sums["unused.weight"].any())
    model.zero_grad()
    nn.functional.cross_entropy(model(images), labels, reduction="sum").backward()
    torch.testing.assert_close(sums["conv1.weight"], model.conv1.weight.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_the_layout_in_memory_does_not_matter(method):
    """Opacus 1.6 by itself takes wrong windows of channels-last inputs, without a word."""
    model = network("cnn-gn", (3, 16, 16))
    images, labels = data(5, (3, 16, 16))
    plain = gradients_of(model, dp(grad_sample=method), images, labels)
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    last = gradients_of(model, dp(grad_sample=method), images.contiguous(memory_format=torch.channels_last), labels)
    for name, total in plain.items():
        torch.testing.assert_close(last[name], total, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("padding", [0, 1, "same"])
@pytest.mark.parametrize(("groups", "stride", "dilation"), [(1, 1, 1), (1, 2, 1), (2, 1, 2)])
def test_convolutions_of_every_kind_have_gradients_per_example(padding, groups, stride, dilation):
    if padding == "same" and stride > 1:
        return  # torch has none
    torch.manual_seed(0)
    convolution = nn.Conv2d(4, 6, 3, stride, padding, dilation, groups)
    model = nn.Sequential(convolution, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 10))
    images, labels = data(4, (4, 9, 9))
    reference = one_by_one(model, 0.7, images, labels)
    for layout, method in itertools.product((torch.contiguous_format, torch.channels_last), METHODS):
        convolution.weight.data = convolution.weight.data.contiguous(memory_format=layout)
        images = images.contiguous(memory_format=layout)
        for name, total in gradients_of(model, dp(clip=0.7, grad_sample=method), images, labels).items():
            torch.testing.assert_close(total, sum(each[name] for each in reference), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "norm",
    [
        nn.LayerNorm(12, bias=False),
        nn.LayerNorm((4, 12), bias=False),
        nn.LayerNorm(12, elementwise_affine=False),
        nn.RMSNorm(12),
        nn.RMSNorm((4, 12), eps=0.1),
        nn.GroupNorm(2, 4, bias=False),
    ],
    ids=str,
)
def test_norms_without_a_bias_have_gradients_per_example(norm):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12, bias=False), norm, nn.ReLU(), nn.Flatten(), nn.Linear(48, 10)).train()
    for method in METHODS:
        check_private(model, (4, 8), [name for name, _ in model.named_parameters()], method)
    assert_every_method_clips_one_by_one(model, *data(4, (4, 8)))


class UsedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.body(images.flatten(1)).relu()))


def test_a_layer_that_is_used_twice_is_known_to_hooks_alone_and_is_refused_without_a_hint_that_may_be_refused_too():
    model = UsedTwice().train()
    names = [name for name, _ in model.named_parameters()]
    with pytest.raises(ValueError, match=r"layer 'body' is used twice, allowed with dp\.enabled: .* layer once$"):
        check_private(model, (1, 8, 8), names, "one-pass")
    check_private(model, (1, 8, 8), names, "hooks")


@pytest.mark.parametrize("method", METHODS)
def test_frozen_parameters_have_no_part_in_the_norm(method):
    model = network()
    images, labels = data(4)
    frozen = ["conv1.weight", "fc1.bias"]
    sums = gradients_of(model, dp(grad_sample=method), images, labels, frozen=frozen)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    reference = one_by_one(model, 1.0, images, labels, frozen=frozen)
    assert sums.keys() == reference[0].keys()
    for key, total in sums.items():
        torch.testing.assert_close(total, sum(each[key] for each in reference), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_one_example_changes_a_sum_by_at_most_the_clipping_norm(method):
    model = network()
    images, labels = data(5)
    images *= torch.tensor([1e-3, 1.0, 10.0, 1e4, 1e8]).view(-1, 1, 1, 1)  # whatever it is
    masks = half_masks(model)
    whole = gradients_of(model, dp(clip=0.5, grad_sample=method), images, labels, masks)
    for left_out in range(5):
        rest = [i for i in range(5) if i != left_out]
        without = gradients_of(model, dp(clip=0.5, grad_sample=method), images[rest], labels[rest], masks)
        change = math.sqrt(sum(float((whole[n] - without[n]).double().square().sum()) for n in whole))
        assert change <= 0.5 * (1 + 1e-4)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("poison", [math.inf, math.nan, 1e30])
def test_an_example_without_a_finite_gradient_has_no_part(method, poison):
    model = network()
    images, labels = data(4)
    bad = images.clone()
    bad[2, 0, 0, 0] = poison
    sums = gradients_of(model, dp(grad_sample=method), bad, labels)
    good = gradients_of(model, dp(grad_sample=method), images[[0, 1, 3]], labels[[0, 1, 3]])
    for name in sums:
        torch.testing.assert_close(sums[name], good[name])
    nothing = gradients_of(model, dp(grad_sample=method), bad[2:3], labels[2:3])
    assert all(not bool(total.any()) for total in nothing.values())


@pytest.mark.parametrize("method", METHODS)
def test_no_weights_let_an_entry_pass_the_clipping_because_its_square_is_zero(method):
    """The weights are a server's, who also chooses the coordinates: inputs of 2e-23, and gradients of 1e14 on them."""
    model, clip = network("mlp4", (1, 28, 28)), 1e-6
    parameters = dict(model.named_parameters())
    masks = {name: torch.zeros_like(p, dtype=torch.bool) for name, p in parameters.items()}
    masks["fc2.weight"][:] = True
    with torch.no_grad():
        for name in parameters:
            parameters[name].fill_(2e-23 if name in ("fc1.bias", "fc2.bias") else 0)
        parameters["fc3.weight"].fill_(8e6)
        parameters["fc4.weight"][0], parameters["fc4.weight"][1] = 8e6, -8e6
    example = torch.rand(1, 1, 28, 28), torch.tensor([1])
    gradient = gradients_of(model, dp(clip=1e6, grad_sample="hooks"), *example, masks)["fc2.weight"]
    assert float(gradient.double().norm()) > 100 * clip
    total = gradients_of(model, dp(clip=clip, grad_sample=method), *example, masks)
    assert math.sqrt(sum(float(each.double().square().sum()) for each in total.values())) <= clip * (1 + 1e-4)


def test_a_norm_that_is_no_number_has_no_factor():
    factors = clip_factors(torch.tensor([math.inf, math.nan, 16.0, 0.25, 0.0]), 1.0)
    torch.testing.assert_close(factors, torch.tensor([math.nan, math.nan, 0.25, 1.0, 1.0]), equal_nan=True)


@pytest.mark.parametrize("method", METHODS)
def test_the_model_is_as_it_was_afterwards(method):
    model = network()
    before, attributes = {n: p.clone() for n, p in model.named_parameters()}, set(vars(model))
    gradients_of(model, dp(grad_sample=method), *data(3))
    assert set(vars(model)) == attributes
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert not {"grad_sample", "_norm_sample", "_forward_counter"} & set(vars(parameter))
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._backward_hooks
        assert not hasattr(module, "activations")


@pytest.mark.parametrize("name", ["cnn-small-bn", "resnet18-bn"])
def test_batch_norm_is_refused_on_one_line(name):
    with pytest.raises(ValueError, match=r"with BatchNorm .*allowed with dp\.enabled") as caught:
        check_model(build_model(name, (3, 32, 32), 10, rng=generator(0, "init")))
    assert "\n" not in str(caught.value)


def test_the_configuration_offers_what_there_is():
    assert tuple(OPTIONS["dp.grad-sample"].choices) == ("auto", *METHODS)
    assert tuple(OPTIONS["dp.accountant"].choices) == ACCOUNTANTS


# --- noise ------------------------------------------------------------------------------------------------------------


def noise_alone(sigma: float, clip: float, rate: float, masks, noise=None) -> dict[str, torch.Tensor]:
    """The private gradient of an empty batch out of 1000 examples: noise alone."""
    model = network("cnn-gn", (3, 16, 16))
    gradients = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    kept = {n: torch.ones_like(g) for n, g in gradients.items()} | {n: m.float() for n, m in masks.items()}
    with dp(sigma, clip, rate, noise=noise).attached(model, gradients, kept) as step:
        step.finish(rate * 1000)
    return gradients


def test_noise_has_its_standard_deviation_and_is_exactly_zero_off_the_mask():
    masks = half_masks(network("cnn-gn", (3, 16, 16)))
    sigma, clip, rate = 1.7, 3.0, 0.02
    gradients = noise_alone(sigma, clip, rate, masks, keyed(8))
    values = torch.cat([g[masks[n]] if n in masks else g.flatten() for n, g in gradients.items()]).double()
    count = len(values)
    assert count > 10_000
    expected = sigma * clip / (rate * 1000)
    assert abs(float(values.mean())) < 5 * expected / math.sqrt(count)
    assert float(values.std()) == pytest.approx(expected, rel=5 / math.sqrt(2 * count))
    fourth = float((values / expected).pow(4).mean())
    assert fourth == pytest.approx(3, abs=5 * math.sqrt(96 / count))  # as Gaussian tails are
    for name, mask in masks.items():
        assert not bool(gradients[name][~mask].any())


def test_each_step_has_noise_of_its_own():
    how = dp()
    model = network()
    gradients = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    kept = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    with how.attached(model, gradients, kept) as step:
        step.finish(1.0)
        first = {name: g.clone() for name, g in gradients.items()}
        for gradient in gradients.values():
            gradient.zero_()
        step.finish(1.0)
    one, other = (torch.cat([g.flatten() for g in each.values()]) for each in (first, gradients))
    assert abs(float(torch.corrcoef(torch.stack([one, other]))[0, 1])) < 5 / math.sqrt(len(one))


# --- the training loop ------------------------------------------------------------------------------------------------


def test_batches_are_poisson_samples():
    how = dp(rate=0.05, steps=4000)
    sizes, hits = [], torch.zeros(40)
    together = 0
    for batch in how.batches(40):
        sizes.append(len(batch))
        hits[batch] += 1
        together += int({0, 1} <= set(batch.tolist()))
    counts = torch.tensor(sizes, dtype=torch.float64)
    assert float(counts.mean()) == pytest.approx(2.0, abs=5 * math.sqrt(1.9 / 4000))
    assert float(counts.var()) == pytest.approx(1.9, rel=0.15)
    assert 0 in sizes
    assert float((hits / 4000 - 0.05).abs().max()) < 5 * math.sqrt(0.05 * 0.95 / 4000)
    assert together / 4000 == pytest.approx(0.05**2, abs=5 * math.sqrt(0.0025 / 4000))  # independent of each other


class Scripted:
    """Which examples are in, and the noise, written down."""

    def __init__(self, batches: list[list[int]], num_examples: int, noise: list[torch.Tensor]) -> None:
        self.inside = [torch.tensor([0.0 if i in batch else 0.999 for i in range(num_examples)]) for batch in batches]
        self.noise = list(noise)

    def uniform(self, size: int) -> torch.Tensor:
        return self.inside.pop(0).double()

    def gaussian(self, size: int, device: torch.device | str = "cpu") -> torch.Tensor:
        assert len(self.noise[0]) == size
        return self.noise.pop(0).double()

    def laplace(self, scale: float) -> float:
        raise AssertionError

    def seed(self) -> int:
        return 0


@pytest.mark.parametrize("method", METHODS)
def test_a_private_training_is_its_definition_step_by_step(method):
    """Momentum, weight decay, masks, an empty batch and physical batches, against loops over examples."""
    model, (images, labels) = network(), data(8)
    masks = half_masks(model)
    batches = [[0, 3, 4, 6, 7], [], [1], [2, 5]]
    size = sum(p.numel() for p in model.parameters())
    noises = [torch.randn(size, generator=generator(step, "scripted")) for step in range(4)]
    rate, sigma, clip = 0.25, 0.8, 1.5
    sgd = SGD(learning_rate=0.1, momentum=0.5, weight_decay=0.01, epochs=2)
    how = DPSGD(sigma, clip, rate, 2, Scripted(batches, 8, noises), method, physical_batch=2)
    epochs = []
    result = train(
        model, images, labels, sgd, rng=generator(0, "x"), masks=masks, after_epoch=epochs.append, private=how
    )
    assert epochs == [0, 1]
    assert (result.num_steps, result.num_examples, result.loss_mean, result.diverged) == (4, 8, None, False)

    expected = network()
    with torch.no_grad():
        for name, mask in masks.items():
            dict(expected.named_parameters())[name].mul_(mask)
    velocity = {name: torch.zeros_like(p) for name, p in expected.named_parameters()}
    for batch, noise in zip(batches, noises, strict=True):
        each = one_by_one(expected, clip, images[batch], labels[batch], masks)
        start = 0
        for name, parameter in expected.named_parameters():
            kept = masks.get(name, torch.ones_like(parameter, dtype=torch.bool))
            part = noise[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()
            total = sum((g[name] for g in each), torch.zeros_like(parameter)) + sigma * clip * part * kept
            gradient = total / (rate * 8) + 0.01 * parameter.detach()
            velocity[name] = 0.5 * velocity[name] + gradient
            parameter.data -= 0.1 * velocity[name]
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.data, dict(expected.named_parameters())[name].data, rtol=1e-3, atol=1e-5)
    for name, mask in masks.items():
        assert not bool(dict(model.named_parameters())[name][~mask].any())


def test_hooks_see_the_private_gradient_and_no_other():
    model, (images, labels) = network(), data(8)
    seen = []
    noise = torch.zeros(sum(p.numel() for p in model.parameters()))
    how = DPSGD(1.0, 1e-3, 0.5, 1, Scripted([[0, 1, 2]], 8, [noise]))

    def look(values, gradients):
        seen.append(math.sqrt(sum(float(g.square().sum()) for g in gradients.values())))

    train(model, images, labels, SGD(0.1), rng=generator(0, "x"), adjust_gradients=look, private=how)
    assert len(seen) == 1
    assert 0 < seen[0] <= 3 * 1e-3 / (0.5 * 8) * (1 + 1e-4)


def test_nobody_who_knows_the_runs_seed_knows_what_a_network_drops():
    """Known masks would tell: an example less gives the others in its batch other masks, and moves the sum by more."""
    images, labels = data(8)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 10))
    ends = []
    for key in (1, 1, 2):
        trained = copy.deepcopy(model)
        how = dp(sigma=0.0, clip=1e6, rate=1.0, noise=keyed(key))  # all are in, and nothing hides the masks
        train(trained, images, labels, SGD(0.1), rng=generator(0, "x"), private=how)
        ends.append(trained[1].weight)
    assert torch.equal(ends[0], ends[1])
    assert not torch.allclose(ends[0], ends[2])


def test_private_training_that_diverges_says_so_by_its_weights():
    model, (images, labels) = network(), data(8)
    how = dp(sigma=1.0, clip=1e30, rate=0.5, steps=30)
    assert train(model, images, labels, SGD(1e30), rng=generator(0, "x"), private=how).diverged


def test_without_noise_and_with_everybody_it_is_gradient_descent():
    model, plain = network(), network()
    images, labels = data(12)
    images *= 0.1
    how = DPSGD(0.0, 1e6, 1.0, 1, keyed(0))
    train(model, images, labels, SGD(0.05, momentum=0.5, epochs=3), rng=generator(0, "x"), private=how)
    train(plain, images, labels, SGD(0.05, momentum=0.5, epochs=3, batch_size=12), rng=generator(0, "x"))
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


# --- parts of a network -------------------------------------------------------------------------------------------


def part_of(kind: str, model: nn.Module) -> tuple[Part, dict[str, torch.Tensor]]:
    """A part, and which coordinates of the full network it has."""
    shapes = {name: p.shape for name, p in model.named_parameters()}
    if kind == "masks":
        masks = {name: mask for name, mask in half_masks(model).items() if name != "fc1.weight"}
        return Part(masks=masks), masks
    groups = hidden_groups(layers_of(list(shapes), prunable_names(model)), shapes)
    reach = extents(groups, {group.name: group.size // 2 for group in groups})
    return Part(extents=reach, norm_groups={f"gn{k}": 2 for k in (1, 2, 3)}), leading_masks(reach, shapes)


def step_on(model: nn.Module, part: Part, images, labels, sigma: float, clip: float, masks=None) -> dict:
    """How one step of rate 1, on everything, changes the weights."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    sgd = SGD(1.0, batch_size=len(labels))
    train(
        model, images, labels, sgd, rng=generator(4, "order"), part=lambda _: part, private=dp(sigma, clip, 1.0),
        masks=masks,
    )  # fmt: skip
    kept = masks or {}
    start = {n: torch.where(kept[n], w, 0) if n in kept else w for n, w in before.items()}
    return {name: start[name] - p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", ["masks", "extents"])
@pytest.mark.parametrize("masked", [False, True])
def test_a_step_on_a_part_sums_the_clipped_gradients_of_that_part_alone(kind, masked):
    """The reference masks the full network, one example at a time, whatever is sliced in the product."""
    model, (images, labels) = network("cnn-gn", (1, 8, 8)), data(6)
    images[:3] *= 0.05
    part, there = part_of(kind, model)
    outside = {"conv2.weight": torch.rand(32, 16, 3, 3, generator=generator(9, "outside")) < 0.7} if masked else {}
    start = copy.deepcopy(model)
    alone = copy.deepcopy(model)
    for name, p in alone.named_parameters():
        p.data = p.data * there.get(name, 1) * outside.get(name, 1)
    trained = {n: there.get(n, torch.ones_like(p)) * outside.get(n, 1) for n, p in model.named_parameters()}
    norms = [
        math.sqrt(sum(float(g.square().sum()) for g in each.values()))
        for each in one_by_one(alone, math.inf, images, labels, trained)
    ]
    clip = sorted(norms)[2] * 1.01
    clipped = one_by_one(alone, clip, images, labels, trained)
    moved = step_on(start, part, images, labels, 0.0, clip, outside)
    for name, change in moved.items():
        expected = sum(each[name] for each in clipped) / len(labels)
        torch.testing.assert_close(change, expected, rtol=2e-4, atol=1e-6)
        assert not change[~trained[name].bool()].any()


@pytest.mark.parametrize("kind", ["masks", "extents"])
def test_the_noise_of_a_step_on_a_part_is_on_that_part_and_of_full_size(kind):
    model, (images, labels) = network("cnn-gn", (1, 8, 8)), data(5)
    part, there = part_of(kind, model)
    outside = {"conv3.weight": half_masks(model)["conv3.weight"]}
    moved = step_on(model, part, images, labels, 300.0, 0.5, outside)
    noise = []
    for name, change in moved.items():
        where = (there.get(name, torch.ones_like(change)) * outside.get(name, 1)).bool()
        assert not change[~where].any()
        noise.append(change[where])
    values = torch.cat(noise) / (300.0 * 0.5 / 5)
    assert abs(float(values.std()) - 1) < 4 / math.sqrt(2 * len(values))


def test_a_part_is_asked_for_the_expected_number_of_examples_not_for_the_drawn_one():
    model, (images, labels) = network(), data(40)
    asked = []

    def part(count: int) -> Part:
        asked.append(count)
        return Part()

    sgd = SGD(0.1, batch_size=10, epochs=2)
    train(model, images, labels, sgd, rng=generator(4, "order"), part=part, private=dp(1.0, 1.0, 0.25, 4))
    assert asked == [10] * 8


def test_a_method_that_knows_whole_networks_alone_refuses_parts():
    images, labels = data(4)
    with pytest.raises(ValueError, match="grad_sample is 'hooks', allowed with groups or parts of a network: auto"):
        train(
            network(), images, labels, SGD(0.1), rng=generator(4, "order"), part=lambda _: Part(),
            private=dp(grad_sample="hooks"),
        )  # fmt: skip


# --- groups -------------------------------------------------------------------------------------------------------


def sum_over_groups(model: nn.Module, how: DPSGD, images, labels, masks=None) -> dict[str, torch.Tensor]:
    """The sum of a step on all groups, as a training of one step without noise shows it."""
    start = copy.deepcopy(model)
    for name, mask in (masks or {}).items():
        dict(start.named_parameters())[name].data *= mask
    trained = copy.deepcopy(start)
    how = replace(how, noise_multiplier=0.0, sample_rate=1.0, steps_per_epoch=1, noise=keyed(5), num_units=1)
    train(trained, images, labels, SGD(1.0), rng=generator(4, "order"), masks=masks, private=how)
    pairs = zip(start.named_parameters(), trained.parameters(), strict=True)
    return {name: before.detach() - after.detach() for (name, before), after in pairs}


def norm_of(gradients: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))


def numbered(sizes: list[int], seed: int) -> torch.Tensor:
    """Groups of these sizes, mixed, whose numbers are in the order of their first examples."""
    mixed = torch.tensor([group for group, size in enumerate(sizes) for _ in range(size)])
    mixed = mixed[torch.randperm(len(mixed), generator=generator(seed, "groups"))].tolist()
    order = dict.fromkeys(mixed)
    return torch.tensor([list(order).index(group) for group in mixed])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("physical_batch", [1, 2, 100])
def test_a_group_adds_the_clipped_mean_of_its_gradients_however_it_is_cut_into_chunks(physical_batch, masked):
    model, (images, labels), groups = network(), data(9), numbered([1, 5, 2, 1], 0)
    images *= torch.linspace(0.01, 1, 9).view(-1, 1, 1, 1)
    masks = half_masks(model) if masked else None
    start = copy.deepcopy(model)
    for name, mask in (masks or {}).items():
        dict(start.named_parameters())[name].data *= mask
    each = one_by_one(start, math.inf, images, labels, masks)
    means = [
        {n: torch.stack([each[i][n] for i in (groups == group).nonzero()]).mean(0) for n in each[0]}
        for group in range(4)
    ]
    norms = [norm_of(mean) for mean in means]
    clip = sorted(norms)[1] * 1.01
    how = dp(clip=clip, groups=groups, group_limit=9, physical_batch=physical_batch)
    for name, total in sum_over_groups(model, how, images, labels, masks).items():
        expected = sum(mean[name] * min(1.0, clip / norm) for mean, norm in zip(means, norms, strict=True))
        torch.testing.assert_close(total, expected, rtol=1e-4, atol=2e-5)


@settings(max_examples=12, deadline=None)
@given(
    name=st.sampled_from(["cnn-small", "cnn-gn", "mlp-small"]),
    sizes=st.lists(st.integers(1, 6), min_size=2, max_size=5),
    new_size=st.integers(0, 8),
    physical_batch=st.integers(1, 9),
    scale=st.sampled_from([1e-3, 1.0, 1e4, 1e8, math.nan]),
    seed=st.integers(0, 9),
)
def test_one_group_changed_arbitrarily_moves_the_sum_by_at_most_the_clipping_norm_each_way(
    name, sizes, new_size, physical_batch, scale, seed
):
    """A group that is a blank adds nothing, so one that takes its place may add one norm, and another one twice it."""
    shape = SMALLEST.get(name, (1, 8, 8))
    model, (images, labels), groups = network(name, shape), data(sum(sizes) + new_size, shape), numbered(sizes, seed)
    others = (groups != 0).nonzero().squeeze(1)
    added = torch.arange(len(groups), len(images))
    images[added] *= scale

    def sum_on(positions: torch.Tensor, numbers: torch.Tensor) -> dict[str, torch.Tensor]:
        unique = numbers.unique()
        compact = torch.searchsorted(unique, numbers)
        how = dp(clip=0.5, groups=compact, group_limit=8, physical_batch=physical_batch)
        return sum_over_groups(model, how, images[positions], labels[positions])

    without = sum_on(others, groups[others])
    before = sum_on(torch.arange(len(groups)), groups)
    after = sum_on(torch.cat([others, added]), torch.cat([groups[others], torch.zeros_like(added)]))
    for one, other, most in ((before, without, 1), (after, without, 1), (after, before, 2)):
        assert norm_of({n: one[n] - other[n] for n in one}) <= most * 0.5 * (1 + 1e-4)


def test_groups_of_one_are_examples_to_the_last_bit():
    trained = []
    for groups in (None, torch.arange(8)):
        model, (images, labels) = network(), data(8)
        how = dp(rate=0.4, steps=4, groups=groups, physical_batch=3)
        train(model, images, labels, SGD(0.1, epochs=2), rng=generator(0, "x"), private=how)
        trained.append(model.state_dict())
    assert all(torch.equal(trained[0][name], tensor) for name, tensor in trained[1].items())


def test_whole_groups_are_drawn_each_by_itself_and_of_a_large_one_no_more_than_the_limit():
    groups = numbered([1, 2, 7, 3], 0)
    big = int(groups.bincount().argmax())
    how = dp(rate=0.3, steps=3000, groups=groups, group_limit=4)
    drawn, taken = torch.zeros(4), torch.zeros(13)
    for batch in how.batches(13):
        assert batch.tolist() == sorted(set(batch.tolist()))
        counts = groups[batch].bincount(minlength=4)
        for group, count in enumerate(counts.tolist()):
            assert count in {0, min(4, int((groups == group).sum()))}
        drawn += counts > 0
        taken[batch] += 1
    assert float((drawn / 3000 - 0.3).abs().max()) < 5 * math.sqrt(0.21 / 3000)
    of_big = taken[groups == big] / drawn[big]
    assert float((of_big - 4 / 7).abs().max()) < 5 * math.sqrt(0.25 / float(drawn[big]))  # each example alike


def test_the_expected_batch_follows_the_number_of_groups():
    model, (images, labels), groups = network(), data(9), numbered([4, 3, 2], 1)
    asked = []
    how = dp(rate=1.0, groups=groups, group_limit=5)

    def part(count: int) -> Part:
        asked.append(count)
        return Part()

    train(model, images, labels, SGD(0.1), rng=generator(4, "order"), part=part, private=how)
    assert asked == [3 * 5]  # examples of three groups, at most


@pytest.mark.parametrize("poison", [math.inf, math.nan, 1e30])
def test_a_group_without_a_finite_gradient_has_no_part(poison):
    model, (images, labels), groups = network(), data(6), torch.tensor([0, 0, 1, 1, 2, 2])
    bad = images.clone()
    bad[2, 0, 0, 0] = poison
    kept = [0, 1, 4, 5]
    sums = sum_over_groups(model, dp(groups=groups, group_limit=2), bad, labels)
    good = sum_over_groups(model, dp(groups=groups[[0, 1, 2, 3]], group_limit=2), images[kept], labels[kept])
    for name in sums:
        torch.testing.assert_close(sums[name], good[name])


@pytest.mark.parametrize("kind", ["masks", "extents"])
def test_a_group_adds_the_clipped_mean_of_its_gradients_on_a_part_of_the_network(kind):
    """Groups of two equal examples are these examples once."""
    (images, labels), moved = data(4), []
    for groups, count in ((None, 1), (torch.arange(4).repeat_interleave(2), 2)):
        model = network("cnn-gn", (1, 8, 8))
        part, _ = part_of(kind, model)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        how = dp(0.0, 0.5, 1.0, groups=groups, group_limit=count)
        pair = images.repeat_interleave(count, 0), labels.repeat_interleave(count)
        train(model, *pair, SGD(1.0), rng=generator(4, "order"), part=lambda _, part=part: part, private=how)
        moved.append({name: before[name] - p.detach() for name, p in model.named_parameters()})
    for name, change in moved[0].items():
        torch.testing.assert_close(moved[1][name], change, rtol=2e-4, atol=1e-6)


# --- networks that would break the promise ----------------------------------------------------------------------------


class Mixing(nn.Module):
    """A network that subtracts the mean over a batch, with or without its gradient."""

    def __init__(self, is_detached):
        super().__init__()
        self.last, self.is_detached = nn.Linear(12, 2), is_detached

    def forward(self, images):
        mean = images.mean(0)
        return self.last(torch.flatten(images - (mean.detach() if self.is_detached else mean), 1))


class Counting(nn.Module):
    """A network that keeps a running mean of its inputs."""

    def __init__(self, in_place):
        super().__init__()
        self.last, self.in_place = nn.Linear(12, 2), in_place
        self.register_buffer("mean", torch.zeros(12))

    def forward(self, images):
        flat = torch.flatten(images, 1)
        if self.in_place:
            self.mean.add_(flat.mean(0).detach())
        else:
            self.mean = self.mean + flat.mean(0).detach()
        return self.last(flat)


@pytest.mark.parametrize("is_detached", [False, True])
def test_a_network_that_mixes_the_examples_of_a_batch_is_refused(is_detached):
    with pytest.raises(ValueError, match=r"^the network mixes the examples of a batch, allowed with dp\.enabled"):
        check_independence(Mixing(is_detached), (3, 2, 2))


@pytest.mark.parametrize("in_place", [False, True])
def test_a_network_that_writes_down_what_it_sees_is_refused(in_place):
    with pytest.raises(ValueError, match=r"^the network changes 'mean' as it computes, allowed with dp\.enabled"):
        check_independence(Counting(in_place), (3, 2, 2))


@pytest.mark.parametrize("name", in_test(PRIVATE_MODELS, "lenet5", "cnn5", "cnn-gn", "mlp3"))
def test_networks_that_may_be_private_mix_nothing_and_the_check_draws_nothing(name):
    model = build_model(name, (3, 32, 32), 10, rng=generator(0, "init")).train()
    before = torch.random.get_rng_state()
    check_independence(model, (3, 32, 32))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_network_that_draws_is_no_network_that_mixes():
    check_independence(nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Dropout(), nn.Linear(8, 2)).train(), (3, 2, 2))
