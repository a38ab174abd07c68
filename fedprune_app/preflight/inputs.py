"""The inputs of a run: settings of files and of a command line or call, its folder, and its placement."""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from numbers import Integral
from pathlib import Path

from fedprune_app import plugins
from fedprune_app.config import (
    OPTIONS,
    POLICY_FILE,
    Config,
    ConfigError,
    Scalar,
    parse_override,
    paths_from_here,
    read_toml,
)
from fedprune_app.config.errors import unknown_key
from fedprune_app.config.toml import config_file
from fedprune_app.core.named import Values


@dataclass(frozen=True)
class RunInputs:
    """A user's settings by source, the run's folder, and whether to resume it.

    ``base`` has the settings of a run that has begun. ``files`` override it, later files override earlier ones, and the
    command line overrides all. ``out`` is the run's folder; with ``resume`` the run in it continues. With ``is_whole``
    the settings are complete: a resumed run takes none from its run.json. ``where`` is named in errors.
    """

    base: Mapping[str, object] = field(default_factory=dict)
    files: Sequence[Mapping[str, Scalar]] = ()
    on_command_line: Mapping[str, Scalar] = field(default_factory=dict)
    out: Path | None = None
    resume: bool = False
    accept_loss: bool = False
    is_whole: bool = False
    where: str = ""

    @property
    def folder(self) -> Path:
        """The absolute path of ``out``, which must be given."""
        assert self.out is not None
        return self.out.expanduser().resolve()

    @property
    def chosen(self) -> dict[str, Scalar]:
        """The settings of files and of the command line, with absolute paths."""
        sources = (*self.files, self.on_command_line)
        return paths_from_here({key: value for source in sources for key, value in source.items()})

    def for_run_in(self, out: Path, *, resume: bool = False, accept_loss: bool = False) -> RunInputs:
        return replace(self, out=out, resume=resume, accept_loss=accept_loss)


def inputs_in(
    files: Sequence[Path] | None, overrides: Sequence[str] | None, more_plugins: Sequence[str] | None = None
) -> RunInputs:
    """Return the settings in run-config files (or shipped ones by name) and texts ``key=value``; the last one counts.

    ``more_plugins`` are added to the key ``plugins``. All code that the settings name is loaded.
    """
    in_files, texts = [read_toml(config_file(file)) for file in files or []], overrides or []
    known = [text for text in texts if text.partition("=")[0].strip() in OPTIONS]
    with_plugins(in_files, dict(map(parse_override, known)), more_plugins)  # declares the options of the other texts
    return with_plugins(in_files, dict(map(parse_override, texts)), more_plugins)


def with_plugins(
    files: Sequence[Mapping[str, Scalar]],
    on_command_line: Mapping[str, Scalar],
    more_plugins: Sequence[str] | None = None,
) -> RunInputs:
    inputs = RunInputs(files=files, on_command_line=on_command_line)
    if more_plugins:
        names = ",".join(dict.fromkeys([*plugins.names_in(inputs.chosen), *more_plugins]))
        inputs = replace(inputs, on_command_line={**on_command_line, "plugins": names})
    plugins.load(inputs.chosen)
    for key in on_command_line:  # fails before slow imports
        if key not in OPTIONS:
            raise unknown_key(key, OPTIONS)
    return inputs


def trusted_code(names: Sequence[str] | None) -> list[str]:
    """Load these plug-ins, and return their names with absolute paths."""
    return plugins.names_in(with_plugins([], {}, names).chosen)


def of_run(info: Values, trusted: Collection[str]) -> RunInputs:
    """Return the settings in a run.json; its code may be loaded only if ``trusted`` names it."""
    plugins.check_named(info["config"], {"plugins": ",".join(trusted)})
    return RunInputs(info["config"], where=origin_of(info))


def origin_of(info: Values) -> str:
    """Return the source of a run.json's settings for errors, with its version, whose keys may no longer exist."""
    return f"run of fedprune {info['versions']['fedprune']}"


# --- where a run takes place ------------------------------------------------------------------------------------------


ENGINES = ("ray", "flower", "inprocess")
_ON_RAY = ("ray", "flower")


@dataclass(frozen=True)
class Placement:
    """Where a run takes place: engine, workers, or real nodes."""

    engine: str = "ray"
    num_clients: int | None = None  # by default as many as a resumed run has, or 20
    num_workers: int | None = None  # by default one for each GPU; without a GPU, one for each CPU
    ray_address: str = ""  # "host:port" of a Ray cluster to use, in place of starting a Ray
    superlink: str = ""  # the name of a connection in Flower's own configuration, for real nodes
    nodes: tuple[Mapping[str, Scalar], ...] = ()  # node-configs of a deployment on this machine, instead of engine
    deployment: Path | None = None  # the folder of that deployment

    @property
    def is_simulation(self) -> bool:
        """Whether there are no real nodes: neither those of a SuperLink nor of a deployment on this machine."""
        return not (self.superlink or self.nodes)

    @property
    def shares_data(self) -> bool:
        """Whether each client has a part of data that is also on this machine."""
        return not (self.superlink or self.ray_address or any(map(_has_own_data, self.nodes)))

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ConfigError("--engine", self.engine, ", ".join(ENGINES))
        if self.engine in _ON_RAY and self.is_simulation and find_spec("ray") is None:
            raise ConfigError("--engine", self.engine, "inprocess", condition="where Ray is not installed")
        if self.ray_address and (self.engine not in _ON_RAY or not self.is_simulation):
            raise ConfigError("--ray-address", self.ray_address, condition="with engine 'ray' or 'flower' alone")
        if self.ray_address:
            _check_ray_address(self.ray_address)
        for option, value in (("--clients", self.num_clients), ("--workers", self.num_workers)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, Integral) or value < 1):
                raise ConfigError(option, value, "a whole number, at least 1")
        if self.num_workers is not None and (self.engine == "inprocess" or not self.is_simulation):
            raise ConfigError(
                "--workers",
                self.num_workers,
                "nothing",
                condition="with engine 'inprocess'" if self.is_simulation else "on real nodes",
            )

    @property
    def clients(self) -> int:
        return 20 if self.num_clients is None else int(self.num_clients)  # from a NumPy integer, too

    def resumed(self, info: Values) -> Placement:
        """Return the placement of a run whose run.json is ``info``; of a new one if that is empty.

        Raises :class:`ConfigError` for another number of clients than before.
        """
        if not (info and self.is_simulation):
            return self
        num_recorded = clients_of(info)
        if self.num_clients and num_recorded not in (0, self.num_clients):
            raise ConfigError(
                "--clients", self.num_clients, f"{num_recorded}, as the run began", condition="when resuming"
            )
        return replace(self, num_clients=self.num_clients or num_recorded or None)

    def with_nodes_for(self, config: Config) -> Placement:
        """Return the placement with complete node-configs, as operators would write them for a run with ``config``."""
        nodes = (_node_for(config, node, k, len(self.nodes)) for k, node in enumerate(self.nodes))
        return replace(self, nodes=tuple(nodes))


def _node_for(config: Config, node: Mapping[str, Scalar], number: int, count: int) -> Mapping[str, Scalar]:
    """Return the node-config of a rehearsal's node. A node with a policy file of its own gets no default policy."""
    policy: dict[str, Scalar] = {}
    place: dict[str, Scalar] = {"data-dir": config.data_dir} if config.data_dir else {}
    place |= {"partition-id": number, "num-partitions": count}
    if targets := ",".join(dict.fromkeys(code.target for code in plugins.code_in(config.to_dict()))):
        policy["allowed-plugins"] = targets  # the user operates these nodes
    if config.dp.enabled and _has_own_data(node):
        policy["allowed-label-columns"] = config.label_column
    elif config.dp.enabled:  # for the same hash as that of the run in this process
        policy["secure-rng"] = config.dp.secure_rng
    return {**({} if _has_own_data(node) else place), **({} if POLICY_FILE in node else policy), **node}


def _has_own_data(node: Mapping[str, Scalar]) -> bool:
    return "data-dir" in node and "partition-id" not in node


def clients_of(info: Values) -> int:
    """Return a recorded run's initial number of clients, including those left out; 0 if unknown."""
    return info.get("num_partitions") or len(info.get("partition") or [])


def recorded_clients(folders: Iterable[Path]) -> int:
    """Return the initial number of clients of the first run in these folders that records it; 0 if none does."""
    from fedprune_app.results.reader import read_info
    from fedprune_app.results.recorder import holds_run

    return next(filter(None, (clients_of(read_info(folder)) for folder in folders if holds_run(folder))), 0)


def _check_ray_address(address: str) -> None:
    """Raise :class:`ConfigError` unless a server listens at ``address``; Ray itself would wait for a long time."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(
            "--ray-address",
            address,
            "HOST:PORT of a running cluster, as `ray start --head` prints it",
            hint=f"there: {error}",
        ) from None
