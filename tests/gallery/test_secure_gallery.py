"""Methods of the gallery whose servers only add replies up: secure sums give the same models, and show no update."""

from __future__ import annotations

import pytest

from fedprune_app.engine import wire
from fedprune_app.engine.secure_aggregation import MASKED
from fedprune_app.engine.simulated_grid import InProcessGrid
from fedprune_app.testing import lasting, run_with
from tests.examples import in_test
from tests.gallery.federations import file_of, settings_of

pytestmark = pytest.mark.usefixtures("no_plugins")
MORE = {"fedbn": {"model": "cnn-small-bn"}}
METHODS = ["ssfl", "fedper", "fedbn", "scaffold", "apfl", "lpft"]


@pytest.mark.parametrize("name", in_test(METHODS, "ssfl"))
def test_a_method_has_the_same_models_with_secure_sums_and_without(tmp_path, name):
    sent = []

    class Watched(InProcessGrid):
        def pull_messages(self, message_ids):
            for reply in super().pull_messages(message_ids):
                if not reply.has_error() and wire.PAYLOAD in reply.content:
                    sent.append(wire.payload_of(reply.content, 10**8))
                yield reply

    settings = {**settings_of(name), **MORE.get(name, {}), "fraction-train": 0.8}
    plain = run_with(settings, tmp_path / "plain", clients=4)
    secure = run_with({**settings, "secure-sums": True}, tmp_path / "secure", Watched, clients=4)
    assert secure.sha256 == plain.sha256
    assert lasting(secure.rounds) == lasting(plain.rounds)
    assert len(sent) >= 6
    assert all(payload.tensors.keys() == {MASKED} for payload in sent), "and SSFL's scores are no exception"


def test_a_run_of_a_plug_in_with_secure_sums_is_tried_before_it_starts(fedprune):
    code, said = fedprune(
        "check", "--plugin", file_of("ssfl"), "system=ssfl", "secure-sums=true", "fraction-train=1", "--clients", 4
    )
    assert code == 0, said
