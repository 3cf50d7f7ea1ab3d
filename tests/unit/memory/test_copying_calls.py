"""How the copies by address take their arguments, that calls leave nothing behind, and which implementation is used."""

from __future__ import annotations

import gc
import importlib.machinery
import os
import platform
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpull_async.memory import copying
from tests.copies import at, canaries, noise, words

# -- arguments ---------------------------------------------------------------------------------------------------------

ONE = words(1)
WRONG = {
    "list": ([1], TypeError),
    "floats": (np.ones(1), TypeError),
    "short integers": (np.ones(1, np.int32), TypeError),
    "foreign byte order": (ONE.astype(ONE.dtype.newbyteorder()), TypeError),
    "a table": (np.ones((1, 1), np.int64), ValueError),
    "every other": (np.ones(4, np.int64)[::2], ValueError),
    "not aligned": (np.frombuffer(bytes(9), np.int64, offset=1), ValueError),
    "longer than the others": (words(1, 2), ValueError),
}


@pytest.mark.parametrize(("wrong", "error"), WRONG.values(), ids=WRONG.keys())
@pytest.mark.parametrize("column", range(3))
def test_arrays_that_are_no_column_are_refused(impl: Any, wrong: Any, error: type[Exception], column: int) -> None:
    columns = [words(0), words(0), words(0)]
    columns[column] = wrong
    epoch = words(0)
    with pytest.raises(error):
        impl.copy_rows(*columns, impl.CancelFlag())
    with pytest.raises(error):
        impl.copy_rows_checked(*columns, at(epoch), 0)
    with pytest.raises(error):
        impl.read_process(os.getpid(), *columns, impl.CancelFlag())


@pytest.mark.parametrize("lengths", [(-1, 1), (2**62, 2**62)])
def test_lengths_that_cannot_be_are_refused(impl: Any, lengths: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="lengths"):
        impl.copy_rows(words(0, 0), words(0, 0), words(*lengths), impl.CancelFlag())


def test_only_a_flag_is_a_flag(impl: Any) -> None:
    for wrong in (None, 0, threading.Event()):
        with pytest.raises(TypeError, match="CancelFlag"):
            impl.copy_rows(words(), words(), words(), wrong)
        with pytest.raises(TypeError, match="CancelFlag"):
            impl.read_process(os.getpid(), words(), words(), words(), wrong)


def test_a_hundred_thousand_calls_leave_nothing_behind(impl: Any) -> None:
    source, target, epoch, flag = noise(16), canaries(16), words(2**40), impl.CancelFlag()
    row = words(at(target)), words(at(source)), words(16)
    wrong = np.ones(1)

    def calls(n: int) -> tuple[list[int], int]:
        for _ in range(n):
            impl.copy_checked(row[0].item(), row[1].item(), 16, at(epoch), 2**40)
            impl.load_word(at(epoch))
            impl.store_word(at(epoch), 2**40)
        for _ in range(n // 10):
            impl.copy_rows(*row, flag)
            impl.copy_rows_checked(*row, at(epoch), 2**40)
            impl.CancelFlag().set()
            with pytest.raises(TypeError):
                impl.copy_rows(row[0], row[1], wrong, flag)
        gc.collect()
        kept = [*row, wrong, flag, impl.CancelFlag]
        return [sys.getrefcount(item) for item in kept], sys.getallocatedblocks()

    references, blocks = calls(1000)
    later, more = calls(30_000)
    assert later == references
    assert more - blocks < 500


# -- which implementation ----------------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The module in a package of its own, where nothing was built."""
    memory = tmp_path / "kvpull_async" / "memory"
    memory.mkdir(parents=True)
    for folder in (memory, memory.parent):
        (folder / "__init__.py").touch()
    shutil.copy(copying.__file__, memory)
    return memory


def asked(package: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    code = "from kvpull_async.memory import copying; print(copying.ACCELERATED, copying.ORDERED)"
    environ = {**os.environ, "KVPULL_NO_EXTENSION": "", "PYTHONPATH": str(package.parents[1]), **environment}
    return subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)


def test_without_the_extension_x86_is_still_ordered(package: Path) -> None:
    assert asked(package).stdout.split() == ["False", str(platform.machine() == "x86_64")]


def test_a_broken_extension_is_an_error_unless_it_is_turned_off(package: Path) -> None:
    (package / f"_speedups{importlib.machinery.EXTENSION_SUFFIXES[0]}").write_bytes(b"not a library")
    broken = asked(package)
    assert broken.returncode != 0
    assert "ImportError" in broken.stderr
    assert asked(package, KVPULL_NO_EXTENSION="1").stdout.split()[0] == "False"


def test_the_extension_is_ordered_everywhere(impl: Any) -> None:
    assert impl.ORDERED or not impl.ACCELERATED
