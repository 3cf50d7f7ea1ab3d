"""Sums by name: the same whatever pieces the bytes come in, another one for any bit that differs."""

from __future__ import annotations

import itertools
import sys
import zlib

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvpull_async import LLMException, LLMStatusCode, plan, sums
from kvpull_async.config import kinds
from kvpull_async.memory.base import PIECE_BYTES, Region
from kvpull_async.memory.host import HostMemory
from kvpull_async.values import Placement
from tests.strategies import thorough

NAMES = ("crc32", "xxh3")
names = pytest.mark.parametrize("name", NAMES)


def begin(name: str) -> sums.Sum:
    return sums.begin(name, where="this side")


def test_they_are_those_that_others_make_too() -> None:
    data = bytes(range(256)) * 5
    assert sums.sum_of(begin("crc32"), [[memoryview(data)]]) == zlib.crc32(data).to_bytes(4, "big")
    assert sums.sum_of(begin("xxh3"), [[memoryview(data)]]) == xxhash.xxh3_64(data).digest()


@names
@thorough
@given(data=st.binary(max_size=300), cuts=st.lists(st.integers(0, 300), max_size=8))
def test_pieces_and_batches_do_not_matter(name: str, data: bytes, cuts: list[int]) -> None:
    marks = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    pieces = [memoryview(data)[start:end] for start, end in itertools.pairwise(marks)]
    whole = sums.sum_of(begin(name), [[memoryview(data)]])
    assert sums.sum_of(begin(name), [pieces]) == whole
    assert sums.sum_of(begin(name), [[piece] for piece in pieces]) == whole


@names
def test_a_sum_over_nothing_is_one_too(name: str) -> None:
    assert sums.sum_of(begin(name), []) == sums.sum_of(begin(name), [[memoryview(b"")]])


def test_each_step_is_a_batch() -> None:
    memory = HostMemory()
    data = np.zeros(3 * PIECE_BYTES + 5, np.uint8)
    lending = memory.lending([Region(data.ctypes.data, data.size, Placement.HOST)], np.array([[0, 0, data.size]]))
    assert list(sums.steps(begin("crc32"), lending)) == [PIECE_BYTES] * 3 + [5]


def test_p10_a_sum_that_cannot_be_made_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LLMException, match="crc32, xxh3, not 'md5'") as caught:
        begin("md5")
    assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
    monkeypatch.setitem(sys.modules, "xxhash", None)
    begin("crc32")
    with pytest.raises(LLMException, match=r"package xxhash on the source: pip install 'kvpull\[verify\]'") as caught:
        sums.begin("xxh3", where="the source")
    assert caught.value.status_code is LLMStatusCode.LLM_FEATURE_NOT_ENABLED


def test_what_is_needed_is_asked_for_without_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    for name in ("", "none", "crc32"):
        sums.need(name, where="this side")
    with pytest.raises(LLMException):
        sums.need("xxh3", where="this side")


def test_a_peer_that_asks_for_none_gets_none() -> None:
    assert sums.asked("", where="here") is None
    made = sums.asked("crc32", where="here")
    assert made is not None
    assert made.digest() == bytes(4)
    with pytest.raises(LLMException, match="not 'none'"):  # a peer says nothing then
        sums.asked("none", where="here")


def test_the_option_knows_the_same_names() -> None:
    for name in sums.NAMES:
        assert kinds.OWN["verify"].check("verify", name) == name
    with pytest.raises(ValueError, match="none, crc32, xxh3"):
        kinds.OWN["verify"].check("verify", "md5")


# --- over plans: both ends sum in the order of the stream ---


@st.composite
def block_plans(draw: st.DrawFn) -> tuple[plan.Segments, plan.Segments, int]:
    """Rows of a source and a destination, of 2 tensors each, and the bytes of one tensor of either."""
    size, count = draw(st.integers(1, 9)), draw(st.integers(1, 12))
    blocks = draw(st.permutations(range(16))), draw(st.permutations(range(16)))
    src, dst = (np.array(order[:count], np.int64) for order in blocks)
    if draw(st.booleans()):  # a contiguous entry, cut into blocks
        per_tensor = count * size - draw(st.integers(0, size - 1))
        source = plan.run_segments(range(2), start=draw(st.integers(0, 5)), size=per_tensor)
        return source, plan.slice_segments(range(2), dst, block_nbytes=size, per_tensor=per_tensor), 16 * size + 5
    source = plan.block_segments(range(2), src, block_nbytes=size)
    return source, plan.block_segments(range(2), dst, block_nbytes=size), 16 * size + 5


@names
@thorough
@given(rows=block_plans(), seed=st.integers(0, 2**16), where=st.integers(0, 2**16), bit=st.integers(0, 7))
def test_p2_the_sums_of_both_ends_agree_if_and_only_if_the_bytes_do(
    name: str, rows: tuple[plan.Segments, plan.Segments, int], seed: int, where: int, bit: int
) -> None:
    src, dst, nbytes = rows
    memory = HostMemory()
    source = np.random.default_rng(seed).integers(0, 256, (2, nbytes), np.uint8)
    destination = np.zeros((2, nbytes), np.uint8)
    ends = [[Region(t.ctypes.data, nbytes, Placement.HOST, t) for t in end] for end in (source, destination)]
    for from_tensor, start, to_tensor, to, length in plan.pair(src, dst).tolist():
        destination[to_tensor, to : to + length] = source[from_tensor, start : start + length]

    def both() -> list[bytes]:
        return [sums.sum_of(begin(name), memory.lending(ends[i], table)) for i, table in enumerate((src, dst))]

    ours, theirs = both()
    assert ours == theirs
    landed = [(t, at) for t, start, length in dst.tolist() for at in range(start, start + length)]
    tensor, at = landed[where % len(landed)]
    destination[tensor, at] ^= 1 << bit
    ours, theirs = both()
    assert ours != theirs
