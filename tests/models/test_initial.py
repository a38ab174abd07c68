"""Which tensors of the common initial model are shared."""

import pytest
import torch
from torch import nn

from fedprune_app.models.initial import initial_model, layer_flops, shared_names, trains_on_one
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
