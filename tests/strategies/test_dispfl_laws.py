"""What must hold of Dis-PFL, D-PSGD, FedAvg-FT, Ditto and FedFomo whatever the numbers, in whole federations."""

from __future__ import annotations

import json
import shutil
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Message

from clients.context import NodeContext
from clients.dispfl import DisPFLClient
from clients.gossip import GossipClient
from clients.task import Task
from fedprune_app import server_app
from fedprune_app.config import parse_config, read_toml
from fedprune_app.core.payload import Payload
from fedprune_app.engine import simulated_grid, wire
from fedprune_app.engine.simulated_grid import run_in_process
from fedprune_app.engine.store import State, VersionedStore, read_tensors
from fedprune_app.federation import exchanges, update_store
from fedprune_app.federation.update_store import UpdateStore
from fedprune_app.models.initial import initial_model
from fedprune_app.preflight.inputs import RunInputs
from fedprune_app.sweeps.matrix import read_matrix
from tests.conftest import Finished, tampered_app
from tests.examples import full, in_test
from tests.refusing import refuses
from tests.strategies.conftest import TINY, config_key
from tests.strategies.reference import WEIGHTS
from tests.strategies.reference_dispfl import Federation, erk_by_hand

CONFIGS = Path(__file__).parents[2] / "configs"
FEDFOMO_FILES = [
    path
    for path in sorted(CONFIGS.rglob("*.*ml"))
    if "system: fedfomo" in path.read_text().replace(" = ", ": ").replace('"', "")
]
QUICK = {"fraction_train": 1.0, "local_epochs": 1, "evaluate_every": 3, "momentum": 0.0}
MIXED = {"dispfl_densities": "0.2 0.4 0.6 0.8 1.0"}
GOSSIP = {
    "dispfl": {"clients": 6, "dispfl_neighbours": 2, "drop_probability": 0.3, **MIXED},
    "dispfl, ring": {"dispfl_topology": "ring"},
    "dispfl, random-in, some not sampled": {
        "clients": 6,
        "fraction_train": 0.7,
        "dispfl_topology": "random-in",
        "dispfl_neighbours": 2,
    },
    "dispfl, dropped train alone": {
        "clients": 6,
        "dispfl_neighbours": 2,
        "drop_probability": 0.4,
        "dispfl_dropped": "trains-alone",
    },
    "dpsgd": {"clients": 5, "dpsgd_neighbours": 2, "drop_probability": 0.3},
    "dpsgd, under a mask": {"dpsgd_density": 0.4, "dpsgd_topology": "full"},
    "dpsgd-ft": {"dpsgd_density": 0.5, "dpsgd_topology": "exponential"},
}
RESUMED = {  # one of every new system
    "dispfl": GOSSIP["dispfl"],
    "dispfl, clients average": {"dispfl_gossip": "client", **GOSSIP["dispfl"]},
    "dpsgd": GOSSIP["dpsgd"],
    "dpsgd-ft": GOSSIP["dpsgd-ft"],
    "fedavg-ft": {"fraction_train": 0.5},
    "ditto": {"fraction_train": 0.5},
    "fedfomo": {"clients": 5, "fedfomo_candidates": 2},
}


def start(federation, case, settings, **more):
    """The run of a case that is named after its system."""
    return federation(system=case.partition(",")[0], **{**QUICK, **settings, **more})


def by_letters(case):
    return {f"{case.split('-')[0].partition(',')[0]}_gossip": "client"}


def versions(run, partition):
    """A client's states on disk by round."""
    rounds = VersionedStore(run.folder / "clients" / f"{partition:05d}").rounds()
    return {round: run.client(partition, before=round + 1)[1] for round in rounds}


def weights(run, partition, before=None):
    return run.client(partition, before)[1].group("weights")


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def timeless(rows):
    return [{key: value for key, value in row.items() if "seconds" not in key} for row in rows]


# --- gossip -------------------------------------------------------------------------------------------------------


def test_a_held_out_client_leaves_no_gap_in_a_ring(federation):
    settings = {"dpsgd_topology": "ring", "num_server_rounds": 2}
    four = start(federation, "dpsgd", {"clients": 4, **settings})
    one_held_out = start(federation, "dpsgd", {"clients": 5, **settings}, holdout_clients=1)
    assert one_held_out.rounds[1]["peer_bytes"] == four.rounds[1]["peer_bytes"] > 0


@pytest.mark.parametrize("topology", ["random", full("random-in"), full("ring")])
def test_after_the_last_round_each_client_hears_as_many_members_as_in_a_round(federation, topology):
    """Members in a last phase, and clients that were held out, who have no models for each other."""
    settings = {"clients": 7, "dpsgd_topology": topology, "dpsgd_neighbours": 2, "num_server_rounds": 2}
    run = start(federation, "dpsgd", settings, dpsgd_gossip="client", holdout_clients=3, last_phase=True)
    heard = [(m.round, m.partition, len(m.peer_updates)) for m in run.wiretap.messages if m.kind == "train"]
    assert {(client, count) for round, client, count in heard if round == 3} == {(client, 2) for client in range(7)}


@pytest.mark.parametrize("case", in_test(GOSSIP, "dispfl"))
def test_it_does_not_matter_whether_the_server_averages_or_each_client(federation, case):
    relayed = start(federation, case, GOSSIP[case])
    by_client = start(federation, case, GOSSIP[case], **by_letters(case))
    assert any(message.peer_updates for message in by_client.wiretap.messages)
    assert not any(message.peer_updates for message in relayed.wiretap.messages)
    assert by_client.sha256 == relayed.sha256
    results = [
        [{key: value for key, value in row.items() if "bytes" not in key} for row in timeless(run.clients)]
        for run in (relayed, by_client)
    ]
    assert results[0] == results[1]
    for key in ("busiest_node_bytes", "node_bytes_mean", "peer_bytes", "paper_busiest_bytes", "density_mean"):
        assert [row[key] for row in relayed.rounds] == [row[key] for row in by_client.rounds]


def test_in_a_full_topology_all_start_from_the_plain_average_of_what_was_published(federation):
    run = federation(system="dpsgd", dpsgd_topology="full", **QUICK)
    for round in (2, 3):
        published = [message.up.tensors for message in run.wiretap.of("train", round - 1).values()]
        assert len(published) == 4
        for message in run.wiretap.of("train", round).values():
            assert not message.down.masks
            for name, received in message.down.tensors.items():
                mean = torch.stack([tensors[name].double() for tensors in published]).mean(0)
                torch.testing.assert_close(received, mean.float(), rtol=3e-7, atol=1e-11)
    assert not any(message.down.tensors for message in run.wiretap.of("train", 1).values())  # all begin as one


@pytest.mark.full
def test_at_density_one_dispfl_is_dpsgd(federation):
    sparse = federation(system="dispfl", density=1.0, dispfl_neighbours=2, **QUICK)
    dense = federation(system="dpsgd", dpsgd_neighbours=2, **QUICK)
    for partition in range(4):
        assert same(weights(sparse, partition), weights(dense, partition))


@pytest.mark.parametrize(
    "case", in_test([case for case in GOSSIP if "," in case or case == "dispfl"], "dispfl", "dispfl, ring")
)
def test_every_client_keeps_as_many_coordinates_of_every_tensor_in_every_round(federation, case):
    run = start(federation, case, GOSSIP[case])
    shapes = {name: tensor.shape for name, tensor in weights(run, 0).items()}
    moved = False
    for partition in range(run.num_clients):
        for state in versions(run, partition).values():
            masks = state.group("masks")
            if run.config.system == "dispfl":
                density = run.config.dispfl.density_of(partition, run.config.density)
                densities = erk_by_hand(shapes, Fraction(str(density)))
            else:
                densities = dict.fromkeys(WEIGHTS, Fraction(str(run.config.dpsgd.density)))
            expected = {name: int(densities[name] * shapes[name].numel()) for name in WEIGHTS}
            assert {name: int(mask.sum()) for name, mask in masks.items()} == expected
            if run.config.system == "dispfl":
                after = state.group("next-masks")
                assert {name: int(mask.sum()) for name, mask in after.items()} == expected
                moved |= not same(masks, after)
    assert moved == (run.config.system == "dispfl")


def test_no_client_ever_has_a_weight_outside_its_masks(federation, monkeypatch):
    """Neither in what its training starts from, nor in its state, nor in what it sends."""
    starts = {}
    real = GossipClient.test_start

    def watch(client, task, tensors):
        starts[client.client_id, task.round] = {name: t.clone() for name, t in tensors.items()}
        return real(client, task, tensors)

    monkeypatch.setattr(GossipClient, "test_start", watch)
    run = start(federation, "dispfl", GOSSIP["dispfl"], fresh=True)
    assert len(starts) == sum(row["replies"] for row in run.rounds)
    grown = 0
    for partition in range(run.num_clients):
        before = None
        for round, state in versions(run, partition).items():
            sent = run.wiretap.of("train", round)[partition].up
            masks, trained, started = state.group("masks"), state.group("weights"), starts[partition, round]
            assert same(dict(sent.tensors), trained)
            assert same(dict(sent.masks), masks)
            for name, mask in masks.items():
                assert not trained[name][~mask].any()
                assert not started[name][~mask].any()
            if before is not None:  # the masks found after the last training are those of this one
                assert same(masks, before.group("next-masks"))
                grown += sum(int((masks[n] & ~before.group("masks")[n] & (started[n] != 0)).sum()) for n in masks)
            before = state
    assert grown > 50  # what grew took its value from the neighbours


@pytest.mark.parametrize("gossip", ["server", "client"])
def test_a_client_without_a_model_keeps_its_initial_weights_where_no_neighbour_has_one(tmp_path, gossip):
    config = parse_config({"system": "dispfl", "density": 0.3, "dispfl.gossip": gossip})
    client, neighbour = (DisPFLClient(config, NodeContext(k, 4, tmp_path / str(k))) for k in (0, 1))
    initial = {name: parameter.detach().clone() for name, parameter in client.model.named_parameters()}
    masks, held = client.initial_masks, neighbour.initial_masks
    sent = Payload.pruned({name: tensor + 1 for name, tensor in initial.items()}, held)
    task = Task(2, sent) if gossip == "server" else Task(2, peer_updates={1: sent})
    start = client.begin(task, State())
    alone = 0
    for name, tensor in start.items():
        if name in masks:
            assert torch.equal(tensor[held[name] & masks[name]], (initial[name] + 1)[held[name] & masks[name]])
            assert torch.equal(tensor[masks[name] & ~held[name]], initial[name][masks[name] & ~held[name]])
            assert not tensor[~masks[name]].any()
            alone += int((masks[name] & ~held[name]).sum())
        else:
            torch.testing.assert_close(tensor, initial[name] + 1)
    assert alone > 50


# --- clients that are away ------------------------------------------------------------------------------------------


def away(run):
    """By round who took part, told from the draws alone."""
    drawn = Federation(run.config, run.num_clients)
    return {round: drawn.participants(round) for round in range(1, run.config.num_server_rounds + 1)}


@pytest.mark.parametrize("case", ["dispfl", "dpsgd"])
def test_a_dropped_client_neither_trains_nor_sends_nor_is_charged_and_is_nobodys_neighbour(federation, case):
    run = start(federation, case, GOSSIP[case], **by_letters(case), evaluate_every=0)
    taking_part = away(run)
    assert any(len(present) < run.num_clients for present in taking_part.values())
    for round, present in taking_part.items():
        exchanged = run.wiretap.of("train", round)
        assert list(exchanged) == present
        assert run.rounds[round - 1]["dropped"] == run.num_clients - len(present)
        charged = {row["partition"] for row in run.clients if row["round"] == round and row.get("bytes_up")}
        assert charged == set(present)
        links = min(2, len(present) - 1)
        assert run.rounds[round - 1]["paper_bytes_down"] == pytest.approx(run.rounds[round - 1]["paper_bytes_up"])
        for message in exchanged.values():
            assert set(message.peer_updates) <= set(present) - {message.partition}
            assert len(message.peer_updates) <= links
    for partition in range(run.num_clients):
        assert list(versions(run, partition)) == [r for r, present in taking_part.items() if partition in present]


@pytest.mark.parametrize("topology", ["random", full("ring"), full("full")])
def test_a_dropped_client_that_trains_alone_hears_nobody_and_serves_its_old_model(federation, topology):
    run = federation(
        system="dispfl",
        clients=6,
        drop_probability=0.4,
        dispfl_dropped="trains-alone",
        dispfl_neighbours=3,
        dispfl_topology=topology,
        dispfl_gossip="client",
        **QUICK,
    )
    heard_of_dropped = 0
    for round, present in away(run).items():
        exchanged = run.wiretap.of("train", round)
        assert list(exchanged) == list(range(6))  # all train
        dropped = set(range(6)) - set(present)
        assert run.rounds[round - 1]["dropped"] == len(dropped)
        for partition, message in exchanged.items():
            assert not (message.peer_updates and partition in dropped)
            heard_of_dropped += len(set(message.peer_updates) & dropped)
            for sender, update in message.peer_updates.items():
                assert update.digest() == run.wiretap.of("train", round - 1)[sender].up.digest()
    assert (heard_of_dropped > 0) == (topology != "full")  # as the released code has it


# --- the same run again -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", in_test(RESUMED, "dispfl"))
def test_the_order_in_which_replies_arrive_does_not_matter(federation, monkeypatch, case):
    in_order = start(federation, case, RESUMED[case], evaluate_every=0)
    shuffle = np.random.default_rng(0)
    orders = []

    class ShuffledGrid(simulated_grid.InProcessGrid):
        def pull_messages(self, message_ids):
            orders.append(shuffle.permutation(list(message_ids)).tolist())
            return super().pull_messages(orders[-1])

    monkeypatch.setattr(simulated_grid, "InProcessGrid", ShuffledGrid)
    shuffled = start(federation, case, RESUMED[case], evaluate_every=0, fresh=True)
    assert any(order != sorted(order, key=int) for order in orders)
    assert shuffled.sha256 == in_order.sha256
    assert timeless(shuffled.clients) == timeless(in_order.clients)


@pytest.mark.parametrize("case", ["dispfl", full("dispfl, clients average"), full("dpsgd"), full("fedfomo")])
def test_a_message_made_after_others_have_replied_carries_the_letters_of_the_round_before(
    federation, monkeypatch, case
):
    """With room for one message on its way, each client is sent its own when the one before it has replied."""
    at_once = start(federation, case, RESUMED[case], evaluate_every=0)
    one_by_one = partial(exchanges.send_and_receive, in_flight_bytes=1)
    monkeypatch.setattr(exchanges, "send_and_receive", one_by_one)
    one_by_one = start(federation, case, RESUMED[case], evaluate_every=0, fresh=True)
    assert one_by_one.sha256 == at_once.sha256
    assert timeless(one_by_one.clients) == timeless(at_once.clients)


# --- what is reported -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", in_test(GOSSIP, "dispfl", "dispfl, ring"))
def test_the_peers_bytes_are_those_of_the_letters_and_the_stars_those_of_the_messages(federation, case):
    run = start(federation, case, GOSSIP[case], **by_letters(case))
    for row in run.rounds:
        exchanged = run.wiretap.of("train", row["round"])
        down = {partition: sum(message.peer_bytes.values()) for partition, message in exchanged.items()}
        up = dict.fromkeys(range(run.num_clients), 0)
        for message in exchanged.values():
            for sender, num_bytes in message.peer_bytes.items():
                up[sender] += num_bytes
        assert (row["peer_bytes"] > 0) == (row["round"] > 1)
        assert row["peer_bytes"] == sum(down.values()) == sum(up.values())
        assert row["busiest_node_bytes"] == max([*down.values(), *up.values()])
        assert row["node_bytes_mean"] == pytest.approx(sum(max(down[k], up[k]) for k in down) / len(down))
        assert row["bytes_down"] == sum(message.bytes_down for message in exchanged.values())
        assert row["bytes_up"] == sum(message.bytes_up for message in exchanged.values())


def test_the_paper_charges_every_link_for_the_senders_kept_parameters(federation):
    run = federation(system="dispfl", clients=5, dispfl_topology="ring", **MIXED, **QUICK)
    kept = [sum(int(t.sum()) for t in run.client(k)[1].group("masks").values()) + 58 for k in range(5)]  # and biases
    heard = [4 * (kept[(k - 1) % 5] + kept[(k + 1) % 5]) for k in range(5)]
    said = [2 * 4 * kept[k] for k in range(5)]
    for row in run.rounds:
        assert row["paper_bytes_down"] == row["paper_bytes_up"] == pytest.approx(sum(heard))
        assert row["paper_busiest_bytes"] == pytest.approx(max(heard + said))


@pytest.mark.parametrize(("growth", "batches"), [("gradient", 1), full("random", 0)])
def test_a_client_counts_its_sparse_training_and_the_dense_batch_of_a_gradient(federation, growth, batches):
    run = federation(system="dispfl", clients=5, dispfl_topology="ring", dispfl_growth=growth, **MIXED, **QUICK)
    dense = {"conv1": 2 * 16 * 9 * 64, "conv2": 2 * 32 * 16 * 9 * 16, "fc1": 2 * 128 * 10}
    for partition, row in run.rows(3).items():
        masks = run.client(partition)[1].group("masks")
        sparse = sum(flops * float(masks[f"{layer}.weight"].double().mean()) for layer, flops in dense.items())
        assert row["num_examples"] == 72
        (flops,) = {m["flops"] for m in replies(run, 3, partition)}
        assert flops == pytest.approx(3 * 72 * sparse + batches * 3 * 10 * sum(dense.values()))


def test_nothing_is_searched_or_charged_once_the_masks_stand_still(federation):
    settings = {"system": "dispfl", "clients": 5, "dispfl_topology": "ring", "dispfl_annealing_rounds": 1, **QUICK}
    run = federation(**settings)
    for partition in range(5):
        first, *later = (m["flops"] for round in (1, 2, 3) for m in replies(run, round, partition))
        dense = 2 * 16 * 9 * 64 + 2 * 32 * 16 * 9 * 16 + 2 * 128 * 10
        assert [first - flops for flops in later] == [pytest.approx(3 * 10 * dense)] * 2
        masks = [run.client(partition, before=round + 1)[1].group("masks") for round in (2, 3)]
        assert all(torch.equal(mask, masks[1][name]) for name, mask in masks[0].items())


def replies(run, round, partition):
    return [row for row in run.clients if (row["round"], row["partition"]) == (round, partition)]


def test_the_masks_in_the_folder_are_as_far_apart_as_those_the_clients_have(federation):
    run = start(federation, "dispfl", GOSSIP["dispfl"])
    content = json.loads((run.folder / "masks.json").read_text())
    masks = [run.client(partition)[1].group("masks") for partition in range(6)]
    assert content["round"] == 3
    assert content["partitions"] == list(range(6))
    pruned = [name for name in WEIGHTS if any(not mask[name].all() for mask in masks)]
    total = sum(masks[0][name].numel() for name in pruned)
    for i, mine in enumerate(masks):
        for j, other in enumerate(masks):
            differing = sum(
                a != b
                for name in pruned
                for a, b in zip(mine[name].flatten().tolist(), other[name].flatten().tolist(), strict=True)
            )
            assert content["distance"][i][j] == pytest.approx(differing / total, abs=1e-6)
    assert max(map(max, content["distance"])) > 0.3


# --- baselines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plain", "tuned", "settings"),
    [("fedavg", "fedavg-ft", {"fraction_train": 0.5}), full("dpsgd", "dpsgd-ft", GOSSIP["dpsgd"])],
)
def test_fine_tuning_leaves_no_trace_in_any_model_or_state(federation, plain, tuned, settings):
    """However often it is done."""
    before = start(federation, plain, settings)
    after = [
        start(federation, tuned, settings, evaluate_every=1),
        start(federation, tuned, settings, evaluate_every=0),
    ]
    for run in after:
        assert same(run.server, before.server)
        for partition in range(run.num_clients):
            ours, plains = versions(run, partition), versions(before, partition)
            assert ours.keys() == plains.keys()
            assert all(same(dict(ours[round].tensors), dict(plains[round].tensors)) for round in ours)
        personal = [row["accuracy_personal"] for row in run.rows(3).values()]
        assert personal != [row["accuracy_personal"] for row in before.rows(3).values()]
        assert [r["accuracy_global"] for r in run.rows(3).values()] == [
            r["accuracy_global"] for r in before.rows(3).values()
        ]


@pytest.mark.full
def test_dittos_global_model_is_fedavgs_whatever_becomes_of_the_personal_ones(federation):
    settings = {**QUICK, "fraction_train": 0.5}
    fedavg = federation(system="fedavg", **{**settings, "local_epochs": 2})
    personal = set()
    for epochs, pull in ((3, 0.5), (1, 0.5), (3, 5.0)):
        run = federation(system="ditto", ditto_personal_epochs=epochs, ditto_pull=pull, **settings)
        assert same(run.server, fedavg.server)
        personal.add(run.sha256)
    assert len(personal) == 3


@pytest.mark.full
def test_dittos_personal_models_are_pulled_into_the_global_one(federation):
    """With λ = 1 / η each step ends where the model that was received is."""
    run = federation(system="ditto", ditto_pull=20.0, learning_rate=0.05, **QUICK)
    received = run.wiretap.of("train", 3)
    for partition in range(4):
        torch.testing.assert_close(weights(run, partition), dict(received[partition].down.tensors))


@pytest.mark.full
def test_fedfomo_keeps_the_model_it_had_when_no_candidate_helps(federation):
    """Training that only harms: everybody ends where it began."""
    run = federation(system="fedfomo", partition="iid", learning_rate=50.0, max_grad_norm=1.0, **QUICK)
    initial = initial_model("cnn-small", "digits", (1, 8, 8), 10, init="default", seed=0)
    assert run.rounds[-1]["replies"] == 4
    for partition in range(4):
        assert same(weights(run, partition), dict(initial.state_dict()))


def test_fedfomos_server_sums_what_models_were_worth_negative_values_included(federation):
    run = start(federation, "fedfomo", RESUMED["fedfomo"], learning_rate=0.5)
    expected = torch.zeros(5, 5, dtype=torch.float64)
    for message in run.wiretap.messages:
        if message.kind == "train" and message.peer_updates:
            assert message.told["candidates"] == sorted(message.peer_updates)
            for candidate, worth in zip(message.told["candidates"], message.told["worth"], strict=True):
                expected[message.partition, candidate] += worth
    saved = read_tensors(run.folder / "checkpoints" / "round-00003.safetensors").tensors["affinity"]
    assert torch.equal(saved, expected)
    assert (saved < 0).any()
    assert saved.abs().max() > 1  # no weights that were divided by their sum


@pytest.mark.parametrize("path", FEDFOMO_FILES, ids=lambda path: path.name)
def test_in_every_configuration_all_clients_of_fedfomo_train_in_every_round(path):
    if path.suffix == ".toml":
        fractions = [parse_config(read_toml(path)).fraction_train]
    else:
        cells = read_matrix(path).cells(RunInputs(out=Path("/nowhere")))
        fractions = [cell.config.fraction_train for cell in cells if cell.config.system == "fedfomo"]
    assert fractions
    assert set(fractions) == {1.0}


def test_fedfomo_sends_no_more_candidates_than_asked_for_and_never_a_clients_own_model(federation):
    run = start(federation, "fedfomo", RESUMED["fedfomo"], evaluate_every=0)
    for round in (1, 2, 3):
        for partition, message in run.wiretap.of("train", round).items():
            assert len(message.peer_updates) == (2 if round > 1 else 0)
            assert partition not in message.peer_updates
            for sender, update in message.peer_updates.items():
                assert update.digest() == run.wiretap.of("train", round - 1)[sender].up.digest()


@pytest.mark.full
def test_a_run_with_a_horizon_of_its_own_can_be_resumed_for_longer(federation, tmp_path):
    """Without one, a longer run would have searched its masks at another rate from the first round on."""
    settings = {"system": "dispfl", "dispfl_topology": "ring", **QUICK}
    short = shutil.copytree(federation(num_server_rounds=2, **settings).folder, tmp_path / "fixed")
    with refuses("num-server-rounds", 3):
        federation(resume_from=str(short), **settings)
    settings |= {"dispfl_annealing_rounds": 2}
    whole = federation(**settings)
    short = shutil.copytree(federation(num_server_rounds=2, **settings).folder, tmp_path / "open")
    assert federation(resume_from=str(short), **settings).sha256 == whole.sha256
    for partition in range(4):  # the horizon is behind round 3: nothing is searched there
        state = whole.client(partition)[1]
        assert same(state.group("masks"), state.group("next-masks"))


# --- hostile letters --------------------------------------------------------------------------------------------------


def of_another_shape(update):
    name = "fc1.weight"
    masks = {n: (m[:, :-1] if n == name else m) for n, m in update.masks.items()}
    return Payload({n: (t[:, :-1] if n == name else t) for n, t in update.tensors.items()}, masks)


def with_nan(update):
    return Payload({n: t + (float("nan") if n == "fc1.bias" else 0) for n, t in update.tensors.items()}, update.masks)


def without_masks(update):
    return Payload(update.tensors)


def lacking_a_tensor(update):
    return Payload({n: t for n, t in update.tensors.items() if n != "fc1.bias"}, update.masks)


def huge(update):
    return Payload({n: t + (1e30 if n == "fc1.bias" else 0) for n, t in update.tensors.items()}, update.masks)


def overflowing(update):
    """Finite, and yet its predictions are not."""
    return Payload({n: t * 1e30 for n, t in update.tensors.items()}, update.masks)


BAD = [of_another_shape, with_nan, without_masks, lacking_a_tensor]


def hostile(folder, spoil, **settings):
    """A federation of four in which client 1 spoils whatever it sends."""

    def tamper(request, reply, partition):
        if partition != 1 or not reply.has_content():
            return reply
        content = reply.content
        arrays = wire.to_arrays(spoil(wire.payload_of(content, 10**9)))
        return Message(wire.pack(arrays, wire.fields_of(content)), reply_to=request)

    values = {config_key(name): value for name, value in {**QUICK, **settings}.items()}
    config = parse_config({**TINY, "out-dir": str(folder), **values})
    run_in_process(server_app.app, tampered_app(tamper), 4, config.to_dict())
    return Finished(folder)


def left_out(run, round):
    return [note for note in run.rounds[round - 1]["notes"] if "peer/1 is left out" in note]


@pytest.mark.parametrize("spoil", in_test(BAD, with_nan))
def test_a_bad_update_is_left_out_by_each_client_that_receives_it(tmp_path, spoil):
    run = hostile(tmp_path, spoil, system="dispfl", dispfl_gossip="client", dispfl_topology="full")
    assert run.info["status"] == "completed"
    assert [row["replies"] for row in run.rounds] == [4, 4, 4]
    assert [len(left_out(run, round)) for round in (1, 2, 3)] == [0, 3, 3]  # of clients 0, 2 and 3


@pytest.mark.parametrize("spoil", in_test(BAD, with_nan))
def test_a_bad_reply_is_refused_by_a_server_that_averages(tmp_path, spoil):
    run = hostile(tmp_path, spoil, system="dispfl", dispfl_topology="full")
    assert run.info["status"] == "completed"
    assert [row["replies"] for row in run.rounds] == [3, 3, 3]
    assert all(reason.startswith("client 1:") for row in run.rounds for reason in row["failure_reasons"])
    assert not any(row["notes"] for row in run.rounds)


@pytest.mark.parametrize("gossip", ["client", full("server")])
def test_an_update_of_numbers_too_large_to_average_harms_nobody_else(tmp_path, gossip):
    run = hostile(tmp_path, huge, system="dispfl", dispfl_gossip=gossip, dispfl_topology="full")
    assert run.info["status"] == "completed"
    honest = [reason for row in run.rounds for reason in row["failure_reasons"] if "client 1:" not in reason]
    assert honest == []


def test_a_consensus_model_is_made_without_the_letters_that_cannot_be_read(tmp_path):
    """The server sees the letters of D-PSGD that it passes on unread only when it averages them for an evaluation."""
    run = hostile(tmp_path, with_nan, system="dpsgd", dpsgd_gossip="client", dpsgd_topology="full")
    assert run.info["status"] == "completed"
    assert run.rounds[-1]["accuracy_global"] > 0.1
    assert any("client 1: its update is left out" in note for note in run.rounds[-1]["notes"])


@pytest.mark.parametrize(
    "spoil", [of_another_shape, full(with_nan), full(lacking_a_tensor), full(huge), full(overflowing)]
)
def test_a_bad_candidate_harms_nobody_else(tmp_path, spoil):
    run = hostile(tmp_path, spoil, system="fedfomo", fedfomo_candidates=3)
    assert run.info["status"] == "completed"
    honest = [reason for row in run.rounds for reason in row["failure_reasons"] if "client 1:" not in reason]
    assert honest == []


@pytest.mark.full
def test_a_neighbour_model_is_read_from_disk_only_where_memory_has_no_room(federate, monkeypatch):
    """It was decoded when it came. The averages are the same."""
    read, get = [], UpdateStore.get
    monkeypatch.setattr(UpdateStore, "get", lambda self, *which: read.append(which) or get(self, *which))
    found = []
    for room in (10**9, 0):
        monkeypatch.setattr(update_store, "_quarter_of_memory", lambda room=room: room)
        settings = {**QUICK, "num_server_rounds": 3, "dispfl.neighbours": 2}
        found.append((federate(f"{room}", system="dispfl", **settings).sha256, len(read)))
    (with_room, none), (without, many) = found
    assert with_room == without
    assert none == 0
    assert many == 2 * 6 * 3 + 6  # in two rounds six clients have two neighbours and themselves; at the end all masks
