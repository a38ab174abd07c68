"""How a wrong setting is told, and how it leaves a ServerApp."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class ConfigError(ValueError):
    """A setting has a value that cannot be; the message is one line for the user."""


@contextmanager
def told_of(where: str) -> Iterator[None]:
    """Say in each :class:`ConfigError` ``where`` the wrong setting stands, such as a file and an entry of the file."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(": ".join(filter(None, (where, str(error))))) from error


_REFUSED = "refused setting: "


def refusal(error: ConfigError) -> ConfigError:
    """Mark ``error`` as it leaves a ServerApp: Flower hands on the text alone, in which :func:`refused` finds it."""
    return ConfigError(f"{_REFUSED}{str(error).removeprefix(_REFUSED)}")


def refused(text: str) -> str:
    """Return the message of the error that :func:`refusal` marked within ``text``; empty if ``text`` has none."""
    return text.partition(_REFUSED)[2]
