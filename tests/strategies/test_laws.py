"""What must hold of a federation whatever the numbers: of Sub-FedAvg first, then of all systems."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedprune_app.config import Config, ConfigError
from fedprune_app.data.datasets import IDX
from fedprune_app.data.splits import client_data, data_config
from fedprune_app.engine import simulated_grid
from fedprune_app.engine.store import VersionedStore, read_tensors
from fedprune_app.federation.round import Round, RunContext
from fedprune_app.learning.evaluate import evaluate
from fedprune_app.models.initial import initial_model
from fedprune_app.models.names import chosen_name
from fedprune_app.models.vision import load_state_tensors
from fedprune_app.preflight.inputs import RunInputs
from fedprune_app.sweeps.matrix import read_matrix
from strategies.fedavg import FedAvg
from strategies.standalone import Standalone
from strategies.subfedavg import SubFedAvg
from tests.examples import full, in_test
from tests.refusing import refuses
from tests.strategies.test_reference import SYSTEMS

NUM_PARAMETERS, NUM_WEIGHTS = 6090, 6032  # of cnn-small on digits; biases are never pruned
PRUNED = "conv1.weight", "conv2.weight", "fc1.weight"
UNEQUAL = {"partition": "dirichlet-class", "shard_size": 0}

PRUNING = {
    "small last steps": SYSTEMS["subfedavg"],
    "full steps": {"fraction_train": 1.0},
    "large steps to the end": {
        "fraction_train": 1.0,
        "num_server_rounds": 6,
        "subfedavg_prune_step": 40.0,
        "subfedavg_target_rate": 43.8,
    },
    "one last step": {"subfedavg_target_rate": 8.5},
}


@pytest.fixture(params=in_test(PRUNING, "small last steps"))
def pruning_run(request, federation):
    return federation(**PRUNING[request.param])


@pytest.fixture(scope="session")
def pictures(tmp_path_factory):
    """An image folder of two kinds of 16x16 pictures, large enough for LeNet-5, with room for its batch norms."""
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for part, count in (("train", 12), ("test", 4)):
        for label, brightness in (("dark", 0), ("light", 120)):
            (folder / part / label).mkdir(parents=True)
            for i in range(count):
                pixels = brightness + rng.integers(0, 100, (16, 16))
                Image.fromarray(pixels.astype(np.uint8)).save(folder / part / label / f"{i:02}.png")
    return {
        "dataset": "image-folder",
        "data_dir": str(folder),
        "model": "lenet5-bn",
        "partition": "iid",
        "shard_size": 0,
        "validation_fraction": 0.3,
        "subfedavg_accuracy_threshold": 1.0,
        "num_server_rounds": 2,
    }


def masks_by_round(run, partition):
    versions = VersionedStore(run.folder / "clients" / f"{partition:05d}").rounds()
    return [run.client(partition, before=version + 1)[1].group("masks") for version in versions]


# --- Sub-FedAvg: masks --------------------------------------------------------------------------------------------


def test_masks_only_shrink(pruning_run):
    some_pruned = False
    for partition in range(pruning_run.num_clients):
        history = masks_by_round(pruning_run, partition)
        for before, after in pairwise(history):
            for name in PRUNED:
                assert not (after[name] & ~before[name]).any()
        some_pruned |= any(not mask.all() for masks in history for mask in masks.values())
    assert some_pruned


def test_a_client_overshoots_its_target_by_less_than_one_weight_per_tensor(pruning_run):
    least = 1 - pruning_run.config.subfedavg.target_rate / 100 - len(PRUNED) / NUM_PARAMETERS
    densities = [row["density"] for row in pruning_run.clients]
    assert min(densities) < 1
    assert min(densities) >= least


def test_the_target_is_reached_and_then_left_alone(federation):
    run = federation(**PRUNING["large steps to the end"])
    for partition in range(run.num_clients):
        densities = [run.rows(round)[partition]["density"] for round in range(1, 7)]
        reached = [density for density in densities if density <= 0.562]
        assert len(reached) > 1
        assert len(set(reached)) == 1


def test_density_counts_all_parameters_biases_included(pruning_run):
    for partition, row in pruning_run.rows(pruning_run.config.num_server_rounds).items():
        found = pruning_run.client(partition)
        kept = sum(int(mask.sum()) for mask in found[1].group("masks").values()) if found else NUM_WEIGHTS
        assert row["density"] == pytest.approx((kept + NUM_PARAMETERS - NUM_WEIGHTS) / NUM_PARAMETERS, abs=1e-12)


def test_pruned_weights_are_zero_in_the_state_and_what_is_sent_is_the_state(pruning_run):
    for partition in range(pruning_run.num_clients):
        versions = VersionedStore(pruning_run.folder / "clients" / f"{partition:05d}").rounds()
        for round in versions:
            state = pruning_run.client(partition, before=round + 1)[1]
            sent = pruning_run.wiretap.of("train", round)[partition].up
            assert sent.masks.keys() == set(PRUNED)
            for name, weights in state.group("weights").items():
                assert torch.equal(sent.tensors[name], weights)
            for name, mask in state.group("masks").items():
                assert torch.equal(sent.masks[name], mask)
                assert not state.group("weights")[name][~mask].any()


def test_with_target_zero_nothing_is_pruned_and_equal_clients_make_it_fedavg(federation):
    pruned, plain = federation(subfedavg_target_rate=0.0), federation(system="fedavg")
    assert {row["density"] for row in pruned.clients} == {1.0}
    torch.testing.assert_close(pruned.server, plain.server, rtol=1e-5, atol=1e-7)
    for partition in range(4):
        one, other = pruned.client(partition), plain.client(partition)
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one[1].group("weights"), other[1].group("weights"), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "never",
    [{"local_epochs": 1}, full({"subfedavg_accuracy_threshold": 100.0}), full({"subfedavg_mask_distance": 1.0})],
    ids=lambda settings: next(iter(settings)),
)
def test_nothing_is_pruned(federation, never):
    """With one epoch both masks are one; no accuracy is above 100 %; no two masks are further apart than 1."""
    run = federation(**never)
    assert {row["density"] for row in run.clients} == {1.0}
    assert all(mask.all() for k in range(4) if run.client(k) for mask in run.client(k)[1].group("masks").values())


@pytest.mark.full
def test_gating_on_test_data_changes_nothing_but_the_gate(federation):
    """Open for both, or shut for both: the same bits."""
    on_validation, on_test = (federation(subfedavg_gate_split=split) for split in ("validation", "test"))
    assert on_validation.sha256 == on_test.sha256
    assert min(row["density"] for row in on_test.clients) < 0.9
    shut = {"subfedavg_accuracy_threshold": 100.0}
    assert federation(**shut).sha256 == federation(subfedavg_gate_split="test", **shut).sha256


# --- the server ---------------------------------------------------------------------------------------------------


def expected_server(run, round, old):
    """Every coordinate's mean over those who kept it, weighted as the system says, from what was really sent."""
    sent = list(run.wiretap.of("train", round).values())
    weight = {partition: row["num_examples"] for partition, row in run.rows(round).items()}
    result = {}
    for name, before in old.items():
        total, weights = torch.zeros_like(before, dtype=torch.float64), torch.zeros_like(before, dtype=torch.float64)
        for message in sent:
            a = weight[message.partition] if run.config.system == "fedavg" else 1
            kept = message.up.masks.get(name, torch.ones_like(before, dtype=torch.bool)).double()
            total += a * kept * message.up.tensors[name].double()
            weights += a * kept
        result[name] = torch.where(weights > 0, total / weights.clamp(min=1), before.double()).float()
    return result


@pytest.mark.parametrize(
    "case", ["subfedavg", full("subfedavg with batch norms"), full("fedavg"), full("fedavg with batch norms")]
)
def test_the_server_averages_what_was_sent_and_sends_the_average(federation, pictures, case):
    settings = pictures if "norms" in case else UNEQUAL if case == "fedavg" else SYSTEMS["subfedavg"]
    run = federation(system=case.partition(" ")[0], **settings)
    last = run.config.num_server_rounds
    for round in range(1, last + 1):
        before = next(iter(run.wiretap.of("train", round).values())).down
        assert before.masks == {}  # the server's model is dense
        average = expected_server(run, round, before.tensors)
        after = run.server if round == last else next(iter(run.wiretap.of("train", round + 1).values())).down.tensors
        assert after.keys() == before.tensors.keys()
        torch.testing.assert_close(dict(after), average, rtol=3e-7, atol=1e-11)  # one float32 rounding; the 2^-40 grid
        assert all(m.down.digest() == before.digest() for m in run.wiretap.of("train", round).values())
        evaluated = {m.down.digest() for m in run.wiretap.of("evaluate", round).values()}
        assert len(evaluated) == 1
        assert evaluated != {before.digest()}


def test_a_coordinate_that_no_participant_kept_stays_bit_for_bit(federation):
    run = federation(**PRUNING["full steps"])
    before = run.wiretap.of("train", 3)[0].down.tensors
    untouched = 0
    for name in PRUNED:
        kept = torch.stack([message.up.masks[name] for message in run.wiretap.of("train", 3).values()]).any(0)
        assert torch.equal(run.server[name][~kept], before[name][~kept])
        assert not torch.equal(run.server[name][kept], before[name][kept])
        untouched += int((~kept).sum())
    assert untouched > 10


def cost(kind, model, num_rounds, **options):
    """Megabytes by the paper's formula: ten clients a round."""
    config = Config(subfedavg=type(Config().subfedavg)(**options))
    strategy = kind(RunContext(config, {}, None, None, ""), dict(model.named_parameters()))
    return num_rounds * sum(strategy.paper_bytes(Round(1, tuple(range(10)), participants=tuple(range(10))))) / 1e6


def test_the_cost_formula_gives_table_1_of_the_paper():
    """Megabytes at 30, 50 and 70 % pruned, and of FedAvg; the paper rounds the CIFAR-10 numbers to 10 MB."""
    cnn5 = initial_model("cnn5", "mnist", (1, 28, 28), 10, init="default", seed=0)
    lenet5 = initial_model("lenet5", "cifar10", (3, 32, 32), 10, init="default", seed=0)
    rates = (30.0, 50.0, 70.0)
    mnist = [cost(SubFedAvg, cnn5, 300, target_rate=p) for p in rates] + [cost(FedAvg, cnn5, 300)]
    cifar10 = [cost(SubFedAvg, lenet5, 500, target_rate=p) for p in rates] + [cost(FedAvg, lenet5, 500)]
    assert mnist == pytest.approx([448.0, 397.21, 346.43, 524.16], abs=0.01)
    assert cifar10 == pytest.approx([2120, 1880, 1640, 2480], abs=5)
    assert cost(Standalone, cnn5, 300) == 0


@pytest.mark.parametrize("data", ["mnist", "emnist"])
def test_the_matrix_of_table_1_trains_the_network_whose_bytes_the_paper_prints(data):
    """The letters have 26 classes, so a larger network; the digits give the 524.16 MB of the table."""
    matrices = Path(__file__).parents[2] / "configs" / "matrices" / "papers"
    cells = read_matrix(matrices / f"subfedavg_table1_{data}.yaml").cells(RunInputs(out=matrices))
    config = next(cell.config for cell in cells if cell.config.system == "fedavg")
    classes = IDX[config.dataset].classes
    model = initial_model(
        chosen_name(config.model, config.dataset), config.dataset, (1, 28, 28), len(classes), init="default", seed=0
    )
    assert sum(parameter.numel() for parameter in model.parameters()) == 21_840
    assert cost(FedAvg, model, config.num_server_rounds) == pytest.approx(524.16, abs=0.01)


# --- all systems --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", ["subfedavg", full("fedavg"), full("standalone")])
def test_a_client_that_is_not_sampled_keeps_its_state(federation, system):
    run = federation(system=system, clients=5, fraction_train=0.2)
    rounds_of = {partition: [] for partition in range(5)}
    for round in (1, 2, 3):
        participants = run.wiretap.of("train", round)
        assert len(participants) == 1
        rounds_of[min(participants)].append(round)
    assert [] in rounds_of.values()
    for partition, rounds in rounds_of.items():
        folder = run.folder / "clients" / f"{partition:05d}"
        assert VersionedStore(folder).rounds() == rounds


@pytest.mark.full
@pytest.mark.parametrize(
    "settings",
    [{"fraction_train": 1.0}, {"system": "fedavg", "fraction_train": 1.0, **UNEQUAL}, {"system": "standalone"}],
    ids=["subfedavg", "fedavg", "standalone"],
)
def test_the_order_in_which_replies_arrive_does_not_matter(federation, monkeypatch, settings):
    in_order = federation(clients=6, **settings)
    shuffle = np.random.default_rng(0)
    orders = []

    class ShuffledGrid(simulated_grid.InProcessGrid):
        def pull_messages(self, message_ids):
            orders.append(shuffle.permutation(list(message_ids)).tolist())
            return super().pull_messages(orders[-1])

    monkeypatch.setattr(simulated_grid, "InProcessGrid", ShuffledGrid)
    shuffled = federation(clients=6, fresh=True, **settings)
    assert any(order != sorted(order, key=int) for order in orders)
    assert shuffled.sha256 == in_order.sha256

    def timeless(rows):
        return [{key: value for key, value in row.items() if "seconds" not in key} for row in rows]

    assert timeless(shuffled.clients) == timeless(in_order.clients)


@pytest.mark.parametrize("system", ["subfedavg", full("fedavg")])
def test_local_norms_stay_at_home_and_averaged_ones_travel(federation, pictures, system):
    norms = {f"bn{i}.{part}" for i in (1, 2) for part in ("weight", "bias", "running_mean", "running_var")}
    others = {f"{layer}.{part}" for layer in ("conv1", "conv2", "fc1", "fc2", "fc3") for part in ("weight", "bias")}
    for batch_norm, shared in (("averaged", others | norms), ("local", others)):
        run = federation(system=system, batch_norm=batch_norm, clients=3, fraction_train=0.7, **pictures)
        for message in run.wiretap.messages:
            if message.kind == "train":
                assert message.up.tensors.keys() == message.down.tensors.keys() == shared
            elif message.kind == "evaluate":
                assert message.down.tensors.keys() == shared
        assert run.server.keys() == shared
        states = [run.client(k)[1].group("weights") for k in range(3) if run.client(k)]
        assert all(state.keys() == others | norms for state in states)
        assert not torch.equal(states[0]["bn1.running_mean"], states[1]["bn1.running_mean"])
        if system == "subfedavg":  # and never are norms pruned
            assert all(
                m.up.masks.keys() == {n for n in others if "weight" in n} for m in run.wiretap.of("train").values()
            )


def test_local_norms_go_on_from_where_they_were(federation, pictures):
    """Two rounds of one client with a learning rate of almost nothing: its own statistics move on, weights stay."""
    still = {"learning_rate": 1e-30, "local_epochs": 1, "clients": 1, "system": "fedavg"}
    means = {}
    for batch_norm in ("local", "averaged"):
        run = federation(batch_norm=batch_norm, **still, **pictures)
        means[batch_norm] = [run.client(0, before=t + 1)[1].group("weights")["bn1.running_mean"] for t in (1, 2)]
    assert not torch.equal(*means["local"])
    torch.testing.assert_close(means["local"], means["averaged"])  # of one client, the average is its own


@pytest.mark.parametrize("system", ["dpsgd", full("dpsgd-ft"), full("fedavg-ft"), full("fedavg"), full("ditto")])
def test_received_models_are_tested_with_the_clients_own_norms_whatever_was_tested_before(federation, system):
    """An accuracy of the last round does not depend on earlier evaluations, whose scores a client remembers."""
    settings = {"model": "cnn-small-bn", "batch_norm": "local", "clients": 4, "num_server_rounds": 4}
    often, once = (federation(system=system, evaluate_every=every, **settings) for every in (1, 0))
    assert often.info["final_sha256"] == once.info["final_sha256"]
    last = {name: value for name, value in once.rounds[-1].items() if name.startswith("accuracy_")}
    assert last == {name: often.rounds[-1][name] for name in last}
    for partition, row in once.rows(4).items():
        state = once.client(partition)
        sent = once.wiretap.of("evaluate", 4)[partition].down.tensors
        network = initial_model("cnn-small-bn", "digits", (1, 8, 8), 10, init=once.config.init, seed=0)
        if state is not None:
            own = state[1].group("local") or state[1].group("weights")
            load_state_tensors(network, {name: tensor for name, tensor in own.items() if name not in sent})
        load_state_tensors(network, sent)
        data = client_data(data_config(once.config), partition, 4)
        tested = evaluate(network, data.test_images, data.test_labels)
        assert row["accuracy_global"] == pytest.approx(tested.accuracy)


@pytest.mark.parametrize("system", ["subfedavg", "fedavg", full("standalone")])
def test_a_federation_of_one_client_with_one_label_runs(federation, system):
    run = federation(
        system=system, clients=1, partition="classes", classes_per_client=1, shard_size=0, fraction_train=0.01
    )
    assert run.info["status"] == "completed"
    assert [row["replies"] for row in run.rounds] == [1, 1, 1]
    assert run.rows(3)[0]["accuracy_personal"] == 1.0


def test_pruning_that_no_validation_data_could_decide_is_refused(federation):
    with refuses("validation-fraction", 0.0):
        federation(validation_fraction=0.0)
    dense = federation(system="fedavg", validation_fraction=0.0)
    assert {row["accuracy_validation"] for row in dense.clients} == {None}
    assert dense.rounds[-1]["accuracy_validation_mean"] is None


@pytest.mark.full
def test_a_new_run_does_not_inherit_the_clients_of_an_earlier_one(federation, tmp_path):
    settings = {"clients": 6, "fraction_train": 0.34}
    alone = federation(seed=2, **settings)
    federation(seed=1, state_dir=str(tmp_path), **settings)
    assert federation(seed=2, state_dir=str(tmp_path), **settings).sha256 == alone.sha256


def test_the_checkpoint_is_the_model_that_was_sent_next(federation):
    run = federation(system="fedavg")
    saved = read_tensors(run.folder / "checkpoints" / "round-00002.safetensors")
    sent = next(iter(run.wiretap.of("train", 3).values())).down
    assert all(torch.equal(saved.tensors[name], tensor) for name, tensor in sent.tensors.items())


def test_a_run_is_not_resumed_with_another_number_of_clients(federation, tmp_path):
    whole = federation()
    cut = shutil.copytree(whole.folder, tmp_path / "cut")
    with pytest.raises(ConfigError):
        federation(clients=5, num_server_rounds=4, resume_from=str(cut))


# --- known faults -------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_on_a_gpu_clients_prune_as_on_the_cpu(federation):
    on_gpu, on_cpu = (federation(device=device) for device in ("cuda", "cpu"))
    assert on_gpu.rounds[-1]["failures"] == 0
    assert on_gpu.rounds[-1]["density_mean"] == pytest.approx(on_cpu.rounds[-1]["density_mean"], abs=1e-3)


def test_a_newcomer_to_lg_fedavg_keeps_the_lower_layers_that_it_trained(federation):
    """Its test has the server's lower layers too, where rounds of FedAvg came first."""
    settings = {"lgfedavg_pretrain_rounds": 1, "num_server_rounds": 2, "local_epochs": 20, "learning_rate": 0.1}
    run = federation(system="lg-fedavg", clients=4, partition="iid", holdout_clients=2, **settings)
    rows = {row["partition"]: row.get("accuracy_newcomer") for row in run.clients if row["round"] == 2}
    newcomers = {partition: accuracy for partition, accuracy in rows.items() if accuracy is not None}
    assert len(newcomers) == 2
    network = initial_model(run.config.model, "digits", (1, 8, 8), 10, init=run.config.init, seed=0)
    load_state_tensors(network, run.server)
    of_the_server = {}
    for partition in newcomers:
        data = client_data(data_config(run.config), partition, 4)
        of_the_server[partition] = evaluate(network, data.test_images, data.test_labels).accuracy
    assert newcomers != pytest.approx(of_the_server)


def test_a_full_pull_leads_ditto_back_to_the_model_that_it_received_local_norms_too(federation, pictures):
    settings = {"batch_norm": "local", "clients": 1, **pictures, "num_server_rounds": 1, "local_epochs": 1}
    pull = {"learning_rate": 0.125, "ditto_pull": 8.0, "ditto_global_epochs": 1, "ditto_personal_epochs": 1}
    run = federation(system="ditto", **settings, **pull)
    own = run.client(0)[1].group("weights")
    start = federation(system="ditto", **settings, **{**pull, "learning_rate": 1e-30}).client(0)[1]
    learned = [name for name in own if "running" not in name]
    for name in learned:
        torch.testing.assert_close(own[name], start.group("weights")[name], msg=name)
