"""Laws of the partitions: who gets which samples."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedprune_app.data import partitions
from tests.examples import examples, full

CIFAR_LIKE = np.arange(50_000, dtype=np.int64) % 10


def rng(seed=0):
    return np.random.default_rng(seed)


def some_labels(seed, num_samples, num_classes):
    """Unbalanced labels in random order; every class occurs."""
    shares = rng(seed).dirichlet(np.full(num_classes, 5.0))
    drawn = rng(seed).choice(num_classes, size=num_samples, p=shares)
    return np.concatenate([np.arange(num_classes), drawn]).astype(np.int64)


WHOLE = {  # the schemes that use every sample
    "iid": lambda labels, clients, rng: partitions.iid(labels, clients, rng),
    "shards": lambda labels, clients, rng: partitions.shards(labels, clients, 2, 0, rng),
    "dirichlet-class": lambda labels, clients, rng: partitions.dirichlet_class(labels, clients, 1.0, rng),
    "dirichlet-client": lambda labels, clients, rng: partitions.dirichlet_client(labels, clients, 0.1, rng),
}
ALL = WHOLE | {
    "cyclic": lambda labels, clients, rng: partitions.classes(labels, clients, 2, rng),
    "random": lambda labels, clients, rng: partitions.classes(labels, clients, 2, rng, "random"),
}


def volumes(parts):
    return np.array([len(part) for part in parts])


def classes_of(labels, parts):
    return [set(labels[part].tolist()) for part in parts]


@pytest.mark.parametrize("scheme", WHOLE)
@settings(deadline=None, max_examples=examples(40))
@given(
    seed=st.integers(0, 2**32),
    num_samples=st.integers(60, 400),
    num_clients=st.integers(1, 12),
    num_classes=st.integers(1, 12),
)
def test_every_sample_goes_to_exactly_one_client(scheme, seed, num_samples, num_clients, num_classes):
    labels = some_labels(seed, num_samples, num_classes)
    parts = WHOLE[scheme](labels, num_clients, rng(seed))
    assert len(parts) == num_clients
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))


@pytest.mark.parametrize("assignment", ["cyclic", "random"])
@settings(deadline=None, max_examples=examples(60))
@given(
    seed=st.integers(0, 2**32),
    num_clients=st.integers(1, 12),
    num_classes=st.integers(1, 10),
    per_client=st.integers(1, 10),
)
def test_every_sample_of_a_held_class_goes_to_one_of_its_holders(
    assignment, seed, num_clients, num_classes, per_client
):
    assume(per_client <= num_classes)
    labels = np.concatenate([some_labels(seed, 200, num_classes), np.repeat(np.arange(num_classes), num_clients)])
    parts = partitions.classes(labels, num_clients, per_client, rng(seed), assignment)
    held = classes_of(labels, parts)
    assert all(len(own) == per_client for own in held)
    expected = np.flatnonzero(np.isin(labels, list(set.union(*held))))
    assert np.array_equal(np.sort(np.concatenate(parts)), expected)
    if num_clients * per_client >= num_classes and assignment == "random":
        assert len(expected) == len(labels)


@pytest.mark.parametrize("scheme", ALL)
def test_a_partition_is_a_function_of_its_generator(scheme):
    labels = some_labels(3, 500, 5)
    first, again, other = (ALL[scheme](labels, 6, rng(seed)) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("scheme", ALL)
def test_indices_are_sorted_int64(scheme):
    for part in ALL[scheme](some_labels(3, 500, 5), 6, rng()):
        assert part.dtype == np.int64
        assert (np.diff(part) > 0).all()


@pytest.mark.parametrize("scheme", ["iid", "shards", "dirichlet-client"])
@settings(deadline=None, max_examples=25)
@given(num_samples=st.integers(40, 300), num_clients=st.integers(1, 15))
def test_an_uneven_division_is_dealt_out_not_dropped(scheme, num_samples, num_clients):
    labels = np.arange(num_samples) % 7
    sizes = volumes(WHOLE[scheme](labels, num_clients, rng()))
    assert sizes.max() - sizes.min() <= (2 if scheme == "shards" else 1)


def test_cifar_shards_of_the_paper_use_all_images_and_give_at_most_two_labels():
    parts = partitions.shards(CIFAR_LIKE, 100, 2, 250, rng())
    assert volumes(parts).tolist() == [500] * 100
    assert len(np.unique(np.concatenate(parts))) == 50_000
    assert {len(own) for own in classes_of(CIFAR_LIKE, parts)} == {1, 2}


def test_shards_nobody_draws_are_left_out():
    parts = partitions.shards(np.zeros(60_000, dtype=np.int64), 100, 2, 250, rng())  # MNIST: 240 shards
    assert len(np.unique(np.concatenate(parts))) == 50_000


def test_a_shard_is_a_run_of_the_samples_sorted_by_label():
    labels = np.array([1, 0, 1, 0, 2, 2])
    shards = {tuple(part) for part in partitions.shards(labels, 3, 1, 2, rng())}
    assert shards == {(1, 3), (0, 2), (4, 5)}


def test_cyclic_classes_are_those_of_fedp3():
    parts = partitions.classes(CIFAR_LIKE, 100, 5, rng())
    for client, own in enumerate(classes_of(CIFAR_LIKE, parts)):
        assert own == {(client + j) % 10 for j in range(5)}
    assert volumes(parts).tolist() == [500] * 100
    assert all((np.bincount(CIFAR_LIKE[part])[list({*CIFAR_LIKE[part]})] == 100).all() for part in parts)


@pytest.mark.parametrize("assignment", ["cyclic", "random"])
@pytest.mark.parametrize("per_client", [2, 5])
def test_volumes_are_equal_although_classes_are_not(assignment, per_client):
    sizes = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]  # MNIST
    labels = np.repeat(np.arange(10), sizes)
    parts = partitions.classes(labels, 100, per_client, rng(), assignment)
    assert np.abs(volumes(parts) - 600).max() <= 1
    assert len(np.unique(np.concatenate(parts))) == 60_000


def test_random_classes_are_held_equally_often_and_differ_from_cyclic_ones():
    parts = partitions.classes(CIFAR_LIKE, 100, 2, rng(), "random")
    held = classes_of(CIFAR_LIKE, parts)
    assert np.bincount([label for own in held for label in own]).tolist() == [20] * 10
    assert any((max(own) - min(own)) not in (1, 9) for own in held)


def test_samples_of_a_class_that_nobody_holds_are_left_out():
    parts = partitions.classes(np.arange(40) % 10, 3, 1, rng())
    assert classes_of(np.arange(40) % 10, parts) == [{0}, {1}, {2}]
    assert volumes(parts).tolist() == [4, 4, 4]


def label_skew(labels, parts):
    """Mean total variation distance of the clients' label shares from the whole."""
    whole = np.bincount(labels) / len(labels)
    return np.mean([np.abs(np.bincount(labels[p], minlength=len(whole)) / len(p) - whole).sum() / 2 for p in parts])


@pytest.mark.parametrize("scheme", [partitions.dirichlet_class, partitions.dirichlet_client])
def test_a_smaller_alpha_is_more_skewed_and_a_huge_one_is_iid(scheme):
    skews = [label_skew(CIFAR_LIKE, scheme(CIFAR_LIKE, 20, alpha, rng())) for alpha in (0.1, 1.0, 1e6)]
    assert skews[0] > skews[1] > skews[2]
    assert skews[2] < 0.05


def test_dirichlet_class_splits_classes_by_the_moments_of_the_dirichlet_law():
    shares = np.concatenate(
        [
            [np.bincount(CIFAR_LIKE[part], minlength=10) / 5000 for part in parts]
            for parts in (partitions.dirichlet_class(CIFAR_LIKE, 20, 0.5, rng(seed)) for seed in range(20))
        ]
    )
    mean = 1 / 20
    assert shares.mean() == pytest.approx(mean, abs=1e-12)
    assert shares.var() == pytest.approx(mean * (1 - mean) / (20 * 0.5 + 1), rel=0.1)  # Var of Dir(alpha)


@pytest.mark.full
def test_dirichlet_client_follows_the_slow_reference_in_distribution():
    """The papers' loop, redraws and all, on a case in which classes run out."""

    def slow(labels, num_clients, alpha, rng):
        priors = rng.dirichlet(np.full(4, alpha), size=num_clients)
        unused = [list(np.flatnonzero(labels == label)) for label in range(4)]
        room = np.full(num_clients, len(labels) // num_clients)
        parts = [[] for _ in range(num_clients)]
        while room.sum():
            client = rng.integers(num_clients)
            if not room[client]:
                continue
            room[client] -= 1
            while True:
                label = rng.choice(4, p=priors[client])
                if unused[label]:
                    parts[client].append(unused[label].pop())
                    break
        return [np.array(part) for part in parts]

    labels = np.repeat(np.arange(4), [5, 10, 15, 20])

    def purity(scheme, base):
        """Share of the most frequent label of a client, over many draws."""
        parts = [part for s in range(150) for part in scheme(labels, 5, 0.7, rng(base + s))]
        return np.mean([np.bincount(labels[part]).max() / len(part) for part in parts])

    # 750 clients each; the share has a standard deviation of about 0.17, so the means one of 0.006
    assert purity(partitions.dirichlet_client, 0) == pytest.approx(purity(slow, 1000), abs=0.03)


def test_dirichlet_client_ends_when_nobody_prefers_what_is_left():
    labels = np.repeat(np.arange(10), 5)
    for seed in range(20):  # preferences of alpha 1e-6 are one class with certainty, to the last bit
        parts = partitions.dirichlet_client(labels, 5, 1e-6, rng(seed))
        assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(50))


def test_clients_of_a_group_share_their_label_preferences():
    parts = partitions.dirichlet_client(CIFAR_LIKE, 20, 0.3, rng(), num_groups=4)
    assert volumes(parts).tolist() == [2500] * 20
    shares = np.array([np.bincount(CIFAR_LIKE[part], minlength=10) for part in parts]) / 2500
    distances = np.abs(shares[:, None] - shares).sum(axis=2) / 2  # (20, 20) total variation
    group = np.repeat(np.arange(4), 5)  # clients 0 to 4, 5 to 9, ...
    same = group[:, None] == group
    assert distances[same].max() < distances[~same].min() / 2


def test_a_group_for_each_client_is_no_group():
    labels = some_labels(1, 300, 5)
    own, grouped = (partitions.dirichlet_client(labels, 7, 0.3, rng(), num_groups=count) for count in (0, 7))
    assert all(np.array_equal(a, b) for a, b in zip(own, grouped, strict=True))


@settings(deadline=None, max_examples=examples(40))
@given(num_clients=st.integers(1, 12), data=st.data())
def test_groups_change_no_volume(num_clients, data):
    num_groups = data.draw(st.integers(1, num_clients))
    labels = some_labels(2, 100, 4)
    parts = partitions.dirichlet_client(labels, num_clients, 0.5, rng(), num_groups)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    assert volumes(parts).max() - volumes(parts).min() <= 1


def test_dirichlet_class_keeps_its_least_volume():
    parts = partitions.dirichlet_class(CIFAR_LIKE[:500], 20, 0.5, rng(), min_size=8)
    assert volumes(parts).min() >= 8


@settings(deadline=None, max_examples=examples(60))
@given(
    seed=st.integers(0, 2**32),
    num_samples=st.integers(2, 200),
    num_classes=st.integers(1, 8),
    fraction=st.floats(0.01, 0.99),
)
def test_a_stratified_holdout_has_the_label_shares_of_the_whole(seed, num_samples, num_classes, fraction):
    labels = rng(seed).integers(num_classes, size=num_samples)
    kept, held = partitions.stratified_holdout(labels, fraction, rng(seed))
    assert np.array_equal(np.sort(np.concatenate([kept, held])), np.arange(num_samples))
    assert len(held) == min(max(round(fraction * num_samples), 1), num_samples - 1)
    shares = np.bincount(labels) * len(held) / num_samples
    assert (np.abs(np.bincount(labels[held], minlength=len(shares)) - shares) < 1).all()


@settings(deadline=None, max_examples=examples(60))
@given(seed=st.integers(0, 2**32), num_classes=st.integers(1, 8), data=st.data())
def test_a_stratified_sample_has_its_size_and_the_label_shares_of_the_whole(seed, num_classes, data):
    labels = some_labels(seed, 50, num_classes)
    size = data.draw(st.integers(0, len(labels)))
    chosen = partitions.stratified_sample(labels, size, rng(seed))
    assert len(chosen) == size
    assert (np.diff(chosen) > 0).all()
    shares = np.bincount(labels) * size / len(labels)
    assert (np.abs(np.bincount(labels[chosen], minlength=num_classes) - shares) < 1).all()


@pytest.mark.parametrize(
    "fraction",
    [
        0.05,
        0.1,
        0.15,
        0.2,
        0.25,
        0.3,
        full(1 / 3),
        full(0.35),
        full(0.45),
        full(0.5),
        full(0.7),
        full(0.75),
        full(0.95),
    ],
)
def test_what_is_held_out_is_at_most_what_can_have_been(fraction):
    for num_samples in range(2, 400):
        kept, held = map(len, partitions.stratified_holdout(np.zeros(num_samples, dtype=int), fraction, rng()))
        most = partitions.most_held_out(kept, fraction)
        assert held <= most <= max(1, (fraction * kept + 0.5) / (1 - fraction) + 1e-6), num_samples


def test_a_holdout_of_nothing_or_of_a_single_sample_keeps_all():
    for labels, fraction in ((np.zeros(5, dtype=int), 0.0), (np.zeros(1, dtype=int), 0.5)):
        kept, held = partitions.stratified_holdout(labels, fraction, rng())
        assert (len(kept), len(held)) == (len(labels), 0)


LABELS = np.arange(20) % 4


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: partitions.dirichlet_class(LABELS, 11, 1, rng()), "dirichlet-alpha is 1: no draw in 1000"),
        (lambda: partitions.shards(LABELS, 5, 5, 0, rng()), "shards-per-client is 5: 5 clients need 25 shards"),
        (lambda: partitions.shards(LABELS, 5, 2, 3, rng()), "20 samples make 6 of shard-size 3"),
        (lambda: partitions.shards(LABELS, 5, 2, 30, rng()), "20 samples make 0 of shard-size 30"),
        (lambda: partitions.classes(LABELS, 5, 0, rng()), "classes-per-client is 0"),
        (lambda: partitions.classes(LABELS, 5, 5, rng()), "classes-per-client is 5"),
        (lambda: partitions.classes(LABELS, 6, 4, rng()), "6 of 6 clients would share the 5 samples of class 0"),
        (lambda: partitions.dirichlet_class(LABELS, 10, 0.001, rng()), "dirichlet-alpha is 0.001: no draw in 1000"),
    ],
)
def test_what_cannot_be_is_an_error_of_one_line(call, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the message is checked below
        call()
    assert message in str(error.value)
    assert "\n" not in str(error.value)
