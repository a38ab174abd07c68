"""A search draws settings from a space: for each key a list of choices, or a range from a low to a high end."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fedprune_app.config import OPTIONS, ConfigError, Scalar, told_of

Range = list[Scalar] | Mapping[str, Any]  # choices, or a table with low and high, and with log or step


@dataclass(frozen=True)
class Search:
    """A search draws ``trials`` settings from ``space``, which win over its ``settings``; each is a run for each seed.

    ``name`` tells the searches of several systems apart; alone it is empty. ``where`` names the file in errors.
    """

    name: str
    settings: Mapping[str, Scalar]
    space: Mapping[str, Range]
    seeds: tuple[int, ...]
    where: str
    trials: int
    sampler: str
    objective: str

    def file(self, name: str) -> str:
        """Return the name of this search's own file; alone it is ``name``, as ``search.csv``."""
        stem, _, ending = name.partition(".")
        return f"{stem}-{self.name}.{ending}" if self.name else name

    def folder(self, number: int, seed: int) -> str:
        return f"{self.name and f'{self.name}-'}trial{number + 1:03d}-seed{seed}"

    def probes(self) -> Iterator[tuple[str, dict[str, Scalar]]]:
        """Yield a name and settings until each seed, each choice and each end of a range was there once."""
        values = {
            key: spec if isinstance(spec, list) else [spec["low"], spec["high"]] for key, spec in self.space.items()
        }
        first = {**self.settings, **{key: choices[0] for key, choices in values.items()}, "seed": self.seeds[0]}
        yield self.name, first
        for key, choices in {"seed": list(self.seeds), **values}.items():
            for value in choices[1:]:
                yield f"{self.name} {key}={value}".strip(), {**first, key: value}

    def distributions(self) -> dict[str, Any]:
        """Return what Optuna draws each key from. Raises :class:`ConfigError` for a range that it does not take."""
        with told_of(self.where):
            return {key: _distribution(key, spec) for key, spec in self.space.items()}


def check_range(where: str, key: object, spec: Any) -> None:
    """Raise :class:`ConfigError` for what is neither a list of choices nor a table with two ends."""
    if not isinstance(key, str) or key == "seed":
        raise ConfigError("space", key, "names of settings, and seed in seeds", where=where)
    are_choices = isinstance(spec, list) and spec and all(isinstance(each, bool | int | float | str) for each in spec)
    is_range = isinstance(spec, dict) and {"low", "high"} <= spec.keys() <= {"low", "high", "log", "step"}
    if not are_choices and not is_range:
        raise ConfigError(
            f"{key} in space",
            spec,
            "a list of choices, or {low: ..., high: ...} with log: true or step: ...",
            where=where,
        )


def optuna() -> Any:
    """Return the library Optuna. Raises :class:`ConfigError` where it is not installed."""
    try:
        import optuna
    except ImportError:
        raise ConfigError("a search needs the package optuna: install the extra fedprune[search]") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _distribution(key: str, spec: Range) -> Any:
    kinds = optuna().distributions
    option = OPTIONS[key]
    if isinstance(spec, list):
        return kinds.CategoricalDistribution([option.parse(key, option.from_here(value)) for value in spec])
    kind = {int: kinds.IntDistribution, float: kinds.FloatDistribution}.get(type(option.default))
    if kind is None:
        raise ConfigError(f"{key} in space", spec, "a list of choices")
    low, high = (option.parse(key, spec[end]) for end in ("low", "high"))
    arguments = {name: value for name, value in spec.items() if name in ("log", "step")}
    try:
        return kind(low, high, **arguments)
    except (ArithmeticError, TypeError, ValueError) as error:
        raise ConfigError(f"{key} in space", spec, "what Optuna draws from", hint=str(error)) from None
