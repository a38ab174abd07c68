"""A placement says where a run takes place: on which engine, with how many clients and workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from numbers import Integral
from pathlib import Path

from fedprune_app import launch
from fedprune_app.config import ConfigError, Scalar

ENGINES = ("ray", "flower", "inprocess")
_ON_RAY = ("ray", "flower")


@dataclass(frozen=True)
class Placement:
    """A placement says where a run takes place."""

    engine: str = "ray"
    num_clients: int = 20
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
        own = any("data-dir" in node for node in self.nodes)
        return not (self.superlink or self.ray_address or own)

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ConfigError(f"--engine is {self.engine!r}, allowed: {', '.join(ENGINES)}")
        if self.engine in _ON_RAY and self.is_simulation and find_spec("ray") is None:
            raise ConfigError(f"--engine is {self.engine!r}, allowed where Ray is not installed: inprocess")
        if self.superlink and self.engine != "ray":
            raise ConfigError(f"--superlink is {self.superlink!r}, allowed with --engine {self.engine}: nothing")
        if self.ray_address and (self.engine not in _ON_RAY or not self.is_simulation):
            raise ConfigError(f"--ray-address is {self.ray_address!r}, allowed with --engine ray or flower alone")
        if self.superlink:
            launch.check_superlink(self.superlink)
        if self.ray_address:
            launch.check_ray_address(self.ray_address)
        for option, value in (("--clients", self.num_clients), ("--workers", self.num_workers)):
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, Integral):
                raise ConfigError(f"{option} is {value!r}, allowed: a whole number")
            if value < 1:
                raise ConfigError(f"{option} is {value}, allowed: at least 1")
        if self.num_workers is not None and (self.engine == "inprocess" or not self.is_simulation):
            where = "with --engine inprocess" if self.is_simulation else "on real nodes"
            raise ConfigError(f"--workers is {self.num_workers!r}, allowed {where}: nothing")
        object.__setattr__(self, "num_clients", int(self.num_clients))  # it may be a number of NumPy
