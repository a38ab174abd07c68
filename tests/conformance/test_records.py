"""Every number that a run of any system records is declared in ``results/measures.py``."""

from __future__ import annotations

from typing import Any

from fedprune_app.results.measures import MEASURES, Kind
from tests.conformance.conftest import SYSTEM


def is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def is_one(value: Any, kind: Kind) -> bool:
    """Whether a value is what a field of this kind holds."""
    if kind is Kind.NUMBER:
        return is_number(value)
    if kind is Kind.TEXTS:
        return all(isinstance(text, str) for text in value)
    inner = Kind.NUMBER if kind is Kind.BY_NAME else Kind.BY_NAME
    return isinstance(value, dict) and all(is_one(each, inner) for each in value.values())


@SYSTEM
def test_every_number_that_is_recorded_is_declared_as_what_it_is(conform, system):
    run = conform(system)
    kinds = {name: kind for kind, names in MEASURES.kinds.items() for name in names}
    of_rounds, of_clients = {*MEASURES.columns}, {"round", "partition", *MEASURES.of_clients}
    for rows, declared in ((run.rounds, of_rounds), (run.clients, of_clients)):
        assert rows
        for row in rows:
            assert row.keys() <= declared
            assert [name for name, value in row.items() if not is_one(value, kinds[name])] == []
