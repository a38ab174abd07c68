"""Mironov's attack: which of two sums was noised, by what floating-point numbers can reach?

The attacker knows all examples, whether one of them is in or out excepted, and the whole update rule. The released
weights are exact float32 numbers. A sum from which no draw of noise leads to them was not the one.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fedprune_app.core.rng import generator
from fedprune_app.learning.parts import Changes
from fedprune_app.learning.sgd import SGD, sgd_step
from fedprune_app.learning.train import train
from fedprune_app.models.vision import build_model
from fedprune_app.privacy.dpsgd import DPSGD, Step
from fedprune_app.privacy.noise import KeyedNoise, Noise, noisy_count
from tests.examples import in_test

EXAMPLES = 16  # a power of two, so that dividing by it is exact
TRIALS = 40
SETTINGS = [(1.4, 10.0, 0.01), (1.0, 1.0, 0.1), (4.0, 1.0, 0.05)]
Rule = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A rule gives the weights after a step: from those before it, the sum of clipped gradients, and draws of noise."""


class RunInputs(Noise):
    def __init__(self, draws: Tensor) -> None:
        self.draws = draws

    def uniform(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.float64)  # every example is in the sample

    def gaussian(self, size: int, device: torch.device | str = "cpu") -> Tensor:
        return self.draws.clone()

    def seed(self) -> int:
        return 0


def update(before: Tensor, gradient: Tensor, rate: float) -> Tensor:
    after = before.clone()
    sgd_step(Changes(by_client=[], values=[after], gradients=[gradient], velocity=None, kept=None), SGD(rate))
    return after


def product_rule(sigma: float, clip: float, rate: float) -> Rule:
    def rule(before: Tensor, total: Tensor, draws: Tensor) -> Tensor:
        gradient = total.clone()
        how = DPSGD(sigma, clip, 1.0, 1, RunInputs(draws))
        Step(how, dict, dict, {"all": gradient}, {"all": torch.ones_like(gradient)}).finish(EXAMPLES)
        return update(before, gradient, rate)

    return rule


def float32_rule(sigma: float, clip: float, rate: float) -> Rule:
    """What must not be done: noise of float32, scaled and added in float32."""

    def rule(before: Tensor, total: Tensor, draws: Tensor) -> Tensor:
        return update(before, (total + draws.float() * (sigma * clip)) / EXAMPLES, rate)

    return rule


def example_in_and_out(clip: float) -> tuple[dict[bool, Tensor], Callable[[bool], tuple[torch.nn.Module, Tensor]]]:
    """The two sums of clipped gradients, and the model and images of a training with the example in or out."""
    draw = generator(1, "examples")
    images, labels = torch.randn(EXAMPLES, 1, 8, 8, generator=draw) * 3, torch.randint(10, (EXAMPLES,), generator=draw)

    def world(is_in: bool) -> tuple[torch.nn.Module, Tensor]:
        seen = images.clone()
        if not is_in:
            seen[0] = torch.nan  # an example without a finite gradient has no part in the sum
        return build_model("cnn-small", (1, 8, 8), 10, rng=generator(0, "init")), seen

    totals: dict[bool, Tensor] = {}
    for is_in in (True, False):
        model, seen = world(is_in)

        def look(values: dict[str, Tensor], gradients: dict[str, Tensor], is_in: bool = is_in) -> None:
            totals[is_in] = torch.cat([gradient.flatten() for gradient in gradients.values()]) * EXAMPLES

        how = DPSGD(0.0, clip, 1.0, 1, RunInputs(torch.zeros(sum(p.numel() for p in model.parameters())).double()))
        train(model, seen, labels, SGD(0.1), rng=generator(0, "x"), adjust_gradients=look, private=how)
    assert float((totals[True] - totals[False]).norm()) == pytest.approx(clip, rel=1e-3)

    return totals, world


def labels() -> Tensor:
    draw = generator(1, "examples")
    torch.randn(EXAMPLES, 1, 8, 8, generator=draw)
    return torch.randint(10, (EXAMPLES,), generator=draw)


def flat(model: torch.nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def reachable(rule: Rule, before: Tensor, total: Tensor, released: Tensor, dtype: torch.dtype) -> Tensor:
    """Whether a draw of this floating-point type leads from ``total`` to ``released``, by coordinate.

    The released weight falls while the draw rises. So the largest draw is sought that leads to no less than
    ``released``, by bisection over all floating-point numbers in their order.
    """
    whole = {torch.float32: torch.int32, torch.float64: torch.int64}[dtype]

    def numbered(order: Tensor) -> Tensor:
        """The floating-point numbers by their place, negative ones before positive ones."""
        return torch.where(order >= 0, order, torch.iinfo(whole).min - order).to(whole).view(dtype)

    largest = int(torch.tensor(1e3, dtype=dtype).view(whole))
    low = torch.full(total.shape, -largest, dtype=torch.int64)
    high = torch.full_like(low, largest)
    for _ in range(torch.iinfo(whole).bits):
        middle = (low & high) + ((low ^ high) >> 1)  # half way, where the difference would overflow
        reaches = rule(before, total, numbered(middle)) >= released
        low, high = torch.where(reaches, middle, low), torch.where(reaches, high, middle)
    return rule(before, total, numbered(low)) == released


def guess(rule: Rule, before: Tensor, totals: dict[bool, Tensor], released: Tensor, dtype: torch.dtype) -> bool | None:
    """Whether the example was in, or None where both sums explain all that was released."""
    possible = [is_in for is_in, total in totals.items() if bool(reachable(rule, before, total, released, dtype).all())]
    assert possible
    return possible[0] if len(possible) == 1 else None


@pytest.mark.parametrize(("sigma", "clip", "rate"), in_test(SETTINGS, SETTINGS[0]))
def test_the_attack_is_always_right_where_noise_is_added_in_float32(sigma, clip, rate):
    totals, world = example_in_and_out(clip)
    before, rule = flat(world(True)[0]), float32_rule(sigma, clip, rate)
    right = 0
    for trial in range(TRIALS):
        truth = bool(trial % 2)
        draws = KeyedNoise(trial.to_bytes(32, "little")).gaussian(len(before))
        released = rule(before, totals[truth], draws)
        right += guess(rule, before, totals, released, torch.float32) is truth
    assert right == TRIALS


@pytest.mark.full
@pytest.mark.parametrize(("sigma", "clip", "rate"), SETTINGS)
def test_the_attack_can_tell_nothing_from_the_weights_after_a_private_step(sigma, clip, rate):
    totals, world = example_in_and_out(clip)
    before, rule = flat(world(True)[0]), product_rule(sigma, clip, rate)
    decided = 0
    for trial in range(TRIALS):
        truth = bool(trial % 2)
        source = KeyedNoise(trial.to_bytes(32, "little"))
        draws = KeyedNoise(trial.to_bytes(32, "little"))
        model, images = world(truth)
        train(model, images, labels(), SGD(rate), rng=generator(0, "x"), private=DPSGD(sigma, clip, 1.0, 1, source))
        released = flat(model)
        draws.uniform(EXAMPLES)
        known = draws.gaussian(len(before))
        assert torch.equal(rule(before, totals[truth], known), released)  # the attacker's rule is what training does
        decided += guess(rule, before, totals, released, known.dtype) is not None
    assert decided == 0


def test_sums_that_cancel_tell_nothing_either():
    """Near 0 float32 is finer than float64 noise beside a large sum, so that rounding to float32 alone would tell."""
    before, rule = torch.zeros(2000), product_rule(1.0, 1.0, 1.0)
    totals = {True: torch.full((2000,), 0.7), False: torch.full((2000,), -0.001)}
    near = 1e-11 * KeyedNoise(bytes(32)).gaussian(2000)  # what is left of the sum and the noise

    def rounded_alone(before: Tensor, total: Tensor, draws: Tensor) -> Tensor:
        return update(before, (total + draws).float() / EXAMPLES, 1.0)

    for truth in (True, False):
        draws = near - totals[truth]
        told = guess(rounded_alone, before, totals, rounded_alone(before, totals[truth], draws), torch.float64)
        assert told is (None if truth else False)  # beside the small sum noise is finer, and so gives itself away
        assert guess(rule, before, totals, rule(before, totals[truth], draws), torch.float64) is None


def test_every_count_near_by_can_come_from_every_other():
    for count in (7, 8):
        source = KeyedNoise(bytes([count] * 32))
        values = {noisy_count(count, 4.0, source) for _ in range(500)}
        assert values >= set(range(1, 15)), count
