"""Fed-LTP, Fed-SPA and DP-Fed against an independent slow reference: choices exactly, weights closely, noise included.

The product's noise hangs on every bit of the model it is added to, which a reference does not have: for these tests
both sides draw from streams that (purpose, client, round) alone determine.
"""

from __future__ import annotations

import pytest
import torch

from fedprune_app.privacy import noise
from tests.examples import in_test
from tests.known_noise import KnownNoise
from tests.strategies import reference_fedltp as reference

COMMON = {
    "clients": 6,
    "num_server_rounds": 3,
    "fraction_train": 0.5,
    "partition": "iid",
    "shard_size": 0,
    "samples_per_client": 100,
    "local_epochs": 1,
    "steps_per_epoch": 12,
    "lr_decay": 0.9,
    "validation_fraction": 0.2,
    "evaluate_every": 3,
    "fedltp_ticket_iterations": 25,
    "fedltp_tickets": 2,
}
PRIVATE = {
    "dp_enabled": True,
    "dp_noise_multiplier": 0.5,
    "dp_clip_norm": 1.5,
    "dp_count_scale": 3.0,
    "dp_delta": 1e-3,
}
FEDLTP = {
    "one-shot": {"density": 0.4},
    "one-shot, private": {"density": 0.4, **PRIVATE},
    "iterative, private": {"density": 0.8, "fedltp_pruning": "iterative", "fedltp_further_pruned": 0.4, **PRIVATE},
    "iterative, private, line 9 as printed": {
        "density": 0.8,
        "fedltp_pruning": "iterative",
        "fedltp_further_pruned": 0.4,
        "fedltp_average": "participants",
        **PRIVATE,
    },
    "iterative, the round's clients validate, trained values": {
        "density": 0.7,
        "fedltp_pruning": "iterative",
        "fedltp_further_pruned": 0.2,
        "fedltp_validators": "selected",
        "fedltp_start": "trained",
        "learning_rate": 0.01,
        **PRIVATE,
    },
    "rule 9, anew, no validation": {
        "density": 0.7,
        "fedltp_rule": "relative-threshold",
        "fedltp_start": "random",
        "fedltp_validators": "none",
        "fedltp_pruning": "iterative",
    },
    "without tickets": {"fedltp_tickets": 0, "fedltp_pruning": "iterative", "fedltp_further_pruned": 0.3},
    "several epochs, unequal clients": {
        "density": 0.5,
        "steps_per_epoch": 0,
        "local_epochs": 2,
        "partition": "dirichlet-class",
        "seed": 2,
        **PRIVATE,
    },
}
BASELINES = {
    "dpfed, private": {"system": "dpfed", **PRIVATE},
    "dpfed, unequal clients": {"system": "dpfed", "partition": "dirichlet-class"},
    "fedspa, private": {"system": "fedspa", "fedspa_share": 0.3, **PRIVATE},
    "fedspa, adam, private": {
        "system": "fedspa",
        "fedspa_share": 0.6,
        "fedspa_acceleration": "adam",
        "fedspa_server_learning_rate": 0.03,
        **PRIVATE,
    },
    "fedspa, momentum": {"system": "fedspa", "fedspa_share": 0.5, "fedspa_acceleration": "momentum"},
}


@pytest.fixture(scope="module")
def finished(federation):
    runs = {}

    def run(**settings):
        key = repr(settings)
        if key not in runs:

            def stream(secure, seed, role, partition, round, inputs, settings):
                return KnownNoise(reference.rng.generator(seed, f"shared noise of {role}", partition, round))

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(noise, "noise_source", stream)
                runs[key] = federation(fresh=True, **{**COMMON, **settings})
        return runs[key]

    return run


def close(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("case", in_test(FEDLTP, "one-shot"))
def test_fedltp_is_what_its_algorithms_say(finished, case):
    run = finished(system="fedltp", **FEDLTP[case])
    expected = reference.fedltp(run.config, run.num_clients)
    assert min(expected.margins) > 1e-7  # no mask hangs on float noise
    assert run.info["ticket"].get("correct", []) == expected.counts
    assert run.info["ticket"].get("chosen", 0) == expected.chosen
    assert run.info["best_round"] == expected.best
    if run.config.fedltp.validators != "none":
        told = [row["validation_score"] for row in run.rounds]
        assert told == pytest.approx([score / examples for score, examples in expected.scores])
    for partition, weights in expected.trained.items():
        mine = run.client(partition)[1]
        close(mine.group("weights"), weights)
        for name, mask in mine.group("masks").items():
            assert not bool(mine.group("weights")[name][~mask].any())
    close(run.server, expected.model)
    for name in reference.WEIGHTS:
        assert torch.equal(run.server[name] != 0, expected.model[name] != 0)


@pytest.mark.parametrize("case", in_test(BASELINES, "dpfed, unequal clients"))
def test_the_baselines_are_what_their_algorithms_say(finished, case):
    run = finished(**BASELINES[case])
    expected = reference.baseline(run.config, run.num_clients)
    for partition, weights in expected.trained.items():
        close(run.client(partition)[1].group("weights"), weights)
    close(run.server, expected.model)
