"""A node's settings: its operator's folders for data, state and ledger, and its policy."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from fedprune_app import plugins
from fedprune_app.config import (
    POLICY_FILE,
    POLICY_KEYS,
    Config,
    ConfigError,
    Policy,
    declined,
    naming_source,
    read_toml,
)
from fedprune_app.config.options import listed
from fedprune_app.core.named import Values
from fedprune_app.data.names import LOADERS
from fedprune_app.engine import wire
from fedprune_app.engine.simulated_grid import is_simulated
from fedprune_app.plugins import Code
from fedprune_app.preflight.inputs import RunInputs
from fedprune_app.preflight.prepare import prepare
from fedprune_app.registry import SYSTEMS


def read_policy(node_config: Mapping[str, object]) -> Policy:
    """Return the policy of the node that was started with ``node_config``.

    The file is read for every message, so that a change applies at once. Raises :class:`ConfigError` for a missing or
    damaged file, an unknown key, an invalid value, and a key in both places: without a readable policy a node replies
    to no message.
    """
    node_values = {key: value for key, value in node_config.items() if key in POLICY_KEYS}
    policy = Policy.parse(node_values, "node-config")
    if POLICY_FILE in node_config:
        policy = _policy_in_file(node_config[POLICY_FILE], node_values)
    for name in policy.allowed_systems.split():
        if name not in SYSTEMS and name not in plugins.installed()["system"] and not policy.allowed_plugins:
            raise ConfigError("allowed-systems", name, ", ".join(SYSTEMS), condition="on the node")
    return policy


def check_allowed(policy: Policy, code: Code) -> None:
    """Raise :class:`~fedprune_app.config.PolicyError` for code of a run that the node's policy does not allow."""
    if code.target not in listed(policy.allowed_plugins):
        allowed = policy.allowed_plugins or "no code"
        raise declined(code.key, code.target, "allowed-plugins", allowed)


def _policy_in_file(name: object, node_values: Mapping[str, object]) -> Policy:
    if not (isinstance(name, str) and Path(name).is_absolute()):
        raise ConfigError(POLICY_FILE, name, "an absolute path", where="node-config")
    with naming_source(POLICY_FILE):
        file_values = read_toml(Path(name))
    for key in node_values:
        if key in file_values:
            raise ConfigError(
                key, node_values[key], "one of them", which=f"is in {POLICY_FILE} {name!r} too", where="node-config"
            )
    return Policy.parse({**file_values, **node_values}, f"{POLICY_FILE} {name!r}")


def ledger_folder(policy: Policy, node_config: Mapping[str, object]) -> str:
    """Return the folder of the node's ledger; empty if the run chooses it.

    It is the policy's ``ledger-dir``, or else ``ledgers`` in the node's ``state-dir``, for all runs, if the node has
    data of its own or a budget. Raises :class:`ConfigError` for a budget without such a folder, since every run could
    begin a new ledger.
    """
    if policy.ledger_dir:
        return policy.ledger_dir
    state_dir = node_config.get("state-dir")
    if state_dir and (policy.epsilon_budget or "partition-id" not in node_config):
        return str(Path(str(state_dir)) / "ledgers")
    if policy.epsilon_budget:
        raise ConfigError(
            "epsilon-budget", policy.epsilon_budget, condition="with a ledger-dir or state-dir of the node's own"
        )
    return ""


NODE_KEYS = ("partition-id", "num-partitions", "capacity", "data-dir", "state-dir", POLICY_FILE, *POLICY_KEYS)
OWN = ("image-folder", "table", "text")  # datasets that a client may have of its own, besides those of plug-ins


def node_settings(run_config: Values, node_config: Values) -> tuple[Config, Policy]:
    """Return the run's configuration on this node, and the node's policy.

    The node's operator, not the run, sets the folders of its data, state and ledger and the source of its noise.
    Without ``state-dir`` the state is below the home folder of the node's user. Raises :class:`ConfigError` for an
    unknown key of the node-config, for a path that is not absolute, and for a ``data-dir`` that only the run sets.
    Raises :class:`PolicyError` if the run breaks the policy. No data is read here.
    """
    for key in node_config:
        if key not in NODE_KEYS:
            raise ConfigError(key, node_config[key], ", ".join(NODE_KEYS), which="is no key", where="node-config")
    own_settings = {key: node_config[key] for key in ("data-dir", "state-dir") if key in node_config}
    for key, value in own_settings.items():
        if not (isinstance(value, str) and Path(value).is_absolute()):
            raise ConfigError(key, value, "an absolute path", where="node-config")
    if not is_simulated():
        if "data-dir" not in own_settings and (run_data_dir := run_config.get("data-dir")):
            raise ConfigError("data-dir", run_data_dir, "data-dir in its node-config", condition="on a node")
        own_settings.setdefault("state-dir", str(Path.home() / "fedprune-state"))
    policy = read_policy(node_config)
    if folder := ledger_folder(policy, node_config):
        own_settings["dp.ledger-dir"] = folder
        policy = replace(policy, ledger_dir=folder)
    run_may_choose = is_simulated() and "partition-id" in node_config
    if not policy.secure_rng:
        own_settings["dp.secure-rng"] = False
    elif not run_may_choose:
        own_settings["dp.secure-rng"] = True
    if not is_simulated():
        plugins.load(run_config, allows=partial(check_allowed, policy))
    config = policy.over(prepare(RunInputs({**run_config, **own_settings})).config)
    policy.check(config)
    if not run_may_choose:
        policy.check_shared_noise(config.dp.noise_shared_by)
    if "partition-id" not in node_config:
        policy.check_own_labels(config)
    return config, policy


def number_of(node_config: Values, fields: wire.Fields, dataset: str) -> tuple[int, int]:
    """Return a client's number, and the number of clients that share the data, from its operator.

    Without them the client has data of its own, the second number is 0, and each message has the client's number.
    Raises :class:`ConfigError` for invalid numbers.
    """
    client_id, num_clients = (node_config.get(key) for key in ("partition-id", "num-partitions"))
    if "partition-id" not in node_config and "num-partitions" not in node_config:
        if "data-dir" not in node_config:
            raise ConfigError(
                "partition-id",
                ...,
                "partition-id and num-partitions, or a data-dir of its own",
                which="is not given, nor is data-dir",
                where="node-config",
            )
        if dataset not in OWN and dataset not in LOADERS:
            raise ConfigError("dataset", dataset, ", ".join(OWN), condition="on a node without partition-id")
        return int(wire.number(fields, "partition", 0, 2**31)), 0
    if not isinstance(client_id, int) or not isinstance(num_clients, int) or not 0 <= client_id < num_clients:
        raise ConfigError(
            "partition-id",
            client_id,
            f"a whole number from 0 to below num-partitions, {num_clients!r}",
            where="node-config",
        )
    return client_id, num_clients


def check_capacity(value: object) -> float | None:
    """Return ``capacity`` of a node-config, the density that the node can train, or None.

    Raises :class:`ConfigError` for an invalid value.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ConfigError("capacity", value, "a number above 0 and at most 1", where="node-config")
    return float(value)
