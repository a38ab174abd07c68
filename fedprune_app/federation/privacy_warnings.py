"""Warnings of a private run about δ, budgets and noised accuracies; each is a line for the user."""

from fedprune_app.config import Config
from fedprune_app.core.bounds import rounded_up_text
from fedprune_app.federation.clients import Roster
from fedprune_app.results.statistics import noise_of_mean


def privacy_warnings(config: Config, clients: Roster, headline: str) -> list[str]:
    """Return the warnings; ``headline`` is the metric by which the system is judged."""
    dp = config.dp
    if not dp.enabled:
        return []
    largest, unit = max(clients.values(), key=lambda client: client.num_examples), config.protected_unit
    lines = [
        f"{key} is {delta:g}, and client {largest.id} has {largest.num_examples:,} {unit}s: with so large a δ "
        f"the promise even allows that one {unit} is published; a meaningful δ is below "
        f"{rounded_up_text(1 / largest.num_examples)}"
        for key, delta in {"dp.delta": dp.delta, "dp.second-delta": dp.second_delta}.items()
        if delta * largest.num_examples >= 1
    ]
    if 0 < dp.epsilon_budget < dp.target_epsilon:
        lines.append(
            f"dp.epsilon-budget is {dp.epsilon_budget:g}, less than dp.target-epsilon {dp.target_epsilon:g}: the "
            "noise is chosen for the target, and clients stop at the budget"
        )
    return [*lines, *_noise_warnings(config, clients, headline)]


def _noise_warnings(config: Config, clients: Roster, headline: str) -> list[str]:
    """Return a warning about the noise of accuracies, if it moves their mean by a point or more."""
    if config.dp.accuracies != "noised" or not config.evaluate_every or not headline.startswith("accuracy"):
        return []
    tests_per_example = config.test_fraction / (1 - config.test_fraction) / (1 - config.validation_fraction)
    num_tests = [max(1, round(info.num_examples * tests_per_example)) for info in clients.values()]
    deviations = list(map(config.dp.noise_of_accuracy, num_tests))
    of_mean = noise_of_mean(deviations) or 0
    if of_mean < 0.01:
        return []
    return [
        f"accuracies are told with noise: about ± {100 * max(deviations):.0f} points for the client with the "
        f"fewest test examples, and ± {100 * of_mean:.0f} for the mean over {len(deviations)} clients. "
        "Differences within twice that say nothing. On public data, dp.accuracies=open tells accuracies as they are"
    ]
