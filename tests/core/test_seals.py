"""A sealed file shows damage wherever it is, and is not taken for one that was never sealed."""

import pytest

from fedprune_app.core.seals import Unsealed, seal, unseal

ABOUT = {"layer": 3}
SEALED = seal(b"weights", ABOUT)


@pytest.mark.parametrize("length", range(len(SEALED)))
def test_a_file_that_is_cut_is_damaged(length):
    with pytest.raises(ValueError, match=r"ends after|first line is damaged|not what was written") as raised:
        unseal(SEALED[:length], ABOUT)
    assert not isinstance(raised.value, Unsealed)


def test_a_file_of_an_earlier_version_has_no_seal():
    with pytest.raises(Unsealed):
        unseal(b"\x01weights", ABOUT)
