"""A sealed file shows damage wherever it is, and one without a seal is refused."""

import pytest

from fedprune_app.core.seals import seal, unseal

ABOUT = {"layer": 3}
SEALED = seal(b"weights", ABOUT)


@pytest.mark.parametrize("length", range(len(SEALED)))
def test_a_file_that_is_cut_is_damaged(length):
    with pytest.raises(ValueError, match="its content is not what was written"):
        unseal(SEALED[:length], ABOUT)


def test_a_file_without_a_seal_is_refused():
    with pytest.raises(ValueError, match="its content is not what was written"):
        unseal(b"\x01weights", ABOUT)
