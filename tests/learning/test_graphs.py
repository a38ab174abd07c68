"""A recorded step, repeated, is the step: all that differs between steps lies in memory that stays in its place.

On a GPU the recording is a CUDA graph. Here it is a list of PyTorch's operations, see tests/recording.py.
"""

import pytest
import torch

from fedprune_app.config import parse_config
from fedprune_app.core import cohort
from fedprune_app.core.graphs import WARM_UP_STEPS
from fedprune_app.core.masks import random_masks
from fedprune_app.core.rng import generator
from fedprune_app.learning.device import recorder_of
from fedprune_app.learning.sgd import SGD
from fedprune_app.learning.train import train
from fedprune_app.learning.training import proximal
from fedprune_app.models.vision import build_model, prunable_names, state_tensors
from tests.recording import Recording

SIZES = (44, 37, 24)  # of three clients' data
EVERYTHING = SGD(0.05, momentum=0.5, weight_decay=0.1, batch_size=8, epochs=2, max_grad_norm=0.5)


def client(number, recorder, *, model="lenet5", masked=False, pulled=False, sgd=EVERYTHING):
    """A function that trains the network of a client of this number, and returns its weights and what was told."""

    def work():
        network = build_model(model, (3, 32, 32), 10, rng=generator(0, "model"))
        how = {}
        if masked:
            tensors = state_tensors(network)
            shapes = {name: tensors[name].shape for name in prunable_names(network)}
            how["masks"] = random_masks(shapes, dict.fromkeys(shapes, 0.5), generator(0, "masks", number))
        if pulled:
            how["adjust_gradients"] = proximal({n: v.clone() for n, v in state_tensors(network).items()}, 0.1)
        size, draw = SIZES[number], generator(0, "data", number)
        images, labels = torch.randn(size, 3, 32, 32, generator=draw), torch.randint(10, (size,), generator=draw)
        told = train(network, images, labels, sgd, rng=generator(0, "train", number), recorder=recorder, **how)
        return state_tensors(network), told

    return work


def all_trained(recorder, **how):
    works = [client(number, recorder, **how) for number in range(len(SIZES))]
    found = dict(cohort.work_in_cohort(works))
    return [found[number] for number in range(len(works))]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "how",
    [{}, {"masked": True}, {"model": "cnn-gn"}, {"sgd": SGD(0.1, batch_size=8, epochs=2)}],
    ids=["plain", "masked", "group-norm", "without-momentum"],
)
def test_repeated_steps_end_with_the_same_weights(how):
    recorder = Recording()
    for (weights, told), (expected, expected_told) in zip(
        all_trained(recorder, **how), all_trained(None, **how), strict=True
    ):
        assert told == expected_told
        assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    # of 3, 2 and 1 clients: these end after 6, 10 and 12 steps
    assert (recorder.steps, recorder.recorded, recorder.repeated) == (WARM_UP_STEPS * 2 + 2, 2, 3 + 1)


def test_a_step_with_hooks_is_not_recorded():
    recorder = Recording()
    all_trained(recorder, pulled=True)
    assert (recorder.steps, recorder.recorded) == (0, 0)


def test_only_a_cuda_device_that_is_asked_to_records():
    for key, device in ((True, "cpu"), (False, "cuda"), (False, "cpu")):
        assert recorder_of(parse_config({"cuda-graphs": key}), torch.device(device)) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_graph_ends_with_the_same_weights():
    device = torch.device("cuda")
    recorder = recorder_of(parse_config({"cuda-graphs": True}), device)
    assert recorder is not None
    for (weights, _), (expected, _) in zip(all_trained(recorder), all_trained(None), strict=True):
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[name], tensor)
