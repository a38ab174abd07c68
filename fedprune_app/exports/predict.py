"""Classification of image files, or rows of tables, with an exported model."""

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedprune_app.core.texts import one_line
from fedprune_app.data import tables
from fedprune_app.data.folders import read_image
from fedprune_app.exports.file import ExportInfo, load_model, read_export_info
from fedprune_app.exports.formats import Runner, runner_of
from fedprune_app.models.vision import Build

_BATCH = 1024  # examples that go through a network together
Classes = list[tuple[str, float]]  # (class, probability), the likeliest first


class Prediction(NamedTuple):
    """Classes of an image, or of a table's row, which is numbered from 1."""

    file: Path
    row: int | None
    classes: Classes


def predictions(
    model: Path,
    files: Sequence[Path],
    top: int = 1,
    build: Build | None = None,
    refuse: Callable[[ValueError], None] | None = None,
) -> list[Prediction]:
    """Return the ``top`` likeliest classes of each image, or of each row of each table.

    ``model`` was exported in safetensors or ONNX. ``build(image_shape, num_classes)`` makes a network that is not one
    of fedprune's own.

    Images are scaled to [0, 1] and normalised as the model's training images were. For a model that was trained on a
    table, the files are tables, whose columns are found by name; other columns are ignored. Raises a one-line
    ``ValueError`` that names the file; with ``refuse`` an invalid file's error is passed to it, and the other files are
    classified. Models of other data raise ``ValueError``.
    """
    info, compute = _opened(model, build)
    if not info.features and (info.inputs != "images" or info.image_shape[1:] == (1, 1)):
        raise ValueError(
            f"model '{model}' was trained on {info.inputs}, allowed: one trained on images of 8 bits, or on a table "
            "whose columns the model names; in Python, fedprune_app.load_model takes numbers"
        )
    results = []
    for path in files:
        try:
            examples = _examples(path, info)
        except ValueError as error:
            if refuse is None:
                raise
            refuse(error)
            continue
        for row, classes in enumerate(_likeliest(compute, info, examples, top), 1):
            results.append(Prediction(path, row if info.features else None, classes))
    return results


def _opened(model: Path, build: Build | None) -> tuple[ExportInfo, Runner]:
    """Return what an exported file says of its model, and what computes logits; of ONNX that is onnxruntime."""
    if model.suffix.lower() != ".onnx":
        return read_export_info(model), load_model(model, build=build)
    try:
        onnxruntime = import_module("onnxruntime")
    except ImportError:
        raise ValueError(f"model '{model}' needs the package onnxruntime: install the extra fedprune[export]") from None
    try:
        session = onnxruntime.InferenceSession(model.read_bytes(), providers=["CPUExecutionProvider"])
        info = ExportInfo.from_json(session.get_modelmeta().custom_metadata_map["fedprune"])
    except KeyError:
        raise ValueError(f"model '{model}' says nothing of its inputs, allowed: a file of `fedprune export`") from None
    except Exception as error:  # onnxruntime has errors of its own
        raise ValueError(f"model '{model}' cannot be read: {one_line(error)}") from None
    return info, runner_of(session)


def _examples(path: Path, info: ExportInfo) -> Tensor:
    """Return an image as float32 in [0, 1], or a table's rows as float64: (N, C, H, W), not normalised yet."""
    if not path.is_file():
        kind = "table" if info.features else "image"
        raise ValueError(f"{kind} {str(path)!r} is no file here, allowed: files of {kind}s")
    if info.features:
        return torch.from_numpy(np.array(tables.rows(path, info.features))).view(-1, *info.image_shape)
    return torch.from_numpy(np.array(read_image(path, info.image_shape, info.image_fit)))[None].float().div_(255)


def _likeliest(compute: Runner, info: ExportInfo, examples: Tensor, top: int) -> list[Classes]:
    names = info.class_names or tuple(map(str, range(info.classes)))
    mean, std = (torch.tensor(values, dtype=examples.dtype).view(-1, 1, 1) for values in (info.mean, info.std))
    likeliest: list[Classes] = []
    for batch in torch.split(examples, _BATCH):
        with torch.no_grad():
            shares, classes = compute((batch - mean).div(std).float()).softmax(1).topk(min(top, len(names)))
        for row in zip(classes.tolist(), shares.tolist(), strict=True):
            likeliest.append([(names[k], share) for k, share in zip(*row, strict=True)])
    return likeliest
