from __future__ import annotations

import pytest

from fedprune_app.core.layers import last_layers

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
