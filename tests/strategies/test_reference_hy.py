"""Sub-FedAvg (Hy) against an independent slow reference in which nothing shrinks, and laws of its federations."""

from __future__ import annotations

import shutil
from itertools import pairwise

import pytest
import torch

from fedprune_app.config import ConfigError
from fedprune_app.engine.exchange import TooFewReplies
from tests.examples import in_test
from tests.refusing import refuses
from tests.strategies import reference_hy as reference

COMMON = {
    "system": "subfedavg-hy",
    "dataset": "image-folder",
    "model": "cnn5-bn",
    "shard_size": 8,
    "shards_per_client": 3,
    "validation_fraction": 0.3,
    "evaluate_every": 0,
    "fraction_train": 0.75,
    "learning_rate": 0.02,
    "subfedavg_accuracy_threshold": 50.0,
    "num_server_rounds": 5,
}
RUNS = {
    "lenet5-bn": {"model": "lenet5-bn"},
    "to a target that is met": {
        "seed": 1,
        "num_server_rounds": 6,
        "subfedavg_target_rate": 25.0,
        "subfedavg_prune_step": 15.0,
        "subfedavg_fc_mask_distance": 0.008,
        "subfedavg_channel_distance": 0.1,
    },
    "with weight decay": {
        "num_server_rounds": 8,
        "subfedavg_accuracy_threshold": 34.0,
        "weight_decay": 0.01,
        "max_grad_norm": 2.0,
    },
    "gate on test, the code's initial weights": {
        "subfedavg_gate_split": "test",
        "subfedavg_accuracy_threshold": 40.0,
        "init": "subfedavg",
        "learning_rate": 0.1,
        "lr_decay": 0.8,
        "momentum": 0.9,
    },
    "norms of their own": {"batch_norm": "local", "subfedavg_target_rate": 60.0},
}
ALWAYS = {"fraction_train": 1.0, "num_server_rounds": 2, "local_epochs": 3, "subfedavg_accuracy_threshold": 0.0}
"""Gates that hardly ever shut."""
PARAMETERS = {"conv1": 260, "bn1": 20, "conv2": 5020, "bn2": 40, "fc1": 4050, "fc2": 204}  # of cnn5-bn on 20x20
LINEAR = "fc1.weight", "fc2.weight"
NORM_PARTS = "weight", "bias", "running_mean", "running_var"


@pytest.fixture(scope="session")
def hybrid(federation, tmp_path_factory):
    """``hybrid(**settings)``: a finished run of Sub-FedAvg (Hy) on generated pictures."""
    folder = str(reference.draw_pictures(tmp_path_factory.mktemp("quarters")))
    return lambda **settings: federation(**{**COMMON, "data_dir": folder, **settings})


@pytest.fixture(scope="session")
def compared(hybrid):
    """By name of :data:`RUNS`, a run and what the reference makes of its settings, made once."""
    outcomes = {}

    def pair(name):
        run = hybrid(**RUNS[name])
        if name not in outcomes:
            outcomes[name] = reference.federation(run.config, run.num_clients)
        return run, outcomes[name]

    return pair


@pytest.fixture(params=in_test(RUNS, "lenet5-bn"))
def both(request, compared):
    return compared(request.param)


def close(actual, expected):
    torch.testing.assert_close(dict(actual), dict(expected), rtol=1e-4, atol=1e-5)


def last(run):
    return run.config.num_server_rounds


# --- against the reference ----------------------------------------------------------------------------------------


def test_every_clients_channels_and_masks_are_the_references_exactly(both):
    run, expected = both
    for partition, client in expected.clients.items():
        round, state = run.client(partition)
        assert round == client.round
        assert state.group("channels").keys() == {f"bn{i}" for i in client.kept}
        assert {i: state.group("channels")[f"bn{i}"].tolist() for i in client.kept} == {
            i: mask.tolist() for i, mask in client.kept.items()
        }
        masks, expected_masks = state.group("fc"), reference.coordinates(client.tensors, client.kept, client.fc)
        existing = reference.coordinates(client.tensors, client.kept)
        assert masks.keys() == client.fc.keys()
        for name in masks:
            assert torch.equal(masks[name] & existing[name], expected_masks[name])


def test_every_clients_weights_and_statistics_are_close_to_the_references(both):
    run, expected = both
    for partition, client in expected.clients.items():
        close(run.client(partition)[1].group("weights"), client.tensors)


def test_the_servers_model_is_the_references(both):
    run, expected = both
    close(run.server, expected.server)


def test_what_is_sent_has_the_masks_of_the_reference(both):
    run, expected = both
    participants = run.wiretap.of("train")
    assert list(participants) == expected.participants[-1]
    for partition, message in participants.items():
        client = expected.clients[partition]
        masks = reference.coordinates(expected.server, client.kept, client.fc)
        assert message.up.masks.keys() == message.up.tensors.keys() == masks.keys()
        for name, mask in masks.items():
            assert torch.equal(message.up.masks[name], mask)
            assert not message.up.tensors[name][~mask].any()


def test_densities_and_accuracies_are_the_references(both):
    """Accuracies to one test image: no more than that may stand on the edge between two classes."""
    run, expected = both
    parameters = [name for name in expected.clients[0].tensors if reference.place_of(name)[2] in ("weight", "bias")]
    for partition, row in run.rows(last(run)).items():
        client = expected.clients[partition]
        masks = reference.coordinates(client.tensors, client.kept, client.fc)
        density = sum(int(masks[n].sum()) for n in parameters) / sum(masks[n].numel() for n in parameters)
        assert row["density"] == pytest.approx(density, abs=1e-12)
        one = 1.01 / len(reference.client_data(reference.data_config(run.config), partition, 4).test_labels)
        assert row["accuracy_personal"] == pytest.approx(float(expected.personal[partition]), abs=one)
        assert row["accuracy_received"] == pytest.approx(float(expected.received[partition]), abs=one)
        assert row["accuracy_global"] == pytest.approx(float(expected.of_all[partition]), abs=one)


def test_the_work_reported_is_that_of_the_small_networks(both):
    run, expected = both
    assert [row["flops"] for row in run.rounds] == expected.flops
    assert len(set(expected.flops)) > 1


def test_no_choice_that_was_adopted_is_within_float_noise(both):
    run, expected = both
    noise = max(
        float((run.client(k)[1].group("weights")[name] - tensor).abs().max())
        for k, client in expected.clients.items()
        for name, tensor in client.tensors.items()
        if name in client.fc or name in ("bn1.weight", "bn2.weight")
    )
    assert len(expected.margins) > 5
    assert min(expected.margins) > noise


@pytest.mark.full
def test_the_reference_runs_take_every_branch_of_both_gates(compared):
    names = "lenet5-bn", "to a target that is met", "with weight decay"
    decisions = {words for name in names for words in compared(name)[1].decisions}
    adopted, refused = {"full step", "last step"}, {"masks too close", "target reached"}
    linear, channels = map(set, zip(*decisions, strict=True))
    assert linear == adopted | refused | {"not accurate enough"}
    assert channels == {"removed", "choices too close", "floor reached", "not accurate enough"}
    # one gate opened where the other, asked about another network, stayed shut
    assert {("not accurate enough", "removed"), ("full step", "not accurate enough")} < decisions


def test_a_step_that_would_pass_the_floor_is_not_taken(hybrid):
    """10 and 5 channels, and 20 and 10: another step would leave less than half of them."""
    run = hybrid(**RUNS["with weight decay"])
    for partition in range(4):
        kept = run.client(partition)[1].group("channels")
        assert [int(kept[name].sum()) for name in ("bn1", "bn2")] == [5, 10]


# --- laws ---------------------------------------------------------------------------------------------------------


def sent_masks(run, partition):
    """By round, those of the rounds that the client took part in."""
    rounds = [run.wiretap.of("train", round) for round in range(1, last(run) + 1)]
    return [messages[partition].up.masks for messages in rounds if partition in messages]


def alive_channels(masks, norm):
    return masks[f"{norm}.weight"]


@pytest.mark.parametrize("name", ["to a target that is met", "with weight decay"])
def test_what_is_removed_never_comes_back(hybrid, name):
    run = hybrid(**RUNS[name])
    steps = 0
    for partition in range(run.num_clients):
        for before, after in pairwise(sent_masks(run, partition)):
            for tensor, mask in after.items():
                assert not (mask & ~before[tensor]).any()
            steps += not torch.equal(alive_channels(before, "bn1"), alive_channels(after, "bn1"))
    assert steps > 1


def test_with_a_target_of_zero_channels_still_go_and_linear_weights_stay(hybrid):
    run = hybrid(**ALWAYS, subfedavg_target_rate=0.0)
    for partition in range(4):
        state = run.client(partition)[1]
        assert {name: int(kept.sum()) for name, kept in state.group("channels").items()} == {"bn1": 5, "bn2": 10}
        assert all(mask.all() for mask in state.group("fc").values())


def test_channels_that_never_differ_enough_stay_and_linear_weights_still_go(hybrid):
    run = hybrid(**ALWAYS, subfedavg_channel_distance=1.0)
    for partition in range(4):
        state = run.client(partition)[1]
        assert all(kept.all() for kept in state.group("channels").values())
        weights, kept = state.group("weights"), sent_masks(run, partition)[-1]
        assert {name for name, mask in kept.items() if not mask.all()} == set(LINEAR)
        assert all(float(state.group("fc")[name].double().mean()) == pytest.approx(0.9**2, abs=0.01) for name in LINEAR)
        assert all(weights[name][kept[name]].all() for name in ("conv1.weight", "conv2.weight"))


@pytest.mark.full
def test_neither_gate_changes_what_the_other_proposes(hybrid):
    """In round 1 all start alike: each gate adopts the same with the other one open as with it shut."""
    everything, only_channels, only_linear = (
        hybrid(**ALWAYS, **more) for more in ({}, {"subfedavg_target_rate": 0.0}, {"subfedavg_channel_distance": 1.0})
    )
    for partition, message in everything.wiretap.of("train", 1).items():
        channels = only_channels.wiretap.of("train", 1)[partition].up.masks
        linear = only_linear.wiretap.of("train", 1)[partition].up.masks
        assert not all(mask.all() for mask in channels.values())
        assert not all(mask.all() for mask in linear.values())
        for name, mask in message.up.masks.items():
            assert torch.equal(mask, channels[name] & linear[name])


def test_masks_cover_what_channels_are_made_of(hybrid):
    run = hybrid(**ALWAYS)
    for message in run.wiretap.of("train").values():
        masks = message.up.masks
        one, two = (alive_channels(masks, norm) for norm in ("bn1", "bn2"))
        assert (int(one.sum()), int(two.sum())) == (5, 10)
        for norm, conv, kept in (("bn1", "conv1", one), ("bn2", "conv2", two)):
            for name in [f"{conv}.bias", *(f"{norm}.{part}" for part in NORM_PARTS)]:
                assert torch.equal(masks[name], kept)
        assert torch.equal(masks["conv1.weight"], one.view(10, 1, 1, 1).expand(10, 1, 5, 5))
        assert torch.equal(masks["conv2.weight"], (two.view(20, 1) & one).view(20, 10, 1, 1).expand(20, 10, 5, 5))
        columns = two.repeat_interleave(4)  # maps of 2x2
        assert not masks["fc1.weight"][:, ~columns].any()
        assert 0.5 < float(masks["fc1.weight"][:, columns].double().mean()) < 1
        assert masks["fc1.bias"].all()  # the plain mean
        assert masks["fc2.bias"].all()


def test_the_server_averages_over_the_keepers_and_leaves_the_rest_bit_for_bit(hybrid):
    run = hybrid(**ALWAYS)
    untouched = 0
    for round in range(1, last(run) + 1):
        messages = list(run.wiretap.of("train", round).values())
        before = messages[0].down
        assert before.masks == {}  # the server's model is dense
        after = run.server if round == last(run) else run.wiretap.of("train", round + 1)[0].down.tensors
        for name, old in before.tensors.items():
            kept = torch.stack([message.up.masks[name] for message in messages])
            total = torch.stack([message.up.tensors[name].double() for message in messages]).sum(0)
            nobody = ~kept.any(0)
            mean = (total / kept.sum(0).clamp(min=1)).float()
            torch.testing.assert_close(after[name][~nobody], mean[~nobody], rtol=3e-7, atol=1e-11)
            assert torch.equal(after[name][nobody], old[nobody])
            untouched += int(nobody.sum())
    assert untouched > 10


def test_uploads_shrink_with_the_network_and_downloads_do_not(hybrid):
    """What travels up is the values that are left, and a little to say which they are."""
    small = hybrid(**ALWAYS, subfedavg_target_rate=0.0)
    full = hybrid(**ALWAYS, subfedavg_target_rate=0.0, subfedavg_channel_distance=1.0)
    floats = sum(PARAMETERS.values()) + 60  # and two running statistics per channel
    left = 5 * 26 + 4 * 5 + 10 * (5 * 25 + 1) + 4 * 10 + 50 * (10 * 4) + 50 + 204
    for partition, message in small.wiretap.of("train").items():
        other = full.wiretap.of("train")[partition]
        assert message.bytes_down == other.bytes_down > 4 * floats
        assert 4 * floats < other.bytes_up
        assert 4 * left < message.bytes_up < 4 * left + (other.bytes_up - 4 * floats) + floats / 8


@pytest.mark.parametrize("name", ["lenet5-bn", "with weight decay"])
def test_a_client_is_as_accurate_as_its_masked_full_network(hybrid, name):
    run = hybrid(**RUNS[name])
    removed = 0
    for partition, row in run.rows(last(run)).items():
        data = reference.client_data(reference.data_config(run.config), partition, run.num_clients)
        state = run.client(partition)[1]
        accuracy = reference.share_correct(state.group("weights"), data.test_images, data.test_labels)
        assert row["accuracy_personal"] == float(accuracy)
        removed += not state.group("channels")["bn1"].all()
    assert removed > 1


@pytest.mark.full
def test_the_same_run_twice_gives_the_same_bits(hybrid):
    settings = RUNS["to a target that is met"]
    assert hybrid(**settings, fresh=True).sha256 == hybrid(**settings).sha256


def test_a_run_that_is_killed_resumes_to_the_same_models(hybrid, tmp_path):
    """With channels gone before the cut: the small networks come back from disk."""
    whole = hybrid(**ALWAYS)
    assert not any(alive_channels(sent_masks(whole, partition)[0], "bn1").all() for partition in range(4))
    cut = shutil.copytree(whole.folder, tmp_path / "cut")
    (cut / "checkpoints" / "round-00002.safetensors").unlink()
    resumed = hybrid(**ALWAYS, resume_from=str(cut))
    assert resumed.info["resumed_after_rounds"] == [1]
    assert {m.round for m in resumed.wiretap.messages if m.kind == "train"} == {2}
    assert resumed.sha256 == whole.sha256


@pytest.mark.full
def test_gating_on_test_data_changes_nothing_but_the_gate(hybrid):
    """Open for both, or shut for both: the same bits."""
    shut = ALWAYS | {"subfedavg_accuracy_threshold": 100.0}
    for settings in (ALWAYS, shut):
        on_validation, on_test = (hybrid(**settings, subfedavg_gate_split=split) for split in ("validation", "test"))
        assert on_validation.sha256 == on_test.sha256
    assert {row["density"] for row in on_test.rows(2).values()} == {1.0}


def test_local_norms_stay_at_home_and_the_channels_they_rank_go(hybrid):
    run = hybrid(**ALWAYS, batch_norm="local")
    norms = {f"{norm}.{part}" for norm in ("bn1", "bn2") for part in NORM_PARTS}
    layers = {f"{layer}.{part}" for layer in ("conv1", "conv2", "fc1", "fc2") for part in ("weight", "bias")}
    assert run.server.keys() == layers
    for partition, message in run.wiretap.of("train").items():
        assert message.up.tensors.keys() == message.up.masks.keys() == message.down.tensors.keys() == layers
        state = run.client(partition)[1]
        assert state.group("weights").keys() == layers | norms
        kept = state.group("channels")["bn1"]
        assert int(kept.sum()) == 5
        assert torch.equal(message.up.masks["conv1.bias"], kept)
        assert not state.group("weights")["bn1.running_var"][~kept].any()


def test_local_norms_of_clients_that_never_trained_are_the_initial_ones(hybrid):
    run = hybrid(batch_norm="local", num_server_rounds=1, fraction_train=0.25)
    assert sum(run.client(k) is None for k in range(4)) == 3
    assert run.info["status"] == "completed"


def test_a_network_without_batch_norm_is_refused_on_one_line(hybrid):
    with pytest.raises((ConfigError, TooFewReplies, ValueError), match="no BatchNorm to rank channels by") as refused:
        hybrid(model="cnn5")
    assert "\n" not in str(refused.value)


def test_channels_that_no_validation_data_could_judge_are_refused(hybrid):
    """The channel gate does not look at the target, so a target of zero makes the gate no less needed."""
    for target in (50.0, 0.0):
        with refuses("validation-fraction", 0.0):
            hybrid(validation_fraction=0.0, subfedavg_target_rate=target)
