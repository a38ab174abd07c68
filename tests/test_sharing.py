"""With several processes, tests that share fixtures are in one: the scheduler of tests/conftest.py."""

from __future__ import annotations

import pytest

from tests.conftest import sharing


@pytest.mark.parametrize(
    ("nodeid", "group"),
    [
        ("tests/core/test_codec.py::test_it[dispfl-1]", "tests/core/test_codec.py"),
        ("tests/core/test_codec.py::TestIt::test_it", "tests/core/test_codec.py"),
        ("tests/conformance/test_resume.py::test_it[ldp-fedp3-1]", "ldp-fedp3"),
        ("tests/conformance/test_records.py::test_it[fedavg-ft]", "fedavg-ft"),
        ("tests/conformance/test_recorded.py::test_it[fedspallm: private]", "fedspallm"),
        ("tests/conformance/test_engines.py::test_it[ray with 1 worker-dispfl]", "tests/conformance/test_engines.py"),
        ("tests/conformance/test_records.py::test_it", "tests/conformance/test_records.py"),
    ],
)
def test_the_tests_of_a_file_share_a_process_and_so_do_those_of_a_systems_laws(nodeid, group):
    assert sharing(nodeid) == group
