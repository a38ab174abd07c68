"""A key or a value that there is not is answered with the one that was probably meant."""

import difflib
from collections.abc import Collection

from fedprune_app.config.errors import ConfigError

# These words for a key are common elsewhere.
_OTHER_WORDS = {
    "lr": "learning-rate",
    "rounds": "num-server-rounds",
    "num-rounds": "num-server-rounds",
    "epochs": "local-epochs",
    "batch": "batch-size",
    "bs": "batch-size",
    "wd": "weight-decay",
    "alpha": "dirichlet-alpha",
    "fraction": "fraction-train",
    "sparsity": "density",
    "method": "system",
    "algorithm": "system",
    "strategy": "system",
    "network": "model",
    "arch": "model",
    "gpu": "device",
    "data": "data-dir",
    "data-path": "data-dir",
    "noise-multiplier": "dp.noise-multiplier",
    "sigma": "dp.noise-multiplier",
    "clip": "dp.clip-norm",
}
_COMMAND_LINE = {"clients": "--clients", "num-clients": "--clients", "workers": "--workers", "out": "--out"}
_COMMAND_LINE |= {"output": "--out", "engine": "--engine", "resume": "--resume", "config": "-c"}


def unknown_key(key: str, keys: Collection[str]) -> ConfigError:
    """Return the error of a key that there is not, with the key or the command's option that was probably meant.

    >>> str(unknown_key("lr", ["learning-rate", "lr-decay"]))
    "setting is 'lr', which is unknown; did you mean 'learning-rate'?"
    """
    return ConfigError("setting", key, which="is unknown", hint=_suggestion_for(key.lower().replace("_", "-"), keys))


def _suggestion_for(key: str, keys: Collection[str]) -> str:
    if key in _COMMAND_LINE:
        return f"it is the command's option {_COMMAND_LINE[key]}"
    meant = [_OTHER_WORDS[key]] if key in _OTHER_WORDS else [name for name in keys if f".{name}".endswith(f".{key}")]
    meant = meant or difflib.get_close_matches(key, keys, n=1)
    return f"did you mean {' or '.join(map(repr, meant))}?" if meant else "see `fedprune list --keys`"


def not_allowed(key: str, value: object, allowed: Collection[str]) -> ConfigError:
    """Return the error of a value that is none of the ``allowed`` names, with the one that was probably meant.

    >>> str(not_allowed("dataset", "CIFAR-10", ["mnist", "cifar10"]))
    "dataset is 'CIFAR-10', allowed: mnist, cifar10; did you mean 'cifar10'?"
    """
    by_letters = {_letters(name): name for name in allowed}
    matches = difflib.get_close_matches(_letters(str(value)), list(filter(None, by_letters)), n=1)
    suggestion = f"did you mean {by_letters[matches[0]]!r}?" if matches else ""
    return ConfigError(key, value, ", ".join(filter(None, allowed)), hint=suggestion)


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))
