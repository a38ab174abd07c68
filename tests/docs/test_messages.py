"""The page of messages names every field that a client of the product may send."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from clients.node import declared
from fedprune_app.registry import SYSTEMS
from tests.docs.blocks import ROOT

NAMED = set(re.findall(r"`([a-z0-9/-]+)", (ROOT / "docs" / "concepts" / "wire.md").read_text()))


@pytest.mark.parametrize("system", ["fedavg", "dispfl", "fedfomo", "fedltp", "subfedavg-hy", "fedspallm"])
def test_the_page_names_every_field_that_replies_may_have(system):
    may_have = declared(SYSTEMS[system].client)
    names = {name for each in fields(may_have) for name in getattr(may_have, each.name)}
    assert names - NAMED == set()
