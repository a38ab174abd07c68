"""FedP3: what leaves a client, what it costs, and where the system becomes another one."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from flwr.app import ConfigRecord
from flwr.common.serde import recorddict_to_proto

from fedprune_app.config import parse_config
from fedprune_app.core.payload import Payload
from fedprune_app.engine import simulated_grid
from fedprune_app.engine.exchange import TooFewReplies
from fedprune_app.federation.clients import ImageClientInfo
from fedprune_app.federation.round import Round, RunContext
from fedprune_app.models.initial import initial_model
from fedprune_app.models.vision import architecture, named_tensors, prunable_names
from fedprune_app.registry import SYSTEMS
from strategies.fedp3 import FedP3
from tests.conftest import tampered_app
from tests.e2e.test_capacity import grid_with
from tests.examples import full
from tests.refusing import refuses

GN = {"system": "fedp3", "model": "cnn-gn", "clients": 6, "batch_size": 24, "density": 0.7, "num_server_rounds": 2}
LAYERS = {k: {f"conv{k}.weight", f"conv{k}.bias", f"gn{k}.weight", f"gn{k}.bias"} for k in "123"}
HEAD = {"fc1.weight", "fc1.bias"}


def strategy_of(sizes_of, num_clients=100, **settings):
    """The server half alone, for a network of which only the shapes matter."""
    config = parse_config({"system": "fedp3", **{k.replace("_", "-"): v for k, v in settings.items()}})
    tensors, prunable = sizes_of
    clients = {k: ImageClientInfo(k, k, 10, None, False, (1, 8, 8), 10) for k in range(num_clients)}
    return FedP3(RunContext(config, clients, None, None, "key"), tensors, frozenset(prunable))  # type: ignore[arg-type]


def round_of(clients):
    return Round(1, clients, participants=clients)


def network(name, shape, num_classes=10):
    model = architecture(name, shape, num_classes)
    return {n: torch.zeros(t.shape) for n, t in named_tensors(model).items()}, prunable_names(model)


# --- what leaves a client -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("local", ["fixed", full("uniform"), full("ordered-dropout")])
def test_the_bytes_on_the_wire_hold_the_clients_own_layers_and_nothing_else(federate, local):
    """Read as bytes: every run of three values of an own layer is there, none of another layer is."""
    sent = {}

    def listen(request, reply, partition):
        sent[partition] = reply.content
        return reply

    settings = {"fedp3.layer-set": "lowerb", "fedp3.local": local, "num-server-rounds": 1, "density": 0.7}
    run = federate(system="fedp3", model="cnn-gn", app=tampered_app(listen), fraction_train=1.0, **settings)
    for partition, content in sent.items():
        own = LAYERS["123"[partition // 2]] | HEAD
        raw = recorddict_to_proto(content).SerializeToString()
        state = inprocess_state(run, partition)
        assert own < state.keys()
        for name, tensor in state.items():
            values = tensor.reshape(-1).numpy()
            runs = [values[i : i + 3].tobytes() for i in range(0, len(values) - 2, 3)]
            if name.endswith("bias") or "gn" in name:
                runs = [values.tobytes()]
            found = [run in raw for run in runs]
            assert all(found) if name in own else not any(found), (partition, name)
        num_values = sum(state[name].numel() for name in own)
        (array,) = content["payload"].values()
        assert 4 * num_values < len(array.data) < 4 * num_values + 30 * len(own)  # names and shapes, no room for more
        assert set(content["fields"]) == {"loss", "density", "flops", "seconds", "num-examples"}
        assert isinstance(content["fields"], ConfigRecord)
        assert content.keys() == {"payload", "fields"}


def inprocess_state(run, partition):
    from fedprune_app.engine.store import VersionedStore

    return VersionedStore(run.folder / "clients" / f"{partition:05d}").load()[1].group("weights")


@pytest.mark.parametrize("forgetful", [False, full(True)])
def test_a_client_refuses_to_send_other_layers_than_before(federation, monkeypatch, forgetful):
    """A server that asked for one set after another would see the whole model in time; nor may it feign a new run."""
    honest = FedP3.fields

    def curious(self, assigned):
        fields = honest(self, assigned)
        if self.draws == 2 and forgetful:
            self.state_rounds.clear()
        return fields | {"layers": ["conv1", "conv2"]} if self.draws == 2 else fields

    monkeypatch.setattr(FedP3, "fields", curious)
    with pytest.raises(TooFewReplies, match="layers conv1, conv2 are asked for, allowed: conv3, as before"):
        federation(**GN, fedp3_layer_set="by-hand", fedp3_layers="conv3", fraction_train=1.0, fresh=True)


def test_a_client_sends_no_more_layers_than_the_run_says(federation, monkeypatch):
    monkeypatch.setattr(FedP3, "fields", lambda self, assigned: {"layers": ["conv1", "conv2"], "density": 0.5})
    with pytest.raises(TooFewReplies, match=r"2 layers are asked for, allowed with fedp3\.layer-set 'lowerb': 1"):
        federation(**GN, fedp3_layer_set="lowerb", fresh=True)


def test_a_layer_that_is_not_there_is_not_sent(federation, monkeypatch):
    monkeypatch.setattr(FedP3, "fields", lambda self, assigned: {"layers": ["../secret"], "density": 0.5})
    with pytest.raises(TooFewReplies, match=r"layer '../secret' is asked for, allowed: conv1, conv2, conv3, fc1"):
        federation(**GN, fresh=True)


@pytest.mark.parametrize("extra", ["conv2.weight", full("conv9.weight")])
def test_a_reply_with_more_or_less_than_asked_for_is_left_out(federate, extra):
    def more(request, reply, partition):
        from fedprune_app.engine import wire

        if partition == 0:
            payload = wire.payload_of(reply.content, 10**9)
            reply.content["payload"] = wire.to_arrays(Payload({**payload.tensors, extra: torch.zeros(3)}))
        return reply

    settings = {"fedp3.layer-set": "lowerb", "num-server-rounds": 1, "fraction-train": 1.0}
    run = federate(system="fedp3", model="cnn-gn", app=tampered_app(more), **settings)
    assert run.rounds[0]["replies"] == 5
    assert f"wrong tensors: ['{extra}'] missing or not asked for" in run.rounds[0]["failure_reasons"][0]


# --- where it is another system -----------------------------------------------------------------------------------


@pytest.mark.full
def test_with_all_layers_it_is_fedavg_of_clients_that_count_alike(federation):
    """72 digits each: FedAvg's weights are equal. Nothing is pruned where nothing is left."""
    fedavg = federation(system="fedavg", **{k: v for k, v in GN.items() if k not in ("system", "density")})
    run = federation(**GN, fedp3_layer_set="all")
    torch.testing.assert_close(run.server, fedavg.server, rtol=1e-5, atol=1e-7)  # 72/216 is rounded otherwise than 1/3
    assert all(not message.down.masks for message in run.wiretap.messages)


@pytest.mark.full
def test_local_pruning_that_keeps_everything_changes_nothing(federation, own_form):
    plain = federation(**GN, fedp3_layer_set="lowerb", fresh=True)
    for local in ("uniform", "ordered-dropout"):
        kept = federation(
            **GN,
            fedp3_layer_set="lowerb",
            fedp3_local=local,
            fedp3_local_density=1.0,
            fresh=True,
        )
        assert all(torch.equal(kept.server[n], t) for n, t in plain.server.items())
        assert [row["flops"] for row in kept.rounds] == pytest.approx([row["flops"] for row in plain.rounds])


@pytest.mark.full
def test_weighted_averaging_of_equal_sets_is_the_simple_one(federation):
    for kind in ("weighted", "weighted-with-head"):
        weighted = federation(**GN, fedp3_layer_set="opu2", fedp3_aggregation=kind)
        simple = federation(**GN, fedp3_layer_set="opu2").server
        torch.testing.assert_close(weighted.server, simple, rtol=1e-5, atol=1e-7)


def test_the_literal_weights_shrink_a_layer_by_the_share_of_layers_that_sent_it(federation):
    settings = {**GN, "num_server_rounds": 1, "fraction_train": 1.0, "fedp3_layer_set": "lowerb"}
    literal = federation(**settings, fedp3_aggregation="weighted-literal").server
    simple = federation(**settings).server
    for k, names in LAYERS.items():
        for name in names:
            torch.testing.assert_close(literal[name], simple[name] / 3, msg=f"layer {k}: 2 of 6 clients")
    for name in HEAD:
        torch.testing.assert_close(literal[name], simple[name])


def test_a_layer_that_no_participant_trains_stays_as_it_was(federation):
    run = federation(**GN, fedp3_layer_set="by-hand", fedp3_layers="conv1")
    initial = initial_model("cnn-gn", "digits", (1, 8, 8), 10, init="default", seed=0)
    for name, tensor in initial.named_parameters():
        assert torch.equal(run.server[name], tensor.detach()) == (name not in LAYERS["1"] | HEAD), name


@pytest.mark.full
def test_what_the_server_pruned_stays_zero(federation):
    run = federation(**GN, fedp3_layer_set="lowerb", fraction_train=1.0)
    for partition, message in run.wiretap.of("train").items():
        weights = run.client(partition)[1].group("weights")
        away = torch.cat([weights[name][~mask] for name, mask in message.down.masks.items()])
        assert len(away) > 1000
        assert not away.any()


@pytest.mark.full
def test_with_a_personal_head_the_last_layer_never_travels_and_differs_between_clients(federation):
    run = federation(**GN, fedp3_personal_head=True, fraction_train=1.0)
    for message in run.wiretap.messages:
        assert not HEAD & (message.up.tensors.keys() | message.down.tensors.keys())
    assert not HEAD & run.server.keys()
    heads = [run.client(k)[1].group("weights")["fc1.weight"] for k in range(6)]
    assert all(not torch.equal(a, b) for a, b in pairwise(heads))
    rows = run.rows(2)
    assert all("accuracy_global" not in row or row["accuracy_global"] is None for row in rows.values())
    trained = federation(**{**GN, "num_server_rounds": 1}, fedp3_personal_head=True, fraction_train=1.0)
    again = run.wiretap.of("train", 2)
    assert again.keys() == trained.wiretap.of("train", 1).keys()


def test_a_personal_head_is_not_charged(federation):
    whole = federation(**GN, fedp3_layer_set="all", fraction_train=1.0).rounds[0]
    run = federation(**GN, fedp3_layer_set="all", fedp3_personal_head=True, fraction_train=1.0).rounds[0]
    head = 4 * 6 * 64 * 10  # weights of the last layer for six clients, 32 bits each
    assert whole["paper_bytes_up"] - run["paper_bytes_up"] == head
    assert whole["paper_bytes_down"] - run["paper_bytes_down"] == head


@pytest.mark.full
def test_a_run_notes_layers_that_no_client_owns(federation):
    run = federation(**{**GN, "clients": 2}, fedp3_layer_set="lowerb", fraction_train=1.0)
    assert run.info["notes"] == ["no client owns conv3, so the server never changes these layers"]
    start = dict(
        initial_model("cnn-gn", "digits", (1, 8, 8), 10, init=run.config.init, seed=run.config.seed).named_parameters()
    )
    assert run.server["conv3.weight"].equal(start["conv3.weight"].detach())
    assert "notes" not in federation(**GN, fedp3_layer_set="lowerb", fraction_train=1.0).info


def test_a_personal_head_goes_on_from_where_it_was(federation):
    """With a learning rate of almost nothing in round 2, what was trained is what it started from."""
    settings = {**GN, "fedp3_personal_head": True, "fraction_train": 1.0, "lr_decay": 1e-12}
    run = federation(**settings)
    for partition in range(6):
        first = run.client(partition, before=2)[1].group("weights")
        second = run.client(partition)[1].group("weights")
        for name in HEAD:
            torch.testing.assert_close(second[name], first[name], rtol=0, atol=1e-7)


def test_global_and_personal_accuracies_are_of_the_models_they_name(federation):
    """A client that never took part answers for the server's model as it would receive it."""
    run = federation(**{**GN, "num_server_rounds": 1, "density": 0.3}, fraction_train=0.17, fedp3_layer_set="lowerb")
    (trained,) = run.wiretap.of("train", 1)
    for partition, row in run.rows(1).items():
        if partition != trained:
            assert row["accuracy_personal"] == row["accuracy_received"]
            assert run.client(partition) is None
        assert row["density"] < 0.99
    assert len({row["density"] for row in run.rows(1).values()}) == 3  # by layer set


# --- resume, order ------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_resumed_run_is_the_uninterrupted_one(federation):
    settings = {**GN, "fedp3_assignment": "per-round", "fedp3_layer_set": "opu1-2-3", "fedp3_local": "ordered-dropout"}
    whole = federation(**{**settings, "num_server_rounds": 3})
    half = federation(**settings, fresh=True)
    resumed = federation(**{**settings, "num_server_rounds": 3}, resume_from=str(half.folder), fresh=True)
    assert resumed.sha256 == whole.sha256
    assert resumed.info["bytes_by_layer_set"] == whole.info["bytes_by_layer_set"]


# --- what it costs ------------------------------------------------------------------------------------------------

TABLE4 = {  # the paper's sizes, for a network that FashionMNIST's images do not fit
    "conv1": (64, 1, 5, 5), "conv2": (64, 64, 5, 5), "fc1": (1024, 1600), "fc2": (1024, 1024), "fc3": (10, 1024),
}  # fmt: skip


def table4():
    tensors = {}
    for layer, shape in TABLE4.items():
        tensors |= {f"{layer}.weight": torch.zeros(shape), f"{layer}.bias": torch.zeros(shape[0])}
    return tensors, [f"{layer}.weight" for layer in TABLE4]


def percent(strategy, which):
    """(largest - smallest) / smallest over LowerB's layers, in percent, of ``paper_bytes``: 0 down, 1 up."""
    each = []
    for partition in range(0, 100, 100 // len(strategy.hidden)):
        strategy.begin(round_of((partition,)))
        each.append(strategy.paper_bytes(round_of((partition,)))[which])
    return 100 * (max(each) - min(each)) / min(each)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (network("cnn-fedp3", (3, 32, 32)), 10815),
        (network("cnn-fedp3", (3, 32, 32), 100), 1522.91),
        (table4(), 13749.46),
        (network("mlp4", (1, 28, 28)), 30.23),
    ],
    ids=["CIFAR-10", "CIFAR-100", "FashionMNIST", "EMNIST-L"],
)
def test_the_uploads_differ_by_the_percentages_of_appendix_b5(sizes, expected):
    assert percent(strategy_of(sizes, **{"fedp3.layer-set": "lowerb"}), 1) == pytest.approx(expected, abs=0.5 * 10 ** -(
        0 if expected == 10815 else 2))  # fmt: skip


def test_the_deployed_models_differ_by_the_percentage_of_appendix_b5():
    strategy = strategy_of(network("cnn-fedp3", (3, 32, 32)), **{"fedp3.layer-set": "lowerb", "density": 0.5})
    assert percent(strategy, 0) == pytest.approx(57.93, abs=0.005)


@pytest.mark.parametrize(("layer_set", "share"), [("opu3", 0.751), ("opu2", 0.502), ("lowerb", 0.253), ("all", 1.0)])
def test_the_mean_upload_is_three_two_and_one_quarter_of_the_parameters_not_80_60_and_40_percent(layer_set, share):
    """The paper counts layers; on its CIFAR-10 network parameters tell another story."""
    strategy = strategy_of(network("cnn-fedp3", (3, 32, 32)), **{"fedp3.layer-set": layer_set})
    strategy.begin(everybody := round_of(tuple(range(100))))
    assert strategy.paper_bytes(everybody)[1] / (4 * 100 * sum(strategy.table_sizes.values())) == pytest.approx(
        share, abs=5e-4
    )
    counted = [(len(strategy.assigned(k)[0]) + 1) / 5 for k in range(100)]
    assert sum(counted) / 100 == pytest.approx({"opu3": 0.8, "opu2": 0.6, "lowerb": 0.4, "all": 1.0}[layer_set])


def test_measured_bytes_are_the_formulas_and_the_masks(federation):
    """Up: 4 bytes a value and some names. Down: besides, at most one bit per coordinate that may be pruned."""
    run = federation(**{**GN, "fraction_train": 1.0}, fedp3_layer_set="lowerb")
    sizes = {n: t.numel() for n, t in run.server.items()}
    for partition, message in run.wiretap.of("train").items():
        own = LAYERS["123"[partition // 2]] | HEAD
        up = 4 * sum(sizes[n] for n in own)
        assert up < message.bytes_up < up + 600
        others = {n for n in sizes if n.endswith("weight") and n not in own and "gn" not in n}
        values = 4 * (sum(sizes.values()) - sum(sizes[n] for n in others) + sum(int(0.7 * sizes[n]) for n in others))
        assert values < message.bytes_down < values + sum(sizes[n] for n in others) / 8 + 900
        row = run.rows(2)[partition]
        assert (row["bytes_up"], row["bytes_down"]) == (message.bytes_up, message.bytes_down)
    by_set = run.info["bytes_by_layer_set"]
    assert by_set.keys() == {"conv1", "conv2", "conv3"}
    last = run.wiretap.of("train")
    assert [by_set[f"conv{k}"]["bytes_up"] for k in "123"] == [last[k].bytes_up for k in (1, 3, 5)]
    assert run.info["largest_over_smallest_upload"] == pytest.approx(last[5].bytes_up / last[1].bytes_up)


# --- who trains what ----------------------------------------------------------------------------------------------


def sets_of(strategy):
    return [strategy.assigned(k)[0] for k in strategy.clients]


def test_layers_are_dealt_to_contiguous_clients_as_in_the_released_code():
    cnn = network("cnn-fedp3", (3, 32, 32))
    hidden = ["conv1", "conv2", "fc1", "fc2"]
    for layer_set, count in (("lowerb", 1), ("opu2", 2), ("opu3", 3)):
        sets = sets_of(strategy_of(cnn, **{"fedp3.layer-set": layer_set}))
        for k, chosen in enumerate(sets):
            assert set(chosen) == {hidden[(k // 25 + i) % 4] for i in range(count)}


@pytest.mark.parametrize(("layer_set", "counts"), [("opu2", {2}), ("opu1-2-3", {1, 2, 3}), ("opu2-3", {2, 3})])
def test_random_sets_are_uniform_in_size_and_layers_and_stay(layer_set, counts):
    strategy = strategy_of(network("cnn-fedp3", (3, 32, 32)), 900, **{
        "fedp3.layer-set": layer_set, "fedp3.assignment": "random"})  # fmt: skip
    sets = sets_of(strategy)
    strategy.round = 7
    assert sets_of(strategy) == sets
    for count in counts:
        assert sum(len(s) == count for s in sets) == pytest.approx(900 / len(counts), abs=75)
    for layer in strategy.hidden:
        mean = sum(counts) / len(counts)
        assert sum(layer in s for s in sets) == pytest.approx(900 * mean / 4, abs=75)


def test_sets_drawn_every_round_change():
    strategy = strategy_of(
        network("cnn-fedp3", (3, 32, 32)), **{"fedp3.assignment": "per-round", "fedp3.layer-set": "opu2"}
    )
    first = sets_of(strategy)
    strategy.draws = 1
    assert 50 < sum(a != b for a, b in zip(first, sets_of(strategy), strict=True)) < 100


def test_resnets_block_variants_leave_out_what_their_names_say():
    resnet = network("resnet18-gn", (3, 32, 32))
    everything = set(strategy_of(resnet, 2, **{"fedp3.layer-set": "all"}).hidden)
    assert len(everything) == 17
    for name, expected in {
        "b2-b3-full": ({"layer2"}, {"layer3"}),
        "b2-part": ({"layer2.0"}, {"layer2.1"}),
        "b3-part": ({"layer3.0"}, {"layer3.1"}),
    }.items():
        sets = sets_of(strategy_of(resnet, 4, **{"fedp3.layer-set": name}))
        for k, chosen in enumerate(sets):
            (block,) = expected[k % 2]
            assert everything - set(chosen) == {x for x in everything if x.startswith(f"{block}.")}
            assert len(chosen) == (13 if "full" in name else 15)


def test_a_residual_projection_and_every_norm_belong_to_a_layer_of_18():
    strategy = strategy_of(network("resnet18-bn", (3, 32, 32)), 2, **{"fedp3.layer-set": "all"})
    assert len(strategy.layers) == 18
    names = strategy.layers["layer2.0.conv2"]
    assert {n.removeprefix("layer2.0.") for n in names} == {
        "conv2.weight",
        *(f"bn2.{x}" for x in ("weight", "bias", "running_mean", "running_var")),
        "downsample.0.weight",
        *(f"downsample.1.{x}" for x in ("weight", "bias", "running_mean", "running_var")),
    }
    assert sorted(n for names in strategy.layers.values() for n in names) == sorted(strategy.model)


def test_a_clients_capacity_bounds_what_is_deployed_to_it(federation, monkeypatch):
    monkeypatch.setattr(simulated_grid, "InProcessGrid", grid_with([None, 0.5, 0.8, 1.0, 0.2, None]))
    run = federation(**GN, fedp3_layer_set="capacity", fedp3_capacities="0.75 0.9", fraction_train=1.0, fresh=True)
    total = sum(t.numel() for t in run.server.values())
    capacities = [0.75, 0.5, 0.8, 1.0, 0.2, 0.9]
    for k, message in run.wiretap.of("train").items():
        assert message.down.num_kept() <= capacities[k] * total
        assert message.up.tensors.keys() > HEAD
    deployed = [message.down.num_kept() / total for message in run.wiretap.of("train").values()]
    assert deployed[3] == 1.0
    assert deployed[4] > 0.19  # the smallest layer, and the others sparser than 0.7
    assert run.wiretap.of("train")[4].up.tensors.keys() == LAYERS["1"] | HEAD


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"fedp3_layer_set": "opu9"}, ("fedp3.layer-set", "opu9")),
        ({"fedp3_layer_set": "by-hand"}, ("fedp3.layers", "")),
        ({"fedp3_layers": "conv1"}, ("fedp3.layers", "conv1")),
        (
            {"fedp3_layer_set": "by-hand", "fedp3_layers": "conv1; conv7"},
            ("fedp3.layer-set", "by-hand"),
        ),
        ({"fedp3_layer_set": "by-hand", "fedp3_layers": "fc1"}, ("fedp3.layer-set", "by-hand")),
        (
            {"fedp3_layer_set": "by-hand", "fedp3_layers": "conv1;"},
            ("fedp3.layer-set", "by-hand"),
        ),
        ({"fedp3_layer_set": "b2-part"}, ("fedp3.layer-set", "b2-part")),
        ({"fedp3_layer_set": "opu3", "model": "cnn-small"}, ("fedp3.layer-set", "opu3")),
        ({"fedp3_capacities": "much"}, ("fedp3.capacities", "much")),
        ({"fedp3_layer_set": "capacity", "fedp3_capacities": "0.01"}, ("fedp3.layer-set", "capacity")),
    ],
    ids=str,
)
def test_settings_that_cannot_be_are_refused_on_one_line(federation, settings, says):
    with refuses(*says):
        federation(**{**GN, **settings}, fresh=True)


def test_the_system_is_registered_with_both_halves():
    assert SYSTEMS["fedp3"].strategy is FedP3
