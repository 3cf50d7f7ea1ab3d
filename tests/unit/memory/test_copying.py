"""Copies by address: every byte where it belongs and nothing beside it, stopped by a flag, checked against an epoch.

All of it holds for the C extension and for what stands in where it was not built. Arguments, leaks and the choice
between the two are in test_copying_calls.py.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.copies import (
    BOUND,
    CANARY,
    KIB,
    MIB,
    STREAMED,
    Bytes,
    aligned,
    at,
    canaries,
    endless,
    eventually,
    noise,
    same,
    words,
)

# -- copying -----------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("base", [1, 61, STREAMED + 1, 2 * STREAMED + 1])
def test_every_pair_of_alignments_copies_what_it_should_and_nothing_beside_it(impl: Any, base: int) -> None:
    step = (base + 64 + 2 * 64 + 127) // 64 * 64
    source, target = aligned(noise, 64 * 64 * step), aligned(canaries, 64 * 64 * step)
    expected = target.copy()
    places = []
    for pair in range(64 * 64):
        slot, to, frm, length = pair * step + 64, pair % 64, pair // 64, base + 2 * (pair * 7 % 32)
        places.append((slot + to, slot - 64 + frm, length))
        expected[slot + to : slot + to + length] = source[slot - 64 + frm : slot - 64 + frm + length]
    table = np.array(places, np.int64)
    to, frm, lengths = (column.copy() for column in table.T)
    done = impl.copy_rows(to + at(target), frm + at(source), lengths, impl.CancelFlag())
    assert done == lengths.sum()
    same(target, expected)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 130), st.integers(0, 130), st.integers(0, 5000)), max_size=20), st.booleans())
def test_any_table_is_copied_row_by_row(impl: Any, shape: list[tuple[int, int, int]], large: bool) -> None:
    if large:  # beside much else, so that long rows take the way of large jobs
        shape = [(gap, skip, length * 211 % 40_000) for gap, skip, length in shape] + [(3, 1, 2 * MIB + 5)]
    end = sum(gap + length for gap, _, length in shape) + 200
    source, target = noise(end + 200), canaries(end)
    expected, position, places = target.copy(), 0, []
    for gap, skip, length in shape:
        position += gap
        expected[position : position + length] = source[position + skip : position + skip + length]
        places.append((at(target) + position, at(source) + position + skip, length))
        position += length
    to, frm, lengths = np.array(places, np.uint64).reshape(-1, 3).T
    columns = [np.ascontiguousarray(column) for column in (to, frm, lengths)]
    assert impl.copy_rows(*columns, impl.CancelFlag()) == int(lengths.sum())
    same(target, expected)


@pytest.mark.parametrize("nbytes", [256 * KIB - 1, 256 * KIB + 1, MIB + 3, 2 * MIB + 33, 3 * MIB + 77])
def test_a_long_row_is_whole_across_its_pieces(impl: Any, nbytes: int) -> None:
    source, target = noise(nbytes + 300), canaries(nbytes + 300)
    expected = target.copy()
    expected[101 : 101 + nbytes] = source[58 : 58 + nbytes]
    assert impl.copy_rows(words(at(target) + 101), words(at(source) + 58), words(nbytes), impl.CancelFlag()) == nbytes
    same(target, expected)


def test_the_source_may_be_a_read_only_mapping_of_a_memory_file(impl: Any) -> None:
    descriptor = os.memfd_create("test-copying")
    os.write(descriptor, noise(3 * MIB).tobytes())
    mapping = mmap.mmap(descriptor, 3 * MIB, mmap.MAP_SHARED, mmap.PROT_READ)
    os.close(descriptor)
    source, target = np.frombuffer(mapping, np.uint8), canaries(3 * MIB)
    try:
        assert impl.copy_rows(words(at(target)), words(at(source)), words(3 * MIB), impl.CancelFlag()) == 3 * MIB
    finally:
        del source
        mapping.close()
    same(target, noise(3 * MIB))


def test_no_rows_and_empty_rows_copy_nothing(impl: Any) -> None:
    flag = impl.CancelFlag()
    assert impl.copy_rows(words(), words(), words(), flag) == 0
    assert impl.copy_rows(words(0, 0), words(0, 0), words(0, 0), flag) == 0
    assert impl.copy_rows_checked(words(), words(), words(), at(epoch := words(4)), 4)
    assert epoch[0] == 4


# -- the flag ----------------------------------------------------------------------------------------------------------


def stopped_on_the_way(impl: Any, rows: tuple[NDArray[np.int64], ...], memory: Bytes) -> int:
    """Copy in a thread, let this one run Python meanwhile, set the flag; what the copy returned."""
    flag, result = impl.CancelFlag(), []
    thread = threading.Thread(target=lambda: result.append(impl.copy_rows(*rows, flag)))
    memory[:] = 0
    thread.start()
    eventually(lambda: memory[-1] != 0)
    flag.set()
    thread.join(BOUND)
    assert not thread.is_alive()
    assert flag.is_set
    memory[:] = CANARY
    time.sleep(0.02)
    assert (memory == CANARY).all(), "something was written after the copy had returned"
    return result[0]


def test_a_flag_set_before_leaves_everything_as_it_was(impl: Any) -> None:
    flag, target, source = impl.CancelFlag(), canaries(100), noise(100)
    assert not flag.is_set
    flag.set()
    flag.set()
    assert flag.is_set
    assert impl.copy_rows(words(at(target)), words(at(source)), words(100), flag) == 0
    assert impl.read_process(os.getpid(), words(at(target)), words(at(source)), words(100), flag) == 0
    same(target, canaries(100))


def test_another_thread_stops_a_copy_inside_one_long_row(impl: Any) -> None:
    total = 16 * 1024 * MIB
    source = np.ones(MIB, np.uint8)
    with endless(total) as (base, memory), endless(total) as (origin, pattern):
        pattern[:] = source
        done = stopped_on_the_way(impl, (words(base), words(origin), words(total)), memory)
    assert MIB <= done < total


def test_another_thread_stops_a_copy_of_many_rows(impl: Any) -> None:
    source, target = np.ones(MIB, np.uint8), np.zeros(MIB, np.uint8)
    n = 64 * 1024  # the same row again and again
    rows = (np.full(n, at(target)), np.full(n, at(source)), np.full(n, MIB))
    done = stopped_on_the_way(impl, rows, target)
    assert 0 < done < n * MIB


# -- epochs and words --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1, 2**63, 2**64 - 1])
def test_a_checked_copy_wants_the_epoch(impl: Any, number: int) -> None:
    epoch, source, target = np.array([number], np.uint64), noise(1001), canaries(1003)
    assert not impl.copy_checked(at(target) + 1, at(source), 1001, at(epoch), number ^ 1)
    same(target, canaries(1003))
    assert impl.copy_checked(at(target) + 1, at(source), 1001, at(epoch), number) is True
    same(target[1:-1], source)
    assert target[0] == target[-1] == CANARY


def test_a_checked_copy_notices_that_the_epoch_changed_meanwhile(impl: Any) -> None:
    memory, source = words(5, 7), words(9, 9)
    assert impl.copy_checked(at(memory) + 8, at(source), 8, at(memory), 5)
    # The copy itself changes the epoch: nothing else could at the right moment.
    assert impl.copy_checked(at(memory), at(source), 16, at(memory), 5) is False
    memory[0] = 5
    row = words(at(memory)), words(at(source)), words(8)
    assert impl.copy_rows_checked(*row, at(memory), 5) is False


def test_a_few_rows_are_copied_under_one_epoch(impl: Any) -> None:
    epoch, source, target = words(3), noise(300), canaries(300)
    to, frm, lengths = words(at(target), at(target) + 200), words(at(source) + 1, at(source) + 90), words(77, 100)
    assert not impl.copy_rows_checked(to, frm, lengths, at(epoch), 4)
    same(target, canaries(300))
    assert impl.copy_rows_checked(to, frm, lengths, at(epoch), 3)
    same(target, np.concatenate([source[1:78], canaries(123), source[90:190]]))


@pytest.mark.parametrize("number", [0, 1, 2**32, 2**63, 2**64 - 1])
def test_words_are_written_and_read_whole(impl: Any, number: int) -> None:
    memory = np.array([11, 12, 13], np.uint64)
    impl.store_word(at(memory) + 8, number)
    assert memory.tolist() == [11, number, 13]
    assert impl.load_word(at(memory) + 8) == number


@pytest.mark.parametrize("number", [-1, 2**64])
def test_a_number_that_is_no_word_is_refused(impl: Any, number: int) -> None:
    memory = words(1)
    with pytest.raises(OverflowError):
        impl.store_word(at(memory), number)
    assert memory[0] == 1


# -- another process's memory ------------------------------------------------------------------------------------------

CHILD = """
import ctypes, sys
memory = ctypes.create_string_buffer(bytes(i * i % 251 for i in range(4 << 20)), 4 << 20)
print(ctypes.addressof(memory), flush=True)
sys.stdin.read()
"""


@pytest.mark.smoke
def test_rows_of_another_process_are_read(impl: Any) -> None:
    pattern = np.array([i * i % 251 for i in range(251)], np.uint8)
    target = canaries(5 * MIB)
    skips = [(i * 37 % 4099, 300 + i % 3 * 251) for i in range(2500)] + [(9, 0), (1234, 3 * MIB + 1), (0, 5)]
    offsets, lengths = (np.array(column, np.int64) for column in zip(*skips, strict=True))
    starts = np.cumsum(lengths) - lengths + at(target) + 1
    with subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        base = int(child.stdout.readline())
        try:
            done = impl.read_process(child.pid, starts, offsets + base, lengths, impl.CancelFlag())
        except PermissionError:
            pytest.skip("this machine does not let a process read its child's memory")
        finally:
            child.kill()
    assert done == lengths.sum()
    expected = [np.resize(np.roll(pattern, -(offset % 251)), length) for offset, length in skips]
    rest = canaries(target.size - 1 - done)
    same(target, np.concatenate([canaries(1), *expected, rest]))


def test_a_dead_process_is_told_apart(impl: Any) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait(BOUND)
    target = canaries(8)
    with pytest.raises(ProcessLookupError) as failure:
        impl.read_process(child.pid, words(at(target)), words(at(target)), words(8), impl.CancelFlag())
    assert failure.value.errno == errno.ESRCH


@pytest.mark.parametrize("pid", [0, -1, 2**31])
def test_a_number_that_is_no_process_is_refused(impl: Any, pid: int) -> None:
    with pytest.raises(ValueError, match="pid must be"):
        impl.read_process(pid, words(), words(), words(), impl.CancelFlag())


def test_memory_that_is_not_there_ends_the_read_after_the_rows_before_it(impl: Any) -> None:
    page, source, target = mmap.PAGESIZE, noise(100), canaries(3 * mmap.PAGESIZE)
    with endless(MIB) as (base, memory):
        memory[:] = 7
        to = words(at(target), at(target) + 100, at(target) + 100 + 2 * page)
        # The second row begins in memory that may be read and ends in a page that may not.
        ctypes.CDLL(None).mprotect(ctypes.c_void_p(base + page), ctypes.c_size_t(page), 0)
        with pytest.raises(OSError, match="address") as failure:
            impl.read_process(
                os.getpid(), to, words(at(source), base, at(source)), words(100, 2 * page, 100), impl.CancelFlag()
            )
    assert failure.value.errno == errno.EFAULT
    same(target[:100], source)
    same(target[100 + 2 * page :], canaries(page - 100))
