"""A node's policy is read from its node-config, or from a file of the node's own that the node-config names."""

from collections.abc import Mapping
from pathlib import Path

from fedprune_app import plugins
from fedprune_app.config import POLICY_FILE, POLICY_KEYS, ConfigError, Policy, declined, read_toml, told_of
from fedprune_app.config.lists import listed
from fedprune_app.plugins import Code
from fedprune_app.registry import SYSTEMS


def read_policy(node_config: Mapping[str, object]) -> Policy:
    """Return the policy of the node that was started with ``node_config``.

    The file is read for every message, so that a change holds at once. Raises :class:`ConfigError` for a file that is
    missing or damaged, an unknown key, a value that cannot be, and a key that stands in both places. A node without a
    readable policy thus answers no message.
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
    """Raise :class:`~fedprune_app.config.PolicyError` for code of a run that the node's operator has not allowed."""
    if code.target not in listed(policy.allowed_plugins):
        allowed = policy.allowed_plugins or "no code"
        raise declined(code.key, code.target, "allowed-plugins", allowed)


def _policy_in_file(name: object, node_values: Mapping[str, object]) -> Policy:
    if not (isinstance(name, str) and Path(name).is_absolute()):
        raise ConfigError(POLICY_FILE, name, "an absolute path", where="node-config")
    with told_of(POLICY_FILE):
        file_values = read_toml(Path(name))
    for key in node_values:
        if key in file_values:
            raise ConfigError(
                key, node_values[key], "one of them", which=f"is in {POLICY_FILE} {name!r} too", where="node-config"
            )
    return Policy.parse({**file_values, **node_values}, f"{POLICY_FILE} {name!r}")


def ledger_folder(policy: Policy, node_config: Mapping[str, object]) -> str:
    """Return the folder of the node's ledger; empty where the run says which it is.

    The folder is ``ledger-dir`` of the policy. Without that key it is ``ledgers`` in the node's ``state-dir``, for all
    runs, where the node has data of its own or a budget. Raises :class:`ConfigError` for a budget without a place of
    the node's own for its ledger: every run could begin a fresh one.
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
