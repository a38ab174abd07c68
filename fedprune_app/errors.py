"""Errors that end a command with one line for the user, in addition to ``ConfigError`` for a wrong setting."""


class LaunchError(RuntimeError):
    """Raised for a run that could not be started or did not complete; the message is one line for the user."""


class RunDetached(LaunchError):
    """Raised when the run continues on remote machines without this process; the message says how to stop it."""
