"""Networks are trained on one thread here too: the number of threads changes float sums."""

from tests.clients.conftest import one_thread

__all__ = ["one_thread"]
