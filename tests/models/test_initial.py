"""Which tensors of the common initial model are shared."""

import pytest
import torch
from torch import nn

from fedprune_app.models.initial import channel_groups, initial_model, layer_flops, shared_names, trains_on_one
from fedprune_app.models.vision import buffer_names, parameter_names

PHOTOS = ("cifar10", (3, 32, 32), 10)


@pytest.mark.parametrize("name", ["cnn-gn", "resnet18-gn", "vgg11-gn", "lenet5"])
def test_group_norms_are_shared_and_are_no_batch_norms_that_could_stay(name):
    model = initial_model(name, *PHOTOS, init="default", seed=0)
    assert shared_names(model, "averaged") == shared_names(model, "local") == parameter_names(model)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.BatchNorm3d, nn.SyncBatchNorm])
def test_batch_norms_of_every_kind_stay_on_the_client_if_local(norm):
    model = nn.Sequential(nn.Linear(4, 3), norm(3), nn.Linear(3, 2))
    assert shared_names(model, "local") == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_a_network_whose_batch_norm_sees_one_pixel_cannot_be_trained_on_one_example():
    digits = ("digits", (1, 8, 8), 10)  # of which ResNet-18's last stage leaves one pixel
    assert not trains_on_one("resnet18-bn", *digits)
    assert trains_on_one("resnet18-gn", *digits)
    assert trains_on_one("resnet18-bn", *PHOTOS)


def test_batch_norms_and_their_statistics_stay_on_the_client_if_local():
    model = initial_model("lenet5-bn", *PHOTOS, init="default", seed=0)
    assert shared_names(model, "averaged") == parameter_names(model) + buffer_names(model)
    assert shared_names(model, "local") == [name for name in parameter_names(model) if not name.startswith("bn")]


def test_a_participants_model_is_its_own_and_equal_to_everybody_elses():
    first, second = (initial_model("cnn-gn", *PHOTOS, init="default", seed=3) for _ in range(2))
    other = initial_model("cnn-gn", *PHOTOS, init="default", seed=4)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.conv1.weight, other.conv1.weight)
    first.conv1.weight.data.zero_()
    assert second.conv1.weight.any()


def test_flops_by_layer_are_those_of_convolutions_and_linear_layers():
    flops = layer_flops("cnn-gn", *PHOTOS)
    assert flops == {  # 2 x outputs x inputs of each: side² x out x 9 in
        "conv1": 2 * 16**2 * 16 * 9 * 3,
        "conv2": 2 * 16**2 * 32 * 9 * 16,
        "conv3": 2 * 8**2 * 64 * 9 * 32,
        "fc1": 2 * 1024 * 10,
    }


def block(inputs, outputs, size=3, **how):
    return nn.Sequential(nn.Conv2d(inputs, outputs, size, padding=size // 2, **how), nn.BatchNorm2d(outputs))


class TwoBlocks(nn.Module):
    """Two blocks, with something between them, and features that are flattened in an order of their own."""

    def __init__(self, between=lambda x: x, inputs=8, order=(0, 1, 2, 3), **how):
        super().__init__()
        self.first, self.second = block(1, 8), block(inputs, 8, **how)
        self.out, self.between, self.order = nn.Linear(8 * 16, 10), between, order

    def forward(self, x):
        x = torch.relu(self.second(self.between(torch.relu(self.first(x)))))
        return self.out(nn.functional.adaptive_avg_pool2d(x, 4).permute(self.order).flatten(1))


def chain(*layers):
    return nn.Sequential(*layers, nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 10))


ANOTHER_NETWORK_WHEN_CUT = {
    "flattened with channels last": lambda: TwoBlocks(order=(0, 2, 3, 1)),
    "flipped channels": lambda: TwoBlocks(lambda x: x.flip(1)),
    "shuffled channels": lambda: TwoBlocks(nn.ChannelShuffle(2)),
    "concatenation": lambda: TwoBlocks(lambda x: torch.cat([x, x], 1), 16),
    "ResNeXt": lambda: TwoBlocks(groups=4),
    "GLU": lambda: TwoBlocks(lambda x: nn.functional.glu(x, 1), 4),
    "depthwise": lambda: chain(*block(1, 8), nn.ReLU(), *block(8, 8, groups=8)),
    "PReLU": lambda: chain(*block(1, 8), nn.PReLU(8), *block(8, 8)),
}


@pytest.mark.parametrize("kind", ANOTHER_NETWORK_WHEN_CUT)
def test_a_network_that_would_be_another_one_without_some_of_its_channels_is_refused_in_one_line(kind):
    with pytest.raises(ValueError, match="cannot be made smaller, allowed") as refusal:
        channel_groups(ANOTHER_NETWORK_WHEN_CUT[kind](), (1, 8, 8))
    assert "\n" not in str(refusal.value)


def test_blocks_within_a_chain_are_cut_like_the_chain():
    groups = channel_groups(chain(block(1, 8), nn.ReLU(), block(8, 8)), (1, 8, 8))
    assert [group.name for group in groups] == ["0.1", "2.1"]


def test_a_network_is_left_as_it_was_by_the_comparison():
    model = TwoBlocks(inputs=8)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert len(channel_groups(model, (1, 8, 8))) == 2
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
