"""Checks of combinations of settings that do not depend on the machine: registered names, and the system's limits."""

from collections.abc import Mapping
from functools import lru_cache

from fedprune_app.config import Config, ConfigError
from fedprune_app.config.errors import not_allowed
from fedprune_app.config.toml import gallery_systems
from fedprune_app.core.bounds import threshold_of
from fedprune_app.data.names import DATASETS, PARTITIONS, TEXTS
from fedprune_app.models.names import BUILDERS, MODELS, chosen_name
from fedprune_app.registry import SYSTEMS


def check_names(config: Config) -> None:
    """Raise :class:`ConfigError` unless all names in ``config`` are registered; nothing is imported.

    The model and the partition of a run with texts are checked when they are opened.
    """
    allowed: dict[str, Mapping[str, object]] = {
        "system": SYSTEMS,
        "dataset": DATASETS,
        "partition": PARTITIONS,
        "fedltp.public-dataset": {"": "", **DATASETS},
        "model": {"auto": "", "auto-bn": "", **MODELS},
    }
    system = SYSTEMS.get(config.system)
    if system and system.reads_text:
        if config.dataset not in TEXTS:
            raise ConfigError("dataset", config.dataset, ", ".join(TEXTS), condition=f"with system {config.system!r}")
        return
    values = config.to_dict()
    for key, names in allowed.items():
        value = values[key]
        if value not in names:
            raise unknown_name(key, value, names)


def unknown_name(key: str, value: object, names: Mapping[str, object]) -> ConfigError:
    """Return the error for a name that is not registered, with the plug-in of the gallery that has a system."""
    error = not_allowed(key, value, names)
    if key == "system" and (file := gallery_systems().get(str(value))):
        error.hint = f"it is in the gallery: --plugin {file}"
    error.hint = error.hint or "the name of a plug-in needs that the plug-in is named too"
    return error


@lru_cache(maxsize=16)  # a client checks its run's configuration with every message
def check_system(config: Config) -> Config:
    """Return ``config`` if its names are registered and its system supports it, else raise :class:`ConfigError`."""
    check_names(config)
    system = SYSTEMS[config.system]
    if config.dp.enabled and (reason := why_not_private(config)):
        raise ConfigError(reason)
    if config.secure_sums:
        if reason := system.client.why_not_summed(config):
            raise ConfigError(reason)
        least = threshold_of(config.secure_sums_threshold, config.holdout_clients)
        if 0 < config.holdout_clients < least:
            allowed = f"0, or at least {least}"
            raise ConfigError("holdout-clients", config.holdout_clients, allowed, condition="with secure-sums")
    if config.dataset == "table" and config.augmentation != "none":
        raise ConfigError(
            "augmentation", config.augmentation, "none", condition="with dataset 'table'", hint="a row is no image"
        )
    if config.dp.enabled and not system.reads_text:
        _check_private(config)
    return config


def why_not_private(config: Config) -> str:
    """Return why the system of ``config`` cannot be private; empty if it can.

    A plug-in's client class that overrides methods must declare its own privacy: the base class's declaration does not
    cover it.
    """
    kind = SYSTEMS[config.system].client
    for cls in kind.__mro__:
        if {"why_not_private", "not_private"} & vars(cls).keys():
            break
        changed_methods = [name for name, value in vars(cls).items() if _is_method(name, value)]
        if changed_methods and not cls.__module__.startswith(("clients.", "fedprune_app.")):
            return (
                f"dp.enabled is true, allowed with system {config.system!r}: false; {cls.__name__} changes "
                f"{', '.join(sorted(changed_methods))} and does not say by why_not_private that this is private"
            )
    return kind.why_not_private(config)


def _is_method(name: str, value: object) -> bool:
    is_special = name.startswith("__") and name != "__init__"
    return not is_special and (callable(value) or isinstance(value, property | classmethod | staticmethod))


def _check_private(config: Config) -> None:
    if config.augmentation != "none":
        raise ConfigError(
            "augmentation",
            config.augmentation,
            "'none'",
            condition="with dp.enabled",
            hint="one example more changes the crops of the others in its batch, which clipping does not bound",
        )
    if config.dp.accuracies != "none" and config.test_split != "holdout":
        raise ConfigError(
            "test-split",
            config.test_split,
            "'holdout' (with dp.accuracies 'none' every split)",
            condition="with dp.enabled",
            hint="the labels that a client trains on decide what it is tested on, so an accuracy tells them",
        )
    from torch import nn

    from fedprune_app.models.vision import architecture

    name = chosen_name(config.model, config.dataset)
    if name in BUILDERS:  # the network may need one shape of images: each client checks it
        return
    layers = architecture(name, (3, 64, 64), 2).modules()  # any size of images has the same layers
    if any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in layers):
        raise ConfigError(
            "model", name, "one without BatchNorm, which mixes the examples of a batch", condition="with dp.enabled"
        )
