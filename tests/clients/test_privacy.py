"""The key of seeded noise: a text that is frozen, of all settings that make another training of the same data."""

from __future__ import annotations

import pytest

from clients.context import NodeContext
from clients.fedprox import FedProxClient
from clients.privacy import ClientPrivacy, Dependencies
from clients.task import Task
from fedprune_app.config import OPTIONS, has_effect, parse_config
from fedprune_app.learning.sgd import SGD

BASE = {"system": "fedprox", "fedprox.mu": 0.1, "shard-size": 40, "dp.enabled": True, "dp.delta": 1e-3}
BASE |= {"dp.noise-multiplier": 1.0, "lr-decay": 0.9}
ELSEWHERE = {  # why the text need not say it
    "the data, which are another client's; of groups of several examples the text has a word": (
        *("dataset", "partition", "shard-size", "shards-per-client", "samples-per-client", "public-fraction"),
        *("validation-fraction", "test-split", "test-fraction", "dp.unit"),
    ),
    "the tensors with which training begins, or the seed, are in the key beside it": (
        *("system", "model", "init", "batch-norm", "seed"),
    ),
    "who takes part": ("fraction-train", "drop-probability", "holdout-clients", "only-clients"),
    "how the same numbers are computed; a private run refuses what makes others": (
        *("augmentation", "precision", "training-form", "deterministic", "num-threads", "dp.grad-sample"),
    ),
    "what is charged and reported, or whether noise is seeded at all": (
        *("dp.enabled", "dp.secure-rng", "dp.delta", "dp.second-delta", "dp.epsilon-budget", "dp.accountant"),
        *("dp.accuracies", "dp.count-scale"),
    ),
}
OTHERS = {"dp.target-epsilon": {"dp.target-epsilon": 3.0, "dp.noise-multiplier": 0.0}, "batch-size": {"batch-size": 11}}
CHANGING = [
    key
    for key, option in OPTIONS.items()
    if option.changes_results and not option.resumable and has_effect(key, parse_config(BASE))
    if not any(key in keys for keys in ELSEWHERE.values())
]


class Stopped(Exception):
    """Training need not go on."""


class Listening(ClientPrivacy):
    """Stops where noise is asked for, with the text."""

    def noise(self, role, round, public, settings):
        raise Stopped(settings)


class Client(FedProxClient):
    privacy_kind = Listening


@pytest.fixture
def text_of(tmp_path):
    """``text_of(settings)``: what the noise of the second round's training depends on."""

    def text(settings):
        client = Client(parse_config({**BASE, **settings}), NodeContext(0, 4, tmp_path))
        with pytest.raises(Stopped) as stopped:
            client.train(Task(2))
        return str(stopped.value)

    return text


def test_the_text_of_the_key_is_frozen(text_of):
    """Another text is other noise in all seeded private runs: recorded results would change."""
    sgd = SGD(0.1, 0.5, 1e-4, batch_size=8, epochs=3, max_grad_norm=None, steps_per_epoch=2, skips_lone=True)
    trained = (
        "SGD(learning_rate=0.1, momentum=0.5, weight_decay=0.0001, batch_size=8, epochs=3, max_grad_norm=None, "
        "steps_per_epoch=2) 00ff"
    )
    assert str(Dependencies(sgd, "00ff", None, [], 1.0, 2.0, 0.25)) == f"{trained} None 1.0 2.0 0.25"
    own = [("fedprox.mu", 0.2)]
    assert (
        str(Dependencies(sgd, "00ff", 0.5, own, 1.0, 2.0, 0.25)) == f"{trained} 0.5 [('fedprox.mu', 0.2)] 1.0 2.0 0.25"
    )
    grouped = Dependencies(sgd, "00ff", None, own, 1.0, 2.0, 0.25, "3 of each school")
    assert str(grouped) == f"{trained} None [('fedprox.mu', 0.2)] 3 of each school 1.0 2.0 0.25"
    assert text_of({}).startswith("SGD(learning_rate=0.009")


@pytest.mark.parametrize("key", CHANGING)
def test_a_setting_that_changes_training_changes_the_noise(text_of, key):
    value = OPTIONS[key].parse(key, parse_config(BASE).to_dict()[key])
    other = OTHERS.get(key, {key: type(value)(value / 2) or type(value)(1)})
    assert text_of(other) != text_of({})


def test_every_setting_is_in_the_key_or_has_a_reason():
    assert len(CHANGING) == 12
    assert not [key for keys in ELSEWHERE.values() for key in keys if key not in OPTIONS]
