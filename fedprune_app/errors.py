"""These errors end a command with one line for the user, beside the ``ConfigError`` of a wrong setting."""


class LaunchError(RuntimeError):
    """The run could not be started or did not complete; the message is one line for the user."""


class RunDetached(LaunchError):
    """The run goes on without this process, on machines not ours; the message says how to see and stop the run."""
