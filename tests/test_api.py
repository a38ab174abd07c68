"""The functions for scripts and notebooks do what the command line does."""

from __future__ import annotations

import gc
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.supercore.exit import exit_handler
from PIL import Image

import fedprune
import fedprune_app
from fedprune_app import server_app
from fedprune_app.data import splits
from fedprune_app.exports.file import read_export_info
from fedprune_app.exports.predict import predictions
from fedprune_app.models.embedded import write_untrained
from fedprune_app.results.recorder import write_info
from tests.examples import full
from tests.models.tiny_llm import tiny_checkpoint
from tests.refusing import refuses
from tests.results.conftest import made_up_run

QUICK = {"clients": 3, "engine": "inprocess", "progress": False}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("api") / "run"
    return fedprune_app.run(
        system="dispfl",
        num_server_rounds=1,
        local_epochs=1,
        dispfl={"neighbours": 1},
        fraction_train=1.0,
        out=out,
        **QUICK,
    )


def test_a_run_is_returned_with_its_rounds_and_settings(finished):
    assert finished.status == "completed"
    assert finished.config["dispfl.neighbours"] == 1
    assert finished.config["local-epochs"] == 1
    assert [row["round"] for row in finished.rounds] == [1]
    assert {row["partition"] for row in finished.clients} == {0, 1, 2}
    assert fedprune_app.load_run(finished.folder).rounds == finished.rounds


def test_the_short_name_has_the_same_functions_and_changes_nothing_else():
    assert fedprune.run is fedprune_app.run
    assert {"run", "report", "model"} <= set(dir(fedprune))
    with pytest.raises(AttributeError):
        fedprune.nothing  # noqa: B018


def test_a_run_without_a_folder_is_numbered_and_tells_each_round_as_it_is_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = []
    settings = {"system": "fedavg", "num_server_rounds": 2, "local_epochs": 1, "on_round": told.append}
    run = fedprune.run(**settings, **QUICK)
    assert run.folder == tmp_path / "runs" / "1"
    assert (tmp_path / "runs" / "latest").resolve() == run.folder
    assert [row["round"] for row in told] == [1, 2]
    assert told[-1]["bytes_up"] == run.rounds[-1]["bytes_up"]


def test_a_notebook_shows_a_run_as_a_picture_and_a_table(tmp_path):
    shown = fedprune.load_run(made_up_run(tmp_path / "run"))._repr_html_()
    assert shown.startswith("<svg")
    assert "<th>Personal (%)</th>" in shown
    assert "<script" not in shown


def test_a_run_has_the_hash_of_the_same_run_on_the_command_line(finished, fedprune, tmp_path):
    where = ["--engine", "inprocess", "--clients", "3", "--out", "a"]
    code, said = fedprune(
        "run",
        "system=dispfl",
        "num-server-rounds=1",
        "local-epochs=1",
        "dispfl.neighbours=1",
        "fraction-train=1",
        *where,
    )
    assert code == 0, said
    assert fedprune_app.load_run(tmp_path / "a").info["final_sha256"] == finished.info["final_sha256"]


def test_a_run_is_resumed(tmp_path):
    settings = {"system": "standalone", "local-epochs": 1, "num-server-rounds": 1}
    first = fedprune_app.run(settings, out=tmp_path / "a", **QUICK)
    longer = fedprune_app.run(out=tmp_path / "a", resume=True, num_server_rounds=2, engine="inprocess", progress=False)
    assert (len(first.rounds), len(longer.rounds)) == (1, 2)
    assert len(longer.info["partition"]) == 3
    with refuses("clients", 2, condition="when resuming", allowed="3"):
        fedprune_app.run(out=tmp_path / "a", resume=True, **{**QUICK, "clients": 2})


def test_a_run_or_a_sweep_of_no_clients_is_refused(tmp_path):
    none = {**QUICK, "clients": 0, "out": tmp_path / "a"}
    with refuses("clients", 0):
        fedprune_app.run(system="fedavg", **none)
    with refuses("clients", 0):
        fedprune_app.sweep({"systems": ["fedavg"], "clients": 3}, **none)
    assert not (tmp_path / "a").exists()


def test_a_report_and_a_model_are_written(finished, tmp_path):
    page = fedprune_app.report(finished, tmp_path / "report.html")
    assert "dispfl" in page.read_text()
    assert fedprune_app.report([finished.folder], page) == page
    path = fedprune_app.export(finished, tmp_path / "client.safetensors", client=1)
    network = fedprune_app.load_model(path)
    assert network(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


def test_a_model_is_exported_where_its_folders_have_moved(finished, tmp_path):
    usual = fedprune_app.export(finished, tmp_path / "usual.safetensors", client=1)
    folder = tmp_path / "copy"
    shutil.copytree(finished.folder, folder)
    shutil.move(folder / "clients", tmp_path / "states" / finished.info["run_key"])
    with pytest.raises(ValueError, match=r"^state_dir is .*has no state of client 1"):
        fedprune_app.export(folder, tmp_path / "a.safetensors", client=1)
    path = fedprune_app.export(folder, tmp_path / "a.safetensors", client=1, state_dir=tmp_path / "states")
    assert path.read_bytes() == usual.read_bytes()
    with pytest.raises(ValueError, match="has no state of client 1"):
        fedprune_app.model(folder, 1)
    network = fedprune_app.model(folder, 1, state_dir=tmp_path / "states")
    for name, weights in fedprune_app.model(finished, 1).state_dict().items():
        assert torch.equal(network.state_dict()[name], weights)
    kept = fedprune_app.masks(folder, 1, state_dir=tmp_path / "states")
    assert kept.keys() == fedprune_app.masks(finished, 1).keys()


def test_a_model_is_exported_where_its_data_have_moved(tmp_path):
    rows = "".join(f"{k},{k % 2}\n" for k in range(40))
    (tmp_path / "here").mkdir()
    for part in ("train", "test"):
        (tmp_path / "here" / f"{part}.csv").write_text(f"x,label\n{rows}")
    settings = {"dataset": "table", "data_dir": str(tmp_path / "here"), "partition": "iid", "num_server_rounds": 1}
    run = fedprune_app.run(system="fedavg", **settings, out=tmp_path / "r", **QUICK)
    there = (tmp_path / "here").rename(tmp_path / "there")
    splits.clear_cache()
    whole = fedprune_app.export(run, tmp_path / "whole.safetensors").read_bytes()  # the run knows its normalisation
    model = {key: value for key, value in run.info["model"].items() if key != "normalisation"}
    write_info(run.folder, {**run.info, "model": model})  # as a private run leaves it
    run = fedprune_app.load_run(run.folder)
    with pytest.raises(ValueError, match="is no folder; dataset 'table' is read from"):
        fedprune_app.export(run, tmp_path / "a.safetensors")
    path = fedprune_app.export(run, tmp_path / "a.safetensors", data_dir=there)
    assert path.read_bytes() == whole
    assert fedprune_app.load_model(path)(torch.zeros(3, 1, 1, 1)).shape == (3, 2)


def test_a_language_model_is_exported_as_a_folder(tmp_path):
    folder = tiny_checkpoint(tmp_path / "checkpoint", "llama")
    path = fedprune_app.export(folder, tmp_path / "packed")
    assert fedprune_app.load_packed(path).config.num_hidden_layers == 3
    for given in ({"client": 1}, {"format": "onnx"}, {"state_dir": "s"}, {"plugins": ["p"]}):
        with refuses(*next(iter(given.items())), condition="with a language model"):
            fedprune_app.export(folder, tmp_path / "x", **given)


def test_a_language_model_is_exported_as_a_gguf_file(tmp_path):
    write_untrained(tmp_path / "checkpoint")
    path = fedprune_app.export(tmp_path / "checkpoint", tmp_path / "a.gguf", format="gguf")
    assert path.read_bytes()[:4] == b"GGUF"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"density": 0.1}, ("density", 0.1)),
        ({"lr": 0.1}, ("setting", "lr")),
        ({"learning_rate": "fast"}, ("learning-rate", "fast")),
        ({"dispfl": {"topolgy": "ring"}}, ("setting", "dispfl.topolgy")),
        ({"momentum": None}, ("momentum", None)),
        (
            {"learning_rate": 0.1, "learning-rate": 0.2},
            ("learning-rate", ...),
        ),
    ],
)
def test_errors_are_those_of_the_command_line(tmp_path, settings, message):
    with refuses(*message):
        fedprune_app.run(**settings, out=tmp_path / "a", **QUICK)
    assert not (tmp_path / "a").exists()


def test_a_run_that_fails_raises(tmp_path):
    with pytest.raises(fedprune_app.LaunchError, match="diverged"):
        fedprune_app.run(
            "fedavg",
            dataset="digits",
            model="auto",
            shard_size=0,
            fraction_train=1.0,
            learning_rate=1e30,
            num_server_rounds=1,
            out=tmp_path / "a",
            **QUICK,
        )


def test_to_import_the_package_imports_nothing_heavy():
    heavy = "{'torch', 'flwr', 'ray'} & set(sys.modules)"
    code = f"import sys, fedprune_app; assert 'run' in dir(fedprune_app); assert not {heavy}"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = fedprune_app.nothing


def test_every_public_name_is_documented():
    for name in fedprune_app.__all__:
        assert getattr(fedprune_app, name).__doc__, name


def test_a_run_is_read_as_frames(finished):
    rounds, clients = finished.frame(), finished.frame("clients")
    assert list(rounds["round"]) == [1]
    assert rounds["accuracy_personal_mean"][0] == finished.rounds[0]["accuracy_personal_mean"]
    assert len(clients) == len(finished.clients)
    with pytest.raises(ValueError, match="frame is 'masks', allowed: rounds, clients"):
        finished.frame("masks")
    with pytest.raises(ValueError, match=r"frame is \[\], allowed: rounds, clients"):
        finished.frame([])
    unmeasured = clients["epsilon"]  # of no client
    assert unmeasured.dtype == float
    assert unmeasured.isna().all()


def test_a_run_without_rows_has_frames_with_columns(tmp_path):
    run = fedprune_app.load_run(made_up_run(tmp_path / "none", rounds=0))
    assert not len(run.frame())
    assert {"round", "accuracy_personal_mean"} <= set(run.frame().columns)
    assert "partition" in run.frame("clients").columns


def test_a_run_stays_the_run_that_it_is_where_the_current_folder_changes(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(finished.folder.parent)
    run = fedprune_app.load_run(finished.folder.name)
    monkeypatch.chdir(tmp_path)
    assert fedprune_app.masks(run, 1).keys() == fedprune_app.masks(finished, 1).keys()


def test_a_run_is_short_to_read_and_a_key(finished):
    assert repr(finished) == f"Run('{finished.folder}': dispfl, seed 0, 1 round, completed)"
    assert {finished: "first"}[finished] == "first"


def test_a_client_of_a_frame_is_a_client_to_export(finished, tmp_path):
    client = finished.frame("clients")["partition"].iloc[0]
    assert fedprune_app.export(finished, tmp_path / "net.safetensors", client=client).exists()


def test_a_report_takes_a_folder_of_runs_and_tells_what_is_left_out(tmp_path, caplog):
    runs = tmp_path / "runs"
    for seed, name in enumerate("ab"):
        made_up_run(runs / name, seed=seed)
    (runs / "b" / "run.json").write_text("{")
    page = fedprune_app.report(runs, tmp_path / "page.html")
    assert page.exists()
    assert "left out: " in caplog.text
    with refuses("run folder", tmp_path / "typo"):
        fedprune_app.report([runs / "a", tmp_path / "typo"], tmp_path / "page.html")


def test_another_file_than_safetensors_is_said_to_be_none(tmp_path):
    (tmp_path / "net.onnx").write_bytes(b"\x08\x08\x12\x07pytorch" * 9)
    with pytest.raises(ValueError, match=r"net.onnx': it is no file of safetensors"):
        fedprune_app.load_model(tmp_path / "net.onnx")


def test_a_sweep_that_fails_says_why_and_has_the_other_runs(tmp_path):
    common = {"num_server_rounds": 1, "local_epochs": 1}
    matrix = {"systems": [{"system": "fedavg", "learning_rate": 1e30}, "standalone"], "common": common}
    with pytest.raises(fedprune_app.RunsFailed, match=r"1 of 2 runs failed: .*: round 1 had 0 good") as failure:
        fedprune_app.sweep(matrix, out=tmp_path / "s", **QUICK)
    (run,), (reason,) = failure.value.runs, failure.value.failed.values()
    assert (run.system, run.status) == ("standalone", "completed")
    assert reason in str(failure.value)
    assert isinstance(failure.value, fedprune_app.LaunchError)


def test_a_clients_model_and_masks_are_those_of_its_last_round(finished):
    network, kept = fedprune_app.model(finished, 1), fedprune_app.masks(finished.folder, client=1)
    weights = dict(network.named_parameters())
    assert 0 < len(kept) < len(weights)
    for name, mask in kept.items():
        assert not weights[name][~mask].any()
    share = sum(int(mask.sum()) for mask in kept.values()) / sum(mask.numel() for mask in kept.values())
    assert share == pytest.approx(0.5, abs=0.01)
    with refuses("client", condition="system 'dispfl'", hint="no model is global"):
        fedprune_app.model(finished)


def test_masks_of_removed_channels_are_there_for_the_full_network(tmp_path):
    settings = {"model": "cnn-small-bn", "num_server_rounds": 2, "local_epochs": 2, "fraction_train": 1.0}
    options = {"accuracy_threshold": 0.0, "channel_distance": 0.0, "fc_mask_distance": 0.0}
    found = fedprune_app.run(system="subfedavg-hy", subfedavg=options, out=tmp_path / "run", **settings, **QUICK)
    (row,) = (row for row in found.clients if row["partition"] == 1 and row["round"] == 2)
    small, full = fedprune_app.masks(found, 1), fedprune_app.masks(found, 1, full=True)
    densities = {name: float(mask.double().mean()) for name, mask in full.items()}
    assert densities == pytest.approx(row["density_by_layer"])
    assert densities["conv2.weight"] < 1
    shapes = {name: tensor.shape for name, tensor in fedprune_app.model(found, 1).named_parameters()}
    assert all(mask.shape == shapes[name] for name, mask in small.items())
    assert all(int(mask.sum()) == int(full[name].sum()) for name, mask in small.items())


def test_a_sweep_returns_its_runs_and_goes_on(tmp_path):
    matrix = {"systems": ["fedavg", "standalone"], "seeds": [0, 1], "common": {"local-epochs": 1}}
    quick = {"clients": 2, "engine": "inprocess", "progress": False, "num_server_rounds": 1}
    runs = fedprune_app.sweep(matrix, out=tmp_path / "s", **quick)
    assert [(run.system, run.seed) for run in runs] == [
        ("fedavg", 0),
        ("fedavg", 1),
        ("standalone", 0),
        ("standalone", 1),
    ]
    assert (tmp_path / "s" / "table.csv").exists()
    again = fedprune_app.sweep(matrix, out=tmp_path / "s", resume=True, **quick)
    assert [run.info["final_sha256"] for run in again] == [run.info["final_sha256"] for run in runs]
    with refuses("out", tmp_path / "s", which="is not empty"):
        fedprune_app.sweep(matrix, out=tmp_path / "s", **quick)
    with refuses("min-clients", 9, where="run 'standalone-digits-seed0'"):
        fedprune_app.sweep({"systems": ["standalone"]}, min_clients=9, out=tmp_path / "t", **quick)
    twice = {"systems": ["fedavg"], "common": {"local_epochs": 1, "local-epochs": 2}}
    with refuses("local-epochs", ..., which="twice"):
        fedprune_app.sweep(twice, out=tmp_path / "t", **quick)
    with refuses("entry", "system", where="matrix 'in memory'"):
        fedprune_app.sweep({"system": "fedavg"}, out=tmp_path / "t", **quick)


def test_a_matrix_goes_on_with_the_number_of_clients_that_it_began_with(tmp_path):
    quick = {"out": tmp_path / "s", "engine": "inprocess", "num_server_rounds": 1}

    def sweep(seeds, **more):
        common = {"local-epochs": 1}
        return fedprune_app.sweep(
            {"systems": ["fedavg"], "seeds": seeds, "common": common, "clients": 4}, **quick, **more
        )

    sweep([0], clients=2)
    with refuses("clients", 4, where="run 'fedavg-digits-seed0'", allowed="2"):
        sweep([0, 1], clients=4, resume=True)
    assert not (tmp_path / "s" / "fedavg-digits-seed1").exists()
    runs = sweep([0, 1], resume=True)
    assert [len(run.info["partition"]) for run in runs] == [2, 2]


@pytest.mark.full
def test_a_process_that_ran_a_federation_keeps_nothing_of_it(tmp_path):
    kept = []
    for number in range(2):
        fedprune_app.run(system="fedavg", num_server_rounds=1, out=tmp_path / str(number), **QUICK)
        gc.collect()
        kept.append((len(server_app._at_work), len(exit_handler.registered_exit_handlers)))
    assert kept == [(0, kept[0][1])] * 2


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda api, _: api.run(5, out="a"), "config is 5"),
        (lambda api, _: api.run(out="a", **{**QUICK, "clients": "3"}), "clients is '3'"),
        (lambda api, _: api.run(out="a", **{**QUICK, "clients": 3.0}), "clients is 3.0"),
        (lambda api, _: api.run(out="a", **{**QUICK, "workers": True}), "workers is true"),
        (lambda api, _: api.run(out="a", **{**QUICK, "engine": "x"}), "engine is 'x'"),
        (lambda api, _: api.sweep(5, out="a"), "matrix is 5"),
        (lambda api, _: api.load_run(5), "folder is 5"),
        (lambda api, _: api.load_model(None), "path is None, allowed: a path"),
        (lambda api, _: api.predict(None, []), "model is None"),
        (lambda api, _: api.predict("a", [5]), "files is 5"),
        (lambda api, _: api.load_packed(5), "folder is 5, allowed: a path"),
        (lambda api, _: api.report([None], "r.html"), "runs is None"),
        (lambda api, _: api.report(5, "r.html"), "runs is 5"),
        (lambda api, run: api.model(run, 99), "client is 99"),
        (lambda api, run: api.masks(run, "nobody"), "client is 'nobody'"),
        (lambda api, _: api.model(5), "run is 5"),
    ],
)
def test_an_argument_of_a_wrong_type_is_a_value_error_that_names_the_argument(
    finished, tmp_path, monkeypatch, call, says
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"^{re.escape(says)}") as caught:
        call(fedprune_app, finished)
    assert "--" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_numbers_of_numpy_and_paths_are_settings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    matrix = {"systems": [{"system": "fedavg", "local_epochs": 1}], "seeds": range(1)}
    (swept,) = fedprune_app.sweep(matrix, num_server_rounds=1, learning_rate=np.array(0.5), out="s", **QUICK)
    assert (swept.config["local-epochs"], swept.config["learning-rate"]) == (1, 0.5)
    run = fedprune_app.run(
        {"system": "fedavg", "num-server-rounds": np.int64(1)},
        out=Path("a"),
        clients=np.int64(3),
        engine="inprocess",
        progress=False,
        local_epochs=1,
        learning_rate=np.float32(0.25),
        seed=np.int64(3),
        state_dir=Path("states"),
    )
    assert (run.config["learning-rate"], run.config["seed"]) == (0.25, 3)
    assert run.config["state-dir"] == str(tmp_path / "states")
    assert len(run.info["partition"]) == 3


def test_a_packed_model_that_is_no_folder_is_not_looked_for_on_the_hub(tmp_path, monkeypatch):
    def reached(*arguments, **more):
        raise AssertionError("the network is asked")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("socket.socket.connect", reached)
    monkeypatch.setattr("socket.getaddrinfo", reached)
    with pytest.raises(ValueError, match=r"^packed model 'nosuch': there is no such folder$"):
        fedprune_app.load_packed("nosuch")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"^packed model 'empty' cannot be read"):
        fedprune_app.load_packed("empty")


def test_a_second_run_in_one_process_reads_the_files_as_they_are_now(tmp_path):
    settings = {"dataset": "table", "data_dir": str(tmp_path), "partition": "iid", "num_server_rounds": 1}
    found = []
    for count in (40, 24):
        rows = "".join(f"{k / count},{k % 2}\n" for k in range(count))
        for part in ("train", "test"):
            (tmp_path / f"{part}.csv").write_text(f"x,label\n{rows}")
        run = fedprune_app.run(system="fedavg", **settings, out=tmp_path / str(count), **QUICK)
        clients = run.info["partition"]
        found.append(sum(sum(client["train"]) + sum(client["validation"]) for client in clients))
    assert found == [40, 24]


@pytest.mark.parametrize("name", ["out", "output"])
def test_an_empty_path_is_not_the_current_folder(finished, name):
    run, report = (
        (lambda: fedprune_app.run(system="fedavg", out="", **QUICK)),
        lambda: fedprune_app.report(finished, ""),
    )
    call = run if name == "out" else report
    with pytest.raises(ValueError, match=f"^{name} is '', allowed: a path"):
        call()


LOADER = """import numpy as np
def load(data_dir):
    rng = np.random.default_rng(0)
    images = (rng.random((60, 1, 8, 8)) * {most}).astype(np.{dtype})
    return (images, np.arange(60) % 3), (images[:30], np.arange(30) % 3)
"""


@pytest.mark.parametrize(("dtype", "most", "inputs"), [("float32", 16, "numbers"), full("uint8", 255, "images")])
def test_an_exported_model_knows_whether_it_takes_images_of_8_bits(tmp_path, dtype, most, inputs):
    (tmp_path / "own.py").write_text(LOADER.format(dtype=dtype, most=most))
    dataset = f"{tmp_path / 'own.py'}:load"
    settings = {"model": "cnn-small", "partition": "iid", "num_server_rounds": 1}
    run = fedprune_app.run(system="fedavg", dataset=dataset, **settings, out=tmp_path / "r", **QUICK)
    path = fedprune_app.export(run, tmp_path / "a.safetensors", client=None, plugins=[str(tmp_path / "own.py")])
    assert read_export_info(path).inputs == inputs
    Image.new("L", (8, 8)).save(tmp_path / "one.png")
    if inputs == "images":
        assert len(predictions(path, [tmp_path / "one.png"])) == 1
    else:
        with pytest.raises(ValueError, match="was trained on numbers, allowed: one trained on images of 8 bits"):
            predictions(path, [tmp_path / "one.png"])
