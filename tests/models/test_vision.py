import math
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedprune_app.config import OPTIONS
from fedprune_app.core.flops import forward_flops, training_flops
from fedprune_app.models.names import MODELS
from fedprune_app.models.vision import (
    architecture,
    build_model,
    conv_net,
    initialise,
    load_state_tensors,
    prunable_names,
    state_tensors,
)
from tests.examples import in_test

SHAPES = {
    "lenet5": (3, 32, 32),
    "lenet5-bn": (3, 32, 32),
    "cnn5": (1, 28, 28),
    "cnn5-bn": (1, 28, 28),
    "cnn-small": (1, 8, 8),
    "cnn-small-bn": (1, 8, 8),
    "cnn-gn": (3, 32, 32),
    "cnn-fedp3": (3, 32, 32),
    "cnn-fedp3-fmnist": (1, 28, 28),
    "cnn-fedltp-mnist": (1, 28, 28),
    "cnn-fedltp-fmnist": (1, 28, 28),
    "mlp-small": (12, 1, 1),
    "mlp3": (1, 28, 28),
    "mlp4": (1, 28, 28),
    "cnn-fedp3-cr": (3, 32, 32),
    "cnn-fedp3-fmnist-cr": (1, 28, 28),
    "mlp4-cr": (1, 28, 28),
    "cnn-small-cr": (1, 8, 8),
    "resnet18-gn": (3, 16, 16),  # small, for the time it takes
    "vgg11-gn": (3, 32, 32),
    "resnet18-bn": (3, 16, 16),
    "vgg11-bn": (3, 32, 32),
}
SMALLEST = {
    "cnn-fedltp-fmnist": 10,
    "cnn-small": 4,
    "cnn-small-bn": 4,
    "cnn-gn": 7,
    "mlp-small": 1,
    "mlp3": 1,
    "mlp4": 1,
    "mlp4-cr": 1,
    "cnn-small-cr": 4,
    "resnet18-gn": 1,
    "vgg11-gn": 32,
    "resnet18-bn": 1,
    "vgg11-bn": 32,
}  # else 16


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def num_parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "image_shape", "num_classes", "expected"),
    [  # the counts that the communication tables of Sub-FedAvg and Dis-PFL are computed from
        ("lenet5", (3, 32, 32), 10, 62_006),
        ("lenet5", (3, 32, 32), 100, 69_656),
        ("cnn5", (1, 28, 28), 10, 21_840),
        # by hand: a scale and a shift for each of 6 + 16 and of 10 + 20 channels
        ("lenet5-bn", (3, 32, 32), 10, 62_006 + 2 * 22),
        ("cnn5-bn", (1, 28, 28), 10, 21_840 + 2 * 30),
        # by hand: (9 + 1) 16 + (144 + 1) 32 + (128 + 1) 10; for LeNet on 28 x 28, feature maps 4 x 4
        ("cnn-small", (1, 8, 8), 10, 6_090),
        ("lenet5", (1, 28, 28), 10, 156 + 2_416 + 257 * 120 + 121 * 84 + 850),
        ("resnet18-gn", (3, 32, 32), 10, 11_173_962),
        ("resnet18-gn", (3, 32, 32), 100, 11_220_132),
        ("resnet18-gn", (3, 64, 64), 200, 11_271_432),
        ("vgg11-gn", (3, 32, 32), 10, 9_231_114),
        ("vgg11-gn", (3, 64, 64), 10, 9_231_114),
        ("resnet18-bn", (3, 32, 32), 10, 11_173_962),
        ("vgg11-bn", (3, 32, 32), 10, 9_231_114),
        ("cnn-gn", (3, 32, 32), 10, 34_058),
        ("cnn-fedp3", (3, 32, 32), 10, 2_806_602),  # FedP3
        ("cnn-fedltp-mnist", (1, 28, 28), 10, 111_210),  # Fed-LTP: model 1
        ("cnn-fedltp-fmnist", (1, 28, 28), 10, 843_658),  # and 2
        ("cnn-fedp3", (3, 32, 32), 100, 2_898_852),
        ("cnn-fedp3-fmnist", (1, 28, 28), 10, 1_258_798),
        ("mlp-small", (12, 1, 1), 3, 5_187),
        ("mlp3", (1, 28, 28), 10, 1_863_690),
        ("mlp4", (1, 28, 28), 10, 2_913_290),
        # by hand: the encoder's last layer, 1024 to 2 x 256, and the head, 256 to 10, in place of 1024 to 10
        ("cnn-fedp3-cr", (3, 32, 32), 10, 2_806_602 - 10_250 + 1_025 * 512 + 257 * 10),
    ],
)
def test_parameter_counts_are_those_of_the_papers(name, image_shape, num_classes, expected):
    assert num_parameters(build_model(name, image_shape, num_classes, rng=generator())) == expected


@pytest.mark.parametrize("name", MODELS)
def test_every_model_maps_images_to_one_logit_per_class(name):
    model = build_model(name, SHAPES[name], 7, rng=generator())
    assert model(torch.zeros(3, *SHAPES[name])).shape == (3, 7)


@pytest.mark.parametrize("name", MODELS)
def test_an_architecture_has_the_shapes_of_its_model_and_leaves_the_global_generator_as_it_is(name):
    before = torch.get_rng_state()
    planned = architecture(name, SHAPES[name], 10)
    assert torch.equal(torch.get_rng_state(), before)
    built = build_model(name, SHAPES[name], 10, rng=generator())
    assert [(n, p.shape) for n, p in planned.named_parameters()] == [(n, p.shape) for n, p in built.named_parameters()]


@pytest.mark.parametrize("name", in_test(MODELS, "lenet5", "cnn5-bn", "cnn-gn", "mlp3", "cnn-small-cr"))
@pytest.mark.parametrize("init", in_test(OPTIONS["init"].choices, "default"))
def test_weights_come_from_the_generator_and_the_global_one_is_not_touched(name, init):
    before = torch.get_rng_state()
    first, again, other = (build_model(name, SHAPES[name], 10, rng=generator(seed), init=init) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    weight = prunable_names(first)[0]
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(state_tensors(first)[weight], state_tensors(other)[weight])


def test_the_default_initialisation_is_that_of_pytorch():
    with torch.random.fork_rng():
        torch.manual_seed(5)  # the layers' own constructors draw from the global generator
        reference = nn.Sequential(
            nn.Conv2d(3, 6, 5),
            nn.Conv2d(6, 16, 5),
            nn.Linear(400, 120),
            nn.Linear(120, 84),
            nn.Linear(84, 10),
        )
    model = build_model("lenet5", (3, 32, 32), 10, rng=generator(5))
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_subfedavg_initialises_weights_by_xavier_and_biases_standard_normal():
    model = build_model("lenet5", (3, 32, 32), 10, rng=generator(), init="subfedavg")
    tensors = state_tensors(model)
    assert tensors["fc1.weight"].std().item() == pytest.approx(math.sqrt(2 / (400 + 120)), rel=0.03)
    assert tensors["conv2.weight"].std().item() == pytest.approx(math.sqrt(2 / (25 * (6 + 16))), rel=0.06)
    biases = torch.cat([tensor for name, tensor in tensors.items() if name.endswith("bias")])
    assert biases.std().item() == pytest.approx(1, rel=0.15)


def test_subfedavg_initialises_models_with_batch_norm_as_its_hybrid_variant():
    model = build_model("lenet5-bn", (3, 32, 32), 10, rng=generator(), init="subfedavg")
    tensors = state_tensors(model, include_buffers=True)
    assert torch.equal(tensors["bn1.weight"], torch.full((6,), 0.5))
    assert tensors["conv2.weight"].std().item() == pytest.approx(math.sqrt(2 / (25 * 16)), rel=0.06)
    assert tensors["fc1.weight"].std().item() == pytest.approx(0.01, rel=0.03)
    assert all(not tensor.any() for name, tensor in tensors.items() if name.endswith("bias"))
    assert torch.equal(tensors["bn2.running_var"], torch.ones(16))
    assert torch.equal(tensors["bn2.running_mean"], torch.zeros(16))


@pytest.mark.full
def test_vgg11_starts_as_torchvisions_does():
    """Dis-PFL's released VGG-11 draws its weights as torchvision's: Kaiming by fan-out, and N(0, 0.01)."""
    from torchvision.models import vgg11

    with torch.random.fork_rng():
        torch.manual_seed(5)
        reference = vgg11(num_classes=10)
    theirs = [layer for layer in reference.features if isinstance(layer, nn.Conv2d)]
    model = build_model("vgg11-gn", (3, 32, 32), 10, rng=generator(5))
    ours = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    assert len(ours) == len(theirs) == 8
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.weight.std().item() == pytest.approx(other.weight.std().item(), rel=0.06)
    tensors = state_tensors(model)
    assert tensors["fc1.weight"].std().item() == pytest.approx(reference.classifier[0].weight.std().item(), rel=0.05)
    assert all(not tensor.any() for name, tensor in tensors.items() if name.endswith("bias"))


def test_a_layer_no_rule_covers_is_refused():
    with pytest.raises(ValueError, match="layer '1' of type LayerNorm has no initialisation rule"):
        initialise(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), "default", generator())


def test_group_norms_start_as_the_identity_after_normalising():
    model = build_model("cnn-gn", (3, 32, 32), 10, rng=generator(), init="subfedavg")
    norms = [module for module in model.modules() if isinstance(module, nn.GroupNorm)]
    assert norms
    for norm in norms:
        assert torch.equal(norm.weight, torch.ones_like(norm.weight))
        assert torch.equal(norm.bias, torch.zeros_like(norm.bias))


@pytest.mark.parametrize("name", ["resnet18-gn", "vgg11-gn"])
@pytest.mark.parametrize("side", [32, 64])
def test_a_deep_network_takes_small_images_of_every_size(name, side):
    model = architecture(name, (3, 32, 32), 10)
    assert model(torch.zeros(2, 3, side, side)).shape == (2, 10)


@pytest.mark.full
def test_a_process_that_imports_nothing_else_can_build_resnet18():
    """torchvision does not load by itself next to a torch for the CPU alone."""
    code = "from fedprune_app.models.vision import architecture; architecture('resnet18-gn', (3, 32, 32), 10)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_resnet18_is_dis_pfls():
    """Written out from the paper's appendix and its released code: stages, strides, shortcuts, norms."""

    def block(images, name, stride):
        def conv_norm(images, conv, norm, stride=1, padding=1):
            out = F.conv2d(images, state[f"{name}.{conv}.weight"], stride=stride, padding=padding)
            return F.group_norm(out, 32, state[f"{name}.{norm}.weight"], state[f"{name}.{norm}.bias"])

        inner = conv_norm(images, "conv1", "bn1", stride).relu()
        inner = conv_norm(inner, "conv2", "bn2")
        if f"{name}.downsample.0.weight" in state:
            images = conv_norm(images, "downsample.0", "downsample.1", stride, padding=0)
        return (inner + images).relu()

    model = build_model("resnet18-gn", (3, 32, 32), 10, rng=generator())
    state = dict(model.named_parameters())
    images = torch.randn(2, 3, 32, 32, generator=generator(1))
    with torch.no_grad():
        hidden = F.group_norm(F.conv2d(images, state["conv1.weight"], padding=1), 32).relu()
        for stage, stride in enumerate((1, 2, 2, 2), start=1):
            hidden = block(block(hidden, f"layer{stage}.0", stride), f"layer{stage}.1", 1)
        assert hidden.shape == (2, 512, 4, 4)
        logits = hidden.mean(dim=(2, 3)) @ state["fc.weight"].T + state["fc.bias"]
        torch.testing.assert_close(model(images), logits, atol=1e-5, rtol=1e-4)
    assert len(prunable_names(model)) == 21  # stem, 16 in blocks, 3 shortcuts, linear


@pytest.mark.parametrize("name", ["resnet18-gn", "resnet18-bn"])
def test_resnet18_out_of_place_has_the_bits_of_torchvisions_in_place(name):
    from torchvision.models import resnet18

    model = build_model(name, (3, 16, 16), 10, rng=generator())
    assert not any(getattr(module, "inplace", False) for module in model.modules())
    norm = partial(nn.GroupNorm, 32) if name.endswith("-gn") else nn.BatchNorm2d
    theirs = resnet18(num_classes=10, norm_layer=norm)
    theirs.conv1, theirs.maxpool = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False), nn.Identity()
    theirs.load_state_dict(model.state_dict())
    images = torch.randn(2, 3, 16, 16, generator=generator(1))
    logits, expected = model(images), theirs(images)
    assert torch.equal(logits, expected)
    logits.square().sum().backward()
    expected.square().sum().backward()
    own = dict(model.named_parameters())
    assert all(torch.equal(own[key].grad, parameter.grad) for key, parameter in theirs.named_parameters())


def test_the_small_group_norm_network_pools_before_it_normalises():
    model = build_model("cnn-gn", (3, 32, 32), 10, rng=generator())
    state, images = dict(model.named_parameters()), torch.randn(2, 3, 32, 32, generator=generator(1))
    with torch.no_grad():
        hidden = F.conv2d(images, state["conv1.weight"], state["conv1.bias"], stride=2, padding=1)
        hidden = F.group_norm(hidden, 4).relu()
        for i in (2, 3):
            hidden = F.conv2d(hidden, state[f"conv{i}.weight"], state[f"conv{i}.bias"], padding=1)
            hidden = F.group_norm(F.max_pool2d(hidden, 2), 4).relu()
        logits = hidden.flatten(1) @ state["fc1.weight"].T + state["fc1.bias"]
        torch.testing.assert_close(model(images), logits)


def test_vgg11_is_torchvisions_configuration_a_with_group_norms():
    from torchvision.models import vgg

    features = vgg.make_layers(vgg.cfgs["A"], batch_norm=True)
    for i, layer in enumerate(features):
        if isinstance(layer, nn.BatchNorm2d):
            features[i] = nn.GroupNorm(32, layer.num_features)
    reference = nn.Sequential(features, nn.Flatten(), nn.Linear(512, 10))
    model = build_model("vgg11-gn", (3, 32, 32), 10, rng=generator())
    for theirs, ours in zip(reference.parameters(), model.parameters(), strict=True):
        theirs.data = ours.data
    images = torch.randn(2, 3, 32, 32, generator=generator(1))
    with torch.no_grad():
        torch.testing.assert_close(model(images), reference(images))


def test_flops_of_training_resnet18_are_those_of_dis_pfls_table():
    model = architecture("resnet18-gn", (3, 32, 32), 10)
    five_epochs = training_flops(forward_flops(model, (3, 32, 32)), num_examples=5 * 500)
    assert five_epochs == pytest.approx(8.33e12, rel=1e-3)


def test_prunable_are_the_weights_of_convolutions_and_linear_layers_in_order():
    model = build_model("lenet5-bn", (3, 32, 32), 10, rng=generator())
    assert prunable_names(model) == [f"{layer}.weight" for layer in ("conv1", "conv2", "fc1", "fc2", "fc3")]
    assert prunable_names(nn.Linear(2, 3)) == ["weight"]


def test_pooling_before_relu_gives_the_values_and_gradients_of_relu_before_pooling():
    model = build_model("lenet5", (3, 32, 32), 10, rng=generator())
    usual = nn.Sequential(model.conv1, nn.ReLU(), nn.MaxPool2d(2), model.conv2, nn.ReLU(), nn.MaxPool2d(2), *model[6:])
    images = torch.randn(4, 3, 32, 32, generator=generator(1))
    gradients = []
    for network in (model, usual):
        model.zero_grad()
        network(images).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert torch.equal(model(images), usual(images))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_network_of_fewer_channels_is_built_the_same_way():
    small = conv_net((3, 32, 32), 10, channels=(3, 8), hidden=(120, 84), norm="bn")
    assert small(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert small.fc1.in_features == 8 * 25


def test_running_statistics_are_state_only_when_asked_for():
    model = build_model("cnn5-bn", (1, 28, 28), 10, rng=generator())
    assert list(state_tensors(model)) == [name for name, _ in model.named_parameters()]
    added = list(state_tensors(model, include_buffers=True))[len(state_tensors(model)) :]
    assert added == ["bn1.running_mean", "bn1.running_var", "bn2.running_mean", "bn2.running_var"]


def test_state_is_a_contiguous_copy_and_loads_back():
    source, target = (build_model("lenet5-bn", (3, 32, 32), 10, rng=generator(seed)) for seed in (1, 2))
    source.bn1.running_mean.fill_(3)
    expected = source(torch.ones(2, 3, 32, 32))
    state = state_tensors(source.to(memory_format=torch.channels_last), include_buffers=True)
    assert all(tensor.is_contiguous() and not tensor.requires_grad for tensor in state.values())
    load_state_tensors(target, state)
    state["conv1.weight"].zero_()
    target.bn1.running_mean.copy_(source.bn1.running_mean)
    source(torch.ones(2, 3, 32, 32))
    for name, tensor in state_tensors(target).items():
        assert torch.equal(tensor, state_tensors(source)[name])
    torch.testing.assert_close(target(torch.ones(2, 3, 32, 32)), expected)


def test_a_state_that_does_not_fit_changes_nothing():
    model = build_model("cnn-small", (1, 8, 8), 10, rng=generator())
    before = state_tensors(model)
    good = torch.zeros_like(before["fc1.bias"])
    with pytest.raises(ValueError, match=r"tensor 'fc9.bias' is not in the model, allowed: conv1.weight, "):
        load_state_tensors(model, {"fc1.bias": good, "fc9.bias": good})
    with pytest.raises(ValueError, match=r"tensor 'fc1.weight' has shape \(10,\), allowed: \(10, 128\)"):
        load_state_tensors(model, {"fc1.bias": good, "fc1.weight": good})
    assert torch.equal(model.fc1.bias, before["fc1.bias"])


@pytest.mark.parametrize(
    ("name", "image_shape", "num_classes", "init", "message"),
    [
        ("lenet6", (3, 32, 32), 10, "default", "model 'lenet6' is unknown, allowed: lenet5, lenet5-bn"),
        ("lenet5", (3, 32, 32), 1, "default", "model 'lenet5' with 1 classes, allowed: at least 2"),
        (
            "lenet5",
            (3, 32, 15),
            10,
            "default",
            "image shape 3x32x15 is too small for this model, allowed: sides >= 16",
        ),
        (
            "cnn5",
            (1, 8, 8),
            10,
            "default",
            "image shape 1x8x8 is too small for this model, allowed: sides >= 16",
        ),
        (
            "cnn-small",
            (1, 3, 3),
            10,
            "default",
            "image shape 1x3x3 is too small for this model, allowed: sides >= 4",
        ),
        (
            "vgg11-gn",
            (3, 31, 32),
            10,
            "default",
            "image shape 3x31x32 is too small for this model, allowed: sides >= 32",
        ),
    ],
)
def test_a_bad_choice_is_named_in_one_line(name, image_shape, num_classes, init, message):
    with pytest.raises(ValueError, match=message) as error:
        build_model(name, image_shape, num_classes, rng=generator(), init=init)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", MODELS)
def test_the_smallest_image_named_as_allowed_is_allowed(name):
    side = SMALLEST.get(name, 16)
    model = build_model(name, (1, side, side), 10, rng=generator())
    assert model(torch.zeros(2, 1, side, side)).shape == (2, 10)


@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith("resnet18")])
def test_an_image_one_pixel_smaller_is_refused(name):
    side = SMALLEST.get(name, 16) - 1
    with pytest.raises(ValueError, match=f"allowed: sides >= {side + 1}"):
        build_model(name, (1, side + 1, side), 10, rng=generator())
