"""A client's models do not depend on how many clients its process trains in a step."""

from __future__ import annotations

from fedprune_app.learning import train
from tests.conformance.conftest import CLIENTS, TWO_CASES


@TWO_CASES
def test_a_cohort_of_any_size_ends_with_the_same_models(conform, case):
    assert conform(case, cohort=2).sha256 == conform(case).sha256  # of five clients: two pairs, and one alone


def test_the_clients_of_a_round_are_trained_in_one_step(conform, monkeypatch):
    together = []

    def noting(trainings, inner=train._train):
        together.append(len(trainings))
        return inner(trainings)

    monkeypatch.setattr(train, "_train", noting)
    conform("fedavg", cohort=4)
    assert set(together) == {3, CLIENTS - 3}  # of equal size, or nearly
    together.clear()
    plain = conform("fedavg", cohort=4, training_form="plain")
    assert set(together) == {1}
    assert plain.sha256 == conform("fedavg", cohort=2, training_form="plain").sha256
