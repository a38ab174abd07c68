"""What a comparison found, in words: the first paragraph of the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedprune_app.results.columns import traffic_of
from fedprune_app.results.differences import of_the_same_data
from fedprune_app.results.groups import Group, Statistic
from fedprune_app.results.tables import OWN

REFERENCE = "fedavg"
"""What the others are compared with, if it is there: the dense method that everybody knows."""


def comparison(groups: Sequence[Group]) -> list[str]:
    """Return sentences on the clients' own models of each group, beside those of FedAvg or of the most accurate group.

    Groups whose clients have the same data are compared, and runs that did not complete are left out.
    """
    complete_groups = [group for group in groups if not group.runs[0].flaw and own_accuracy(group)]
    return [line for family in of_the_same_data(complete_groups) if len(family) > 1 for line in _sentences(family)]


def own_accuracy(group: Group) -> Statistic | None:
    """Return the mean accuracy in [0, 1] of the clients' own models, in the last evaluation."""
    return Statistic.of(run.last(OWN) for run in group.runs)


def traffic(group: Group) -> Statistic | None:
    """Return the bytes of training, as :func:`~fedprune_app.results.columns.traffic_of` has them of a run."""
    return Statistic.of(map(traffic_of, group.runs))


def _sentences(groups: Sequence[Group]) -> Iterator[str]:
    accuracy = {group.label: 100 * statistic.mean for group in groups if (statistic := own_accuracy(group))}
    standalone_groups = [group for group in groups if group.system == "standalone"]
    federated_groups = [group for group in groups if group not in standalone_groups]
    for group in standalone_groups:
        yield f"A client that trains alone ({group.label}) has {accuracy[group.label]:.1f} % on average."
    best = max(federated_groups or standalone_groups, key=lambda group: accuracy[group.label])
    reference = next((group for group in federated_groups if group.system == REFERENCE), best)
    reference_accuracy = accuracy[reference.label]
    if reference in federated_groups:
        yield f"With {reference.label}, clients' own models have {reference_accuracy:.1f} %."
    for group in federated_groups:
        if group is not reference:
            points = accuracy[group.label] - reference_accuracy
            beside = f"{abs(points):.1f} points {'above' if points > 0 else 'below'}{_cost(group, reference)}"
            yield f"With {group.label} they have {accuracy[group.label]:.1f} %, {beside}."
    count = "One seed" if len(reference.runs) == 1 else f"{len(reference.runs)} seeds"
    yield f"{count}, {len(reference.runs[0].info.get('partition') or ())} clients: another seed may differ."


def _cost(group: Group, reference: Group) -> str:
    operations = [Statistic.of(run.total("flops") for run in side.runs) for side in (group, reference)]
    pairs = (("traffic", traffic(group), traffic(reference)), ("operations of training", operations[0], operations[1]))
    shares = [
        f"{_times(ours.mean / theirs.mean)} the {quantity}"
        for quantity, ours, theirs in pairs
        if ours and theirs and theirs.mean
    ]
    return f", for {' and '.join(shares)}" if shares else ""


def _times(ratio: float) -> str:
    if ratio < 0.005:
        return "next to none of"
    if 0.995 <= ratio < 1.005:
        return "all of"
    return f"{ratio:.2f} of" if ratio < 1.95 else f"{ratio:.1f} times" if ratio < 9.95 else f"{ratio:.0f} times"
