"""An export is the smallest real model of a finished run, as one file; ``fedprune export`` writes it.

Removed channels are gone from the network. Weights that were pruned one by one are left out of the safetensors file,
which holds kept values and entropy-coded masks. In ONNX and torch.export files, which know dense tensors only, these
weights are zeros.
"""

from __future__ import annotations

import copy
import io
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from clients.base import ImageClient
from clients.finetune import FineTuned
from fedprune_app.config import Config, ConfigError
from fedprune_app.core.flops import forward_flops, sparse_flops
from fedprune_app.core.masks import full_masks
from fedprune_app.core.payload import Payload
from fedprune_app.core.rng import generator
from fedprune_app.core.structured import coordinate_masks, gather
from fedprune_app.data.data_config import data_config
from fedprune_app.data.dataset import Dataset
from fedprune_app.data.names import LOADERS
from fedprune_app.data.splits import dataset_of
from fedprune_app.engine.store import State, client_store, owner, read_tensors, state_folder
from fedprune_app.federation.clients import ImageClientInfo
from fedprune_app.files import replace_file
from fedprune_app.models.initial import channels_of, initial_model, shared_names
from fedprune_app.models.names import BUILDERS, chosen_name
from fedprune_app.models.sparse import sparsify
from fedprune_app.models.vision import load_state_tensors, parameter_names, prunable_names, state_tensors
from fedprune_app.preflight.given import of_run
from fedprune_app.preflight.prepare import prepare
from fedprune_app.registry import SYSTEMS
from fedprune_app.results.load import ExportInfo, encode_export, full_density, network_of, num_parameters
from fedprune_app.results.reader import read_info

Runner = Callable[[Tensor], Any]
"""Images (N, C, H, W) to logits (N, classes)."""


@dataclass(frozen=True, eq=False)
class Exportable:
    """An exportable model of a run has its tensors, the network that they make, and the full network.

    The tensors and their network are small where channels are gone. ``masks`` are those of the full network's tensors,
    where removed channels are False.
    """

    info: ExportInfo
    payload: Payload
    network: nn.Module
    full: nn.Module
    masks: Mapping[str, Tensor]


@dataclass(frozen=True)
class Size:
    """A size says what a model costs: bytes of its file, parameters, FLOPs and milliseconds.

    ``parameters`` counts those that are not pruned. ``flops`` are those of one example if only these parameters are
    multiplied. ``milliseconds`` maps a batch size to the time of one forward pass, in the runtime of the exported
    format.
    """

    file_bytes: int
    parameters: int
    flops: float
    milliseconds: Mapping[int, float]


SUFFIXES = {".safetensors": "safetensors", ".onnx": "onnx", ".pt2": "torch-export"}


def format_of(output: Path, format: str) -> str:
    """Return the format of a file: ``format`` if one is given, else the suffix's, else safetensors.

    Raises a one-line ``ValueError`` for a suffix of another format.
    """
    by_suffix = SUFFIXES.get(output.suffix.lower())
    if format in FORMATS and by_suffix not in (None, "safetensors" if format == SPARSE else format):
        raise ConfigError("--output", output, f"no suffix of {by_suffix}", condition=f"with format {format!r}")
    if not format and output.suffix and by_suffix is None:
        raise ConfigError("--output", output, f"a file that ends in {', '.join(SUFFIXES)}, or a format")
    return format or by_suffix or FORMATS[0]


def export_model(
    run: Path,
    client: int | None,
    format: str,
    output: Path,
    *,
    force: bool = False,
    state_dir: str = "",
    data_dir: str = "",
    trusted: Collection[str] = (),
) -> tuple[ExportInfo, Size, Size]:
    """Write the personal model of ``client``, or the global one (None), to ``output``; nothing is written on error.

    ``state_dir`` and ``data_dir`` replace the run's own settings of these names, where its files have moved. The
    modules and files ``trusted`` may be imported, where the run had them as plug-ins. Returns what was written, and
    what the full network and the exported one cost. Raises a one-line ``ValueError``.
    """
    if format not in FORMATS:
        raise ConfigError("--format", format, ", ".join(FORMATS))
    if output.is_dir():
        raise ConfigError("--output", output, "a file", which="is a folder")
    if output.exists() and not force:
        raise ConfigError("--output", output, "a new file", which="exists", hint="force replaces it")
    found = find_model(run, client, state_dir=state_dir, data_dir=data_dir, trusted=trusted)
    content, runner, full_runner = convert(found, format)
    replace_file(output, content)

    shape = found.info.image_shape
    milliseconds = latencies([full_runner, runner], shape)
    dense = state_tensors(found.full, include_buffers=True)
    full = Size(
        len(safetensors.torch.save(dense)),
        sum(parameter.numel() for parameter in found.full.parameters()),
        sum(forward_flops(found.full, shape).values()),
        {batch: times[0] for batch, times in milliseconds.items()},
    )
    small = Size(
        len(content),
        num_parameters(found.payload, parameter_names(found.network)),
        sparse_flops(forward_flops(found.network, shape), found.payload.masks),
        {batch: times[1] for batch, times in milliseconds.items()},
    )
    return found.info, full, small


# --- finding the model --------------------------------------------------------------------------------------------


def find_model(
    run: Path, client: int | None, *, state_dir: str = "", data_dir: str = "", trusted: Collection[str] = ()
) -> Exportable:
    """Return the personal model that ``client`` answered for at the end of a run, or the run's global model (None).

    How images become inputs, and what the classes are called, is what the run recorded. The data are read only where
    the run did not, and must then be those of the run as far as can be told. Raises a one-line ``ValueError``.
    """
    info = read_info(run)
    if info["status"] != "completed":
        raise ValueError(f"run {str(run)!r} is {info['status']}, allowed: a completed run")
    prepared = prepare(of_run(info["config"], trusted))
    config = prepared.config
    if prepared.system.data != "images":
        raise ValueError(
            f"run {str(run)!r} is of {config.system}, allowed: of images; its models/ are ready as they are"
        )
    if client is None:
        state, round = _global_state(run, info, config), int(info["rounds_completed"])
    else:
        round, state = _client_state(run, info, config, client, state_dir)
    return _exportable(run, config, _inputs(run, info, config, state, data_dir), client, round, state)


@dataclass(frozen=True)
class _Inputs:
    """The inputs are images of this shape, normalised by ``mean`` and ``std``; classes have names or are numbers."""

    image_shape: tuple[int, int, int]
    num_classes: int
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    features: tuple[str, ...]


def _inputs(run: Path, info: Mapping[str, Any], config: Config, state: State, data_dir: str) -> _Inputs:
    """Return what the run's models take, from the client's state and run.json, or else from the data as they are now.

    A client's state knows how that client's images were normalised. For dealt data run.json knows it too.
    """
    model = info.get("model") or {}
    told = state.meta.get("normalisation") or model.get("normalisation")
    if not isinstance(told, dict):
        dataset = _same_data(run, info, config, data_dir)
        told = {"mean": [*map(float, dataset.mean)], "std": [*map(float, dataset.std)]}
        model = {**model, "features": list(dataset.features)}
    fields = {
        "image-shape": model.get("image_shape"),
        "num-classes": model.get("classes"),
        "classes": model.get("class_names", []),
        "features": state.meta.get("features") or model.get("features", []),
        **{f"normalisation-{name}": values for name, values in told.items()},
    }
    try:
        found = ImageClientInfo.facts(fields)
    except ValueError as error:
        raise ValueError(f"run {str(run)!r} says of its images what cannot be: {error}") from None
    return _Inputs(*(found[name] for name in ("image_shape", "num_classes", "classes", "mean", "std", "features")))


def _kind_of_inputs(config: Config) -> str:
    """Return what a run's datasets hold, as ``inputs`` of :class:`ExportInfo` says it."""
    if config.dataset not in LOADERS:
        return "numbers" if config.dataset == "table" else "images"
    try:
        dataset = dataset_of(replace(data_config(config), download=False))
    except ValueError:  # the plug-in's data are not here
        return "unknown"
    return "images" if dataset.train_images.dtype == np.uint8 else "numbers"


def _same_data(run: Path, info: Mapping[str, Any], config: Config, data_dir: str) -> Dataset:
    """Return the data as they are now, which must be those of the run as far as run.json tells.

    They are asked for the global model where clients tell no normalisation: that of a private run does not follow from
    the images, and that of a client's own data stays with the client. Raises ``ValueError`` in one line that says what
    differs.
    """
    is_own = "nodes" in info  # each client has its own data
    data = replace(data_config(config, is_own), download=False, data_dir=data_dir or config.data_dir)
    if is_own and not data.data_dir:
        raise ConfigError(
            "--data-dir",
            "",
            "a folder of a node's data",
            hint=f"run {str(run)!r} does not say how its nodes' images became inputs",
        )
    dataset, model = dataset_of(data), info.get("model") or {}
    where = f"data-dir {data.data_dir!r}" if data.data_dir else f"dataset {data.dataset!r}"
    had = f"run {str(run)!r} had"
    if (shape := model.get("image_shape")) != list(dataset.image_shape):
        raise ValueError(f"{where} has images of shape {list(dataset.image_shape)}, allowed: {shape}, as {had}")
    if model.get("classes") != dataset.num_classes:
        raise ValueError(f"{where} has {dataset.num_classes} classes, allowed: {model.get('classes')}, as {had}")
    for name, before in zip(dataset.classes, model.get("class_names", []), strict=False):
        if name != before:
            raise ValueError(f"{where} has the class {name!r}, allowed in its place: {before!r}, as {had}")
    columns = {"features": list(dataset.features), "features_digest": dataset.features_digest}
    if any(model.get(key, value) != value for key, value in columns.items()):
        raise ValueError(f"{where} has other columns, or the same in another order, allowed: as {had}")
    return dataset


def _global_state(run: Path, info: Mapping[str, Any], config: Config) -> State:
    """Return the global model's tensors as weights; weights that are exactly 0 count as pruned."""
    if not SYSTEMS[config.system].strategy.has_global_model:
        raise _asks_for_a_client(config, "it has no global model")
    path = run / "models" / "global.safetensors"
    if not path.exists():
        raise ValueError(f"{str(path)!r} is missing")
    whose = owner("global model", str(info.get("run_key") or ""))
    tensors = read_tensors(path, round=int(info["rounds_completed"]), owner=whose).tensors
    return State({f"weights/{name}": tensor for name, tensor in tensors.items()})


def _asks_for_a_client(config: Config, why: str, allowed: str = "a client's number") -> ConfigError:
    return ConfigError(
        "--client", ..., allowed, condition=f"with system {config.system!r}", which="is not given", hint=why
    )


def _or_global(run: Path, info: Mapping[str, Any], config: Config) -> str:
    """Return the end of what is allowed in the place of a client, which is empty where no global model is complete."""
    return ", or the global model" if _has_whole_global(run, info, config) else ""


def _has_whole_global(run: Path, info: Mapping[str, Any], config: Config) -> bool:
    model = info.get("model") or {}
    if not SYSTEMS[config.system].strategy.has_global_model or "image_shape" not in model:
        return False
    shape, classes = tuple(model["image_shape"]), model["classes"]
    full = initial_model(config.model, config.dataset, shape, classes, init=config.init, seed=config.seed)
    names = list(state_tensors(full, include_buffers=True))
    from_server = _names_from_server(config, full, int(info["rounds_completed"]))
    try:
        there = _read(run / "models" / "global.safetensors").tensors.keys()
    except ValueError:
        return False
    return {*names} <= there and not 0 < len(from_server) < len(names)


def _client_state(run: Path, info: Mapping[str, Any], config: Config, client: int, state_dir: str) -> tuple[int, State]:
    """Return the client's state that the server took in last, and the round of that state.

    A reply that came too late to count does not count here.
    """
    system = SYSTEMS[config.system]
    if issubclass(system.client, FineTuned):
        raise ConfigError(
            "--client",
            client,
            "none"
            if config.batch_norm == "averaged"
            else "no export, as the global model lacks the norms of batch-norm 'local'",
            condition=f"with system {config.system!r}",
            hint="it does not keep its fine-tuned models",
        )
    known = sorted(row["partition"] for row in info.get("partition") or [])
    if client not in known:
        raise ConfigError("--client", client, f"{_ranges(known)}{_or_global(run, info, config)}")
    run_key = str(info.get("run_key") or "")
    store = client_store(state_folder(run, state_dir or config.state_dir, run_key), client, run_key)
    rounds = {int(p): int(r) for p, r in info["state_rounds"].items()}
    if client not in rounds:
        trained = f"{_ranges(sorted(rounds))}{_or_global(run, info, config)}"
        raise ConfigError("--client", client, trained, which="never trained in this run and has no model")
    if client not in rounds or rounds[client] not in store.rounds():
        raise ConfigError(
            "--state-dir",
            store.folder,
            "the run's state-dir, as it is here",
            which=f"has no state of client {client}",
            hint="or export where the client runs",
        )
    return rounds[client], store.read(rounds[client])


def _from_server(run: Path, config: Config, full: nn.Module, round: int) -> dict[str, Tensor]:
    """Return the tensors of a client's personal model that are the server's final ones (LG-FedAvg's upper layers)."""
    names = _names_from_server(config, full, round)
    found = _read(run / "models" / "global.safetensors").tensors if names else {}
    return {name: found[name] for name in names if name in found}


def _names_from_server(config: Config, full: nn.Module, round: int) -> list[str]:
    kind, names = SYSTEMS[config.system].client, list(state_tensors(full, include_buffers=True))
    if not issubclass(kind, ImageClient):
        return []
    return kind.names_from_server(config, names, prunable_names(full), round)


def _read(path: Path) -> State:
    if not path.exists():
        raise ValueError(f"{str(path)!r} is missing")
    return read_tensors(path)


def _ranges(numbers: Sequence[int]) -> str:
    """Return ``numbers`` in words: "0 to 9" where they are all of that range, else the first of them."""
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, [*numbers[:10], *["..."] * (len(numbers) > 10)])) or "none"


def _exportable(run: Path, config: Config, inputs: _Inputs, client: int | None, round: int, state: State) -> Exportable:
    shape, classes = inputs.image_shape, inputs.num_classes
    full = initial_model(config.model, config.dataset, shape, classes, init=config.init, seed=config.seed)
    weights = state.group("weights")
    if client is not None:
        weights |= _from_server(run, config, full, round)
    names = list(state_tensors(full, include_buffers=True))
    # where clients take some layers of the server alone, what else it has is from before (LG-FedAvg's pre-training)
    if client is None and 0 < len(_names_from_server(config, full, round)) < len(names):
        raise _asks_for_a_client(config, "no model of it is global as a whole")
    if missing := [name for name in names if name not in weights]:
        is_kept = not issubclass(SYSTEMS[config.system].client, FineTuned)
        instead = "a client's number" if is_kept else "no export, as no client's model is kept"
        if client is None and not set(missing) & set(shared_names(full, config.batch_norm)):
            raise _asks_for_a_client(config, "no model is global as a whole with batch-norm 'local'", instead)
        reason = "is of another model" if client is not None else f"is not complete, allowed: {instead}"
        raise ValueError(f"the state {reason}: it has no tensor '{missing[0]}'")
    load_state_tensors(full, weights)
    full.eval().requires_grad_(False)

    masks = state.group("masks") or state.group("fc")
    if client is None:
        masks = {name: weights[name] != 0 for name in prunable_names(full)}
    kept = state.group("channels")
    groups = channels_of(config.model, config.dataset, shape, classes) if kept else ()
    small = gather(weights, groups, kept)
    payload = Payload.pruned({name: small[name] for name in names}, gather(masks, groups, kept))
    name = chosen_name(config.model, config.dataset)
    info = ExportInfo(
        system=config.system,
        client=client,
        round=round,
        model=os.path.basename(name),  # of 'folder/file.py:function'
        image_shape=shape,
        classes=classes,
        mean=inputs.mean,
        std=inputs.std,
        density=full_density(full, payload),
        channels={name: tuple(mask.nonzero().squeeze(1).tolist()) for name, mask in kept.items()},
        class_names=inputs.classes if inputs.classes != tuple(map(str, range(classes))) else (),
        image_fit=config.image_fit,
        inputs=_kind_of_inputs(config),
        features=inputs.features,
    )
    if kept:
        shapes = {name: weights[name].shape for name in prunable_names(full)}
        cut = full_masks(shapes) | coordinate_masks(groups, kept, shapes)
        masks = {name: cut[name] & masks[name] if name in masks else cut[name] for name in shapes}
    return Exportable(info, payload, network_of(info, payload, BUILDERS.get(name)), full, masks)


# --- formats ------------------------------------------------------------------------------------------------------


def _onnx(network: nn.Module, info: ExportInfo) -> tuple[bytes, Runner]:
    """Return an ONNX file, and its runner: onnxruntime on one thread.

    The file has the metadata as the model's property ``fedprune``.
    """
    onnxruntime = _extras("onnx", "onnxscript", "onnxruntime")[-1]
    with _quiet_exporter():
        program = torch.onnx.export(
            network,
            (_examples(info.image_shape, 2),),
            input_names=["images"],
            output_names=["logits"],
            dynamic_shapes=({0: "batch"},),
            dynamo=True,
            verbose=False,
        )
    assert program is not None  # None is returned only in a deprecated way to write files
    for node in program.model.graph.all_nodes():
        node.metadata_props.clear()  # stack traces: they name folders of this machine, and are larger than small models
    program.model.metadata_props["fedprune"] = info.to_json()
    content = program.model_proto.SerializeToString()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    return content, lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


def _torch_export(network: nn.Module, info: ExportInfo) -> tuple[bytes, Runner]:
    """Return a ``torch.export`` program, with the metadata as the extra file ``fedprune.json``, and its runner."""
    file = io.BytesIO()
    with _quiet_exporter():
        example = _examples(info.image_shape, 2)
        program = torch.export.export(network, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))
        for node in program.graph.nodes:
            node.meta.pop("stack_trace", None)  # it names folders of this machine
        program.example_inputs = None
        torch.export.save(program, file, extra_files={"fedprune.json": info.to_json()})
        return file.getvalue(), program.module()


_RUNTIMES: dict[str, Callable[[nn.Module, ExportInfo], tuple[bytes, Runner]]] = {
    "onnx": _onnx,
    "torch-export": _torch_export,
}
SPARSE = "sparse"  # the file of safetensors, timed as load_model(file, sparse=True) computes
FORMATS = ("safetensors", SPARSE, *_RUNTIMES)


def convert(found: Exportable, format: str) -> tuple[bytes, Runner, Runner]:
    """Return the content of the file, its runner, and the runner of the full network in the same runtime, to compare.

    The runtime's logits must be PyTorch's for any batch size: the largest error is at most a ten-thousandth of the
    largest logit. Otherwise ``ValueError`` is raised.
    """
    if format in ("safetensors", SPARSE):
        network = copy.deepcopy(found.network)
        if format == SPARSE:
            sparsify(network)
        return encode_export(found.info, found.payload), network, found.full
    content, runner = _RUNTIMES[format](found.network, found.info)
    for batch in (1, 3):
        images = _examples(found.info.image_shape, batch)
        expected, got = found.network(images), runner(images)
        error, allowed = float((got - expected).abs().max()), 1e-4 * float(expected.abs().max())
        if not error <= allowed:  # an error of NaN fails too
            raise ValueError(f"logits of the {format} model are off by {error:.2g}, allowed: {allowed:.2g}")
    return content, runner, _RUNTIMES[format](found.full, found.info)[1]


def _extras(*names: str) -> list[Any]:
    try:
        return [import_module(name) for name in names]
    except ImportError as error:
        raise ValueError(f"this format needs the package {error.name}: install the extra fedprune[export]") from None


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Hide the warning that torch's exporter gives about its own code."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=r".isinstance\(treespec, LeafSpec\). is deprecated", category=FutureWarning
        )
        yield


def _examples(image_shape: tuple[int, int, int], batch: int) -> Tensor:
    """Return random images of about the scale of normalised ones; the images are always the same."""
    return torch.randn(batch, *image_shape, generator=generator(0, "export", batch))


# --- what it costs ------------------------------------------------------------------------------------------------


@torch.inference_mode()
def latencies(
    runners: Sequence[Runner],
    image_shape: tuple[int, int, int],
    batches: Sequence[int] = (128, 1),
    seconds: float = 1.0,
) -> dict[int, list[float]]:
    """Return for each batch size each runner's median milliseconds per batch, on one thread.

    The times are processor time of that thread. On an idle machine that is the time on the clock. On a busy machine the
    clock would measure which runner has to wait, even in the median. The runners take turns, after one turn each to
    warm up. The median is of 3 to 100 turns, as many as fit into ``seconds``.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {batch: _medians(runners, _examples(image_shape, batch), seconds) for batch in batches}
    finally:
        torch.set_num_threads(threads)


def _medians(runners: Sequence[Runner], images: Tensor, seconds: float) -> list[float]:
    for runner in runners:
        runner(images)
    turns: list[list[float]] = []
    end = time.perf_counter() + seconds
    while len(turns) < 3 or (len(turns) < 100 and time.perf_counter() < end):
        turns.append([_milliseconds(runner, images) for runner in runners])
    return [statistics.median(times) for times in zip(*turns, strict=True)]


def _milliseconds(runner: Runner, images: Tensor) -> float:
    started = time.thread_time()
    runner(images)
    return 1000 * (time.thread_time() - started)


def machine() -> str:
    """Return the machine that the times were taken on: its processor, and the PyTorch version."""
    processor = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), processor)
    except OSError:
        pass  # this system is not Linux
    return f"{processor}, PyTorch {torch.__version__}"
