"""A test names the setting that is refused, and not the sentence that says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import ANY

import pytest

from fedprune_app.config import ConfigError


@contextmanager
def refuses(key: str, value: object = ANY, **said: str) -> Iterator[pytest.ExceptionInfo[ConfigError]]:
    """Expect a :class:`ConfigError` for this key and value; what is ``said`` stands in the fields of these names."""
    with pytest.raises(ConfigError) as caught:
        yield caught
    error = caught.value
    assert (error.key, error.value) == (key, value), str(error)
    assert "\n" not in str(error)
    for name, text in said.items():
        assert text in getattr(error, name), str(error)
