"""A library in C is used only if it was compiled from the source beside it."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from fedprune_app.core import compiled
from hatch_build import compile_libraries

SOURCE = "const char *fedprune_source(void) { return SOURCE; }\nint one(void) { return 1; }\n"
has_compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


@pytest.fixture
def native(tmp_path, monkeypatch):
    """A folder of one small source of one's own."""
    monkeypatch.setattr(compiled, "FOLDER", tmp_path)
    compiled.library.cache_clear()
    (tmp_path / "one.c").write_text(
        "const char *fedprune_source(void) { return SOURCE; }\nint one(void) { return 1; }\n"
    )
    yield tmp_path
    compiled.library.cache_clear()


@pytest.mark.skipif(not has_compiler, reason="needs a C compiler")
def test_a_library_of_another_source_is_no_library(native):
    assert compile_libraries(native)
    assert compiled.library("one").one() == 1
    compiled.library.cache_clear()
    (native / "one.c").write_text((native / "one.c").read_text() + "\n")
    assert compiled.library("one") is None


def test_without_a_library_there_is_none(native):
    assert compiled.library("one") is None
    assert compiled.library("two") is None


def test_a_library_that_does_not_say_its_source_is_no_library(native):
    shutil.copy(np._core._multiarray_umath.__file__, native / "libone.so")  # a library, of somebody else
    assert compiled.library("one") is None


def test_a_compiler_that_fails_makes_no_library(native, monkeypatch):
    monkeypatch.setenv("CC", str(native / "no-compiler"))
    assert not compile_libraries(native)
    assert not list(native.glob("*.so"))


@pytest.mark.skipif(not has_compiler, reason="needs a C compiler")
def test_a_compiler_with_arguments_is_called_with_them(native, monkeypatch):
    monkeypatch.setenv("CC", f"{has_compiler} -DUNUSED=1")
    assert compile_libraries(native)
    assert compiled.library("one").one() == 1


@pytest.mark.skipif(not has_compiler, reason="needs a C compiler")
def test_two_can_compile_at_once_and_leave_nothing_else_behind(native):
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(compile_libraries, [native] * 8))
    assert sorted(path.name for path in native.iterdir()) == ["libone.so", "one.c"]
    assert compiled.library("one").one() == 1
