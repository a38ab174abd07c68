from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedprune_app.core.layers import assign_layers, consecutive, last_layers, layer_counts, layers_of, matching

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
        shares = {client: count / 7 for client, count in wanted.items()}
        dealt = assign_layers(7, shares, np.random.default_rng(seed))
        assert {client: len(set(layers)) for client, layers in dealt.items()} == wanted
        times = [sum(layer in layers for layers in dealt.values()) for layer in range(7)]
        assert max(times) - min(times) <= 1
        assert min(times) >= (1 if sum(counts) >= 7 else 0)
    other = [assign_layers(7, dict.fromkeys(range(3), 3 / 7), np.random.default_rng(seed)) for seed in range(20)]
    assert len({repr(each) for each in other}) > 10


@given(
    st.integers(1, 40),
    st.lists(st.floats(0.01, 1), min_size=1, max_size=30),
    st.integers(0, 2**32 - 1),
    st.floats(0, 1),
)
def test_shares_that_add_up_to_one_cover_every_layer_and_no_client_is_a_layer_off_its_share(
    num_layers, shares, seed, missing
):
    draw = np.random.default_rng(seed)
    first = [layer for layer in range(num_layers) if draw.random() < missing]
    dealt = assign_layers(num_layers, dict(enumerate(shares)), np.random.default_rng(seed), first)
    counts = [len(set(layers)) for _, layers in sorted(dealt.items())]
    wanted = [share * num_layers for share in shares]
    assert all(1 <= count <= num_layers for count in counts)
    assert all(abs(count - number) < 1 + 1e-5 for count, number in zip(counts, wanted, strict=True))
    assert sum(counts) >= round(sum(wanted) - 1e-5)
    if min(wanted) >= 1:
        assert abs(sum(counts) - sum(wanted)) <= 0.5 + 1e-5
    times = [sum(layer in layers for layers in dealt.values()) for layer in range(num_layers)]
    assert max(times) - min(times) <= 1
    if sum(shares) >= 1:
        assert min(times) >= 1
    others = [times[layer] for layer in range(num_layers) if layer not in first]
    assert min((times[layer] for layer in first), default=len(shares)) >= max(others, default=0)


def test_five_clients_of_a_fifth_prune_all_twelve_layers():
    for seed in range(20):
        dealt = assign_layers(12, dict.fromkeys(range(5), 0.2), np.random.default_rng(seed))
        assert sorted(layer for layers in dealt.values() for layer in layers) == list(range(12))
        assert sorted(map(len, dealt.values())) == [2, 2, 2, 3, 3]


def test_half_of_five_layers_is_two_for_one_half_of_the_clients_and_three_for_the_other():
    assert list(layer_counts(5, dict.fromkeys(range(4), 0.5)).values()) == [3, 3, 2, 2]
    assert layer_counts(5, {7: 0.5, 3: 0.4, 1: 1.0, 9: 0.2}) == {7: 3, 3: 2, 1: 5, 9: 1}
    assert layer_counts(5, {4: 0.02, 5: 0.02}) == {4: 1, 5: 1}, "at least one each"
    assert layer_counts(10, {0: 0.7, 1: 0.1 + 0.2}) == {0: 7, 1: 3}, "7 is 7, not 6.999"
    more = [set() for _ in range(4)]
    for seed in range(40):
        for client, layers in assign_layers(5, dict.fromkeys(range(4), 0.5), np.random.default_rng(seed)).items():
            more[client].add(len(layers))
    assert more == [{2, 3}] * 4, "who has one more is drawn"


@pytest.mark.parametrize("share", [0, 1.5])
def test_a_share_of_the_layers_that_cannot_be_is_refused(share):
    with pytest.raises(ValueError, match=f"share of the layers is {share:g}, allowed: above 0 and at most 1"):
        assign_layers(7, {0: share}, np.random.default_rng(0))
