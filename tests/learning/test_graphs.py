"""A recorded step, repeated, is the step: all that differs between steps lies in memory that stays in its place.

On a GPU the recording is a CUDA graph. Here it is a list of PyTorch's operations, see tests/recording.py.
"""

from functools import partial

import pytest
import torch

from fedprune_app.config import parse_config
from fedprune_app.core import cohort
from fedprune_app.core.graphs import WARM_UP_STEPS, RepeatedSteps
from fedprune_app.core.masks import random_masks
from fedprune_app.core.rng import generator
from fedprune_app.learning.device import prepare_torch, recorder_of
from fedprune_app.learning.sgd import SGD
from fedprune_app.learning.train import train
from fedprune_app.learning.training import Training, proximal
from fedprune_app.learning.work import _Pool
from fedprune_app.models.vision import build_model, prunable_names, state_tensors
from tests.examples import full
from tests.recording import Recording

SIZES = (44, 37, 24)  # of three clients' data
EVERYTHING = SGD(0.05, momentum=0.5, weight_decay=0.1, batch_size=8, epochs=3, max_grad_norm=0.5)


def client(number, recorder, *, model="lenet5", masked=False, pulled=False, sgd=EVERYTHING, **how):
    """A function that trains the network of a client of this number, and returns its weights and what was told."""

    def work():
        network = model() if callable(model) else build_model(model, (3, 32, 32), 10, rng=generator(0, "model"))
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
    found = dict(cohort.run_cohort(works))
    return [found[number] for number in range(len(works))]


@pytest.mark.parametrize(
    "how",
    [{}, {"masked": True}, full({"model": "cnn-gn"}), full({"sgd": SGD(0.1, batch_size=8, epochs=3)})],
    ids=["plain", "masked", "group-norm", "without-momentum"],
)
def test_repeated_steps_end_with_the_same_weights(how):
    recorder = Recording()
    for (weights, told), (expected, expected_told) in zip(
        all_trained(recorder, **how), all_trained(None, **how), strict=True
    ):
        assert told == expected_told
        assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    # of 3, 2 and 1 clients: these end after 9, 15 and 18 steps
    assert (recorder.steps, recorder.recorded, recorder.repeated) == (WARM_UP_STEPS * 3, 2, 6 + 3)


@pytest.mark.parametrize("how", [{"pulled": True}, {"sgd": SGD(0.1, batch_size=8, epochs=2)}], ids=["hook", "few"])
def test_steps_with_hooks_and_trainings_of_few_steps_are_not_recorded(how):
    recorder = Recording()
    all_trained(recorder, **how)
    assert (recorder.steps, recorder.recorded) == (0, 0)


def test_only_a_cuda_device_that_is_asked_to_records():
    for key, device in ((True, "cpu"), (False, "cuda"), (False, "cpu")):
        assert recorder_of(parse_config({"cuda-graphs": key}), torch.device(device)) is None


class Drawing(torch.nn.Sequential):
    """A network that draws on the CPU, as one does that skips layers at random."""

    def __init__(self):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 10))

    def forward(self, images):
        return super().forward(images) * torch.rand(1)


@pytest.mark.parametrize("how", [{}, {"masked": True}, {"model": "lenet5-bn"}], ids=["plain", "masked", "batch-norm"])
def test_repeated_steps_of_a_network_in_its_own_form_end_with_the_same_weights(how):
    recorder = Recording()
    (weights, told), (expected, expected_told) = (
        client(0, which, grouped=False, **how)() for which in (recorder, None)
    )
    assert told == expected_told
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    # five steps of eight examples and one of four in each of three epochs
    assert (recorder.steps, recorder.recorded, recorder.repeated) == (WARM_UP_STEPS * 2, 1, 12)


def test_steps_of_a_network_that_draws_are_done_each_time():
    recorder = Recording()
    (weights, _), (expected, _) = (
        client(0, which, grouped=False, model=partial(seeded, Drawing))() for which in (recorder, None)
    )
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    assert (recorder.steps, recorder.recorded) == (18, 0)


def seeded(make):
    torch.manual_seed(0)
    return make()


def test_a_step_that_cannot_be_recorded_is_done_each_time():
    class Refusing(Recording):
        def record(self, step):
            raise RuntimeError("operation not permitted when stream is capturing")

    recorder, done = Refusing(), []
    steps = RepeatedSteps(recorder)
    for number in range(8):
        steps(1, lambda number=number: done.append(number))
    assert len(done) == recorder.steps == 8


def test_batches_are_gathered_at_once_as_one_by_one():
    def training(number):
        draw = generator(0, "data", number)
        images, labels = torch.randn(SIZES[number], 3, 4, 4, generator=draw), torch.arange(SIZES[number])
        network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 50))
        return Training(network, images, labels, EVERYTHING, draw)

    trainings = [training(number) for number in range(3)]
    pool = _Pool(trainings)
    found, expected = ((torch.zeros(3, 8, 3, 4, 4), torch.zeros(3, 8, dtype=torch.int64)) for _ in range(2))
    for sizes in ([8, 8, 8], [8, 8, 8], [4, 5, 8], [8, 1], [8, 8], [3]):
        positions = [torch.randperm(SIZES[number])[:size] for number, size in enumerate(sizes)]
        pool.put(positions, *found)
        for number, batch in enumerate(positions):
            trainings[number].put_examples(batch, expected[0][number], expected[1][number])
            for here, there in zip(found, expected, strict=True):
                assert torch.equal(here[number, : len(batch)], there[number, : len(batch)]), sizes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("grouped", [True, False])
def test_a_cuda_graph_ends_with_the_same_weights(grouped):
    device = torch.device("cuda")
    prepare_torch(parse_config({"device": "cuda", "deterministic": True}))
    recorder = recorder_of(parse_config({"cuda-graphs": True}), device)
    assert recorder is not None
    works = [[client(number, each, device=device, grouped=grouped) for number in range(3)] for each in (recorder, None)]
    found, expected = (dict(cohort.run_cohort(each)) for each in works)
    for number, (weights, _) in found.items():
        assert all(torch.equal(tensor, expected[number][0][name]) for name, tensor in weights.items())
