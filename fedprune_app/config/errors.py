"""How a wrong setting is told, and how it leaves a ServerApp."""

import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from pathlib import PurePath

_SHORT = reprlib.Repr()  # a few lines of YAML aliases can stand for billions of entries
_SHORT.maxstring = _SHORT.maxother = 1000
# An error has this mark as it leaves a ServerApp: Flower hands on the text alone, in which the mark is found.
REFUSED = "refused setting: "


@dataclass(eq=False)
class ConfigError(ValueError):
    """A setting has a value that cannot be; as a text the error is one line for the user.

    * ``key`` is the setting, an option of the command (``--out``), or an argument of a function. An error that is of
      no one setting has a whole sentence here, and nothing else.
    * ``value`` is what the setting has; ``...`` stands for none.
    * ``allowed`` is what it may have, and ``condition`` says under which condition: "with system 'fedavg'".
    * ``which`` says what is wrong with the value: "has no effect".
    * ``hint`` says what may help, or why: "did you mean 'density'?".
    * ``where`` is the place of the setting, such as a file and an entry of the file.
    * ``mark`` is :data:`REFUSED` while the error is on its way out of a ServerApp, and else empty.
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
        """Return the line "WHERE: KEY is VALUE, which WHICH, allowed CONDITION: ALLOWED; HINT", of what there is."""
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
def told_of(where: str) -> Iterator[None]:
    """Say in each :class:`ConfigError` ``where`` the wrong setting stands, such as a file and an entry of the file."""
    try:
        yield
    except ConfigError as error:
        error.where = ": ".join(filter(None, (where, error.where)))
        raise


def refused(text: str) -> str:
    """Return the message of an error with the mark :data:`REFUSED` within ``text``; empty if ``text`` has none."""
    return text.partition(REFUSED)[2]
