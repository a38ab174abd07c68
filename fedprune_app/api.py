"""The functions of ``import fedprune_app``: what the command line does, for scripts and notebooks.

>>> import fedprune_app
>>> run = fedprune_app.run(system="fedavg", num_server_rounds=1, clients=3, engine="inprocess",
...                        out="/tmp/x", progress=False)  # doctest: +SKIP
>>> run.rounds[-1]["accuracy_global_mean"]  # doctest: +SKIP
0.31

Errors are those of the command line, with the same text: :class:`~fedprune_app.config.ConfigError` (a ``ValueError``)
for a wrong setting, :class:`~fedprune_app.errors.LaunchError` (a ``RuntimeError``) for a run that fails.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path

from rich.console import Console

from fedprune_app.config import ConfigError, Scalar, flatten, paths_from_here, read_toml
from fedprune_app.errors import LaunchError
from fedprune_app.results.load import load_model
from fedprune_app.results.reader import Run, load_run
from fedprune_app.results.report import write_report
from fedprune_app.shipped import config_file
from fedprune_app.starting import Given, placed, recorded

__all__ = ["ConfigError", "LaunchError", "Run", "export", "load_model", "load_run", "report", "run"]

Settings = Mapping[str, object]
AnyPath = str | PathLike[str]


def run(
    config: AnyPath | Settings | None = None,
    /,
    *,
    out: AnyPath,
    clients: int | None = None,
    workers: int | None = None,
    engine: str = "ray",
    ray_address: str = "",
    resume: bool = False,
    force: bool = False,
    progress: bool = True,
    **settings: object,
) -> Run:
    """Run one federation in the folder ``out`` to its end, and return the content of that folder.

    ``config`` is a run-config file, the name of a shipped one (``"subfedavg"``), or a mapping of keys to values.
    ``settings`` win over it. They are keys with underscores, and tables as mappings: ``learning_rate=0.1,
    dispfl={"topology": "ring"}``. Relative paths begin at the current folder. The other arguments are the options of
    ``fedprune run``: by default 20 ``clients``, or as many as a resumed run has.

    Raises :class:`ConfigError` for a wrong setting, before anything is written, and :class:`LaunchError` for a run that
    fails.
    """
    from fedprune_app.demo import prepare_models
    from fedprune_app.experiment import Placement, Session
    from fedprune_app.results.ownership import clear_the_way

    folder = Path(out).expanduser().resolve()
    before = recorded(folder) if resume else None
    configuration = placed(_given(config, settings), folder, before, force=force)
    count = clients or len((before or {}).get("partition") or []) or 20
    placement = Placement(engine, count, workers, ray_address=ray_address)
    console = Console(stderr=True, quiet=not progress)
    prepare_models([configuration], console)
    make_way = partial(clear_the_way, folder) if force and not resume else None
    with Session(placement, console) as session:
        session.run(configuration, folder, once_checked=make_way)
    return load_run(folder)


def _given(config: AnyPath | Settings | None, settings: Settings) -> Given:
    files: list[dict[str, Scalar]] = []
    if isinstance(config, Mapping):
        files = [_flat(config)]
    elif config is not None:
        files = [paths_from_here(read_toml(config_file(Path(config))))]
    return Given(files, _flat(settings))


def _flat(settings: Settings) -> dict[str, Scalar]:
    """Return settings by key; the keys' types are checked where they are parsed."""
    with_hyphens = {key.replace("_", "-"): value for key, value in flatten(dict(settings)).items()}
    return paths_from_here(with_hyphens)


def report(runs: Run | AnyPath | Sequence[Run | AnyPath], output: AnyPath, *, force: bool = False) -> Path:
    """Compare runs, or run folders, in one self-contained HTML file, and return its path.

    A folder that is damaged is left out, and the page names it. Raises ``ValueError`` where none can be read. An
    ``output`` that exists and is no report is replaced with ``force`` alone.
    """
    several = [runs] if isinstance(runs, Run | str | PathLike) else list(runs)
    folders = [each.folder if isinstance(each, Run) else Path(each).expanduser() for each in several]
    return write_report(folders, Path(output).expanduser(), force=force)


def export(
    run: Run | AnyPath,
    output: AnyPath,
    *,
    client: int | None = None,
    format: str = "",
    force: bool = False,
) -> Path:
    """Write the smallest model of a ``client``, or the global one (None), of a completed run; return the file's path.

    The ``format`` is safetensors, onnx or torch-export; by default the suffix of ``output`` says it. A file of
    safetensors is read by :func:`load_model`. Raises ``ValueError`` for what cannot be exported.
    """
    from fedprune_app.exporting import export_model, format_of

    path = Path(output).expanduser()
    folder = run.folder if isinstance(run, Run) else Path(run).expanduser()
    export_model(folder, client, format_of(path, format), path, force=force)
    return path
