"""Errors of settings: one line, with a suggestion, also through a Flower ServerApp."""

import difflib
import reprlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from pathlib import PurePath

_SHORT = reprlib.Repr()  # a few lines of YAML aliases can stand for billions of entries
_SHORT.maxstring = _SHORT.maxother = 1000
# Marks an error that leaves a ServerApp: Flower passes on only the text, in which the mark is found.
SETTING_ERROR = "refused setting: "


@dataclass(eq=False)
class ConfigError(ValueError):
    """Raised for an invalid value of a setting; its text is one line for the user.

    * ``key``: the setting, an option of the command (``--out``), or an argument of a function. An error about no
      single setting has a whole sentence here, and nothing else.
    * ``value``: the invalid value; ``...`` stands for none.
    * ``allowed``: the allowed values; ``condition`` limits them: "with system 'fedavg'".
    * ``which``: what is wrong with the value: "has no effect".
    * ``hint``: a suggestion or reason: "did you mean 'density'?".
    * ``where``: the place of the setting, such as a file and an entry of the file.
    * ``mark``: :data:`SETTING_ERROR` while the error leaves a ServerApp, otherwise empty.
    """

    key: str
    value: object = ...
    allowed: str = ""
    _: KW_ONLY
    condition: str = ""
    which: str = ""
    hint: str = ""
    where: str = ""
    mark: str = ""

    def __str__(self) -> str:
        """Return "WHERE: KEY is VALUE, which WHICH, allowed CONDITION: ALLOWED; HINT", without the empty parts."""
        value = "" if self.value is ... else f" is {_value_text(self.value)}"
        which = f"{value and ', which'} {self.which}" if self.which else ""
        allowed = ", allowed" if self.allowed or self.condition else ""
        allowed += f"{self.condition and ' '}{self.condition}{self.allowed and ': '}{self.allowed}"
        hint = f"; {self.hint}" if self.hint else ""
        return f"{self.mark}{self.where}{self.where and ': '}{self.key}{value}{which}{allowed}{hint}"


def _value_text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return _SHORT.repr(str(value) if isinstance(value, PurePath) else value)


@contextmanager
def naming_source(where: str) -> Iterator[None]:
    """Add ``where``, such as a file and an entry of it, to each :class:`ConfigError` that the block raises."""
    try:
        yield
    except ConfigError as error:
        error.where = ": ".join(filter(None, (where, error.where)))
        raise


def refused(text: str) -> str:
    """Return the error's message after the mark :data:`SETTING_ERROR` in ``text``; empty without the mark."""
    return text.partition(SETTING_ERROR)[2]


# Common words of other programs, and the keys that they mean.
OTHER_WORDS = {
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
    "epsilon": "dp.target-epsilon",
    "eps": "dp.target-epsilon",
    "sigma": "dp.noise-multiplier",
    "clip": "dp.clip-norm",
}
_COMMAND_LINE = {"clients": "--clients", "num-clients": "--clients", "workers": "--workers", "out": "--out"}
_COMMAND_LINE |= {"output": "--out", "engine": "--engine", "resume": "--resume", "config": "-c"}


def unknown_key(key: str, keys: Collection[str]) -> ConfigError:
    """Return the error for an unknown key, with the key or the command's option that was probably meant.

    >>> str(unknown_key("lr", ["learning-rate", "lr-decay"]))
    "setting is 'lr', which is unknown; did you mean 'learning-rate'?"
    """
    return ConfigError("setting", key, which="is unknown", hint=_suggestion_for(key.lower().replace("_", "-"), keys))


def _suggestion_for(key: str, keys: Collection[str]) -> str:
    if key in _COMMAND_LINE:
        return f"it is the command's option {_COMMAND_LINE[key]}"
    meant = [OTHER_WORDS[key]] if key in OTHER_WORDS else [name for name in keys if f".{name}".endswith(f".{key}")]
    meant = meant or difflib.get_close_matches(key, keys, n=1)
    return f"did you mean {' or '.join(map(repr, meant))}?" if meant else "see `fedprune list --keys`"


def not_allowed(key: str, value: object, allowed: Collection[str]) -> ConfigError:
    """Return the error for a value that is not among the ``allowed`` names, with the one that was probably meant.

    >>> str(not_allowed("dataset", "CIFAR-10", ["mnist", "cifar10"]))
    "dataset is 'CIFAR-10', allowed: mnist, cifar10; did you mean 'cifar10'?"
    """
    by_letters = {_letters(name): name for name in allowed}
    matches = difflib.get_close_matches(_letters(str(value)), list(filter(None, by_letters)), n=1)
    suggestion = f"did you mean {by_letters[matches[0]]!r}?" if matches else ""
    return ConfigError(key, value, ", ".join(filter(None, allowed)), hint=suggestion)


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))
