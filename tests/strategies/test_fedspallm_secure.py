"""Secure sums in whole runs: the same model with and without, whoever is lost on the way, and nothing seen of one."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from fedprune_app import server_app
from fedprune_app.config import ConfigError, parse_config
from fedprune_app.core.hessians import IntegerMoments, packed_upper, unpacked
from fedprune_app.engine import wire
from fedprune_app.engine.exchange import TooFewReplies
from fedprune_app.engine.secure_aggregation import MASKED, STAGE
from fedprune_app.engine.simulated_grid import run_in_process
from fedprune_app.models.layer_pruning import input_matrices
from fedprune_app.models.llm import LanguageModel
from fedprune_app.preflight.inputs import RunInputs
from fedprune_app.preflight.prepare import prepare
from fedprune_app.privacy.accounting import Steps, epsilon
from strategies.merging import Compression, load_sums
from strategies.pruned_model import PrunedModel
from tests.conftest import Finished, wrapped_app
from tests.refusing import refuses
from tests.strategies.test_fedspallm import cut_off, family, llm, resumed, segments_of, settings, texts

__all__ = ["family", "llm", "settings", "texts"]  # fixtures


@pytest.fixture(scope="session", params=["llama"])
def family(request):  # noqa: F811 - one is enough
    return request.param


@pytest.fixture
def wanted(settings):
    return {**settings, "fedspallm.merge": "hessians"}


@pytest.fixture
def run(wanted, tmp_path):
    """``run(app=..., clients=3, **settings)`` runs anew, and returns the run."""

    def go(app=None, clients=3, **more):
        folder = tmp_path / str(len([*tmp_path.iterdir()]))
        given = {name.replace("_", "-"): value for name, value in more.items()}
        given = {name.replace("fedspallm-", "fedspallm.").replace("dp-", "dp."): v for name, v in given.items()}
        config = parse_config({**wanted, "out-dir": str(folder), **given})
        run_in_process(server_app.app, app or losing({}), clients, config.to_dict())
        return Finished(folder)

    return go


def losing(lost, sent=None):
    """The real app, whose clients in ``lost`` fail at a stage of the sum (None: of a plain run), as if they had gone.

    The payloads of the others are added to ``sent``.
    """

    def train(message, context, honest):
        stage = wire.fields_of(message.content).get(STAGE)
        if context.node_config["partition-id"] in lost.get(stage, ()):
            raise OSError("gone")
        reply = honest(message, context)
        if sent is not None and wire.PAYLOAD in reply.content:
            sent.append(wire.payload_of(reply.content, 10**8))
        return reply

    return wrapped_app(train)


@pytest.mark.parametrize("layers_per_exchange", [1, 0])
def test_a_run_ends_with_the_same_model_with_secure_sums_and_without(run, layers_per_exchange):
    sent = []
    plain = run(fedspallm_layers_per_exchange=layers_per_exchange)
    secure = run(losing({}, sent), fedspallm_layers_per_exchange=layers_per_exchange, secure_sums=True)
    assert secure.sha256 == plain.sha256
    columns = ("replies", "failures", "perplexity_global", "density_global")
    assert [[row[name] for name in columns] for row in secure.rounds] == [
        [row[name] for name in columns] for row in plain.rounds
    ]
    assert [row["layers_pruned"] for row in secure.clients] == [row["layers_pruned"] for row in plain.clients]
    assert len(sent) == 6
    assert all(payload.tensors.keys() == {MASKED} for payload in sent)


def test_a_private_run_ends_with_the_same_model_with_secure_sums_and_without(run):
    """Noise can make of a diagonal what no sum of products has."""
    private = {"dp_enabled": True, "dp_noise_multiplier": 2.0, "dp_clip_norm": 0.5}
    assert run(secure_sums=True, **private).sha256 == run(**private).sha256


SHARED = {
    "secure_sums": True,
    "secure_sums_threshold": 3,
    "dp_enabled": True,
    "dp_noise_multiplier": 2.0,
    "dp_clip_norm": 0.5,
    "dp_noise_shared_by": 2,
}


def noise_of(run, clients):
    """The noise in the sums of layer 0, where these clients are in it, in units of one client's part."""
    config = parse_config(run.info["config"])
    model, found = LanguageModel(Path(config.model)), []
    layers = load_sums(PrunedModel(model, run.folder, run.info["run_key"]).sums, 0, Compression(config, model)).sums
    module = model.layer(0, model.layer_tensors(0))
    for name, total in layers.items():
        assert (total.num_added, total.weight) == (len(clients), 4 * len(clients))
        exact = torch.zeros(total.size, total.size, dtype=torch.int64)
        for client in clients:
            segments = segments_of(config, client, 4, run.folder)
            kind = partial(IntegerMoments, clip_norm=0.5, group_size=1)
            exact += input_matrices(model, module, model.prunable(0), model.embed(segments, 3), 3, kind)[name]
        tensors = total.tensors("x")
        assert not tensors["whole/x"].any()
        noise = (unpacked(tensors["fraction/x"], total.size) - unpacked(packed_upper(exact), total.size)).double()
        rows, columns = torch.triu_indices(total.size, total.size, 1)
        found += [noise.diagonal(), noise[rows, columns] * 2**0.5]
    return torch.cat(found) / (2.0 * 0.5 / 2**0.5 * 2**40)


@pytest.mark.parametrize("lost", [set(), {2}])
def test_what_honest_clients_add_together_is_what_one_adds_alone_and_is_charged_as_that(run, lost):
    result = run(losing({"input": lost}), clients=4, fedspallm_keep_sums=True, **SHARED)
    clients = [client for client in range(4) if client not in lost]
    noise = noise_of(result, clients)
    assert float(noise.std()) == pytest.approx(len(clients) ** 0.5, rel=4 / (2 * len(noise)) ** 0.5)
    assert abs(float(noise.mean())) < 5 * (len(clients) / len(noise)) ** 0.5
    spent = {Steps(2.0, 1.0): 2 * 4}  # two layers with four inputs
    told = [row["epsilon"] for row in result.clients if row["partition"] in clients]
    assert told == pytest.approx([epsilon(spent, 1e-5)] * len(clients))


@pytest.mark.full
def test_with_shared_noise_a_stopped_run_goes_on_to_the_same_model(run, wanted, tmp_path, monkeypatch):
    settings = {name.replace("_", "-").replace("dp-", "dp."): value for name, value in SHARED.items()}
    cut_off({**wanted, **settings, "secure-sums-threshold": 3}, tmp_path / "cut", monkeypatch)
    assert resumed({**wanted, **settings}, tmp_path / "cut").sha256 == run(**SHARED).sha256


def test_documents_share_noise_too(run):
    protected = {"dp_unit": "group", "dp_group_limit": 2, "fedspallm_layers_per_exchange": 0}
    assert run(**SHARED, **protected).rounds[0]["replies"] == 6


@pytest.mark.parametrize("changes", [{"secure-sums": False}, {"secure-sums-threshold": 0}, {"dp.noise-shared-by": 3}])
def test_noise_is_shared_by_fewer_than_a_sum_needs(wanted, changes):
    settings = {name.replace("_", "-").replace("dp-", "dp."): value for name, value in SHARED.items()}
    with refuses("dp.noise-shared-by", allowed="1, or with secure-sums less than secure-sums-threshold"):
        prepare(RunInputs({**wanted, **settings, **changes}))


@pytest.mark.parametrize(("multiplier", "noise"), [(1e-3, "0.000353553"), (1e6, "353553")])
def test_noise_too_small_or_large_to_be_shared_is_refused(run, multiplier, noise):
    line = f"a client's noise is {noise}, allowed with dp.noise-shared-by: 0.002 to 65536"
    with pytest.raises(TooFewReplies, match=line):
        run(**{**SHARED, "dp_noise_multiplier": multiplier})


@pytest.mark.parametrize("stage", ["keys", "shares", "input"])
def test_the_sum_is_of_those_that_are_left_wherever_the_others_are_lost(run, stage):
    """Five clients of which two go: the model is that of three, to the bit."""
    secure = run(losing({stage: {1, 4}}), clients=5, secure_sums=True)
    plain = run(losing({None: {1, 4}}), clients=5)
    assert secure.sha256 == plain.sha256
    assert secure.rounds[0]["replies"] == plain.rounds[0]["replies"] == 6
    assert sorted({text.split(":")[0] for text in secure.rounds[0]["failure_reasons"]}) == ["client 1", "client 4"]


@pytest.mark.full
@pytest.mark.parametrize("stage", ["agree", "open"])
def test_a_sum_is_opened_by_those_that_are_left_after_it(run, stage):
    secure = run(losing({stage: {0, 3}}), clients=5, secure_sums=True)
    assert secure.sha256 == run(clients=5).sha256
    assert secure.rounds[0]["replies"] == 10


@pytest.mark.parametrize(
    ("stage", "line"),
    [
        ("keys", "2 clients are left after stage 'keys' of the secure sum, allowed: 3 or more"),
        ("shares", "2 clients are left after stage 'shares' of the secure sum, allowed: 3 or more"),
        ("input", "2 clients are left after stage 'input' of the secure sum, allowed: 3 or more"),
        ("agree", "2 clients are left after stage 'agree' of the secure sum, allowed: 3 or more"),
        ("open", "2 clients are left after stage 'open' of the secure sum, allowed: 3 or more"),
    ],
)
def test_below_the_threshold_the_run_stops_with_one_line(run, stage, line):
    with pytest.raises(TooFewReplies, match=line) as error:
        run(losing({stage: {1, 3}}), clients=4, secure_sums=True)
    assert str(error.value).startswith("decoder layer 0 in round 1: ")
    assert "\n" not in str(error.value)


@pytest.mark.full
def test_a_run_that_was_stopped_goes_on_to_the_same_model(run, wanted, tmp_path, monkeypatch):
    secure = {**wanted, "secure-sums": True}
    cut_off(secure, tmp_path / "cut", monkeypatch)
    assert resumed(secure, tmp_path / "cut").sha256 == run().sha256


def test_a_threshold_of_the_run_is_what_members_hold_to(run):
    assert run(losing({"input": {2}}), secure_sums=True, secure_sums_threshold=2).rounds[0]["replies"] == 4
    with pytest.raises(TooFewReplies, match="secure-sums-threshold is 2, allowed: more than half of a sum's 4 members"):
        run(clients=4, secure_sums=True, secure_sums_threshold=2)


def test_a_client_of_a_run_with_secure_sums_sends_nothing_in_the_clear(run):
    """A server that asks as in a plain run is refused."""

    def train(message, context, honest):
        fields = message.content["fields"]
        if fields.pop(STAGE, None) == "input":
            fields.pop("sum/body")
        return honest(message, context)

    with pytest.raises(TooFewReplies, match="field 'sum/stage' is 'None'"):
        run(wrapped_app(train), secure_sums=True)


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"fedspallm.merge": "mean"}, "fedspallm.merge is 'mean', allowed with secure-sums: hessians"),
        ({"fedspallm.hessian-form": "int8"}, "fedspallm.hessian-form is 'int8', allowed with secure-sums: float32"),
        (
            {"fedspallm.recovery-rounds": 1, "num-server-rounds": 2},
            "fedspallm.recovery-rounds is 1, allowed with secure-sums: 0",
        ),
    ],
)
def test_what_is_no_sum_is_refused_by_name(wanted, more, line):
    with pytest.raises(ConfigError, match=line):
        prepare(RunInputs({**wanted, "secure-sums": True, **more}))


@pytest.mark.parametrize("system", ["fedfomo", "fedcr", "dispfl"])
def test_a_system_whose_server_reads_single_updates_is_refused_by_name(system):
    with pytest.raises(ConfigError, match=f"secure-sums is true, allowed with system '{system}': false"):
        prepare(RunInputs({"system": system, "secure-sums": True}))


@pytest.mark.parametrize("aggregation", ["attention", "weighted-literal"])
def test_fedp3_sums_what_counts_alike(aggregation):
    line = f"fedp3.aggregation is '{aggregation}', allowed with secure-sums: simple"
    with pytest.raises(ConfigError, match=f"^{line}$"):
        prepare(RunInputs({"system": "fedp3", "secure-sums": True, "fedp3.aggregation": aggregation}))
