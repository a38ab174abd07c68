"""Clients train on one thread here, too."""

from tests.clients.conftest import _one_thread

__all__ = ["_one_thread"]
