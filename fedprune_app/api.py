"""The functions of ``import fedprune``: the command line's commands, for scripts and notebooks.

Examples:
    >>> import fedprune
    >>> run = fedprune.run(system="fedavg", clients=3, engine="inprocess", out="runs/x")  # doctest: +SKIP
    >>> run.frame().tail(1)  # doctest: +SKIP

Errors are those of the command line, but name Python's arguments instead of options:
:class:`~fedprune_app.config.ConfigError` (a ``ValueError``) for a wrong setting,
:class:`~fedprune_app.errors.LaunchError` (a ``RuntimeError``) for a run that fails. If the file system rejects a path,
the error is Python's ``OSError``.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial, wraps
from html import escape
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
from torch import nn

from fedprune_app.config import ConfigError as ConfigError
from fedprune_app.config import Scalar, flatten, read_toml
from fedprune_app.config.toml import config_file
from fedprune_app.core.named import TensorDict, Values
from fedprune_app.data import splits
from fedprune_app.engine.printable import keep_logs_printable
from fedprune_app.errors import LaunchError as LaunchError
from fedprune_app.exports.file import load_model as load_model
from fedprune_app.files import LATEST, folder_for
from fedprune_app.models.saving import load_packed as load_packed
from fedprune_app.preflight.inputs import Placement, RunInputs, trusted_code, with_plugins
from fedprune_app.preflight.prepare import prepare
from fedprune_app.results.groups import group_runs
from fedprune_app.results.paper import drawn
from fedprune_app.results.reader import Run as Run
from fedprune_app.results.reader import load_run as read_run
from fedprune_app.results.report import run_folders, write_report
from fedprune_app.results.tables import final_rows
from fedprune_app.terminal import Terminal

if TYPE_CHECKING:
    from fedprune_app.exports.find import Exportable
    from fedprune_app.exports.predict import Prediction
    from fedprune_app.models.vision import Build

P = ParamSpec("P")
T = TypeVar("T")


def _in_python(function: Callable[P, T]) -> Callable[P, T]:
    """Name Python's arguments in a function's errors instead of options of the command line."""

    @wraps(function)
    def call(*arguments: P.args, **keywords: P.kwargs) -> T:
        keep_logs_printable()
        try:
            return function(*arguments, **keywords)
        except ConfigError as error:
            if error.key.startswith("--"):
                error.key = "plugins" if error.key == "--plugin" else error.key[2:].replace("-", "_")
            raise

    return call


class RunsFailed(LaunchError):
    """Raised when runs of a sweep, or all trials of a search, have failed.

    ``runs`` are the completed ones, in the order of the matrix. ``failed`` maps the name of a run, or of a search, to
    its error.
    """

    def __init__(self, message: str, runs: Sequence[Run], failed: Mapping[str, str]) -> None:
        super().__init__(message)
        self.runs = list(runs)
        self.failed = dict(failed)

    def __reduce__(self) -> tuple[type[RunsFailed], tuple[str, list[Run], dict[str, str]]]:
        """Return the arguments to unpickle the error, because trials of a search run in other processes."""
        return type(self), (str(self), self.runs, self.failed)


Settings = Mapping[str, object]
AnyPath = str | PathLike[str]


@_in_python
def run(
    config: AnyPath | Settings | None = None,
    /,
    *,
    out: AnyPath | None = None,
    clients: int | None = None,
    workers: int | None = None,
    engine: str = "ray",
    ray_address: str = "",
    resume: bool = False,
    progress: bool = True,
    on_round: Callable[[Values], object] | None = None,
    **settings: object,
) -> Run:
    """Run one federation in the folder ``out`` to its end, and return the recorded run.

    Without ``out`` it is runs/1, runs/2, ... in the current folder, and runs/latest leads there.

    ``config`` is a run-config file, the name of a shipped one (``"subfedavg"``), or a mapping of keys to values.
    ``settings`` override it. They are keys with underscores, and tables as mappings: ``learning_rate=0.1,
    dispfl={"topology": "ring"}``. Relative paths start at the current folder. The other arguments are the options of
    ``fedprune run``: by default 20 ``clients``, or as many as a resumed run has. ``on_round`` is called with each row
    of rounds.jsonl as soon as it is written; with ``engine="inprocess"`` another thread calls it.

    Raises :class:`ConfigError` for a wrong setting, before anything is written, and :class:`LaunchError` for a run that
    fails.
    """
    from fedprune_app.running import run as run_prepared

    link = LATEST if out is None and not resume else None
    with folder_for(None if out is None else _path("out", out), not resume) as place:
        folder = place.resolve()
        inputs = _given(config, settings).for_run_in(folder, resume=resume)
        prepared = prepare(inputs, Placement(engine, clients, workers, ray_address=ray_address))
        run_prepared(prepared, folder, Terminal(stderr=True, quiet=not progress), link, on_round)
        return load_run(folder)


def _shown(run: Run) -> str:
    groups = group_runs([run])
    header, (row,) = final_rows(groups)
    pairs = zip(map(escape, header), map(escape, row), strict=True)
    cells = "".join(f"<tr><th>{title}</th><td>{cell}</td></tr>" for title, cell in pairs)
    with suppress(ConfigError):  # without Matplotlib, or where no accuracy was measured
        picture = drawn(groups, "accuracy-by-round", "svg").decode()
        return f"{picture[picture.index('<svg') :]}<table>{cells}</table>"
    return f"<table>{cells}</table>"


Run._repr_html_ = _shown  # type: ignore[attr-defined]  # notebooks ask for it; tables and figures are made of runs


@_in_python
def sweep(
    matrix: AnyPath | Settings,
    /,
    *,
    out: AnyPath,
    clients: int | None = None,
    workers: int | None = None,
    engine: str = "ray",
    ray_address: str = "",
    resume: bool = False,
    progress: bool = True,
    **settings: object,
) -> list[Run]:
    """Run all runs of a matrix in folders below ``out``, write tables of them, and return the runs.

    ``matrix`` is a YAML file, or a mapping with the same entries: ``{"systems": ["fedavg", "dispfl"], "seeds": [0, 1],
    "common": {"num-server-rounds": 5}}``. With an entry ``search`` settings are drawn, see
    :mod:`fedprune_app.sweeps.sweep`. ``settings`` apply to all runs, as for :func:`run`. With ``resume`` completed runs
    are kept. The default number of ``clients`` is that of a resumed sweep, that of the matrix, or 20.

    Raises :class:`ConfigError` for a wrong setting, before anything is written, and :class:`RunsFailed` at the end if a
    run of the matrix failed. That error has the reasons, and the other runs. A failed trial of a search is ignored;
    :class:`LaunchError` is raised if none succeeded.
    """
    from fedprune_app.sweeps.matrix import matrix_of, read_matrix
    from fedprune_app.sweeps.sweep import sweep as make

    parsed_matrix = (
        matrix_of(_plain(matrix), "in memory")
        if isinstance(matrix, Mapping)
        else read_matrix(_path("matrix", matrix, ", or a mapping with its entries"))
    )
    console = Terminal(stderr=True, quiet=not progress)

    inputs = _given(None, settings).for_run_in(_path("out", out), resume=resume)
    outcome = make(parsed_matrix, inputs, Placement(engine, clients, workers, ray_address=ray_address), console)
    try:
        outcome.check()
    except LaunchError as error:
        raise RunsFailed(str(error), outcome.runs, outcome.failed) from None
    return list(outcome.runs)


def _given(config: AnyPath | Settings | None, settings: Settings) -> RunInputs:
    splits.clear_cache()  # files may have changed since an earlier run of this process
    files: list[dict[str, Scalar]] = []
    if isinstance(config, Mapping):
        files = [_flat(config)]
    elif config is not None:
        files = [read_toml(config_file(_path("config", config, ", or a mapping of keys to values")))]
    return with_plugins(files, _flat(settings))


def _flat(settings: Settings) -> dict[str, Scalar]:
    """Return settings by key; parsing checks the keys' types later."""
    flat: dict[str, Scalar] = _plain({str(name): value for name, value in flatten(dict(settings)).items()})
    if isinstance(names := flat.get("plugins"), list) and all(isinstance(name, str) for name in names):
        flat["plugins"] = ",".join(names)
    return flat


def _plain(value: Any) -> Any:
    """Return a value in the form of a settings file.

    Keys have dashes. A NumPy number is a number, an array or a range is a list, and a path is a text.
    """
    if isinstance(value, Mapping):
        keys = [key.replace("_", "-") if isinstance(key, str) else key for key in value]
        for key in keys:
            if keys.count(key) > 1:
                raise ConfigError(key, ..., "once", which="is given twice, with _ and with -")
        return dict(zip(keys, map(_plain, value.values()), strict=True))
    if isinstance(value, list | tuple | range):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    return os.fspath(value) if isinstance(value, PathLike) else value


def _path(name: str, value: object, alternative: str = "") -> Path:
    if not isinstance(value, str | PathLike) or not os.fspath(value):
        raise ConfigError(name, value, f"a path{alternative}")
    return Path(value).expanduser()


@_in_python
def load_run(folder: AnyPath) -> Run:
    """Read the run recorded in ``folder``; an incomplete last line after a crash is left out.

    The run's folder is made absolute, so that it does not depend on the current folder. Raises a one-line
    ``ValueError`` that names the file for a folder without a run, and for a damaged one.
    """
    run = read_run(_path("folder", folder))
    return replace(run, folder=run.folder.absolute())


@_in_python
def report(runs: Run | AnyPath | Sequence[Run | AnyPath], output: AnyPath, *, force: bool = False) -> Path:
    """Compare runs, or run folders, in one self-contained HTML file, and return its path.

    A folder of run folders stands for these. A damaged folder is left out; a warning and the page name it. Raises
    ``ValueError`` for a folder without a run, and if none can be read. An existing ``output`` that is not a report is
    replaced only with ``force``.
    """
    items = list(runs) if isinstance(runs, Iterable) and not isinstance(runs, str) else [runs]
    folders = [run_folders(_folder("runs", item)) for item in items]
    page, warn = _path("output", output), logging.getLogger("fedprune").warning
    return write_report([*itertools.chain(*folders)], page, force=force, on_left_out=partial(warn, "left out: %s"))


@_in_python
def model(
    run: Run | AnyPath,
    client: int | str | None = None,
    *,
    state_dir: AnyPath = "",
    data_dir: AnyPath = "",
    plugins: str | Sequence[str] = (),
) -> nn.Module:
    """Return a completed run's final model of a ``client``, or the global one (None): on the CPU, in evaluation mode.

    Pruned weights are zeros, and removed channels are left out. The run's data are read if it did not record how images
    become inputs. ``state_dir`` and ``data_dir`` are the current places of the run's folders of these names, if they
    have moved. ``plugins`` names the run's plug-ins, which are imported. Raises ``ValueError`` if there is no such
    model.
    """
    return _exportable(run, client, state_dir, data_dir, plugins).network


@_in_python
def masks(
    run: Run | AnyPath,
    client: int | str | None = None,
    *,
    full: bool = False,
    state_dir: AnyPath = "",
    data_dir: AnyPath = "",
    plugins: str | Sequence[str] = (),
) -> TensorDict:
    """Return the masks of that model by the names of its tensors: True where a weight is kept.

    A tensor without a mask is dense. If channels were removed (Sub-FedAvg (Hy)) the masks are those of the small
    network, so clients' masks differ in shape. With ``full`` they are those of the full network, where removed channels
    are False, so that clients' masks can be compared. The other arguments and errors are those of :func:`model`.
    """
    exportable = _exportable(run, client, state_dir, data_dir, plugins)
    return dict(exportable.masks if full else exportable.payload.masks)


def _folder(name: str, run: object) -> Path:
    return run.folder if isinstance(run, Run) else _path(name, run, ", or a run")


def _exportable(
    run: Run | AnyPath, client: int | str | None, state_dir: AnyPath, data_dir: AnyPath, plugins: str | Sequence[str]
) -> Exportable:
    from fedprune_app.exports.find import find_model

    state, data = _present_folder("state_dir", state_dir), _present_folder("data_dir", data_dir)
    return find_model(_folder("run", run), client, state_dir=state, data_dir=data, trusted=_trusted_names(plugins))


def _present_folder(name: str, value: AnyPath) -> str:
    """Return the current place of a run's folder; empty if it has not moved."""
    return str(_path(name, value)) if value else ""


def _trusted_names(plugins: str | Sequence[str]) -> list[str]:
    return trusted_code([plugins] if isinstance(plugins, str) else plugins)


@_in_python
def export(
    run: Run | AnyPath,
    output: AnyPath,
    *,
    client: int | str | None = None,
    format: str = "",
    force: bool = False,
    state_dir: AnyPath = "",
    data_dir: AnyPath = "",
    plugins: str | Sequence[str] = (),
) -> Path:
    """Write the smallest model of a ``client``, or the global one (None), of a completed run; return the file's path.

    The ``format`` is safetensors or onnx, by default that of the suffix of ``output``. :func:`load_model` reads a
    safetensors file. For a language model, or a checkpoint of transformers instead of a run, ``output`` is a .gguf
    file, or a folder, which is packed; :func:`load_packed` reads it. ``state_dir``, ``data_dir`` and ``plugins`` are as
    for :func:`model`. Raises ``ValueError`` if the export is not possible.
    """
    from fedprune_app.exports.formats import (
        check_options,
        export_model,
        format_of,
        is_gguf,
        is_language_model,
        pack_model,
    )
    from fedprune_app.exports.language import export_gguf

    path, folder = _path("output", output), _folder("run", run)
    if is_language_model(folder):
        check_options(path, client, format, state_dir=state_dir, data_dir=data_dir, plugin=plugins)
        (export_gguf if is_gguf(path) else pack_model)(folder, path, force=force)
        return path
    state, data = _present_folder("state_dir", state_dir), _present_folder("data_dir", data_dir)
    form, trusted = format_of(path, format), _trusted_names(plugins)
    export_model(folder, client, form, path, force=force, state_dir=state, data_dir=data, trusted=trusted)
    return path


@_in_python
def predict(
    model: AnyPath, files: AnyPath | Sequence[AnyPath], *, top: int = 1, build: Build | None = None
) -> list[Prediction]:
    """Return the ``top`` likeliest classes of each image, or of each row of a table, by a ``model`` of :func:`export`.

    The files are images; for a model trained on a table they are CSV or Parquet files, whose columns are matched by
    name. A prediction has the ``file``, the ``row`` counted from 1 (None for an image), and ``classes``, pairs of a
    name and a probability, the likeliest first. ``build`` is as for :func:`load_model`. Raises ``ValueError`` naming
    the file that cannot be classified.
    """
    from fedprune_app.exports.predict import predictions

    paths = [files] if isinstance(files, str | PathLike) else files
    return predictions(_path("model", model), [_path("files", path) for path in paths], top, build)
