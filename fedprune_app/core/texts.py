"""Errors as texts of one line."""


def one_line(text: object) -> str:
    return " ".join(str(text).split())


def error_text(error: BaseException) -> str:
    """Return any error as one line, with its type."""
    return one_line(f"{type(error).__name__}: {error}")
