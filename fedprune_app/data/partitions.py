"""Partitions of samples among clients: from labels to one sorted list of indices per client.

Every function is deterministic in its ``rng``, assigns no sample to two clients, and assigns every sample except where
its docstring names the samples left out. Impossible parameters raise a one-line ``ValueError``. The caller checks that
there are at most as many clients as samples.
"""

from bisect import bisect_right
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


_MAX_DRAWS = 1000


def iid(labels: Indices, num_clients: int, rng: np.random.Generator) -> list[Indices]:
    """Shuffle and deal out all samples; volumes differ by at most one sample."""
    return _sort_parts(np.array_split(rng.permutation(len(labels)), num_clients))


def shards(
    labels: Indices,
    num_clients: int,
    shards_per_client: int,
    shard_size: int,
    rng: np.random.Generator,
) -> list[Indices]:
    """Sort by label and cut into shards; each client draws ``shards_per_client`` without replacement.

    ``shard_size=0`` cuts exactly as many shards as are drawn, of sizes that differ by at most one. Every sample is then
    used. A positive size cuts ``len(labels) // shard_size`` shards. As in the paper, undrawn shards and the samples
    after the last full shard are left out. Two shards of a client may have the same label.

    Source: Sub-FedAvg, section 4 (CIFAR-10: 100 clients, 2 shards of 250). Its code sorts unstably; here samples
    of one label keep their order.
    """
    num_drawn = num_clients * shards_per_client
    by_label = np.argsort(labels, kind="stable")
    if shard_size:
        num_shards = len(labels) // shard_size
        pieces = np.split(by_label[: num_shards * shard_size], num_shards) if num_shards else []
    else:
        num_shards = min(num_drawn, len(labels))
        pieces = np.array_split(by_label, num_shards)
    if num_shards < num_drawn:
        size = f" of shard-size {shard_size}" if shard_size else ""
        raise ValueError(
            f"shards-per-client is {shards_per_client}: {num_clients} clients need {num_drawn} shards, "
            f"{len(labels)} samples make {num_shards}{size}"
        )
    shard_numbers = rng.permutation(num_shards)[:num_drawn].reshape(num_clients, shards_per_client)
    return _sort_parts(np.concatenate([pieces[shard] for shard in row]) for row in shard_numbers)


def classes(
    labels: Indices,
    num_clients: int,
    classes_per_client: int,
    rng: np.random.Generator,
    assignment: str = "cyclic",
) -> list[Indices]:
    """Deal each client a fixed number of classes, with volumes as equal as the sizes of the classes allow.

    * ``assignment="cyclic"``: client i holds classes (i+j) mod C, j < ``classes_per_client`` (FedP3, class-wise).
    * ``assignment="random"``: classes are drawn at random, each by as many clients as any other, plus or minus one
      (Dis-PFL, pathological). Dis-PFL's code draws without that balance and assigns samples of a popular class to
      several clients; here no sample is used twice.

    All samples of a class are divided among its holders, at least one each. Samples of a class that no client holds
    (fewer places than classes) are left out. With classes of equal size and equally many holders, all shares are equal.
    Otherwise shares are scaled alternately to equal volumes per client and to the sizes of the classes.
    """
    num_classes = int(labels.max()) + 1
    if not 1 <= classes_per_client <= num_classes:
        raise ValueError(f"classes-per-client is {classes_per_client}, allowed: 1 to {num_classes}")
    if assignment == "cyclic":
        client_classes = (np.arange(num_clients)[:, None] + np.arange(classes_per_client)) % num_classes
    else:
        client_classes = _balanced_classes(num_clients, num_classes, classes_per_client, rng)
    membership = np.zeros((num_clients, num_classes), dtype=bool)
    np.put_along_axis(membership, client_classes, True, axis=1)
    sizes = np.bincount(labels, minlength=num_classes)
    for label in np.flatnonzero(sizes < membership.sum(axis=0)):
        raise ValueError(
            f"classes-per-client is {classes_per_client}: {membership[:, label].sum()} of {num_clients} clients would "
            f"share the {sizes[label]} samples of class {label}"
        )
    return _deal_counts(labels, _equal_volume_counts(membership, sizes), rng)


def dirichlet_class(
    labels: Indices, num_clients: int, alpha: float, rng: np.random.Generator, min_size: int = 2
) -> list[Indices]:
    """Split each class over the clients by proportions p ~ Dir(alpha · 1_K); volumes are unequal.

    The draw is repeated until every client has ``min_size`` samples, at most 1000 times. Every sample is used. Source:
    Hsu et al. 2019 as used by FedML and Fed-LTP, without FedML's cap on the volume of a client.
    """
    sizes = np.bincount(labels)
    for _ in range(_MAX_DRAWS):
        proportions = rng.dirichlet(np.full(num_clients, alpha), size=len(sizes))  # (C, K)
        ends = np.rint(np.cumsum(proportions, axis=1) * sizes[:, None]).astype(np.int64)
        counts = np.diff(ends, axis=1, prepend=0).T  # (K, C)
        if counts.sum(axis=1).min() >= min_size:
            return _deal_counts(labels, counts, rng)
    raise ValueError(
        f"dirichlet-alpha is {alpha:g}: no draw in {_MAX_DRAWS} gave each of {num_clients} clients {min_size} of "
        f"{len(labels)} samples; allowed: a larger alpha or fewer clients"
    )


def dirichlet_client(
    labels: Indices, num_clients: int, alpha: float, rng: np.random.Generator, num_groups: int = 0
) -> list[Indices]:
    """Deal equal volumes (±1) to clients, each with its own label preferences p ~ Dir(alpha · 1_C).

    With ``num_groups`` clients form that many groups of consecutive numbers, of sizes that differ by at most one, and
    share a group's preference (Dis-PFL, figure 5: 20 clients, 4 groups). With 0 every client has its own.

    These steps are repeated until all clients are full:

    1. Draw a client uniformly among those with room.
    2. Draw a class from the client's preferences.
    3. Take an unused sample of that class.

    A class that is used up is no longer drawn; the papers' redrawing is equivalent. A client whose preferred classes
    are all used up draws from the rest, where the papers' code loops forever. Every sample is used. Source: Dis-PFL,
    section 5.1, and FedP3, appendix.
    """
    sizes = np.bincount(labels)
    num_groups = num_groups or num_clients
    group = np.arange(num_clients) * num_groups // num_clients
    preferences = rng.dirichlet(np.full(len(sizes), alpha), size=num_groups)[group]  # (K, C)
    room = [len(part) for part in np.array_split(labels, num_clients)]
    open_clients = list(range(num_clients))
    counts = np.zeros((num_clients, len(sizes)), dtype=np.int64)
    samples_left = sizes.tolist()
    steps = _cumulative_preferences(preferences, sizes)
    for client_draw, label_draw in rng.random((len(labels), 2)).tolist():
        position = int(client_draw * len(open_clients))
        client = open_clients[position]
        label = bisect_right(steps[client], label_draw)
        counts[client, label] += 1
        room[client] -= 1
        samples_left[label] -= 1
        if not room[client]:
            open_clients[position] = open_clients[-1]
            open_clients.pop()
        if open_clients and not samples_left[label]:
            steps = _cumulative_preferences(preferences, np.array(samples_left))
    return _deal_counts(labels, counts, rng)


def stratified_holdout(labels: Indices, fraction: float, rng: np.random.Generator) -> tuple[Indices, Indices]:
    """Return positions (kept, held out); the random held-out share has the overall label distribution.

    The share is round(fraction · n) samples, drawn by :func:`stratified_sample`. If ``fraction > 0``, at least one
    sample is held out and at least one is kept; a single sample is kept.
    """
    total = min(max(round(fraction * len(labels)), 1), len(labels) - 1) if fraction > 0 else 0
    if total <= 0:
        return np.arange(len(labels)), np.arange(0)
    held_out = stratified_sample(labels, total, rng)
    return np.setdiff1d(np.arange(len(labels)), held_out), held_out


def most_held_out(num_kept: int, fraction: float) -> int:
    """Return the most samples, at least 1, that :func:`stratified_holdout` can hold out while it keeps ``num_kept``.

    Of n samples at most ``fraction · n + 1/2`` are held out. The quotient is often a whole number that floats miss.
    """
    return max(1, int((fraction * num_kept + 0.5) / (1 - fraction) * (1 + 1e-9)))


def stratified_sample(labels: Indices, size: int, rng: np.random.Generator) -> Indices:
    """Return sorted positions of ``size`` random samples, at most ``len(labels)``, with the label distribution of all.

    Labels get their share of ``size`` by largest remainder, ties to the smaller label.
    """
    counts, remainders = np.divmod(np.bincount(labels) * size, len(labels))
    counts[np.argsort(-remainders, kind="stable")[: size - counts.sum()]] += 1
    return np.sort(np.concatenate(take_per_label(labels, counts, rng)))


def take_per_label(labels: Indices, counts: NDArray[np.int64], rng: np.random.Generator) -> list[Indices]:
    """Draw, per label, the positions of ``counts[label]`` random samples of this label, without replacement."""
    return [rng.permutation(np.flatnonzero(labels == label))[:count] for label, count in enumerate(counts.tolist())]


def _balanced_classes(num_clients: int, num_classes: int, classes_per_client: int, rng: np.random.Generator) -> Indices:
    """Draw (K, k) classes, distinct in a row, each in equally many rows plus or minus one.

    Every client takes the classes taken least so far, at random among equals.
    """
    num_holders = np.zeros(num_classes, dtype=np.int64)
    client_classes = np.empty((num_clients, classes_per_client), dtype=np.int64)
    for client in range(num_clients):
        client_classes[client] = np.lexsort((rng.random(num_classes), num_holders))[:classes_per_client]
        num_holders[client_classes[client]] += 1
    return client_classes


def _equal_volume_counts(membership: NDArray[np.bool_], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return counts (K, C), positive where held; columns sum to the classes' sizes, rows are as equal as possible."""
    num_clients = len(membership)
    holders = membership.sum(axis=0)
    surplus = np.where(holders > 0, sizes - holders, 0)  # samples beyond the one of every holder
    volume = sizes[holders > 0].sum() / num_clients - membership.sum(axis=1)
    shares = membership.astype(np.float64)
    for _ in range(100):  # iterative proportional fitting; it ends on the columns, which must be exact
        shares *= _ratio(volume, shares.sum(axis=1))[:, None]
        shares *= _ratio(surplus, shares.sum(axis=0))
    counts = np.floor(shares + 1e-6).astype(np.int64)
    for label in range(len(sizes)):  # the samples left by rounding down go to the smallest volumes
        clients = np.flatnonzero(membership[:, label])
        num_missing = int(surplus[label] - counts[:, label].sum())
        deficit = (volume - counts.sum(axis=1))[clients]
        counts[clients[np.argsort(-deficit, kind="stable")[:num_missing]], label] += 1
    return counts + membership


def _ratio(numerator: NDArray[np.float64], denominator: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.divide(numerator, denominator, out=np.zeros(len(denominator)), where=denominator > 0)


def _cumulative_preferences(preferences: NDArray[np.float64], samples_left: NDArray[np.int64]) -> list[list[float]]:
    """Return, per client, cumulative preferences over the classes with samples left, ending in exactly 1.

    A client without any preference for these classes draws them in proportion to the samples left.
    """
    weights = preferences * (samples_left > 0)
    weights[weights.sum(axis=1) <= 0] = samples_left
    ends = np.cumsum(weights, axis=1)
    steps: list[list[float]] = (ends / ends[:, -1:]).tolist()
    return steps


def _deal_counts(labels: Indices, counts: NDArray[np.int64], rng: np.random.Generator) -> list[Indices]:
    """Assign client k ``counts[k, c]`` random samples of class c; counts are (K, C)."""
    parts: list[list[Indices]] = [[] for _ in counts]
    for label, column in enumerate(counts.T):
        members = rng.permutation(np.flatnonzero(labels == label))
        for part, piece in zip(parts, np.split(members, np.cumsum(column))[:-1], strict=True):
            part.append(piece)
    return _sort_parts(np.concatenate(part) for part in parts)


def _sort_parts(parts: Iterable[Indices]) -> list[Indices]:
    return [np.sort(part).astype(np.int64) for part in parts]
