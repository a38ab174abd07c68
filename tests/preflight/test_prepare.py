"""Whatever is given becomes a run on one way: settings, folder and place are checked together, before it starts."""

from __future__ import annotations

import pytest

from fedprune_app.exports.find import find_model
from fedprune_app.models.names import chosen_name
from fedprune_app.preflight.can_start import warnings
from fedprune_app.preflight.inputs import Placement, RunInputs
from fedprune_app.preflight.prepare import prepare, prepare_all
from fedprune_app.results.reader import read_info
from fedprune_app.results.recorder import write_info
from fedprune_app.sweeps.matrix import matrix_of
from tests.refusing import refuses

TOPOLOGY = {"dispfl.topology": "ring"}


def test_a_setting_of_a_file_that_the_command_line_makes_idle_is_a_note():
    given = RunInputs(files=[{"system": "dispfl", **TOPOLOGY}], on_command_line={"system": "fedavg"})
    assert prepare(given).notes == ("without effect with system 'fedavg': dispfl.topology",)


def test_a_setting_of_a_matrix_that_the_command_line_makes_idle_is_a_note(tmp_path):
    matrix = matrix_of({"common": {"dp.enabled": True, "dp.noise-multiplier": 1.0}, "systems": ["fedavg"]}, "x")
    (run,) = matrix.cells(RunInputs(on_command_line={"dp.enabled": False}, out=tmp_path))
    assert run.notes == ("without effect with system 'fedavg': dp.noise-multiplier",)


def test_a_setting_is_refused_where_it_has_an_effect_in_none_of_the_runs_that_have_it():
    several = [RunInputs(files=[{"system": name}], on_command_line=TOPOLOGY) for name in ("fedavg", "dispfl")]
    assert [run.notes for run in prepare_all(several)] == [(), ()]
    with refuses("dispfl.topology", "ring"):
        prepare_all(several[:1])


def test_the_settings_of_a_run_that_has_begun_may_be_idle_and_name_its_folder(tmp_path):
    whole = prepare(RunInputs({"system": "fedavg", "out-dir": str(tmp_path)})).config.to_dict()
    assert prepare(RunInputs(whole)).config.to_dict() == whole
    with refuses("out-dir", str(tmp_path)):
        prepare(RunInputs(on_command_line={"out-dir": str(tmp_path)}))


def test_a_key_that_is_gone_since_a_run_is_refused_with_the_runs_version(federate):
    folder = federate(clients=2, system="standalone", num_server_rounds=1).folder
    info = read_info(folder)
    write_info(folder, {**info, "config": {**info["config"], "gone": 1}, "versions": {"fedprune": "0.1"}})
    with refuses("setting", "gone", where="run of fedprune 0.1"):
        prepare(RunInputs(out=folder, resume=True), Placement("inprocess", 2))
    with refuses("setting", "gone", where="run of fedprune 0.1"):
        find_model(folder, 0)


def test_nodes_of_a_rehearsal_get_what_their_operators_would_give_them():
    config = prepare(RunInputs({"dp.enabled": True, "dp.noise-multiplier": 1.0})).config
    place = Placement(nodes=({}, {"data-dir": "/mine"}, {"policy-file": "/p"})).with_nodes_for(config)
    dealt = {"partition-id": 0, "num-partitions": 3, "secure-rng": config.dp.secure_rng}
    assert place.nodes[0] == dealt
    assert place.nodes[1] == {"data-dir": "/mine", "allowed-label-columns": config.label_column}
    assert place.nodes[2] == {"partition-id": 2, "num-partitions": 3, "policy-file": "/p"}
    assert place.shares_data is False


NOISED = {"system": "fedavg", "dp.enabled": True, "dp.noise-multiplier": 1.0, "test-split": "holdout"}


@pytest.mark.parametrize(
    ("more", "is_said"), [({}, True), ({"dp.accuracies": "open"}, False), ({"dp.count-scale": 0.1}, False)]
)
def test_how_much_of_noised_accuracies_is_noise_is_said_before_the_start(more, is_said, tmp_path):
    run = prepare(RunInputs(on_command_line={**NOISED, **more}, out=tmp_path / "run"))
    said = [
        line for line in warnings(run.config, Placement("inprocess", 10)) if "accuracies are told with noise" in line
    ]
    assert bool(said) == is_said
    assert not said or "± 16 for the mean over 10 clients" in said[0]


def test_sub_fedavg_hy_takes_the_datasets_network_with_batch_norm():
    assert prepare(RunInputs({"system": "subfedavg-hy"})).config.model == "auto-bn"
    assert prepare(RunInputs({"system": "subfedavg-hy", "model": "cnn5-bn"})).config.model == "cnn5-bn"
    assert prepare(RunInputs({"system": "fedavg"})).config.model == "auto"
    assert chosen_name("auto-bn", "digits") == "cnn-small-bn"
    assert chosen_name("auto-bn", "table") == "mlp-small"  # which the start refuses: there is no BatchNorm in it


def test_with_few_real_nodes_all_take_part_unless_the_share_is_given(tmp_path):
    def share(count, **settings):
        placement = Placement(num_clients=count, nodes=({},) * count)
        return prepare(RunInputs(on_command_line=settings, out=tmp_path / "run"), placement).config.fraction_train

    assert (share(3), share(9), share(10)) == (1.0, 1.0, 0.5)
    assert share(3, **{"fraction-train": 0.4}) == 0.4
    assert prepare(RunInputs(out=tmp_path / "run"), Placement("inprocess", 3)).config.fraction_train == 0.5
    elsewhere = Placement(superlink="far"), {"min-clients": 3}  # where the run.json of a run to resume is, too
    for resume in (False, True):
        inputs = RunInputs(on_command_line=elsewhere[1], out=tmp_path / "run", resume=resume)
        assert prepare(inputs, elsewhere[0]).config.fraction_train == 1.0
