import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedprune_app.data.augmentation import CropFlip
from fedprune_app.learning.evaluate import Evaluation, dense_gradient, evaluate
from fedprune_app.learning.flat import Flat, FlatLayout, FlatParameters, trained_names
from fedprune_app.learning.sgd import SGD
from fedprune_app.learning.train import train
from fedprune_app.learning.training import adam
from fedprune_app.models.vision import build_model, prunable_names, state_tensors

SHAPES = {"lenet5": (3, 32, 32), "lenet5-bn": (3, 32, 32), "cnn-small": (1, 8, 8), "cnn-gn": (3, 8, 8)}
DEEP = {"resnet18-gn": (3, 8, 8), "vgg11-gn": (3, 32, 32)}
EVERYTHING = SGD(0.05, momentum=0.5, weight_decay=0.1, batch_size=8, epochs=2, max_grad_norm=0.5)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def new_model(name="cnn-small"):
    return build_model(name, (SHAPES | DEEP)[name], 10, rng=generator(1))


def new_data(name="cnn-small", count=20):
    rng = generator(2)
    return torch.randn(count, *(SHAPES | DEEP)[name], generator=rng), torch.randint(0, 10, (count,), generator=rng)


def half_masks(model):
    rng = generator(3)
    weights = dict(model.named_parameters())
    return {name: torch.rand(weights[name].shape, generator=rng) < 0.5 for name in prunable_names(model)}


def plain_loop(model, images, labels, sgd, rng, masks=None):
    """The reference: torch.optim.SGD on the model's own parameters. Returns the mean loss."""
    masks = masks or {}
    optimizer = torch.optim.SGD(
        model.parameters(), lr=sgd.learning_rate, momentum=sgd.momentum, weight_decay=sgd.weight_decay
    )
    parameters = dict(model.named_parameters())
    model.train()
    with torch.no_grad():
        for name, mask in masks.items():
            parameters[name].mul_(mask)
    losses = []
    for _ in range(sgd.epochs):
        order = torch.randperm(len(labels), generator=rng)
        for start in range(0, len(labels), sgd.batch_size):
            batch = order[start : start + sgd.batch_size]
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            if sgd.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), sgd.max_grad_norm)
            for name, mask in masks.items():
                parameters[name].grad.mul_(mask)
            optimizer.step()
            losses += [loss.item()] * len(batch)
    return sum(losses) / len(losses)


def assert_same_bits(model, other):
    for (name, tensor), expected in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(tensor, expected), name


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["lenet5", "lenet5-bn"])
@pytest.mark.parametrize(
    "sgd",
    [
        SGD(0.05, batch_size=8),
        SGD(0.05, momentum=0.5, batch_size=8, epochs=2),
        SGD(0.05, weight_decay=0.1, batch_size=7, epochs=2),
        SGD(0.05, momentum=0.9, weight_decay=0.1, batch_size=10),
    ],
)
def test_training_is_the_plain_loop_bit_for_bit(name, sgd, masked, own_form):
    model, images, labels = new_model(name), *new_data(name)
    reference = copy.deepcopy(model).to(memory_format=torch.channels_last)  # the layout train() works in
    masks = half_masks(model) if masked else None
    result = train(model, images, labels, sgd, rng=generator(), masks=masks)
    loss = plain_loop(reference, images, labels, sgd, generator(), masks)
    assert_same_bits(model, reference)
    assert result.loss_mean == pytest.approx(loss, rel=1e-12)
    assert (result.num_steps, result.num_examples) == (sgd.epochs * math.ceil(20 / sgd.batch_size), 20)


@pytest.mark.full
@pytest.mark.parametrize("name", DEEP)
def test_deep_networks_are_trained_and_evaluated_like_the_others(name):
    model, (images, labels) = new_model(name), new_data(name, 6)
    reference, masks = copy.deepcopy(model), half_masks(model)
    sgd = SGD(0.01, weight_decay=5e-4, batch_size=4)
    layout = {name: (p.data_ptr(), p.stride()) for name, p in model.named_parameters()}
    result = train(model, images, labels, sgd, rng=generator(), masks=masks)
    assert result.loss_mean == pytest.approx(plain_loop(reference, images, labels, sgd, generator(), masks), rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, reference.get_parameter(name), atol=1e-5, rtol=1e-3)
        assert (parameter.data_ptr(), parameter.stride()) == layout[name]
        if name in masks:
            assert not parameter[~masks[name]].any()
    expected = F.cross_entropy(reference.eval()(images), labels).item()
    assert evaluate(model, images, labels).loss_mean == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("name", SHAPES)
def test_clipping_and_memory_layout_cost_no_more_than_float_rounding(name):
    model, images, labels = new_model(name), *new_data(name)
    reference, masks = copy.deepcopy(model), half_masks(model)
    train(model, images, labels, EVERYTHING, rng=generator(), masks=masks)
    plain_loop(reference, images, labels, EVERYTHING, generator(), masks)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)


def test_the_norm_clipped_is_that_of_the_dense_gradient():
    # One linear layer on one example: the gradient of row c is (p_c - [c is the label]) x.
    model = nn.Linear(2, 2, bias=False)
    nn.init.zeros_(model.weight)
    image, label = torch.tensor([[3.0, 4.0]]), torch.tensor([0])
    mask = torch.tensor([[True, False], [False, False]])
    sgd = SGD(1.0, max_grad_norm=1.0)
    train(model, image, label, sgd, rng=generator(), masks={"weight": mask})
    dense_norm = 0.5 * 5 * math.sqrt(2)  # rows (-1/2, +1/2) times (3, 4)
    expected = torch.tensor([[0.5 * 3 / dense_norm, 0], [0, 0]])
    torch.testing.assert_close(model.weight.detach(), expected)


def test_a_gradient_within_the_clip_norm_is_left_alone():
    models = [new_model() for _ in range(2)]
    for model, norm in zip(models, (None, 1e6), strict=True):
        train(model, *new_data(), SGD(0.05, max_grad_norm=norm), rng=generator())
    assert_same_bits(*models)


def test_masked_weights_stay_exactly_zero_and_the_others_move():
    model = new_model("lenet5")
    masks, before = half_masks(model), state_tensors(model)
    train(model, *new_data("lenet5"), EVERYTHING, rng=generator(), masks=masks)
    for name, tensor in state_tensors(model).items():
        kept = masks.get(name, torch.ones_like(tensor, dtype=torch.bool))
        assert not tensor[~kept].view(torch.int32).any()  # +0, not -0: the same bytes in every message
        assert (tensor[kept] != before[name][kept]).float().mean() > 0.95


def test_a_mask_that_keeps_everything_changes_no_bit():
    models = [new_model() for _ in range(2)]
    everything = {name: torch.ones_like(p, dtype=torch.bool) for name, p in models[0].named_parameters()}
    for model, masks in zip(models, (None, everything), strict=True):
        train(model, *new_data(), EVERYTHING, rng=generator(), masks=masks)
    assert_same_bits(*models)


def test_training_depends_on_its_generator_alone():
    models, losses = [new_model("lenet5-bn") for _ in range(3)], []
    for model, seed in zip(models, (4, 4, 5), strict=True):
        torch.rand(1)  # what others draw from the global generator does not matter
        before = torch.get_rng_state()
        losses.append(train(model, *new_data("lenet5-bn"), EVERYTHING, rng=generator(seed)).loss_mean)
        assert torch.equal(torch.get_rng_state(), before)
    assert_same_bits(models[0], models[1])
    assert losses[0] == losses[1]
    assert not torch.equal(models[0].conv1.weight, models[2].conv1.weight)


def test_every_epoch_sees_every_example_once_in_another_order():
    seen = []

    class Spy(nn.Linear):
        def forward(self, batch):
            seen.extend(batch[:, 0].int().tolist())
            return super().forward(batch)

    images = torch.arange(10.0).unsqueeze(1)
    train(Spy(1, 2), images, torch.zeros(10).long(), SGD(0.0, batch_size=4, epochs=2), rng=generator())
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert len({tuple(seen[:10]), tuple(seen[10:]), tuple(range(10))}) == 3


@pytest.mark.parametrize(("steps", "expected"), [(2, 16), (3, 20), (5, 36), (7, 48)])
def test_an_epoch_can_have_its_number_of_steps_and_goes_through_the_examples_as_often_as_that_takes(steps, expected):
    model, (images, labels) = new_model(), new_data()
    sgd = SGD(0.05, momentum=0.5, batch_size=8, epochs=2, steps_per_epoch=steps)
    result = train(model, images, labels, sgd, rng=generator())
    assert result.num_steps == 2 * steps
    assert sgd.examples_per_epoch(20) == expected

    other, rng = new_model(), generator()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.05, momentum=0.5)
    losses: list[float] = []
    for _ in range(2):
        queue: list[torch.Tensor] = []
        for _ in range(steps):
            queue = queue or list(torch.split(torch.randperm(20, generator=rng), 8))
            batch = queue.pop(0)
            optimizer.zero_grad()
            loss = F.cross_entropy(other(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            losses += [loss.item()] * len(batch)
    for name, tensor in state_tensors(model).items():
        torch.testing.assert_close(tensor, state_tensors(other)[name], rtol=1e-5, atol=1e-6)
    assert len(losses) == 2 * expected
    assert result.loss_mean == pytest.approx(sum(losses) / len(losses))


@pytest.mark.parametrize(("num_examples", "sizes"), [(9, [4, 4]), (10, [4, 4, 2]), (8, [4, 4]), (1, [1])])
@pytest.mark.parametrize("steps", [0, 5])
def test_a_last_batch_of_one_example_is_left_out_where_a_network_needs_two(num_examples, sizes, steps):
    sgd = SGD(0.1, batch_size=4, steps_per_epoch=steps, skips_lone=True)
    batches = list(sgd.batches(num_examples, generator()))
    asked = (sizes * 5)[: steps or len(sizes)]
    assert [len(batch) for batch in batches] == asked
    assert sgd.steps_of(num_examples) == len(asked)
    assert sgd.examples_per_epoch(num_examples) == sum(asked)
    assert len(set(torch.cat(batches[: len(sizes)]).tolist())) == sum(sizes)
    whole = list(SGD(0.1, batch_size=4).batches(num_examples, generator()))
    assert all(torch.equal(mine, its) for mine, its in zip(batches[: len(sizes)], whole, strict=False))


def test_what_is_not_active_keeps_its_value_and_the_rest_trains_as_if_it_were_constant():
    model, (images, labels) = new_model(), new_data()
    active = {n: torch.rand(p.shape, generator=generator(3)) < 0.4 for n, p in model.named_parameters()}
    start = state_tensors(model)
    train(model, images, labels, EVERYTHING, rng=generator(), active=active)

    other, rng = new_model(), generator()
    velocity = {n: torch.zeros_like(p) for n, p in other.named_parameters()}
    for _ in range(2):
        for batch in torch.split(torch.randperm(20, generator=rng), 8):
            other.zero_grad()
            F.cross_entropy(other(images[batch]), labels[batch]).backward()
            nn.utils.clip_grad_norm_(other.parameters(), 0.5)
            for n, p in other.named_parameters():
                velocity[n] = 0.5 * velocity[n] + torch.where(active[n], p.grad + 0.1 * p.data, 0.0)
                p.data -= 0.05 * velocity[n]
    for n, tensor in state_tensors(model).items():
        assert torch.equal(tensor[~active[n]], start[n][~active[n]])
        assert not torch.equal(tensor[active[n]], start[n][active[n]])
        torch.testing.assert_close(tensor, state_tensors(other)[n])


def test_masks_and_active_coordinates_exclude_each_other():
    model, (images, labels) = new_model(), new_data()
    masks = half_masks(model)
    with pytest.raises(ValueError, match="masks and active are given, allowed: one of them"):
        train(model, images, labels, SGD(0.1), rng=generator(), masks=masks, active=masks)


def test_the_adam_hook_makes_plain_sgd_adam():
    model, other, (images, labels) = new_model(), new_model(), new_data()
    sgd = SGD(0.01, batch_size=8, epochs=4)
    train(model, images, labels, sgd, rng=generator(), adjust_gradients=adam())
    optimizer, rng = torch.optim.Adam(other.parameters(), lr=0.01), generator()
    for _ in range(4):
        for batch in torch.split(torch.randperm(20, generator=rng), 8):
            optimizer.zero_grad()
            F.cross_entropy(other(images[batch]), labels[batch]).backward()
            optimizer.step()
    for name, tensor in state_tensors(model).items():
        torch.testing.assert_close(tensor, state_tensors(other)[name], rtol=1e-4, atol=1e-5)


def test_weights_can_be_read_after_every_epoch_and_gradients_reset_by_the_reader():
    model, reference = new_model(), new_model()
    images, labels = new_data()
    read = []

    def after_epoch(epoch):
        read.append((epoch, state_tensors(model)))
        model.zero_grad()  # sets all gradients to None

    sgd = SGD(0.05, momentum=0.5, epochs=2)
    train(model, images, labels, sgd, rng=generator(), after_epoch=after_epoch)
    train(reference, images, labels, sgd, rng=generator())
    assert_same_bits(model, reference)
    train(one_epoch := new_model(), images, labels, SGD(0.05, momentum=0.5), rng=generator())
    assert [epoch for epoch, _ in read] == [0, 1]
    for (_, state), same in zip(read, (one_epoch, model), strict=True):
        assert all(torch.equal(state[name], tensor) for name, tensor in state_tensors(same).items())


def test_an_objective_may_go_backward_and_reset_the_gradients_itself():
    """As sharpness-aware minimisation does: the gradient is that of the loss at a point near the weights."""

    def sharp(network, images, labels):
        weights = list(network.parameters())
        F.cross_entropy(network(images), labels).backward()
        steps = [0.1 * weight.grad for weight in weights]
        network.zero_grad()
        with torch.no_grad():
            torch._foreach_add_(weights, steps)
        loss = F.cross_entropy(network(images), labels)
        with torch.no_grad():
            torch._foreach_sub_([weight.data for weight in weights], steps)
        return loss

    model, other = new_model(), new_model()
    images, labels = new_data()
    train(model, images, labels, SGD(0.05, batch_size=8, epochs=2), rng=generator(), objective=sharp)
    optimizer, rng = torch.optim.SGD(other.parameters(), 0.05), generator()
    for _ in range(2):
        for batch in torch.split(torch.randperm(len(labels), generator=rng), 8):
            optimizer.zero_grad()
            sharp(other, images[batch], labels[batch]).backward()
            optimizer.step()
    for name, tensor in state_tensors(model).items():
        torch.testing.assert_close(tensor, state_tensors(other)[name], rtol=1e-4, atol=1e-6)


def test_a_proximal_term_can_be_added_to_the_gradients():
    model, reference = new_model("lenet5"), new_model("lenet5")
    images, labels = new_data("lenet5")
    anchor = {name: tensor + 0.1 for name, tensor in state_tensors(model).items()}

    def proximal(parameters, gradients):
        for name, gradient in gradients.items():
            gradient.add_(parameters[name] - anchor[name], alpha=0.5)

    train(model, images, labels, SGD(0.1, batch_size=20), rng=generator(), adjust_gradients=proximal)
    loss = F.cross_entropy(reference(images), labels)
    loss = loss + 0.25 * sum((p - anchor[name]).square().sum() for name, p in reference.named_parameters())
    loss.backward()
    for name, parameter in reference.named_parameters():
        expected = parameter.detach() - 0.1 * parameter.grad
        torch.testing.assert_close(state_tensors(model)[name], expected, atol=1e-6, rtol=1e-4)


def test_a_step_hook_acts_on_the_updated_values_before_anything_else_sees_them():
    """Ditto's personal step: an SGD step, then v -= learning_rate * lambda * (v - w) with the updated v."""
    model, reference = new_model("lenet5"), new_model("lenet5").to(memory_format=torch.channels_last)
    images, labels = new_data("lenet5")
    anchor = {name: tensor + 0.1 for name, tensor in state_tensors(model).items()}
    read = []

    def proximal(values):
        torch._foreach_lerp_(list(values.values()), [anchor[name] for name in values], 0.1 * 0.5)

    sgd = SGD(0.1, weight_decay=0.01, batch_size=8)
    train(
        model,
        images,
        labels,
        sgd,
        rng=generator(),
        after_step=proximal,
        after_epoch=lambda epoch: read.append(state_tensors(model)),
    )
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, weight_decay=0.01)
    for batch in torch.randperm(20, generator=generator()).split(8):
        optimizer.zero_grad()
        F.cross_entropy(reference(images[batch]), labels[batch]).backward()
        optimizer.step()
        with torch.no_grad():
            for name, parameter in reference.named_parameters():
                parameter -= 0.1 * 0.5 * (parameter - anchor[name])
    for name, tensor in state_tensors(model).items():
        torch.testing.assert_close(tensor, reference.get_parameter(name).detach())
        assert torch.equal(read[0][name], tensor)


def test_a_step_hook_is_called_once_a_step_with_what_is_trained():
    model, calls = new_model(), []
    frozen = ["conv1.weight"]
    sgd = SGD(0.1, batch_size=8, epochs=2)
    result = train(model, *new_data(), sgd, rng=generator(), frozen=frozen, after_step=lambda v: calls.append([*v]))
    assert len(calls) == result.num_steps == 6
    assert calls[0] == [name for name, _ in model.named_parameters() if name not in frozen]


def test_a_step_hook_that_scales_keeps_masked_weights_at_zero():
    model = new_model()
    masks = half_masks(model)
    train(
        model,
        *new_data(),
        EVERYTHING,
        rng=generator(),
        masks=masks,
        after_step=lambda values: torch._foreach_mul_(list(values.values()), 0.9),
    )
    assert all(not model.get_parameter(name)[~mask].any() for name, mask in masks.items())


class Brighter:
    """An augmentation: each time an image is brighter or darker by a drawn number, up to ``most``."""

    def __init__(self, images, most=1.0):
        self.images, self.most, self.seen = images, most, []

    def draws(self, positions, rng):
        self.seen.extend(positions.tolist())
        return torch.stack([positions, torch.randint(-100, 101, (len(positions),), generator=rng)], dim=1)

    def __call__(self, choices):
        positions, drawn = choices.unbind(1)
        return self.images[positions] + drawn.view(-1, 1, 1, 1) * (self.most / 100)


def test_an_augmentation_that_changes_nothing_changes_no_bit():
    models = [new_model("lenet5") for _ in range(2)]
    images, labels = new_data("lenet5")
    nothing = torch.empty_like(images)  # with an augmentation, only the number and the shape of images count
    sgd = replace(EVERYTHING, epochs=1)  # the augmentation draws from the same generator as the next epoch
    train(models[0], images, labels, sgd, rng=generator())
    train(models[1], nothing, labels, sgd, rng=generator(), augment=Brighter(images, 0.0))
    assert_same_bits(*models)


def test_an_augmentation_gets_every_example_in_every_epoch_and_draws_from_the_same_generator():
    images, labels = new_data()
    models, brighter = [new_model() for _ in range(3)], Brighter(images)
    for model, seed in zip(models, (1, 1, 2), strict=True):
        train(model, images, labels, SGD(0.1, batch_size=8, epochs=2), rng=generator(seed), augment=brighter)
    seen = brighter.seen
    assert_same_bits(*models[:2])
    assert not torch.equal(models[0].conv1.weight, models[2].conv1.weight)
    assert sorted(seen[:20]) == sorted(seen[20:40]) == list(range(20))
    assert seen[:20] != seen[20:40]


def test_training_on_crops_and_mirror_images_is_the_plain_loop_on_them():
    model, reference = new_model("cnn-gn"), new_model("cnn-gn").to(memory_format=torch.channels_last)
    images, labels = new_data("cnn-gn")
    augment = CropFlip(images, torch.zeros(3))
    train(model, images, labels, SGD(0.1, batch_size=20), rng=generator(), augment=augment)
    rng = generator()
    order = torch.randperm(20, generator=rng)
    plain_loop(reference, augment(augment.draws(order, rng)), labels[order], SGD(0.1, batch_size=20), generator())
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", ["lenet5", "lenet5-bn", "cnn-gn"])
def test_a_dense_gradient_is_that_of_the_mean_loss_in_eval_mode(name):
    model, (images, labels) = new_model(name), new_data(name)
    train(model, images, labels, SGD(0.01), rng=generator(), masks=half_masks(model))
    reference = copy.deepcopy(model).eval()
    F.cross_entropy(reference(images), labels).backward()
    gradients = dense_gradient(model, images, labels)
    assert [*gradients] == [name for name, _ in model.named_parameters()]
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, reference.get_parameter(name).grad, atol=1e-7, rtol=1e-4)
        assert gradient.is_contiguous()
        assert not gradient.requires_grad
    for name in prunable_names(model):  # masked weights have gradients too: that is what it is for
        assert gradients[name][model.get_parameter(name) == 0].count_nonzero() > 0


def test_taking_a_dense_gradient_leaves_no_trace():
    model, (images, labels) = new_model("lenet5-bn").train(), new_data("lenet5-bn")
    model.conv1.weight.requires_grad_(False)
    model.fc1.bias.grad = torch.ones(120)
    before = state_tensors(model, include_buffers=True)
    layout = {name: (p.data_ptr(), p.stride()) for name, p in model.named_parameters()}
    gradients = dense_gradient(model, images, labels)
    assert gradients["conv1.weight"].any()
    assert all(torch.equal(t, before[n]) for n, t in state_tensors(model, include_buffers=True).items())
    assert {name: (p.data_ptr(), p.stride()) for name, p in model.named_parameters()} == layout
    assert all(module.training for module in model.modules())
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["conv1.weight"]
    assert {name for name, p in model.named_parameters() if p.grad is not None} == {"fc1.bias"}
    assert torch.equal(model.fc1.bias.grad, torch.ones(120))


def test_a_parameter_the_loss_does_not_reach_has_dense_gradient_zero():
    class Spare(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.spare = nn.Parameter(torch.ones(3))

    model = Spare()
    gradients = dense_gradient(model, torch.ones(1, 2), torch.tensor([0]))
    assert torch.equal(gradients["spare"], torch.zeros(3))
    assert gradients["weight"].any()


@pytest.mark.parametrize("count", [0, 2])
def test_a_dense_gradient_needs_a_batch(count):
    with pytest.raises(ValueError, match=f"{count} images and 0 labels, allowed: equally many, at least 1"):
        dense_gradient(new_model(), torch.zeros(count, 1, 8, 8), torch.zeros(0).long())


def test_frozen_parameters_keep_their_bits_and_can_be_trained_again():
    model = new_model("lenet5")
    before, frozen = state_tensors(model), {"conv1.weight", "conv1.bias", "fc3.weight"}
    train(model, *new_data("lenet5"), EVERYTHING, rng=generator(), frozen=frozen, masks=half_masks_of_two(model))
    for name, tensor in state_tensors(model).items():
        assert torch.equal(tensor, before[name]) == (name in frozen), name
    assert all(parameter.requires_grad for parameter in model.parameters())


def half_masks_of_two(model):
    masks = half_masks(model)
    return {name: masks[name] for name in ("conv2.weight", "fc2.weight")}


def test_a_masked_weight_is_zeroed_even_if_it_is_frozen():
    model = new_model()
    masks, before = half_masks(model), state_tensors(model)
    train(model, *new_data(), SGD(0.1), rng=generator(), masks=masks, frozen=["conv1.weight"])
    expected = torch.where(masks["conv1.weight"], before["conv1.weight"], 0)
    assert torch.equal(model.conv1.weight, expected)


def test_running_statistics_move_in_training_and_not_in_evaluation():
    model, (images, labels) = new_model("lenet5-bn").eval(), new_data("lenet5-bn")
    start = model.bn1.running_mean.clone()
    train(model, images, labels, SGD(0.01), rng=generator())
    trained = model.bn1.running_mean.clone()
    assert not torch.equal(trained, start)
    evaluate(model.train(), images, labels)
    assert torch.equal(model.bn1.running_mean, trained)


def test_modules_get_their_own_modes_back():
    model, (images, labels) = new_model("lenet5-bn").eval(), new_data("lenet5-bn")
    model.bn2.train()
    modes = [module.training for module in model.modules()]
    train(model, images, labels, SGD(0.01), rng=generator())
    assert [module.training for module in model.modules()] == modes
    evaluate(model, images, labels)
    assert [module.training for module in model.modules()] == modes


@pytest.mark.parametrize("fails", [False, True])
def test_parameters_are_in_their_own_memory_again_afterwards(fails):
    model = new_model("lenet5")
    aliases = {name: parameter.detach() for name, parameter in model.named_parameters()}
    layout = {name: (tensor.data_ptr(), tensor.stride()) for name, tensor in aliases.items()}
    before = state_tensors(model)

    def after_epoch(epoch):
        if fails:
            raise RuntimeError("the caller's own trouble")

    try:
        train(model, *new_data("lenet5"), SGD(0.1), rng=generator(), after_epoch=after_epoch)
    except RuntimeError:
        assert fails
    for name, parameter in model.named_parameters():
        assert (parameter.data_ptr(), parameter.stride()) == layout[name]
        assert torch.equal(parameter, aliases[name])
        assert not torch.equal(parameter, before[name])
        assert parameter.grad is None
        assert parameter.requires_grad


def test_flat_parameters_hold_every_value_and_gradient_once_and_nothing_between():
    model = new_model("lenet5-bn")
    images, labels = new_data("lenet5-bn")
    F.cross_entropy(model(images), labels).backward()
    values = state_tensors(model)
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    flat = Flat(FlatLayout(model, trained_names(model)))
    with FlatParameters(model, flat) as parameters:
        F.cross_entropy(model(images), labels).backward()
        for name, parameter in model.named_parameters():
            assert torch.equal(parameters.named_values[name], values[name])
            assert torch.equal(parameters.named_gradients[name], gradients[name])
            assert parameter.data_ptr() % 64 == 0
        assert flat.values.count_nonzero() == sum(int(v.count_nonzero()) for v in values.values())
        flat.values.fill_(7)
        assert all((parameter == 7).all() for parameter in model.parameters())


def test_tied_parameters_are_trained_once():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    reference = copy.deepcopy(model)
    images, labels = torch.randn(12, 4, generator=generator()), torch.arange(12) % 4
    sgd = SGD(0.1, momentum=0.5, batch_size=4)
    train(model, images, labels, sgd, rng=generator())
    plain_loop(reference, images, labels, sgd, generator())
    assert model[2].weight is model[0].weight
    assert_same_bits(model, reference)


def test_divergence_is_told_and_not_raised():
    result = train(new_model(), *new_data(), SGD(1e20, epochs=2), rng=generator())
    assert result.diverged
    overflow = train(
        new_model(), *new_data(), SGD(1e20, batch_size=1000, weight_decay=1e30), rng=generator()
    )  # in the only step
    assert math.isfinite(overflow.loss_mean)
    assert overflow.diverged
    assert not train(new_model(), *new_data(), SGD(0.01), rng=generator()).diverged


def test_evaluation_counts_what_a_hand_made_model_gets_right():
    model = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.eye(2))  # the logits are the images
    images = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0], [0.0, 0.0], [0.0, 5.0]])
    labels = torch.tensor([0, 1, 1, 0, 0])
    losses = [math.log1p(math.exp(margin)) for margin in (-2, -1, 3, 0, 5)]
    for batch_size in (2, 500):
        result = evaluate(model, images, labels, batch_size=batch_size)
        assert (result.correct, result.total) == (3, 5)  # a tie goes to the first class
        assert result.loss_sum == pytest.approx(sum(losses), rel=1e-6)
        assert result.accuracy == 0.6


def test_a_prediction_of_nan_is_wrong_whatever_the_label():
    model = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[math.nan, 0.0], [0.0, 1.0]]))
    assert evaluate(model, torch.ones(4, 2), torch.tensor([0, 0, 1, 1])).correct == 0


def test_evaluation_is_that_of_the_model_in_eval_mode():
    model, (images, labels) = new_model("lenet5-bn"), new_data("lenet5-bn")
    result = evaluate(model.train(), images, labels, batch_size=8)
    logits = model.eval()(images)
    assert result.correct == (logits.argmax(1) == labels).sum()
    assert result.loss_mean == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)


def test_an_empty_split_evaluates_to_nothing():
    result = evaluate(new_model(), torch.empty(0, 1, 8, 8), torch.empty(0, dtype=torch.int64))
    assert result == Evaluation(0, 0, 0.0)
    assert math.isnan(result.accuracy)
    assert math.isnan(result.loss_mean)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"masks": {"fc9.weight": torch.ones(1)}}, "masks names 'fc9.weight', allowed: conv1.weight, conv1"),
        (
            {"masks": {"conv1.bias": torch.zeros(16) > 0, "fc1.bias": torch.ones(3) > 0}},
            r"mask 'fc1.bias' is torch.bool of shape \(3,\), allowed: torch.bool of shape \(10,\)",
        ),
        (
            {"masks": {"fc1.bias": torch.ones(10)}},
            "mask 'fc1.bias' is torch.float32 of shape .* allowed: torch.bool",
        ),
        ({"frozen": ["fc9.bias"]}, "frozen names 'fc9.bias', allowed: conv1.weight"),
        ({"frozen": [name for name, _ in new_model().named_parameters()]}, "parameters to train are none"),
    ],
)
def test_a_name_that_does_not_fit_the_model_is_refused_and_nothing_changes(arguments, message):
    model = new_model()
    before = copy.deepcopy(model)
    with pytest.raises(ValueError, match=message):
        train(model, *new_data(), SGD(0.1), rng=generator(), **arguments)
    assert_same_bits(model, before)


def test_unequal_or_no_examples_are_refused():
    images, labels = new_data()
    with pytest.raises(ValueError, match="20 images and 19 labels, allowed: equally many, at least 1"):
        train(new_model(), images, labels[1:], SGD(0.1), rng=generator())
    with pytest.raises(ValueError, match="0 images and 0 labels"):
        train(new_model(), images[:0], labels[:0], SGD(0.1), rng=generator())
    with pytest.raises(ValueError, match="20 images and 19 labels, allowed: equally many"):
        evaluate(new_model(), images, labels[1:])


@pytest.mark.gpu
def test_training_on_a_gpu_follows_the_cpu():
    assert not torch.backends.cudnn.allow_tf32  # which the bounds below are not for
    models = [new_model("lenet5-bn") for _ in range(2)]
    images, labels = new_data("lenet5-bn")
    for model, device in zip(models, ("cpu", "cuda"), strict=True):
        masks = half_masks(model)
        train(model, images, labels, EVERYTHING, rng=generator(), masks=masks, device=device)
        assert evaluate(model, images, labels, device=device).total == 20
    for ours, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, atol=1e-3, rtol=1e-2)
