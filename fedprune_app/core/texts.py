"""Errors as texts of one line."""


def one_line(text: object) -> str:
    return " ".join(str(text).split())


def error_text(error: BaseException) -> str:
    """Return an error that may be of any kind in one line, with its kind."""
    return one_line(f"{type(error).__name__}: {error}")
