"""Formats of ``fedprune export``, which writes the smallest real model of a finished run, and their costs.

The network is without removed channels. Single pruned weights are left out of the safetensors file, which has kept
values and entropy-coded masks. In ONNX files, which have only dense tensors, these weights are zeros.
"""

import statistics
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor, nn

from fedprune_app.config import ConfigError
from fedprune_app.core.flops import forward_flops, sparse_flops
from fedprune_app.core.payload import Payload
from fedprune_app.core.rng import generator
from fedprune_app.exports.file import ExportInfo, encode_export, num_parameters
from fedprune_app.exports.find import CHECKPOINT, Exportable, find_model, finished_checkpoint
from fedprune_app.files import replace_file
from fedprune_app.models.llm import LanguageModel
from fedprune_app.models.saving import load_packed, write_packed
from fedprune_app.models.vision import parameter_names, state_tensors
from fedprune_app.results.ownership import check_new_file
from fedprune_app.results.recorder import processor

Runner = Callable[[Tensor], Any]  # images (N, C, H, W) to logits (N, classes)


@dataclass(frozen=True)
class Size:
    """Costs of a model: bytes of its file, parameters, FLOPs and milliseconds.

    ``parameters`` counts those that are not pruned. ``flops`` are those of one example with only these parameters.
    ``milliseconds`` maps a batch size to the time of one forward pass in the runtime of the exported format.
    ``zeros`` counts the pruned parameters that the network still has.
    """

    file_bytes: int
    parameters: int
    flops: float
    milliseconds: Mapping[int, float]
    zeros: int = 0


def example_images(image_shape: tuple[int, int, int], batch: int) -> Tensor:
    """Return random images, the same ones each time, of about the scale of normalised images."""
    return torch.randn(batch, *image_shape, generator=generator(0, "export", batch))


@torch.inference_mode()
def latencies(
    runners: Sequence[Runner],
    image_shape: tuple[int, int, int],
    batches: Sequence[int] = (128, 1),
    seconds: float = 1.0,
) -> dict[int, list[float]]:
    """Return for each batch size each runner's median milliseconds per batch, on one thread.

    The times are processor time of that thread: on a busy machine wall time would measure how long a runner waits, even
    in the median. The runners take turns, after one turn each to warm up. The median is over 3 to 100 turns, as many as
    fit into ``seconds``.
    """
    with one_thread():
        return {batch: medians(runners, example_images(image_shape, batch), seconds) for batch in batches}


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def medians(runners: Sequence[Runner], images: Tensor, seconds: float = 1.0) -> list[float]:
    """Return each runner's median milliseconds of this thread's processor time, see :func:`latencies`."""
    for runner in runners:
        runner(images)
    turns: list[list[float]] = []
    end = time.perf_counter() + seconds
    while len(turns) < 3 or (len(turns) < 100 and time.perf_counter() < end):
        turns.append([_milliseconds(runner, images) for runner in runners])
    return [statistics.median(times) for times in zip(*turns, strict=True)]


def _milliseconds(runner: Runner, images: Tensor) -> float:
    start = time.thread_time()
    runner(images)
    return 1000 * (time.thread_time() - start)


def machine() -> str:
    """Return the machine of the measured times: its processor, and the PyTorch version."""
    return f"{processor()}, PyTorch {torch.__version__}"


PACKED, GGUF = "packed", "gguf"  # of language models
FORMATS = ("safetensors", "onnx")
SUFFIXES = {".safetensors": "safetensors", ".onnx": "onnx"}


def format_of(output: Path, format: str) -> str:
    """Return the format of a file: ``format`` if one is given, else the suffix's, else safetensors.

    Raises a one-line ``ValueError`` for a suffix of another format.
    """
    by_suffix = SUFFIXES.get(output.suffix.lower())
    if format in FORMATS and by_suffix not in (None, format):
        raise ConfigError("--output", output, f"no suffix of {by_suffix}", condition=f"with format {format!r}")
    if not format and output.suffix and by_suffix is None:
        raise ConfigError("--output", output, f"a file that ends in {', '.join(SUFFIXES)}, or a format")
    return format or by_suffix or FORMATS[0]


def export_model(
    run: Path,
    client: int | str | None,
    format: str,
    output: Path,
    *,
    force: bool = False,
    state_dir: str = "",
    data_dir: str = "",
    trusted: Collection[str] = (),
) -> tuple[ExportInfo, Size, Size]:
    """Write the personal model of ``client``, or the global one (None), to ``output``; nothing is written on error.

    ``state_dir`` and ``data_dir`` replace the run's settings of these names if its files have moved. The modules and
    files ``trusted`` may be imported if they were the run's plug-ins. Return the description of the model, and the
    costs of the full network and of the exported one. Raises a one-line ``ValueError``.
    """
    if format not in FORMATS:
        raise ConfigError("--format", format, ", ".join(FORMATS))
    check_new_file(output, force)
    model = find_model(run, client, state_dir=state_dir, data_dir=data_dir, trusted=trusted)
    content, runner, full_size, full_runner = convert(model, format)
    replace_file(output, content)

    shape = model.info.image_shape
    milliseconds = latencies([full_runner, runner], shape)
    full = Size(
        full_size,
        sum(parameter.numel() for parameter in model.full.parameters()),
        sum(forward_flops(model.full, shape).values()),
        {batch: times[0] for batch, times in milliseconds.items()},
    )
    num_kept = num_parameters(model.payload, parameter_names(model.network))
    small = Size(
        len(content),
        num_kept,
        sparse_flops(forward_flops(model.network, shape), model.payload.masks),
        {batch: times[1] for batch, times in milliseconds.items()},
        sum(parameter.numel() for parameter in model.network.parameters()) - num_kept,
    )
    return model.info, full, small


def _onnx(network: nn.Module, info: ExportInfo) -> tuple[bytes, Runner]:
    """Return an ONNX file with ``info`` in its property ``fedprune``, and its runner: onnxruntime on one thread."""
    try:
        onnxruntime, *_ = [import_module(name) for name in ("onnxruntime", "onnx", "onnxscript")]
    except ImportError as error:
        raise ValueError(f"this format needs the package {error.name}: install the extra fedprune[export]") from None
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        try:
            program = torch.onnx.export(
                network,
                (example_images(info.image_shape, 2),),
                input_names=["images"],
                output_names=["logits"],
                dynamic_shapes=({0: "batch"},),
                dynamo=True,
                verbose=False,
            )
        except Exception as error:  # a user's network may be beyond torch's converter, which raises anything
            reason = f"torch cannot convert the network to ONNX ({type(error).__name__})"
            raise ValueError(f"{reason}; allowed: a file that ends in .safetensors") from error
    assert program is not None  # None only in a deprecated mode
    for node in program.model.graph.all_nodes():
        node.metadata_props.clear()  # stack traces, which have this machine's paths and are larger than small models
    program.model.metadata_props["fedprune"] = info.to_json()
    content = program.model_proto.SerializeToString()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    return content, runner_of(session)


def runner_of(session: Any) -> Runner:
    """Return what computes logits by a session of onnxruntime."""
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


def convert(model: Exportable, format: str) -> tuple[bytes, Runner, int, Runner]:
    """Return the content of the file, its runner, and of the full network in this form the bytes and the runner.

    Raises ``ValueError`` unless the runtime's logits match PyTorch's for any batch size, with a largest error of at
    most a ten-thousandth of the largest logit.
    """
    if format != "onnx":
        dense = safetensors.torch.save(state_tensors(model.full, include_buffers=True))
        return encode_export(model.info, model.payload), model.network, len(dense), model.full
    content, runner = _onnx(model.network, model.info)
    for batch in (1, 3):
        images = example_images(model.info.image_shape, batch)
        expected, actual = model.network(images), runner(images)
        error, allowed = float((actual - expected).abs().max()), 1e-4 * float(expected.abs().max())
        if not error <= allowed:  # an error of NaN fails too
            raise ValueError(f"logits of the onnx model are off by {error:.2g}, allowed: {allowed:.2g}")
    full_content, full_runner = _onnx(model.full, model.info)
    return content, runner, len(full_content), full_runner


# --- packed language models -------------------------------------------------------------------------------------------


class Packed(NamedTuple):
    """A checkpoint has these bytes dense and packed; ``density`` is the share of prunable weights that is left."""

    dense_bytes: int
    packed_bytes: int
    density: float


def is_language_model(folder: Path) -> bool:
    """Return whether a folder is a checkpoint, or a run with one."""
    return any((place / "config.json").is_file() for place in (folder, folder / CHECKPOINT))


def is_gguf(path: Path) -> bool:
    return path.suffix.lower() == f".{GGUF}"


def check_options(output: Path, client: int | str | None, format: str, **options: object) -> None:
    """Raise :class:`ConfigError` for options of ``fedprune export`` that have no effect for a language model.

    ``options`` must all be empty.
    """
    condition = "with a language model"
    if client is not None:
        raise ConfigError("--client", client, "none, for the global model", condition=condition)
    if format not in ("", own := GGUF if is_gguf(output) else PACKED):
        raise ConfigError("--format", format, own, condition=f"{condition} and --output {str(output)!r}")
    if output.suffix.lower() in SUFFIXES:
        raise ConfigError("--output", output, "a folder, whose name has no suffix of a file", condition=condition)
    for name, value in options.items():
        if value:
            raise ConfigError(f"--{name.replace('_', '-')}", value, "none, since it has no effect", condition=condition)


def pack_model(folder: Path, output: Path, *, force: bool = False) -> Packed:
    """Write the packed model of a run, or of a checkpoint, to the folder ``output``: kept values and coded masks.

    A weight that is exactly 0 counts as pruned. Raises a one-line ``ValueError``.
    """
    if output.exists() and not (force and (output / "packed.json").is_file()):
        raise ConfigError(
            "--output", output, "a new folder", which="exists", hint="" if force else "force replaces a packed model"
        )
    model = LanguageModel(finished_checkpoint(folder))
    counts = {"all": 0, "kept": 0}

    def layer(number: int) -> Payload:
        all_tensors = model.layer_tensors(number)
        tensors = {name: all_tensors[name] for name in model.prunable(number)}
        payload = Payload.pruned(tensors, {name: tensor != 0 for name, tensor in tensors.items()})
        counts["all"] += sum(tensor.numel() for tensor in tensors.values())
        counts["kept"] += payload.num_kept()
        return payload

    packed_bytes = write_packed(model, layer, output)
    dense_bytes = sum(tensor.numel() * tensor.element_size() for tensor in load_packed(output).state_dict().values())
    return Packed(dense_bytes, packed_bytes, counts["kept"] / max(1, counts["all"]))
