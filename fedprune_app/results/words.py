"""What a comparison found, in words: the first paragraph of the report."""

from collections.abc import Iterator, Sequence

from fedprune_app.results.columns import traffic_of
from fedprune_app.results.differences import of_the_same_data
from fedprune_app.results.figures.common import number_of
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
    return Statistic.of(run.last(OWN) for run in group.runs)


def traffic(group: Group) -> Statistic | None:
    return Statistic.of(map(traffic_of, group.runs))


def _sentences(groups: Sequence[Group]) -> Iterator[str]:
    accuracy = {group.label: 100 * statistic.mean for group in groups if (statistic := own_accuracy(group))}
    best = max(groups, key=lambda group: accuracy[group.label])
    reference = next((group for group in groups if group.system == REFERENCE), best)
    yield f"With {reference.label}, clients' own models have {accuracy[reference.label]:.1f} %."
    for group in groups:
        if group is not reference:
            points = accuracy[group.label] - accuracy[reference.label]
            beside = f"{abs(points):.1f} points {'above' if points > 0 else 'below'}{_cost(group, reference)}"
            yield f"With {group.label} they have {accuracy[group.label]:.1f} %, {beside}."
    num_clients = len(reference.runs[0].info.get("partition") or ())
    counts = f"{number_of(len(reference.runs), 'seed')}, {number_of(num_clients, 'client')}"
    yield f"{counts}: another seed may differ."


def _cost(group: Group, reference: Group) -> str:
    operations = [Statistic.of(run.total("flops") for run in side.runs) for side in (group, reference)]
    pairs = (("traffic", traffic(group), traffic(reference)), ("operations of training", operations[0], operations[1]))
    shares = [
        f"{ours.mean / theirs.mean:,.2f} times the {quantity}"
        for quantity, ours, theirs in pairs
        if ours and theirs and theirs.mean
    ]
    return f", for {' and '.join(shares)}" if shares else ""
