"""Clients that train together get the bits that each of them gets alone, whoever is beside it."""

from __future__ import annotations

import copy
import functools
import gc
import random
import signal
import threading
import time
import weakref

import pytest
import torch
from torch import nn

from fedprune_app.core import cohort
from fedprune_app.data.augmentation import CropFlip
from fedprune_app.learning import grouped, training
from fedprune_app.learning.grouped import NoGroupedForm, grouped_form
from fedprune_app.learning.sgd import SGD
from fedprune_app.learning.train import train
from fedprune_app.learning.training import proximal
from fedprune_app.models.vision import build_model, prunable_names, state_tensors
from tests.examples import full, in_test

SHAPES = {
    "lenet5": (3, 32, 32),
    "cnn5": (1, 28, 28),
    "cnn-small": (1, 8, 8),
    "cnn-gn": (3, 16, 16),
    "mlp3": (1, 8, 8),
    "cnn-fedltp-mnist": (1, 28, 28),
}
EVERYTHING = SGD(0.05, momentum=0.5, weight_decay=0.1, batch_size=8, epochs=2, max_grad_norm=0.5)
SIZES = (20, 24, 13, 20, 5)  # of five clients; the last one has less than a batch


@pytest.fixture(autouse=True)
def _of_any_size(monkeypatch):
    """Networks of any size are trained in their grouped form."""
    monkeypatch.setattr(training, "MOST_PARAMETERS", 10**9)
    monkeypatch.setattr(training, "MOST_FLOPS", 10**12)


def in_cohort(works):
    """What each work returned or raised, in their order."""

    def outcome(work):
        try:
            return work()
        except Exception as error:
            return error

    found = dict(cohort.run_cohort([functools.partial(outcome, work) for work in works]))
    return [found[number] for number in range(len(works))]


def generator(seed):
    return torch.Generator().manual_seed(seed)


def half_masks(model, client):
    draw = generator(100 + client)
    weights = dict(model.named_parameters())
    return {name: torch.rand(weights[name].shape, generator=draw) < 0.5 for name in prunable_names(model)}


def training_of(client, name="lenet5", sgd=EVERYTHING, **how):
    """A client's work: it trains its own network on its own examples; returns the result and all tensors."""
    shape, count = SHAPES[name], SIZES[client]
    draw = generator(client)
    images, labels = torch.randn(count, *shape, generator=draw), torch.randint(0, 10, (count,), generator=draw)
    model = build_model(name, shape, 10, rng=generator(50 + client))
    given = {key: value(client, model, images) for key, value in how.items()}
    result = train(model, images, labels, sgd, rng=generator(client), **given)
    return result, state_tensors(model, include_buffers=True)


WAYS = {
    "plain": {},
    "masks": {"masks": lambda client, model, _: half_masks(model, client)},
    "some with masks": {"masks": lambda client, model, _: half_masks(model, client) if client % 2 else None},
    "active": {"active": lambda client, model, _: half_masks(model, client)},
    "frozen": {"frozen": lambda *_: ("conv1.weight", "fc1.weight", "fc1.bias")},
    "proximal": {"adjust_gradients": lambda _, model, __: proximal(state_tensors(model), 0.1)},
    "after each step": {"after_step": lambda *_: lambda values: torch._foreach_mul_(list(values.values()), 0.9)},
    "augmented": {"augment": lambda _, __, images: CropFlip(images, torch.zeros(images.shape[1]))},
}


def assert_same(found, expected):
    assert found[0] == expected[0]
    for name, tensor in expected[1].items():
        assert torch.equal(found[1][name], tensor), name


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *in_test([(name, "plain") for name in SHAPES], ("lenet5", "plain")),
        *(full("lenet5", way) for way in WAYS if way != "plain"),
        *(full("cnn-gn", way) for way in WAYS if way not in ("plain", "frozen")),  # it has no second linear layer
    ],
)
def test_a_clients_bits_are_the_same_alone_and_beside_any_others(name, way):
    work = {client: functools.partial(training_of, client, name, **WAYS[way]) for client in range(5)}
    alone = {client: each() for client, each in work.items()}
    for clients in ([0, 1], [3, 2, 1, 0], [4, 0, 1, 2, 3], [0, 3]):
        for client, found in zip(clients, in_cohort([work[client] for client in clients]), strict=True):
            assert_same(found, alone[client])


@pytest.mark.parametrize(("name", "classes"), [("cnn5", 7), full("cnn5", 9), full("mlp", 10), full("lenet5", 3)])
def test_layers_of_odd_sizes_have_the_same_bits_alone_and_beside_others(name, classes):
    """Clients' gradients of the weights lie one after another, and so began at addresses that no tensor begins at."""

    def work(client):
        draw = generator(client)
        shape = SHAPES.get(name, (1, 28, 28))
        if name == "mlp":
            model = nn.Sequential(nn.Flatten(), nn.Linear(784, 37), nn.ReLU(), nn.Linear(37, classes))
            for parameter in model.parameters():
                parameter.data.normal_(0, 0.05, generator=draw)
        else:
            model = build_model(name, shape, classes, rng=draw)
        images, labels = torch.randn(20, *shape, generator=draw), torch.randint(0, classes, (20,), generator=draw)
        grouped_form(model, shape)
        result = train(model, images, labels, SGD(0.05, batch_size=10), rng=generator(client))
        return result, state_tensors(model, include_buffers=True)

    alone = [work(client) for client in range(8)]
    for size in (2, 5, 8):
        for client, found in enumerate(in_cohort([functools.partial(work, client) for client in range(size)])):
            assert_same(found, alone[client])


@pytest.mark.parametrize("seed", in_test(range(40), 0, 1, 28))
def test_a_random_networks_bits_are_the_same_alone_and_beside_any_number_of_others(seed):
    """torch computes the last few numbers of a tensor by another formula than the others: there is no form for that."""
    draw = random.Random(seed)
    shape, inner = (draw.choice((1, 3)), *[draw.choice((7, 8, 9, 12))] * 2), draw.choice((1, 2, 4, 5, 6, 7, 10, 32))
    layers = nn.Sequential(
        nn.Conv2d(shape[0], inner, draw.choice((1, 2, 3)), padding=draw.choice((0, 1))),
        draw.choice((nn.ReLU, nn.Tanh, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.ELU))(),
        draw.choice((nn.Identity(), nn.MaxPool2d(2), nn.AvgPool2d(2), *map(nn.AdaptiveAvgPool2d, (1, 1, 2)))),
        nn.Flatten(),
    )
    model = nn.Sequential(*layers, nn.Linear(layers(torch.zeros(1, *shape)).shape[1], draw.choice((2, 3, 10))))
    batch, clients = draw.randint(1, 13), draw.randint(2, 9)

    def work(client):
        own = copy.deepcopy(model)
        images = torch.randn(2 * batch, *shape, generator=generator(client))
        result = train(own, images, torch.arange(2 * batch) % 2, SGD(0.05, batch_size=batch), rng=generator(client))
        return result, state_tensors(own, include_buffers=True)

    alone = [work(client) for client in range(clients)]
    for client, found in enumerate(in_cohort([functools.partial(work, client) for client in range(clients)])):
        assert_same(found, alone[client])


def test_a_form_whose_bits_depend_on_the_other_clients_is_refused(monkeypatch):
    linear = grouped._linear

    def of_others(value, *rest):
        return linear(value, *rest) * (1 + 2**-22 * (len(value) > 1 and value.dtype == torch.float32))

    monkeypatch.setattr(grouped, "_forms", {})
    monkeypatch.setattr(grouped, "_linear", of_others)
    with pytest.raises(NoGroupedForm, match="other bits beside others"):
        grouped_form(build_model("lenet5", SHAPES["lenet5"], 10, rng=generator(0)), SHAPES["lenet5"])


@pytest.mark.parametrize("name", in_test(SHAPES, "lenet5", "cnn-gn"))
@pytest.mark.parametrize(
    "sgd", [EVERYTHING, full(SGD(0.05, batch_size=8)), full(SGD(0.05, batch_size=10, steps_per_epoch=5))]
)
def test_the_grouped_form_trains_as_the_network_itself_but_for_float_rounding(name, sgd, monkeypatch):
    grouped = in_cohort([functools.partial(training_of, client, name, sgd) for client in range(5)])
    monkeypatch.setattr(training, "MOST_FLOPS", 0)
    for client in range(5):
        result, tensors = training_of(client, name, sgd)
        assert grouped[client][0].loss_mean == pytest.approx(result.loss_mean, rel=1e-5)
        for key, tensor in tensors.items():
            torch.testing.assert_close(grouped[client][1][key], tensor, rtol=1e-3, atol=2e-6)


def test_a_client_that_is_not_grouped_trains_its_network_as_it_is_in_any_company(monkeypatch):
    work = [functools.partial(training_of, client, grouped=lambda *_: False) for client in range(3)]
    beside = in_cohort(work)
    monkeypatch.setattr(training, "MOST_FLOPS", 0)
    for client in range(3):
        assert_same(beside[client], training_of(client))


@pytest.mark.parametrize("freezes", [{0, 2}, {1}])
def test_a_client_that_freezes_layers_itself_freezes_them_for_nobody_else(freezes):
    def frozen(client, model, _):
        model.conv1.requires_grad_(client not in freezes)
        return ()

    work = [functools.partial(training_of, client, frozen=frozen) for client in range(3)]
    for found, each in zip(in_cohort(work), work, strict=True):
        assert_same(found, each())


def test_masked_weights_stay_zero_in_a_cohort():
    found = in_cohort([functools.partial(training_of, client, **WAYS["masks"]) for client in range(3)])
    for client, (_, tensors) in enumerate(found):
        for name, mask in half_masks(build_model("lenet5", (3, 32, 32), 10, rng=generator(0)), client).items():
            assert not tensors[name][~mask].any()
            assert tensors[name][mask].all()


def test_weights_can_be_read_after_every_epoch_of_each_client():
    seen = {}

    def work(client):
        def after_epoch(_, model, __):
            return lambda epoch: seen.setdefault((client, epoch), state_tensors(model))

        return training_of(client, after_epoch=after_epoch)

    found = in_cohort([functools.partial(work, client) for client in range(5)])
    assert set(seen) == {(client, epoch) for client in range(5) for epoch in range(2)}
    for client, (_, tensors) in enumerate(found):
        assert all(torch.equal(seen[client, 1][name], tensors[name]) for name in tensors)
        assert not torch.equal(seen[client, 0]["conv1.weight"], tensors["conv1.weight"])


@pytest.mark.parametrize("hook", ["adjust_gradients", "after_step", "after_epoch"])
def test_a_hook_that_fails_is_its_own_clients_error_alone(hook):
    def fails(*_):
        raise ValueError("no more")

    works = [functools.partial(training_of, client) for client in range(3)]
    expected = [work() for work in works]
    works[1] = functools.partial(training_of, 1, **{hook: lambda *_: fails})
    first, failed, last = in_cohort(works)
    assert_same(first, expected[0])
    assert_same(last, expected[2])
    with pytest.raises(ValueError, match="no more"):
        raise failed


def test_the_model_is_in_its_own_memory_again_after_an_error():
    model = build_model("cnn-small", (1, 8, 8), 10, rng=generator(0)).eval()
    memory = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}

    def fails(_):
        raise ValueError("no more")

    images, labels = torch.randn(8, 1, 8, 8, generator=generator(0)), torch.arange(8)
    with pytest.raises(ValueError, match="no more"):
        train(model, images, labels, SGD(0.1), rng=generator(0), after_step=fails)
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == memory
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())


# --- the order of work ------------------------------------------------------------------------------------------------


def test_clients_work_one_at_a_time_and_train_when_no_other_is_left_to_work():
    log = []

    def train_cohort(asked):
        log.append(("train", *asked))
        return [f"trained {each}" for each in asked]

    def work(client, trainings):
        for number in range(trainings):
            log.append(("works", client))
            assert cohort.train_in_cohort(f"{client}.{number}", train_cohort) == f"trained {client}.{number}"
        log.append(("is done", client))
        return client

    works = [functools.partial(work, client, trainings) for client, trainings in enumerate((1, 0, 2))]
    assert in_cohort(works) == [0, 1, 2]
    assert log == [
        ("works", 0),
        ("is done", 1),
        ("works", 2),
        ("train", "0.0", "2.0"),
        ("is done", 0),
        ("works", 2),
        ("train", "2.1"),
        ("is done", 2),
    ]


def test_an_error_is_the_outcome_of_the_client_that_raised_it():
    def fails():
        raise KeyError("lost")

    found = in_cohort([lambda: 1, fails, lambda: 3])
    assert (found[0], str(found[1]), found[2]) == (1, "'lost'", 3)
    assert isinstance(in_cohort([fails])[0], KeyError)


def test_no_thread_is_left_behind():
    before = threading.active_count()
    in_cohort([functools.partial(training_of, client, "cnn-small") for client in range(3)])
    assert threading.active_count() == before


# --- networks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.Dropout()), "layer '2' is of type Dropout"),
        (nn.Sequential(nn.Conv2d(3, 6, 1, groups=3), nn.Flatten()), "the rules for groups do not fit"),
        (nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2)), "layer '0' is of type BatchNorm2d"),
    ],
)
def test_a_network_without_a_grouped_form_says_which_layer_has_none(model, reason):
    with pytest.raises(NoGroupedForm, match=reason):
        grouped_form(model, (3, 2, 2))


class Branching(nn.Module):
    """A network whose text does not show its forward pass."""

    def __init__(self, how):
        super().__init__()
        self.first, self.second, self.how = nn.Linear(12, 12), nn.Linear(12, 2), how
        if how == "counts in a buffer":
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        else:
            self.steps = 0

    def forward(self, images):
        hidden = torch.relu(self.first(torch.flatten(images, 1)))
        if self.how == "skip":
            return self.second(hidden + torch.flatten(images, 1))
        if self.how == "scales in training" and self.training:
            return self.second(hidden * 2)
        if self.how == "draws" and self.training and random.random() < 0.0:
            return self.second(hidden * 0)
        if self.how in ("counts", "counts in a buffer"):
            self.steps += 1
            return self.second(hidden * (2 if self.steps > 2 else 1))
        return self.second(hidden)


def test_networks_of_one_text_that_compute_otherwise_have_forms_of_their_own():
    forms = {how: grouped_form(Branching(how), (3, 2, 2)) for how in ("plain", "skip")}
    assert forms["plain"] is not forms["skip"]
    assert grouped_form(Branching("plain"), (3, 2, 2)) is forms["plain"]
    for how, form in forms.items():
        model, images = Branching(how), torch.randn(1, 4, 3, 2, 2, generator=generator(0))
        weights = {name: value[None] if value.dim() == 2 else value for name, value in model.named_parameters()}
        torch.testing.assert_close(form(weights, images)[0], model(images[0]))
    with pytest.raises(NoGroupedForm):
        grouped_form(Branching("scales in training").eval(), (3, 2, 2))
    state = random.getstate()
    for how in ("draws", "counts", "counts in a buffer"):  # its form would have one draw or count for ever
        with pytest.raises(NoGroupedForm, match=r"torch\.fx cannot follow"):
            grouped_form(Branching(how), (3, 2, 2))
    assert random.getstate() == state


@pytest.mark.parametrize("which", ["hook", "pre-hook", "parametrization", "forward of its own"])
def test_a_network_whose_layers_compute_more_than_they_say_has_no_form_of_another(which):
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 2))
    grouped_form(model, (3, 2, 2))
    if which == "hook":
        model[1].register_forward_hook(lambda _module, _inputs, output: output * 0)
    elif which == "pre-hook":
        model[1].register_forward_pre_hook(lambda _module, inputs: inputs[0] * 0)
    elif which == "parametrization":
        nn.utils.parametrizations.weight_norm(model[1])
    else:
        plain = model[1].forward
        model[1].forward = lambda images: plain(images) * 0
    with pytest.raises(NoGroupedForm):
        grouped_form(model, (3, 2, 2))


@pytest.mark.parametrize("name", in_test([*SHAPES, "lenet5-bn"], "lenet5"))
def test_a_process_keeps_no_network_that_was_trained(name):
    kept = []
    for client in range(3):
        model = build_model(name, SHAPES.get(name, (3, 32, 32)), 10, rng=generator(client))
        kept.append(weakref.ref(model))
        images, labels = torch.randn(4, *SHAPES.get(name, (3, 32, 32))), torch.arange(4)
        train(model, images, labels, SGD(0.1), rng=generator(client))
        del model
    gc.collect()
    # a form may hold the layers of the network that it was derived from
    assert [model() for model in kept[1:]] == [None, None]


@pytest.mark.full
def test_a_residual_network_has_a_grouped_form():
    shape = (3, 8, 8)
    models = [build_model("resnet18-gn", shape, 10, rng=generator(client)).double() for client in range(2)]
    images = torch.randn(2, 3, *shape, generator=generator(0), dtype=torch.float64)
    weights = {}
    for name, first in models[0].named_parameters():
        both = [first, dict(models[1].named_parameters())[name]]
        weights[name] = torch.stack(both) if first.dim() == 2 else torch.cat(both)
    found = grouped_form(models[0], shape)(weights, images)
    torch.testing.assert_close(found, torch.stack([model(images[k]) for k, model in enumerate(models)]))


def test_an_interrupt_ends_the_client_that_works_too():
    """A thread that is inside torch when its process ends would abort the process: exit code 134 in place of 130."""
    main = threading.main_thread().ident

    def work():
        signal.pthread_kill(main, signal.SIGINT)
        while True:
            time.sleep(0.001)

    before, others = signal.signal(signal.SIGINT, signal.default_int_handler), set(threading.enumerate())
    try:
        with pytest.raises(KeyboardInterrupt):
            in_cohort([work, work])
    finally:
        signal.signal(signal.SIGINT, before)
    for thread in set(threading.enumerate()) - others:
        thread.join(60)
        assert not thread.is_alive()
