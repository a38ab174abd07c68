from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fedprune_app.results.reader import Masks, Run
from fedprune_app.results.similarity import compare, correlation, label_cosine, ranks


def run(counts: dict[int, list[int]], distance: list[list[float]], partitions: list[int]) -> Run:
    info = {"partition": [{"partition": partition, "train": train} for partition, train in counts.items()]}
    return Run(Path("x"), info, (), (), Masks.of(7, partitions, distance))


def test_labels_are_compared_by_the_angle_between_their_counts():
    cosine = label_cosine([[1, 1], [3, 3], [5], [0, 0, 2]])
    root = 0.5**0.5
    expected = [[1, 1, root, 0], [1, 1, root, 0], [root, root, 1, 0], [0, 0, 0, 1]]
    np.testing.assert_allclose(cosine, expected, atol=1e-12)
    assert cosine.max() <= 1


def test_ranks_of_equal_values_are_their_mean():
    assert ranks(np.array([0.3, 0.1, 0.3, 0.9])).tolist() == [2.5, 1, 2.5, 4]


def test_values_that_differ_by_rounding_alone_share_their_rank():
    cosines = label_cosine([[7, 5, 4], [3, 3, 1], [6, 6, 2], [9, 9, 3], [21, 21, 7]])[0, 1:]  # equal, on paper
    assert ranks(cosines).tolist() == [2.5] * 4
    assert ranks(np.array([np.nextafter(0.3, 1), 0.3, 0.3 + 1e-6])).tolist() == [1.5, 1.5, 3]


def test_correlation_sees_a_line_and_ranks_see_any_order():
    x = np.array([1.0, 2.0, 3.0, 4.0])
    assert correlation(x, 5 - 2 * x) == pytest.approx(-1)
    assert correlation(x, np.exp(5 * x)) < 0.9
    assert correlation(ranks(x), ranks(np.exp(5 * x))) == pytest.approx(1)


@pytest.mark.parametrize("y", [[1.0, 1.0, 1.0], [0.1 + 0.2, 0.3, 0.3]])
def test_a_correlation_with_what_never_varies_is_undefined(y):
    assert correlation(np.array([1.0, 2.0, 3.0]), np.array(y)) is None
    assert correlation(np.array([1.0, 2.0]), np.array([1.0, 2.0])) is None  # two points are always on a line


def test_clients_are_compared_by_their_number_and_each_pair_counts_once():
    counts = {9: [1, 0], 4: [0, 1], 2: [1, 1], 5: [1, 0]}
    distance = [[0, 0.4, 0.1, 0.3], [0.4, 0, 0.4, 0.2], [0.1, 0.4, 0, 0.3], [0.3, 0.2, 0.3, 0]]
    found = compare(run(counts, distance, [9, 4, 5, 2]))
    assert found.clients == (9, 5, 2, 4)
    assert found.round == 7
    np.testing.assert_allclose(found.mask_distance[0], [0, 0.1, 0.3, 0.4])
    np.testing.assert_allclose(found.label_cosine[0], [1, 1, 0.5**0.5, 0])
    root = 0.5**0.5
    labels, masks = [0, 1, root, 0, root, root], [0.4, 0.1, 0.3, 0.4, 0.2, 0.3]  # 9-4, 9-5, 9-2, 4-5, 4-2, 5-2
    assert found.pearson == pytest.approx(np.corrcoef(labels, masks)[0, 1])
    by_rank = np.corrcoef([1.5, 6, 4, 1.5, 4, 4], [5.5, 1, 3.5, 5.5, 2, 3.5])[0, 1]
    assert found.spearman == pytest.approx(by_rank)


def test_clients_without_labels_are_left_out():
    distance = (1 - np.eye(4)).tolist()
    found = compare(run({0: [0, 0], 1: [1, 2], 2: [3, 0]}, distance, [0, 1, 2, 3]))
    assert found.clients == (2, 1)
    assert found.pearson is found.spearman is None


@pytest.mark.parametrize("info", ['{"partition": null}', '{"partition": [{"partition": 0, "train": [1]}]}', "{}"])
def test_fewer_than_two_clients_are_not_compared(info):
    lonely = Run(Path("x"), json.loads(info), (), (), Masks.of(1, [0, 1], [[0, 1], [1, 0]]))
    assert compare(lonely) is None


def test_a_run_without_masks_is_not_compared():
    assert compare(Run(Path("x"), {"partition": [{"partition": 0, "train": [1]}]}, (), ())) is None
