"""A placement says where a run takes place: on which engine, with how many clients and workers."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from numbers import Integral
from pathlib import Path
from typing import Any

from fedprune_app import plugins
from fedprune_app.config import POLICY_FILE, Config, ConfigError, Scalar

ENGINES = ("ray", "flower", "inprocess")
_ON_RAY = ("ray", "flower")


@dataclass(frozen=True)
class Placement:
    """A placement says where a run takes place."""

    engine: str = "ray"
    num_clients: int | None = None  # by default as many as a resumed run has, or 20
    num_workers: int | None = None  # by default one for each GPU; without a GPU, one for each CPU
    ray_address: str = ""  # "host:port" of a Ray cluster to use, in place of starting a Ray
    superlink: str = ""  # the name of a connection in Flower's own configuration, for real nodes
    nodes: tuple[Mapping[str, Scalar], ...] = ()  # node-configs of a deployment on this machine, instead of engine
    deployment: Path | None = None  # the folder of that deployment

    @property
    def is_simulation(self) -> bool:
        """A placement is a simulation unless it has real nodes: those of a SuperLink, or those of a deployment here."""
        return not (self.superlink or self.nodes)

    @property
    def shares_data(self) -> bool:
        """The clients share data if each of them has its part of data that is on this machine too."""
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
        return 20 if self.num_clients is None else int(self.num_clients)  # it may be a number of NumPy

    def resumed(self, info: Mapping[str, Any]) -> Placement:
        """Return the placement of a run whose run.json is ``info``, or of a new one where that is empty.

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
        """Return the placement whose nodes have what their operators would give them for a run with ``config``."""
        nodes = (_node_for(config, node, k, len(self.nodes)) for k, node in enumerate(self.nodes))
        return replace(self, nodes=tuple(nodes))


def _node_for(config: Config, node: Mapping[str, Scalar], number: int, count: int) -> Mapping[str, Scalar]:
    """Return the node-config of a rehearsal's node. A node that has a policy says for itself what it allows."""
    policy: dict[str, Scalar] = {}
    place: dict[str, Scalar] = {"data-dir": config.data_dir} if config.data_dir else {}
    place |= {"partition-id": number, "num-partitions": count}
    if targets := ",".join(dict.fromkeys(code.target for code in plugins.code_in(config.to_dict()))):
        policy["allowed-plugins"] = targets  # the nodes are the user's own
    if config.dp.enabled and _has_own_data(node):
        policy["allowed-label-columns"] = config.label_column
    elif config.dp.enabled:  # the hash is that of the same run in this process
        policy["secure-rng"] = config.dp.secure_rng
    return {**({} if _has_own_data(node) else place), **({} if POLICY_FILE in node else policy), **node}


def _has_own_data(node: Mapping[str, Scalar]) -> bool:
    return "data-dir" in node and "partition-id" not in node


def clients_of(info: Mapping[str, Any]) -> int:
    """Return how many clients a recorded run began with, those that were left out included; 0 if that is unknown."""
    return info.get("num_partitions") or len(info.get("partition") or [])


def recorded_clients(folders: Iterable[Path]) -> int:
    """Return how many clients the first run in these folders began with; 0 if no run says that."""
    from fedprune_app.results.reader import read_info
    from fedprune_app.results.recorder import holds_run

    return next(filter(None, (clients_of(read_info(folder)) for folder in folders if holds_run(folder))), 0)


def _check_ray_address(address: str) -> None:
    """Raise :class:`ConfigError` unless something listens at ``address``; Ray itself would wait for a long time."""
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
