from __future__ import annotations

import numpy as np
import pytest

from fedprune_app.core.layers import assign_layers, consecutive, last_layers, layers_of, matching

NAMES = ["conv1.weight", "conv1.bias", "bn1.weight", "conv2.weight", "bn2.weight", "fc1.weight", "fc1.bias"]
BUFFERS = ["bn1.running_mean", "bn2.running_mean"]
WEIGHTS = {"conv1.weight", "conv2.weight", "fc1.weight"}


def test_the_last_layers_bring_their_biases_norms_and_buffers():
    assert last_layers(NAMES + BUFFERS, WEIGHTS, 1) == ["fc1.weight", "fc1.bias"]
    assert last_layers(NAMES + BUFFERS, WEIGHTS, 2) == [*NAMES[3:], "bn2.running_mean"]
    assert last_layers(NAMES + BUFFERS, WEIGHTS, 3) == NAMES + BUFFERS


@pytest.mark.parametrize("count", [0, 4, -1])
def test_more_layers_than_there_are_is_refused(count):
    with pytest.raises(ValueError, match=rf"the last {count} layers of a model with 3, allowed: 1 to 3"):
        last_layers(NAMES, WEIGHTS, count)


def test_every_tensor_is_in_one_layer_with_what_precedes_it():
    layers = layers_of(NAMES + BUFFERS, WEIGHTS)
    assert layers == {
        "conv1": ("conv1.weight", "conv1.bias", "bn1.weight", "bn1.running_mean"),
        "conv2": ("conv2.weight", "bn2.weight", "bn2.running_mean"),
        "fc1": ("fc1.weight", "fc1.bias"),
    }


def test_a_norm_before_the_first_layer_belongs_to_none_and_is_refused():
    with pytest.raises(ValueError, match=r"tensor 'bn0\.weight' comes before the first layer"):
        layers_of(["bn0.weight", *NAMES], WEIGHTS)


def test_layers_follow_each_other_in_a_ring_and_are_named_in_order():
    assert consecutive("abcd", 3, 2) == ("a", "d")
    assert consecutive("abcd", 1, 3) == ("b", "c", "d")
    assert consecutive("abcd", 2, 4) == tuple("abcd")


def test_texts_name_layers_and_all_below_them_or_take_them_away():
    layers = ["conv1", "layer1.0.conv1", "layer1.1.conv1", "layer10.0.conv1"]
    assert matching(layers, "layer1 conv1") == tuple(layers[:3])  # not layer10
    assert matching(layers, "-layer1.0, -conv1") == ("layer1.1.conv1", "layer10.0.conv1")
    with pytest.raises(ValueError, match="names no hidden layer"):
        matching(layers, "-conv1 -layer1 -layer10")


@pytest.mark.parametrize("counts", [[4, 4], [1, 1, 1, 1], [7, 1, 2], [3, 3, 3, 3, 3], [7]])
def test_layers_are_dealt_so_that_each_is_pruned_by_somebody_and_none_more_often_than_needed(counts):
    for seed in range(20):
        wanted = dict(enumerate(counts))
        dealt = assign_layers(7, wanted, np.random.default_rng(seed))
        assert {client: len(set(layers)) for client, layers in dealt.items()} == wanted
        times = [sum(layer in layers for layers in dealt.values()) for layer in range(7)]
        assert max(times) - min(times) <= 1
        assert min(times) >= (1 if sum(counts) >= 7 else 0)
    other = [assign_layers(7, dict.fromkeys(range(3), 3), np.random.default_rng(seed)) for seed in range(20)]
    assert len({repr(each) for each in other}) > 10


@pytest.mark.parametrize("count", [0, 8])
def test_a_count_of_layers_that_cannot_be_is_refused(count):
    with pytest.raises(ValueError, match=f"a client of {count} layers, allowed: 1 to 7"):
        assign_layers(7, {0: count}, np.random.default_rng(0))
