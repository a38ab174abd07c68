"""Answers on somebody's own data, made of finished runs: whether to federate, how to prune, what privacy costs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from fedprune_app.files import replace_file
from fedprune_app.results.differences import OWN, Difference, accuracies, difference
from fedprune_app.results.groups import NOT_MEASURED, Group
from fedprune_app.results.metrics import MEGABYTE
from fedprune_app.results.reader import Run
from fedprune_app.results.report import filled

ALONE = "standalone"
FEDERATED = "fedavg-ft"  # fixed beforehand, as the first of the tuned comparison in docs/evidence.md
_WORDS = {ALONE: "training alone", FEDERATED: "FedAvg-FT"}
MARGIN = 0.01  # so far behind counts as level
_FEWEST = 3  # seeds
_UNFINISHED = "cannot be told: runs of it have failed"
NO_RATES = "no time was left to choose learning rates"  # a note
_BYTES_PER_SECOND = 10e6 / 8  # at 10 Mbit/s


@dataclass(frozen=True)
class Answer:
    """One line for a question, and what it rests on."""

    question: str
    answer: str
    details: tuple[str, ...] = ()


Methods = Mapping[str, Group]  # by the name of a system; of private ones it ends in " private"


def private(system: str) -> str:
    return f"{system} private"


def _between(methods: Methods, first: str, second: str, client: int | None = None) -> Difference | None:
    """Return how far the first method's own models are ahead on test data, over all clients or of one client."""
    if first not in methods or second not in methods:
        return None
    first_pairs, second_pairs = (
        {key: value for key, value in accuracies(methods[name]).items() if client in (None, key[1])}
        for name in (first, second)
    )
    return difference(first_pairs, second_pairs, of_other_seeds=True)


def points(found: Difference) -> str:
    if len(found.by_seed) < 2:
        return f"{100 * found.mean:+.1f} points"
    return f"{100 * found.mean:+.1f} points ({100 * found.low:+.1f} to {100 * found.high:+.1f})"


def is_ahead(found: Difference, margin: float = 0.0) -> bool | None:
    """Return whether other seeds would show a difference above ``-margin``; None where these cannot tell."""
    if len(found.by_seed) < _FEWEST or found.low <= -margin <= found.high:
        return None
    return found.low > -margin


def _open(found: Difference) -> str:
    count = len(found.by_seed)
    return f"cannot be told with {count} seed{'s' * (count != 1)}"


def federate(methods: Methods, names: Sequence[str]) -> Answer:
    """Answer whether the sites should federate, by a method that was fixed beforehand."""
    question = "Should these sites federate?"
    if (found := _between(methods, FEDERATED, ALONE)) is None:
        return Answer(question, _UNFINISHED)
    word = {True: "yes", False: "no", None: _open(found)}[is_ahead(found)]
    details = []
    by_site = {name: _between(methods, FEDERATED, ALONE, client) for client, name in enumerate(names)}
    if sites := {name: site for name, site in by_site.items() if site is not None}:
        best = max(sites, key=lambda name: sites[name].mean)
        losers = ", ".join(name for name, site in sites.items() if is_ahead(site) is False)
        losses = f"clearly worse off: {losers}" if losers else "no site clearly loses"
        details.append(f"{best} gains most, {points(sites[best])}; {losses}")
    if own := _between(methods, "fedavg", ALONE):
        details.append(f"FedAvg's clients after their local training: {points(own)}")
    return Answer(question, f"{word}: {points(found)} with {_WORDS[FEDERATED]} against {_WORDS[ALONE]}", tuple(details))


def prune(methods: Methods, sparse: Sequence[str], shares: Mapping[str, str]) -> Answer:
    """Answer whether to prune: the sparse methods beside FedAvg-FT or training alone, by validation the better one."""
    question = "Should you prune, and how?"
    dense = max((FEDERATED, ALONE), key=lambda name: validation_of(methods[name]) if name in methods else 0.0)
    verdicts, details = [], []
    for name in sparse:
        if (found := _between(methods, name, dense)) is None:
            continue
        verdicts.append(verdict := is_ahead(found, MARGIN))
        words = {True: "at most a point behind", False: "more than a point behind", None: _open(found)}[verdict]
        if is_ahead(found):
            words = "ahead"
        text = f"{name}: {words}, {points(found)} against {_WORDS[dense]}{_saved(methods[name], methods[dense])}"
        details.append(text + shares.get(name, ""))
    if not verdicts:
        return Answer(question, _UNFINISHED)
    answer = "cannot be told: no sparse method is shown to be at most a point behind"
    if True in verdicts:
        answer = f"yes, with {details.pop(verdicts.index(True))}"
    elif None not in verdicts:
        answer = "no: each sparse method is more than a point behind"
    return Answer(question, answer, tuple(details))


def _saved(sparse: Group, dense: Group) -> str:
    kept = sparse.last("density_mean")
    words = f"; {kept.mean:.0%} of the weights" if kept else ""
    if dense.system == ALONE or not (dense_bytes := _bytes_of(dense)):
        return words
    return f"{words}, {_bytes_of(sparse) / dense_bytes:.0%} of the traffic"


def _bytes_of(group: Group) -> float:
    """Return what all nodes send and receive: what goes to a neighbour passes the server."""
    return fmean((run.total("bytes_up") or 0) + (run.total("bytes_down") or 0) for run in group.runs)


def privacy(methods: Methods, epsilon: float) -> Answer:
    """Answer what privacy costs: each private method beside itself without privacy, and beside training alone."""
    question = "What does privacy cost?"
    if not epsilon:
        return Answer(question, "not asked: with --epsilon 8 private methods run too")
    costs = {
        group.system: found
        for name, group in methods.items()
        if name == private(group.system) and (found := _between(methods, name, group.system))
    }
    details = tuple(
        f"ε {epsilon:g} with {system}: {points(found)} against the same without privacy"
        for system, found in costs.items()
    )
    if (worth := _between(methods, private("fedavg"), ALONE)) is None:
        return Answer(question, _UNFINISHED, details)
    if "fedavg" in costs and is_ahead(costs["fedavg"]):  # noise teaches nothing
        unsuited = "its learning rate or its rounds do not suit these data; give more minutes"
        return Answer(
            question, f"cannot be told: FedAvg is more accurate with noise than without, so {unsuited}", details
        )
    word = {
        True: "worth it",
        False: "not worth it: a site alone tells nobody anything, and is more accurate",
        None: f"whether it is worth it {_open(worth)}",
    }[is_ahead(worth)]
    text = f"{word}; private FedAvg at ε {epsilon:g} has {points(worth)} against training alone without privacy"
    return Answer(question, text, details)


def cost_of(group: Group, num_sites: int) -> str:
    """Return what a run on nodes would take: sites compute at the same time, at most as long as all took in turns."""
    by_site = _bytes_of(group) / num_sites
    seconds = max(run.info["seconds"] for run in group.runs) + by_site / _BYTES_PER_SECOND
    return f"{by_site / MEGABYTE:,.1f} MB and at most {seconds / 60:.1f} minutes a site, at 10 Mbit/s"


def validated(run: Run) -> float:
    """Return the validation accuracy by which alone anything is chosen: after a last phase, but for private runs."""
    return run.last("accuracy_last_phase_validation_mean") or run.last("accuracy_validation_mean") or 0.0


def validation_of(group: Group) -> float:
    return fmean(map(validated, group.runs))


@dataclass(frozen=True)
class Advice:
    """Finished runs of several methods on the same sites, and what follows from them.

    ``names`` are those of the sites by number. ``summaries`` say what each system is. ``models`` are the site and the
    file of each exported model, and ``matrix`` is the file of the runs. ``shares`` say of sparse methods what their
    files save.
    """

    methods: Methods
    summaries: Mapping[str, str]
    names: Sequence[str]
    epsilon: float
    sparse: Sequence[str]
    shares: Mapping[str, str]
    models: Sequence[tuple[str, Path]]
    notes: Sequence[str]
    matrix: Path

    @property
    def answers(self) -> tuple[Answer, ...]:
        return (
            federate(self.methods, self.names),
            prune(self.methods, self.sparse, self.shares),
            privacy(self.methods, self.epsilon),
        )

    @property
    def has_chosen_rates(self) -> bool:
        return NO_RATES not in self.notes

    @property
    def method_rows(self) -> list[list[str]]:
        """A row for each method: its name, what it is, mean accuracy in percent, and what it would take on nodes."""
        rows = []
        for name, group in self.methods.items():
            what = self.summaries[group.system] + (
                f", with ε {self.epsilon:g}" if name == private(group.system) else ""
            )
            found = group.last(OWN)
            accuracy = f"{100 * found.mean:.1f}" if found else NOT_MEASURED
            rows.append([name, what, accuracy, cost_of(group, len(self.names))])
        return rows

    @property
    def site_rows(self) -> list[list[str]]:
        """A row for each site: accuracy alone and federated in percent, and their difference with its interval."""
        rows = []
        for client, name in enumerate(self.names):
            means = []
            for system in (ALONE, FEDERATED):
                pairs = accuracies(self.methods[system]).items() if system in self.methods else ()
                found = [value for (_, k), value in pairs if k == client]
                means.append(f"{100 * sum(found) / len(found):.1f}" if found else NOT_MEASURED)
            gain = _between(self.methods, FEDERATED, ALONE, client)
            rows.append([name, *means, points(gain) if gain else NOT_MEASURED])
        return rows


def write_advice(advice: Advice, out: Path) -> Path:
    replace_file(out, filled(__package__, "templates/advice.html", advice=advice).encode())
    return out
