"""A sealed file shows damage wherever it is, and one without a seal is refused."""

import pytest

from fedprune_app.core.digests import verified_body, with_digest

ABOUT = {"layer": 3}
SEALED = with_digest(b"weights", ABOUT)


@pytest.mark.parametrize("length", range(len(SEALED)))
def test_a_file_that_is_cut_is_damaged(length):
    with pytest.raises(ValueError, match="its content is not what was written"):
        verified_body(SEALED[:length], ABOUT)


def test_a_file_without_a_seal_is_refused():
    with pytest.raises(ValueError, match="its content is not what was written"):
        verified_body(b"\x01weights", ABOUT)
