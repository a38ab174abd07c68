"""Models of finished runs as files: they compute what the client's own code computes, and are as small as they say."""

from __future__ import annotations

import json
import shutil
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import fedprune_app
from clients.context import NodeContext
from clients.fedavg_ft import FineTuned
from clients.task import Task
from fedprune_app import cli, client_app, extend, server_app
from fedprune_app.config import parse_config
from fedprune_app.core.payload import Payload
from fedprune_app.core.rng import numpy_generator
from fedprune_app.data import splits
from fedprune_app.engine.simulated_grid import run_in_process
from fedprune_app.engine.store import State, VersionedStore, client_store, read_tensors, write_tensors
from fedprune_app.exports import formats
from fedprune_app.exports.file import load_model, read_export_info
from fedprune_app.exports.predict import predictions
from fedprune_app.files import sha256_of
from fedprune_app.models.saving import load_packed
from fedprune_app.models.vision import build_model, load_state_tensors, state_tensors
from fedprune_app.registry import SYSTEMS
from fedprune_app.results.recorder import write_info
from tests.conftest import Finished, tampered_app
from tests.examples import full, in_test
from tests.models.tiny_llm import tiny_checkpoint
from tests.refusing import refuses

CLIENTS = 4
TINY = {
    "num-server-rounds": 2,
    "local-epochs": 2,
    "fraction-train": 0.5,
    "evaluate-every": 2,
    "shard-size": 40,
    "density": 0.2,
    "subfedavg.accuracy-threshold": 0.0,
    "subfedavg.mask-distance": 0.0,
    "dispfl.neighbours": 2,
    "fedltp.tickets": 1,
    "fedltp.ticket-iterations": 20,
}
HYBRID = {
    "system": "subfedavg-hy",
    "dataset": "image-folder",
    "model": "cnn5-bn",
    "shard-size": 8,
    "local-epochs": 3,
    "fraction-train": 1.0,
    "validation-fraction": 0.3,
    "learning-rate": 0.1,
    "subfedavg.fc-mask-distance": 0.0,
    "subfedavg.channel-distance": 0.0,
}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """An image folder: 20x20 pictures of three shades, and noise."""
    folder, rng = tmp_path_factory.mktemp("pictures"), numpy_generator(0, "pictures")
    for part, count in (("train", 32), ("test", 8)):
        for label in range(3):
            (folder / part / str(label)).mkdir(parents=True)
            for i in range(count):
                pixels = 70 * label + rng.integers(0, 100, (20, 20))
                Image.fromarray(pixels.astype(np.uint8)).save(folder / part / str(label) / f"{i}.png")
    return str(folder)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, pictures):
    """``finished(system, **settings)``: a completed run in this process, made once."""
    runs = {}

    def run(system, **settings):
        key = repr((system, settings))
        if key not in runs:
            folder = tmp_path_factory.mktemp("runs") / "run"
            own = {**HYBRID, "data-dir": pictures} if system == "subfedavg-hy" else {"system": system}
            own |= {"model": "cnn-small-cr", "max-grad-norm": 10.0} if system == "fedcr" else {}
            own |= {"dp.enabled": True, "dp.noise-multiplier": 0.5} if system == "ldp-fedp3" else {}
            settings = {name.replace("_", "-"): value for name, value in settings.items()}
            config = parse_config({**TINY, **own, "out-dir": str(folder), **settings})
            run_in_process(server_app.app, client_app.app, CLIENTS, config.to_dict())
            runs[key] = Finished(folder)
        return runs[key]

    return run


def state_rounds(run):
    return VersionedStore(run.folder / "checkpoints").load()[1].meta["state-rounds"]


def trained(run):
    return sorted(map(int, state_rounds(run)))


def own_model(run, partition):
    """The client's network as the client's own code sets it up to be tested, and images."""
    config = parse_config(run.info["config"])
    client = SYSTEMS[config.system].client(config, NodeContext(partition, CLIENTS, run.folder / "clients"))
    state = client.store.read(state_rounds(run)[str(partition)])
    received = {}
    if config.system in ("lg-fedavg", "fedper", "fedbn"):  # some layers are the server's
        received = read_tensors(run.folder / "models" / "global.safetensors").tensors
    task = Task(config.num_server_rounds, Payload(received))
    client.test_accuracy(task, client.personal_model(task, state), client.masks(task, state))
    return client.model.eval(), client.data.test_images


def exported(run, client, tmp_path, format="safetensors", **options):
    path = tmp_path / f"{run.info['system']}-{client}.{format}"
    return path, formats.export_model(run.folder, client, format, path, **options)


@pytest.fixture(autouse=True)
def brief(monkeypatch):
    """Times are taken, but shortly."""
    real = formats.latencies
    monkeypatch.setattr(formats, "latencies", lambda runners, shape: real(runners, shape, (2, 1), seconds=0.0))


# --- what is computed ---------------------------------------------------------------------------------------------

PERSONAL = [
    name for name, system in SYSTEMS.items() if not system.reads_text and not issubclass(system.client, FineTuned)
]


@pytest.mark.parametrize("system", in_test(PERSONAL, "subfedavg", "subfedavg-hy"))
def test_an_exported_model_computes_what_the_clients_own_code_does(system, finished, tmp_path):
    run = finished(system)
    for partition in trained(run)[:2]:
        path, (info, _, small) = exported(run, partition, tmp_path)
        expected, images = own_model(run, partition)
        model = load_model(path)
        assert torch.equal(model(images), expected(images))
        assert not model.training
        assert (info.system, info.client, info.round) == (system, partition, state_rounds(run)[str(partition)])
        assert small.file_bytes == path.stat().st_size


@pytest.mark.full
def test_an_onnx_file_predicts_as_the_file_of_safetensors_does(finished, pictures, tmp_path):
    run = finished("subfedavg-hy")
    files = sorted(Path(pictures, "test").rglob("*.png"))[:5]
    paths = [exported(run, trained(run)[0], tmp_path, format)[0] for format in ("safetensors", "onnx")]
    expected, found = (predictions(path, files, 3) for path in paths)
    assert [[name for name, _ in each.classes] for each in found] == [[name for name, _ in e.classes] for e in expected]
    (tmp_path / "x.onnx").write_bytes(b"no model")
    with pytest.raises(ValueError, match=r"model '.*x.onnx' cannot be read: "):
        predictions(tmp_path / "x.onnx", files)


@pytest.mark.full
def test_a_pruned_onnx_file_says_how_many_zeros_it_has(fedprune, finished, tmp_path):
    run = finished("dispfl")
    code, _, err = fedprune("export", run.folder, "--client", trained(run)[0], "-o", tmp_path / "m.onnx")
    assert code == 0, err
    assert "pruned weights are zeros in the file, and its runtimes do not skip zeros" in err
    _, (_, _, small) = exported(run, trained(run)[0], tmp_path, "onnx")
    assert f"{small.zeros:,} pruned" in err
    assert small.zeros > 1000


def test_the_states_of_a_local_deployment_are_found_in_its_folder(finished, tmp_path):
    run = finished("subfedavg")
    copy = Path(shutil.copytree(run.folder, tmp_path / "run"))
    client = trained(run)[0]
    state = copy / "deployment" / "node-1" / "state" / run.info["run_key"]
    shutil.move(copy / "clients", state)
    path, _ = exported(Finished(copy), client, tmp_path)
    expected, images = own_model(run, client)
    assert torch.equal(load_model(path)(images), expected(images))


@pytest.mark.parametrize("system", ["fedavg", full("subfedavg-hy")])
def test_the_global_model_is_the_servers(system, finished, tmp_path):
    run = finished(system)
    path, (info, *_) = exported(run, None, tmp_path)
    expected = build_model(info.model, info.image_shape, info.classes, rng=torch.Generator()).eval()
    load_state_tensors(expected, read_tensors(run.folder / "models" / "global.safetensors").tensors)
    images = torch.randn(5, *info.image_shape, generator=torch.Generator().manual_seed(0))
    assert torch.equal(load_model(path)(images), expected(images))
    assert (info.client, info.round, info.density) == (None, 2, 1.0)


def test_removed_channels_are_gone_and_the_file_says_which(finished, tmp_path):
    run = finished("subfedavg-hy")
    path, (info, full, small) = exported(run, 0, tmp_path)
    kept = VersionedStore(run.folder / "clients" / "00000").load()[1].group("channels")
    assert {name: sum(mask.tolist()) for name, mask in kept.items()} == {"bn1": 5, "bn2": 10}  # of 10 and 20
    assert info.channels == {name: tuple(np.flatnonzero(mask.numpy())) for name, mask in kept.items()}
    layers = dict(load_model(path).named_modules())
    assert (layers["conv1"].out_channels, layers["conv2"].in_channels, layers["conv2"].out_channels) == (5, 5, 10)
    assert layers["fc1"].in_features == 10 * 2 * 2
    pruned_away = int((layers["fc1"].weight == 0).sum() + (layers["fc2"].weight == 0).sum())
    in_layers = sum(p.numel() for p in load_model(path).parameters())
    assert small.parameters == in_layers - pruned_away
    assert info.density == small.parameters / full.parameters
    assert read_export_info(path) == info
    # 2 per multiplication: 16² and 4² outputs of 5x5 patches, then the kept weights of the linear layers
    linear = int((layers["fc1"].weight != 0).sum() + (layers["fc2"].weight != 0).sum())
    assert small.flops == 2 * (16**2 * 5 * 25 + 4**2 * 10 * 5 * 25 + linear)


def test_the_file_shrinks_with_the_density(finished, tmp_path):
    run = finished("dispfl")
    _, (info, full, small) = exported(run, trained(run)[0], tmp_path)
    assert info.density == pytest.approx(0.2, abs=0.005)
    entropy = -(0.2 * np.log2(0.2) + 0.8 * np.log2(0.8)) * full.parameters / 8  # bytes that masks need at most
    assert (
        4 * small.parameters < small.file_bytes < 4 * small.parameters + entropy + 900
    )  # names, sizes, metadata, logits
    assert full.file_bytes > 4 * full.parameters
    assert small.file_bytes < 0.25 * full.file_bytes


def test_images_are_to_be_normalised_as_in_training(finished, tmp_path, pictures):
    _, (info, *_) = exported(finished("subfedavg-hy"), 0, tmp_path)
    values = np.stack([np.asarray(Image.open(file)) for file in Path(pictures).glob("train/*/*.png")]) / 255
    assert info.mean == pytest.approx([values.mean()])
    assert info.std == pytest.approx([values.std()])


def test_a_reply_that_came_too_late_to_count_is_not_exported(finished, tmp_path):
    run = finished("subfedavg")
    folder = tmp_path / "copy"
    shutil.copytree(run.folder, folder)
    partition = trained(run)[0]
    _, state = VersionedStore(folder / "clients" / f"{partition:05d}").load()
    late = {name: t + 1 if t.is_floating_point() else t for name, t in state.tensors.items()}
    write_tensors(folder / "clients" / f"{partition:05d}" / "round-00009.safetensors", late, {})
    path, (info, *_) = exported(Finished(folder), partition, tmp_path)
    again, _ = exported(run, partition, tmp_path, force=True)
    assert info.round <= 2
    assert path.read_bytes() == again.read_bytes()


# --- other formats ------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_onnx_computes_the_same_for_any_batch(finished, tmp_path):
    import onnx
    import onnxruntime

    run = finished("subfedavg-hy")
    path, (info, _, small) = exported(run, 0, tmp_path, "onnx")
    session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    expected, images = own_model(run, 0)
    for batch in (images[:1], images[:7]):
        (logits,) = session.run(["logits"], {"images": batch.numpy()})
        torch.testing.assert_close(torch.from_numpy(logits), expected(batch).detach(), rtol=1e-4, atol=1e-5)
    assert session.get_inputs()[0].shape == ["batch", *info.image_shape]
    assert (
        json.loads(session.get_modelmeta().custom_metadata_map["fedprune"])["channels"].keys() == info.channels.keys()
    )
    assert small.file_bytes == path.stat().st_size
    assert sys.prefix.encode() not in path.read_bytes()  # no folder of this machine
    onnx.checker.check_model(onnx.load(path))
    sizes = [tuple(each.dims) for each in onnx.load(path).graph.initializer]
    assert (10, 5, 5, 5) in sizes
    assert (20, 10, 5, 5) not in sizes


@pytest.mark.full
def test_a_network_that_torch_cannot_convert_is_refused_in_one_line():
    class Branches(torch.nn.Linear):
        def forward(self, images):
            return super().forward(images if images.abs().max() > 5 else -images)

    info = types.SimpleNamespace(image_shape=(1, 2, 3))
    with pytest.raises(ValueError, match=r"^torch cannot convert the network to ONNX \(\w+\); allowed: [^\n]+$"):
        formats._onnx(Branches(3, 2).eval(), info)


def test_a_file_whose_logits_are_off_is_not_kept(finished, tmp_path, monkeypatch):
    run = finished("fedavg")
    for off in (lambda logits: logits * 1.01, lambda logits: logits * float("nan")):
        monkeypatch.setattr(formats, "_onnx", lambda net, _, off=off: (b"x", lambda images: off(net(images))))
        with pytest.raises(ValueError, match="logits of the onnx model are off by"):
            exported(run, None, tmp_path, "onnx")
    assert list(tmp_path.iterdir()) == []


def test_times_are_taken_in_turns_on_one_thread():
    turns = []
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        runners = [lambda images, n=n: turns.append((n, len(images), torch.get_num_threads())) for n in "ab"]
        times = formats.latencies(runners, (1, 2, 2))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert turns == [(name, batch, 1) for batch in (2, 1) for _ in range(4) for name in "ab"]
    assert [len(each) for each in times.values()] == [2, 2]


# --- mistakes -----------------------------------------------------------------------------------------------------


@pytest.fixture
def fedprune(monkeypatch, capsys):
    """The command line in this process: (exit code, stdout, stderr)."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["fedprune", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return caught.value.code or 0, *capsys.readouterr()

    return call


def test_the_command_writes_the_file_and_says_what_it_saves(fedprune, finished, tmp_path):
    run = finished("dispfl")
    path = tmp_path / "new" / "model.safetensors"
    code, out, err = fedprune("export", run.folder, "--client", trained(run)[0], "-o", path)
    assert code == 0, err
    assert load_model(path)
    for row in ("bytes on disk", "parameters kept", "FLOPs per example", "ms per batch of 1 ", "PyTorch"):
        assert row in out
    assert f"{path.stat().st_size:,}" in out
    before = path.read_bytes()
    code, _, err = fedprune("export", run.folder, "--client", trained(run)[1], "-o", path)
    assert (code, err.count("\n")) == (2, 1)
    assert "--output is " in err
    assert path.read_bytes() == before
    assert fedprune("export", run.folder, "--client", trained(run)[1], "-o", path, "--force")[0] == 0
    assert path.read_bytes() != before


@pytest.mark.parametrize(
    ("system", "arguments", "says"),
    [
        ("subfedavg", [], "--client and --global"),
        ("subfedavg", ["--client", "0", "--global"], "--client and --global"),
        ("subfedavg", ["--client", "4"], "--client is 4"),
        ("subfedavg", ["--client", "-1"], "--client is '-1'"),
        ("dispfl", ["--client", "4"], "--client is 4"),
        ("dispfl", ["--global"], "--client is not given"),
        ("fedavg-ft", ["--client", "4"], "--client is 4"),
        (
            "subfedavg",
            ["--global", "--format", "pickle"],
            "--format is 'pickle'",
        ),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(system, arguments, says, fedprune, finished, tmp_path):
    code, _, err = fedprune("export", finished(system).folder, *arguments, "-o", tmp_path / "model")
    assert says in err
    assert (code, err.count("\n")) == (2, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_client_that_never_trained_has_no_model_of_its_own(fedprune, finished, tmp_path):
    run = finished("dispfl", num_server_rounds=1, fraction_train=0.25)
    (one,) = trained(run)
    other = (one + 1) % CLIENTS
    code, _, err = fedprune("export", run.folder, "--client", other, "-o", tmp_path / "model")
    assert (code, err.count("\n")) == (2, 1)
    assert f"--client is {other}" in err
    assert "a client that trained in this run" in err


def test_a_language_model_is_exported_as_a_folder(fedprune, tmp_path):
    folder, out = tiny_checkpoint(tmp_path / "checkpoint", "llama"), tmp_path / "packed"
    code, said, _ = fedprune("export", folder, "-o", out)
    assert code == 0
    for words in ("density 1.00", "packed", "bytes on disk"):
        assert words in said
    assert load_packed(out).config.num_hidden_layers == 3
    for arguments, says in (
        (["-o", out], f"--output is {str(out)!r}"),
        (["-o", tmp_path, "--force"], f"--output is {str(tmp_path)!r}"),
        (
            ["-o", "x", "--format", "onnx"],
            "--format is 'onnx'",
        ),
        (["-o", "x", "--client", "1"], "--client is '1'"),
        (["-o", "x.onnx"], "--output is 'x.onnx'"),
        (["-o", "x", "--data-dir", "d"], "--data-dir is 'd'"),
        (["-o", "x", "--plugin", "p"], "--plugin is ['p']"),
    ):
        code, _, err = fedprune("export", folder, *arguments)
        assert says in err
        assert (code, err.count("\n")) == (2, 1)
    assert fedprune("export", folder, "-o", out, "--force")[0] == 0


def test_a_damaged_language_model_of_a_run_is_refused(finished, fedprune, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished("fedavg").folder, folder)
    tiny_checkpoint(folder / "models" / "global", "llama")
    files = sorted(path for path in (folder / "models" / "global").iterdir() if path.is_file())
    info = json.loads((folder / "run.json").read_text())
    write_info(folder, {**info, "model_files": {f"global/{path.name}": sha256_of(path) for path in files}})
    assert fedprune("export", folder, "-o", tmp_path / "whole")[0] == 0
    (weights,) = (path for path in files if path.suffix == ".safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    code, _, err = fedprune("export", folder, "-o", tmp_path / "packed")
    assert (code, f"{weights} is missing or damaged" in err) == (2, True), err
    assert not (tmp_path / "packed").exists()
    weights.unlink()
    assert f"{weights} is missing" in fedprune("export", folder, "-o", tmp_path / "packed")[2]


def refused(folder, client, tmp_path, match, format="safetensors", **options):
    with pytest.raises(ValueError, match=match) as caught:
        formats.export_model(folder, client, format, tmp_path / "model", **options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "model").exists()


def test_only_completed_runs_are_exported(finished, tmp_path):
    refused(tmp_path / "none", 0, tmp_path, "is not a run folder")
    folder = tmp_path / "copy"
    shutil.copytree(finished("fedavg").folder, folder)
    (folder / "models" / "global.safetensors").unlink()
    refused(folder, None, tmp_path, "global.safetensors' is damaged: No such file")
    info = json.loads((folder / "run.json").read_text())
    write_info(folder, {**info, "status": "interrupted"})
    refused(folder, None, tmp_path, "is interrupted, allowed: a completed run")


def test_states_may_be_elsewhere(finished, tmp_path):
    run = finished("subfedavg")
    partition = trained(run)[0]
    path, _ = exported(run, partition, tmp_path)
    folder = tmp_path / "copy"
    shutil.copytree(run.folder, folder)
    shutil.move(folder / "clients", tmp_path / "states" / run.info["run_key"])
    refused(folder, partition, tmp_path, f"has no state of client {partition}")
    again = tmp_path / "again"
    formats.export_model(folder, partition, "safetensors", again, state_dir=str(tmp_path / "states"))
    assert again.read_bytes() == path.read_bytes()
    (tmp_path / "states" / run.info["run_key"] / f"{partition:05d}" / "round-00002.safetensors").write_bytes(b"x")
    (folder / "checkpoints").rename(folder / "gone")
    refused(folder, partition, tmp_path, "round-00002.safetensors' is damaged", state_dir=str(tmp_path / "states"))


def test_a_global_model_without_its_norms_is_no_model(finished, tmp_path, pictures):
    norms = {
        "dataset": "image-folder",
        "data-dir": pictures,
        "model": "cnn5-bn",
        "batch-norm": "local",
        "shard-size": 8,
    }
    run = finished("fedavg", **norms, fraction_train=1.0)
    refused(run.folder, None, tmp_path, "with system 'fedavg' and batch-norm 'local'")
    assert exported(run, 0, tmp_path)


@pytest.mark.parametrize("pretrain_rounds", [0, 1])
def test_lg_fedavg_has_no_global_model_once_clients_keep_their_lower_layers(finished, tmp_path, pretrain_rounds):
    run = finished("lg-fedavg", **{"lgfedavg.pretrain-rounds": pretrain_rounds})
    refused(run.folder, None, tmp_path, r"^--client is not given.*global as a whole$")
    assert exported(run, trained(run)[0], tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("batch_norm", ["averaged", "local"])
def test_a_fine_tuned_model_is_the_one_that_was_tested(tmp_path, batch_norm):
    quick = {"num_server_rounds": 2, "fraction_train": 0.5, "engine": "inprocess", "progress": False}
    more = {"model": "cnn-small-bn", "batch_norm": batch_norm}
    run = fedprune_app.run(system="fedavg-ft", clients=4, out=tmp_path / "run", **more, **quick)
    assert {str(client) in run.info["state_rounds"] for client in range(4)} == {True, False}
    for client, row in enumerate(row for row in run.clients if row["round"] == 2):
        data = splits.client_data(splits.data_config(parse_config(run.info["config"])), client, 4)
        found = fedprune_app.model(run, client=client)(data.test_images).argmax(1) == data.test_labels
        assert row["accuracy_personal"] == pytest.approx(found.double().mean().item(), abs=1e-9)


@pytest.mark.full
@pytest.mark.usefixtures("no_plugins")
def test_a_model_is_made_of_the_runs_network_and_of_no_other_with_its_name(tmp_path):
    """A notebook's cell is edited and run again."""

    def network(activation):
        return lambda shape, classes: nn.Sequential(nn.Flatten(), nn.Linear(64, 8), activation(), nn.Linear(8, classes))

    quick = {"num_server_rounds": 1, "engine": "inprocess", "progress": False, "clients": 3}
    extend.register_model("mine", network(nn.ReLU), "a network")
    run = fedprune_app.run(system="fedavg", model="mine", out=tmp_path / "run", **quick)
    assert fedprune_app.model(run)
    extend.register_model("mine", network(nn.Softplus), "a network")
    with pytest.raises(ValueError, match="had another network, though with this name and shape"):
        fedprune_app.model(run)


FINE_TUNED_WITH_A_HEAD = """
from fedprune_app import extend as fp

class Client(fp.FedAvgFTClient):
    def begin(self, task, state):
        head = {name: tensor for name, tensor in state.group("weights").items() if name.startswith("fc")}
        return {**super().begin(task, state), **head}

fp.register_system("headed", strategy=fp.FedAvgFT, client=Client, summary="FedAvg-FT with heads that stay")
"""


@pytest.mark.full
@pytest.mark.usefixtures("no_plugins")
def test_a_fine_tuned_model_of_a_plugin_begins_from_the_clients_state(tmp_path):
    plugin = tmp_path / "headed.py"
    plugin.write_text(FINE_TUNED_WITH_A_HEAD)
    quick = {"num_server_rounds": 2, "fraction_train": 1.0, "engine": "inprocess", "progress": False, "clients": 3}
    run = fedprune_app.run(system="headed", plugins=str(plugin), out=tmp_path / "run", **quick)
    for client, digest in run.info["model_digests"].items():
        network = fedprune_app.model(run, client=int(client), plugins=str(plugin))
        assert Payload(state_tensors(network, include_buffers=True)).digest() == digest


@pytest.mark.parametrize("system", ["fedper", "fedbn"])
@pytest.mark.usefixtures("no_plugins")
def test_a_plugins_model_is_written_as_it_was_tested_with_the_servers_tensors_over_its_own(system, tmp_path):
    plugin = str(Path(__file__).parents[2] / "gallery" / f"{system}.py")
    quick = {"num_server_rounds": 2, "fraction_train": 0.5, "engine": "inprocess", "progress": False}
    model = "cnn-small-bn" if system == "fedbn" else "cnn-small"
    run = fedprune_app.run(system=system, plugins=plugin, model=model, clients=4, out=tmp_path / "run", **quick)
    for client in map(int, run.info["state_rounds"]):
        network, images = own_model(Finished(run.folder), client)
        assert torch.equal(fedprune_app.model(run, client=client, plugins=[plugin])(images), network(images))
    store = client_store(run.folder / "clients", client, run.info["run_key"])
    round, state = store.load()
    store.save(round, State({name: tensor + 1 for name, tensor in state.tensors.items()}, state.meta))
    with pytest.raises(ValueError, match="the state of this client is not the model that was tested"):
        fedprune_app.model(run, client=client, plugins=[plugin])


def test_an_own_norm_is_not_looked_for_at_the_server(tmp_path):
    quick = {"num_server_rounds": 1, "fraction_train": 1.0, "engine": "inprocess", "progress": False}
    more = {"model": "cnn-small-bn", "batch_norm": "local"}
    run = fedprune_app.run(system="lg-fedavg", clients=2, out=tmp_path / "run", **more, **quick)
    assert fedprune_app.model(run, client=0)


def test_lg_fedavgs_global_model_is_fedavgs_until_pre_training_ends(finished, tmp_path):
    run = finished("lg-fedavg", **{"lgfedavg.pretrain-rounds": 2})
    path, _ = exported(run, None, tmp_path)
    fedavgs, _ = exported(finished("fedavg"), None, tmp_path)
    weights, same = load_model(path).state_dict(), load_model(fedavgs).state_dict()
    assert weights.keys() == same.keys()
    assert all(torch.equal(weights[name], same[name]) for name in weights)


# --- data that change after the run -------------------------------------------------------------------------------


def shades(folder):
    """An image folder of two classes: dark grey cats and lighter dogs."""
    rng = numpy_generator(0, "shades")
    for part, count in (("train", 24), ("test", 8)):
        for name, level in (("cat", 20), ("dog", 120)):
            (folder / part / name).mkdir(parents=True)
            for i in range(count):
                pixels = (level + rng.integers(0, 60, (8, 8))).astype(np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{i}.png")
    return folder


def add_bright(folder):
    for i in range(300):
        Image.fromarray(np.full((8, 8), 255, np.uint8)).save(folder / "train" / "dog" / f"bright{i}.png")


def rename(folder):
    for part in ("train", "test"):
        (folder / part / "cat").rename(folder / part / "zebra")


def add_class(folder):
    for part in ("train", "test"):
        shutil.copytree(folder / part / "cat", folder / part / "eel")


@pytest.fixture
def of_shades(tmp_path):
    """``of_shades(**settings)``: a run on a folder of its own, and that folder."""
    folder = shades(tmp_path / "shades")
    own = {"dataset": "image-folder", "data-dir": str(folder), "partition": "iid", "fraction-train": 1.0}
    own |= {"model": "cnn-small", "shard-size": 0, "learning-rate": 0.1}

    def run(app=client_app.app, **settings):
        settings = {name.replace("_", "-"): value for name, value in settings.items()}
        config = parse_config({**TINY, "system": "fedavg", **own, "out-dir": str(tmp_path / "run"), **settings})
        run_in_process(server_app.app, app, CLIENTS, config.to_dict())
        splits.clear_cache()  # another process exports
        return Finished(tmp_path / "run"), folder

    return run


@pytest.mark.parametrize("change", [add_bright, rename, full(add_class), full(shutil.rmtree)])
def test_data_that_change_after_a_run_change_no_export(of_shades, tmp_path, change):
    run, folder = of_shades()
    before = {client: exported(run, client, tmp_path)[0].read_bytes() for client in (None, 0)}
    change(folder)
    splits.clear_cache()
    for client, content in before.items():
        path, (info, *_) = exported(run, client, tmp_path, force=True)
        assert path.read_bytes() == content
        assert info.class_names == ("cat", "dog")


@pytest.mark.full
def test_a_private_run_tells_no_normalisation_since_its_own_does_not_follow_from_the_images(of_shades, tmp_path):
    run, folder = of_shades(**{"dp.enabled": True, "dp.noise-multiplier": 1.0, "system": "dpfed"})
    assert "normalisation" not in run.info["model"]
    assert not any(row["train"] for row in run.info["partition"])
    add_bright(folder)
    for client in (None, 0):
        assert exported(run, client, tmp_path)[1][0].mean == (0.5,)
    rename(folder)
    splits.clear_cache()
    refused(run.folder, None, tmp_path, r"has class_names \['dog', 'zebra'\], allowed: \['cat', 'dog'\]")


def test_a_client_that_lies_about_its_data_does_not_change_what_the_run_records(of_shades):
    def lie(request, reply, partition):
        if partition == 0:
            lies = {"normalisation-mean": [0.0], "normalisation-std": [9.0], "features": [f"x{k}" for k in range(64)]}
            reply.content["fields"].update(lies)
        return reply

    run, folder = of_shades(tampered_app(query=lie))
    pixels = np.stack([np.asarray(Image.open(path)) for path in folder.glob("train/*/*.png")]) / 255
    assert run.info["model"]["normalisation"] == {
        "mean": pytest.approx([pixels.mean()]),
        "std": pytest.approx([pixels.std()]),
    }
    assert "features" not in run.info["model"]


def test_a_run_does_not_go_on_with_images_that_are_normalised_otherwise(of_shades):
    run, folder = of_shades(num_server_rounds=1)
    for path in folder.glob("train/*/*.png"):
        Image.fromarray(255 - np.asarray(Image.open(path))).save(path)  # as many of each class
    with refuses("the clients' data", hint="digest"):
        of_shades(num_server_rounds=2, resume_from=str(run.folder))


def test_what_cannot_be_in_a_run_json_is_one_line(of_shades, tmp_path):
    run, _ = of_shades()
    info = json.loads((run.folder / "run.json").read_text())
    for key, wrong, says in (
        ("image_shape", [1, 8], "field 'image-shape' is"),
        ("classes", "two", "field 'num-classes' is"),
        ("class_names", ["cat"], "field 'classes' is"),
        ("features", ["age"], "field 'features' is"),
        ("normalisation", {"mean": [0.1], "std": [-1.0]}, "field 'normalisation-std' is"),
    ):
        write_info(run.folder, {**info, "model": {**info["model"], key: wrong}})
        refused(run.folder, None, tmp_path, f"^run '.*{says}")


def test_onnx_needs_its_extra(finished, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    refused(finished("fedavg").folder, None, tmp_path, r"onnxruntime: install the extra fedprune\[export\]", "onnx")
