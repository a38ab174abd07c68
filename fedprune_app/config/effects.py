"""A setting that has no effect is refused: a result that does not depend on it would be taken for one that does."""

from collections.abc import Iterable, Mapping

from fedprune_app.config.config import OPTIONS, Config
from fedprune_app.config.errors import ConfigError
from fedprune_app.config.options import Needs, NoneOf, Scalar
from fedprune_app.config.plugged import is_used

# By key and system: the keys that a system has for the same quantity, as the end of a sentence.
_INSTEAD = {
    ("density", "subfedavg"): "; system 'subfedavg' has subfedavg.target-rate, the percentage that is pruned",
    ("density", "subfedavg-hy"): "; system 'subfedavg-hy' has subfedavg.target-rate, the percentage that is pruned",
    ("density", "dpsgd"): "; system 'dpsgd' has dpsgd.density",
    ("density", "dpsgd-ft"): "; system 'dpsgd-ft' has dpsgd.density",
    ("density", "fedspa"): "; system 'fedspa' has fedspa.share",
    ("density", "fjord"): "; system 'fjord' has fjord.widths",
    ("local-epochs", "ditto"): "; system 'ditto' has ditto.global-epochs and ditto.personal-epochs",
}

# By key and system: what a key of all systems needs beside, with one of them.
_ALSO: Mapping[tuple[str, str], Needs] = {
    ("density", "fedltp"): {"fedltp.tickets": NoneOf((0,))},
    # of a client that trains all layers nothing is chosen or pruned
    ("density", "fedcr"): {"fedcr.layer-set": NoneOf(("all",))},
    ("fedp3.densities", "fedcr"): {"fedcr.layer-set": NoneOf(("all",))},
    ("fedp3.assignment", "fedcr"): {"fedcr.layer-set": NoneOf(("all",))},
}


def has_effect(key: str, config: Config) -> bool:
    """Return whether the option ``key`` can change anything about a run with this configuration."""
    return _unmet_need(key, config) is None


def check_effects(keys: Iterable[str], config: Config) -> None:
    """Raise :class:`ConfigError` for a key among ``keys`` that has no effect in a run with this configuration."""
    for key in keys:
        if (need := _unmet_need(key, config)) is not None:
            (name, values), settings = need, config.to_dict()
            raise ConfigError(
                key,
                settings.get(key, ...),
                which=f"has no effect with {name} {settings[name]!r}",
                hint=f"{key} needs {name} {_words(values)}{_INSTEAD.get((key, config.system), '')}",
            )


def _unmet_need(key: str, config: Config) -> tuple[str, tuple[Scalar, ...]] | None:
    if not (needs := {**OPTIONS[key].needs, **_ALSO.get((key, config.system), {})}):
        return None
    values = config.to_dict()
    if is_used(config.system, key):
        needs = {name: allowed for name, allowed in needs.items() if name != "system"}
    return next(((name, allowed) for name, allowed in needs.items() if values[name] not in allowed), None)


def _words(values: tuple[Scalar, ...]) -> str:
    words = " or ".join(str(value).lower() if isinstance(value, bool) else repr(value) for value in tuple(values))
    return f"other than {words}" if isinstance(values, NoneOf) else words
