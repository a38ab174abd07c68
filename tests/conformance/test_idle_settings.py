"""A setting that is refused because it has no effect is one that nothing reads in such a run."""

from __future__ import annotations

import sys
from collections import defaultdict

import pytest

from fedprune_app.config import OPTIONS, Config, has_effect, parse_config
from fedprune_app.config.common import CommonOptions
from tests.conformance.conftest import TWO_CASES

HANDED_ON = ("/config/", "/data/splits.py", "/registry.py")
"""These files hand all settings on, or compare them."""
READ_IN_VAIN = {
    "data-dir",  # a client puts it in its first answer, which is for clients with folders of their own
    "dispfl.neighbours",  # every topology is told the number
    "dp.planned-rounds",  # read before it is known whether the noise is given or chosen
    # read for each client, also where it trains all layers, of which none is chosen or pruned
    *("density", "fedp3.assignment"),
    *("fedp3.layer-set", "fedp3.local", "fedp3.personal-head"),  # FedCR replaces or refuses them
}


@pytest.fixture
def reads(monkeypatch):
    """By the name of an options class: the fields that code outside ``config`` has read since."""
    found = defaultdict(set)

    def watched(inner):
        def get(self, name):
            file = sys._getframe(1).f_code.co_filename
            ours = any(room in file for room in ("/fedprune_app/", "/strategies/", "/clients/"))
            if ours and not any(each in file for each in HANDED_ON):
                found[type(self)].add(name)
            return inner(self, name)

        return get

    for kind in {CommonOptions, *(type(table) for table in Config().tables)}:
        monkeypatch.setattr(kind, "__getattribute__", watched(kind.__getattribute__), raising=False)
    return found


@TWO_CASES
def test_a_setting_without_effect_is_read_by_nobody(case, conform, settings_of, reads):
    config = parse_config(settings_of(case))
    conform(case, cohort=7)  # a run of its own, since equal runs are shared
    seen = dict(reads)
    read = set()
    for key in OPTIONS:
        table, _, name = key.rpartition(".")
        holder = type(getattr(config, table.replace("-", "_"))) if table else Config
        if name.replace("-", "_") in seen.get(holder, ()):
            read.add(key)
    assert read  # the fixture sees what it should
    assert {key for key in read if not has_effect(key, config)} <= READ_IN_VAIN
