"""Text from outside, made printable before it reaches a terminal or a log.

A name of a class, a label or a file may come from a stranger, and so may an error that quotes it. It could contain
commands for the terminal that shows it.
"""

import logging

_LOGGERS = ("flwr", "flwr.fedprune", "fedprune")


def printable(text: str) -> str:
    r"""Return a text with its line ends and tabs, and with escapes for all other unprintable characters.

    >>> printable("red: \x1b[31m")
    'red: \\x1b[31m'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def keep_logs_printable() -> None:
    """Make each later record of fedprune's and Flower's loggers printable, with its traceback."""
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_make_printable)


def _make_printable(record: logging.LogRecord) -> bool:
    record.msg, record.args = printable(record.getMessage()), None
    if record.exc_info:
        record.exc_text = printable(logging.Formatter().formatException(record.exc_info))
    return True
