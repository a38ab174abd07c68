"""Sub-FedAvg (Hy)'s client, without a server: which gate opens when, and that the network it works with is small."""

from __future__ import annotations

import math

import pytest
import torch

from clients import base
from clients.context import NodeContext
from clients.subfedavg_hy import SubFedAvgHyClient
from clients.task import Task
from fedprune_app.config import parse_config
from fedprune_app.core.payload import Payload
from fedprune_app.engine.store import State, grouped
from fedprune_app.models.vision import state_tensors
from tests.strategies import reference_hy as reference

FULL = 250 + 10 + 20 + 5000 + 20 + 40 + 50 * 80 + 50 + 4 * 50 + 4  # cnn5-bn on 1x20x20, 4 classes
SMALL = 125 + 5 + 10 + 10 * 5 * 25 + 10 + 20 + 50 * 40 + 50 + 4 * 50 + 4  # with half of each layer's channels
LINEAR = {"fc1.weight": 4000, "fc2.weight": 200}
HALF = {"bn1": 5, "bn2": 10}
WHOLE = {"bn1": 10, "bn2": 20}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return str(reference.draw_pictures(tmp_path_factory.mktemp("quarters"), train=12, test=4))


@pytest.fixture
def client(pictures, tmp_path):
    """A client whose gates find what they are shown right about as often as ``accuracies`` say, in turn.

    It notes on which data they ask, and of how many parameters and which non-zero weights the network is.
    """

    def make(*accuracies, **settings):
        values = {key.replace("_", "-").replace("subfedavg-", "subfedavg."): v for key, v in settings.items()}
        common = {"dataset": "image-folder", "data-dir": pictures, "model": "cnn5-bn", "partition": "iid"}
        training = {"local-epochs": 2, "learning-rate": 0.05, "system": "subfedavg-hy"}
        one = SubFedAvgHyClient(parse_config({**common, **training, **values}), NodeContext(0, 2, tmp_path))
        one.asked, one.network_sizes, one.nonzero = [], [], []
        answers = list(accuracies)

        def accuracy(task, split, decides):
            one.asked.append(split)
            one.network_sizes.append(sum(p.numel() for p in one.model.parameters()))
            one.nonzero.append({name: int(one.model.state_dict()[name].count_nonzero()) for name in LINEAR})
            return answers.pop(0) if len(answers) > 1 else answers[0]

        if accuracies != ("real",):
            one.accuracy = accuracy
        return one

    return make


@pytest.fixture
def trained(monkeypatch):
    """Numbers of parameters of the networks that were trained, as they are trained."""
    sizes = []

    def train(model, *arguments, **more):
        sizes.append(sum(p.numel() for p in model.parameters()))
        return real(model, *arguments, **more)

    real = base.train
    monkeypatch.setattr(base, "train", train)
    return sizes


def initial(one):
    return Payload(state_tensors(one.full, include_buffers=True))


def update(one, state=None, round=1):
    return one.local_update(Task(round, initial(one)), state or State())


def state_of(one, channels=None, fc=None):
    """A state in which the first so many channels of each norm are gone, or the first so many linear weights."""
    kept = {name: torch.ones(size, dtype=torch.bool) for name, size in WHOLE.items()}
    masks = {name: torch.ones(one.shapes[name], dtype=torch.bool) for name in LINEAR}
    for name, count in (channels or {}).items():
        kept[name][:count] = False
    for name, count in (fc or {}).items():
        masks[name].view(-1)[:count] = False
    return State(grouped(weights=initial(one).tensors, channels=kept, fc=masks))


def channels_left(update):
    return {name: int(kept.sum()) for name, kept in update.state.group("channels").items()}


def linear_removed(update):
    return {name: int((~mask).sum()) for name, mask in update.state.group("fc").items()}


def share_of_each(percent, sizes=LINEAR):
    """What one step takes of full tensors: all below the percentile at place percent/100 * (n - 1)."""
    return {name: math.ceil(percent / 100 * (n - 1)) for name, n in sizes.items()}


NOTHING = dict.fromkeys(LINEAR, 0)
HALVED = {"bn1": 5, "bn2": 10}  # as a state: so many are gone


# --- gates --------------------------------------------------------------------------------------------------------


def test_both_gates_open_and_each_takes_its_share(client):
    result = update(client(1.0))
    assert linear_removed(result) == share_of_each(10) == {"fc1.weight": 400, "fc2.weight": 20}
    assert channels_left(result) == HALF


@pytest.mark.parametrize(
    ("answers", "linear", "channels"),
    [
        ((1.0, 0.0), share_of_each(10), WHOLE),
        ((0.0, 1.0), NOTHING, HALF),
        ((0.0, 0.0), NOTHING, WHOLE),
        ((0.5, 0.51), NOTHING, HALF),  # strictly above the threshold
        ((None, None), NOTHING, WHOLE),  # no data to decide with
    ],
)
def test_each_gate_opens_or_stays_shut_by_itself(client, answers, linear, channels):
    result = update(client(*answers))
    assert linear_removed(result) == linear
    assert channels_left(result) == channels


@pytest.mark.parametrize("split", ["validation", "test"])
def test_each_gate_asks_once_and_on_its_split_only(client, split):
    one = client(1.0, subfedavg_gate_split=split)
    update(one)
    assert one.asked == [split, split]


@pytest.mark.parametrize(
    ("first", "left"), [(1.0, {"fc2.weight": 180}), (0.0, {"fc1.weight": 2000, "fc2.weight": 200})]
)
def test_the_second_gate_judges_the_small_network_with_the_weights_the_first_one_left(client, first, left):
    one = client(first, 1.0)
    update(one)
    assert one.network_sizes == [FULL, SMALL]
    assert one.nonzero[0] == {"fc1.weight": 3600, "fc2.weight": 180}
    assert one.nonzero[1] | left == one.nonzero[1]
    assert (one.nonzero[1]["fc1.weight"] < 2000) == bool(first)


def test_shut_gates_leave_the_trained_weights_as_they_are(client):
    shut = update(client(0.0))
    never = update(client(1.0, subfedavg_fc_mask_distance=1.0, subfedavg_channel_distance=1.0))
    assert shut.payload.digest() == never.payload.digest()


def test_with_one_local_epoch_there_is_no_distance(client):
    one = client(1.0, local_epochs=1, subfedavg_fc_mask_distance=0.0, subfedavg_channel_distance=0.0)
    result = update(one)
    assert (linear_removed(result), channels_left(result)) == (NOTHING, WHOLE)
    assert one.asked == []


def test_at_the_floor_the_second_gate_has_nothing_to_ask(client):
    one = client(1.0, subfedavg_target_rate=90.0)
    result = update(one, state_of(one, channels=HALVED))
    assert channels_left(result) == HALF
    assert one.asked == ["validation"]


# --- linear layers ------------------------------------------------------------------------------------------------


def test_a_step_takes_its_share_of_the_weights_whose_channels_are_left(client):
    one = client(1.0, subfedavg_target_rate=90.0)
    result = update(one, state_of(one, channels=HALVED))
    masks = result.payload.masks
    assert int(masks["fc1.weight"].sum()) == 2000 - math.ceil(0.1 * 1999)
    assert not masks["fc1.weight"][:, :40].any()  # blocks of 2x2 columns of the ten that are gone


def test_removed_channels_count_towards_the_target_and_their_gate_does_not_ask_for_it(client):
    """Half the channels are 61 % of the parameters: a target below that is reached."""
    percent = 100 * (1 - SMALL / FULL)
    beyond, before = (client(1.0, subfedavg_target_rate=target) for target in (percent - 0.01, percent + 0.01))
    assert linear_removed(update(beyond, state_of(beyond, channels=HALVED))) == NOTHING
    assert linear_removed(update(before, state_of(before, channels=HALVED))) == {"fc1.weight": 2001, "fc2.weight": 1}
    assert channels_left(update(client(1.0, subfedavg_target_rate=0.0))) == HALF


@pytest.mark.parametrize("percent", [10, 20, 30])
def test_the_last_step_takes_what_is_missing_of_the_parameters_that_are_left(client, percent):
    gone = FULL * percent // 100
    one = client(1.0, subfedavg_target_rate=percent + 2.0)
    taken = linear_removed(update(one, state_of(one, fc={"fc1.weight": gone})))
    pruned = 100 * gone / FULL
    share = (percent + 2 - pruned) / (100 - pruned)
    assert taken["fc1.weight"] == gone + math.ceil(share * (4000 - gone - 1))
    assert taken["fc2.weight"] == math.ceil(share * 199)


@pytest.mark.parametrize(
    ("missing", "pruned", "step"),
    [
        (9.0, 40.0, 15.0),
        (9.6, 40.0, 16.0),  # not above 16
        (9.0, 50.0, 13.0),  # 18, less 5
        (9.9, 80.0, 44.5),
        (-1e-9, 50.0, 0.01),  # never nothing
    ],
)
def test_the_last_step_is_the_released_codes(client, missing, pruned, step):
    assert client(1.0).last_step(missing, pruned) == pytest.approx(step)


@pytest.mark.parametrize("count", [601, 611, 620])
def test_a_target_reached_exactly_is_reached(client, count):
    one = client(1.0, subfedavg_target_rate=100 * count / FULL, subfedavg_channel_distance=1.0)
    result = update(one, state_of(one, fc={"fc1.weight": count}))
    assert linear_removed(result) == NOTHING | {"fc1.weight": count}


# --- the small network --------------------------------------------------------------------------------------------


def test_the_network_that_is_trained_shrinks_with_the_channels(client, trained):
    one = client(1.0)
    first = update(one)
    update(one, first.state, round=2)
    assert trained == [FULL, SMALL]


def test_the_work_reported_is_that_of_the_network_that_was_trained(client):
    """Two per multiply-add, three passes, 2 epochs; what is removed after training counts from the next round."""
    one = client(1.0, subfedavg_target_rate=0.0)
    examples = 3 * 2 * len(one.data.train_labels)
    first = update(one)
    second = update(one, first.state, round=2)
    assert first.flops == examples * 2 * (10 * 25 * 16**2 + 20 * 250 * 4**2 + 50 * 80 + 4 * 50)
    assert second.flops == examples * 2 * (5 * 25 * 16**2 + 10 * 125 * 4**2 + 50 * 40 + 4 * 50)
    assert second.flops < 0.4 * first.flops


def test_what_is_sent_and_kept_is_the_full_network_with_zeros_where_it_was_cut(client):
    result = update(client(1.0))
    assert result.payload.masks.keys() == result.payload.tensors.keys()
    for name, mask in result.payload.masks.items():
        assert not result.payload.tensors[name][~mask].any()
        assert torch.equal(result.payload.tensors[name], result.state.group("weights")[name])
    kept = result.state.group("channels")
    assert torch.equal(result.payload.masks["bn2.running_var"], kept["bn2"])
    assert (result.payload.tensors["bn2.running_var"][kept["bn2"]] > 0).all()


def test_evaluation_is_of_the_small_network_and_as_accurate_as_the_masked_one(client):
    one = client("real", subfedavg_accuracy_threshold=0.0, local_epochs=8)
    received = initial(one)
    one.fit(*Task(1, received).to_numpy())
    state = one.store.load()[1]
    assert {name: int(kept.sum()) for name, kept in state.group("channels").items()} == HALF
    sizes, real = [], one.accuracy
    one.accuracy = lambda task, split, **how: (
        sizes.append((split, sum(p.numel() for p in one.model.parameters()))) or real(task, split, **how)
    )
    _, _, metrics = one.evaluate(*Task(1, received, fields={"state-round": 1}).to_numpy())
    # personal, then as received under the masks, then the global model, which is whole
    assert sizes == [("test", SMALL), ("validation", SMALL), ("test", SMALL), ("test", FULL)]
    data, weights = one.data, state.group("weights")
    for key, images, labels in (
        ("accuracy-personal", data.test_images, data.test_labels),
        ("accuracy-validation", data.validation_images, data.validation_labels),
    ):
        assert metrics[key] == float(reference.share_correct(weights, images, labels))
    assert metrics["density"] == one.density(one.masks(Task(1), state)) < SMALL / FULL
    assert metrics["density/conv1.weight"] == 0.5
    assert metrics["density/conv2.weight"] == 0.25
    assert metrics["channel-density"] == 0.5
    # a multiplication and an addition per kept weight and place
    masks = one.masks(Task(1), state)
    linear = 2 * sum(int(masks[name].sum()) for name in LINEAR)
    assert metrics["inference-flops"] == 2 * (5 * 25 * 16**2 + 10 * 125 * 4**2) + linear


def test_density_counts_all_parameters_and_no_statistics(client):
    one = client(1.0)
    assert one.density(one.masks(Task(1), state_of(one, channels=HALVED))) == SMALL / FULL
    assert one.density(one.masks(Task(1), State())) == 1


def test_the_state_on_disk_is_enough_to_go_on(client, tmp_path):
    one = client(1.0)
    received = initial(one)
    for round in (1, 2):
        arrays = one.fit(*Task(round, received, fields={"state-round": round - 1}).to_numpy())[0]
    anew = client(1.0).fit(*Task(2, received, fields={"state-round": 1}).to_numpy())[0]
    assert all((a == b).all() for a, b in zip(arrays, anew, strict=True))


def test_local_norms_are_not_sent_and_a_client_begins_with_the_initial_ones(client):
    one = client(1.0, batch_norm="local")
    received = Payload({name: tensor for name, tensor in initial(one).tensors.items() if name in one.shared})
    result = one.local_update(Task(1, received), State())
    assert not any(name.startswith("bn") for name in result.payload.tensors)
    assert result.state.group("weights")["bn1.weight"].count_nonzero() == 5


def test_a_network_without_batch_norm_is_refused_on_one_line(client):
    with pytest.raises(ValueError, match=r"^the model has no BatchNorm to rank channels by"):
        client(1.0, model="cnn5")
