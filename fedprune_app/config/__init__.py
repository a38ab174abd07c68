"""The run configuration: flat kebab-case keys, parsed once per side into frozen dataclasses.

Every option is declared once, with its default, range, help and other properties: see ``option`` in ``options.py``.
The options without a table are in ``common.py``, those of a system in a file of its own, with the conditions that must
hold for them. A new system's options are such a file and one field of ``Config``. A wrong value raises
:class:`ConfigError`, one line with the key, the value and what is allowed.

This package imports no other package of fedprune, and all packages above ``core`` may import it.
"""

from fedprune_app.config.baselines import FedSPAOptions
from fedprune_app.config.common import Table, class_names
from fedprune_app.config.config import DEFAULTS, OPTIONS, Config
from fedprune_app.config.errors import SETTING_ERROR, ConfigError, naming_source, refused
from fedprune_app.config.fedltp import FedLTPOptions
from fedprune_app.config.fedp3 import FEDP3_COUNTS, FedP3Options
from fedprune_app.config.gossip import DisPFLOptions, DPSGDOptions, GossipOptions
from fedprune_app.config.options import Option, PathKind, Scalar, Settings, option
from fedprune_app.config.parsing import (
    check_effects,
    check_resumable,
    has_effect,
    is_whole,
    parse_config,
    paths_from_here,
    written_below,
)
from fedprune_app.config.plugged import check_uses, is_used, register_table, with_carrier
from fedprune_app.config.policy import NO_POLICY, POLICY_FILE, POLICY_KEYS, Policy, PolicyError, declined
from fedprune_app.config.systems import Declared, declared
from fedprune_app.config.toml import flatten, parse_override, read_toml, to_toml, toml_value

__all__ = [
    "DEFAULTS",
    "FEDP3_COUNTS",
    "NO_POLICY",
    "OPTIONS",
    "POLICY_FILE",
    "POLICY_KEYS",
    "SETTING_ERROR",
    "Config",
    "ConfigError",
    "DPSGDOptions",
    "Declared",
    "DisPFLOptions",
    "FedLTPOptions",
    "FedP3Options",
    "FedSPAOptions",
    "GossipOptions",
    "Option",
    "PathKind",
    "Policy",
    "PolicyError",
    "Scalar",
    "Settings",
    "Table",
    "check_effects",
    "check_resumable",
    "check_uses",
    "class_names",
    "declared",
    "declined",
    "flatten",
    "has_effect",
    "is_used",
    "is_whole",
    "naming_source",
    "option",
    "parse_config",
    "parse_override",
    "paths_from_here",
    "read_toml",
    "refused",
    "register_table",
    "to_toml",
    "toml_value",
    "with_carrier",
    "written_below",
]
