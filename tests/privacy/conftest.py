"""Clients train on one thread here, too."""

from tests.clients.conftest import one_thread

__all__ = ["one_thread"]
