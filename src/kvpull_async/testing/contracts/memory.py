"""What every memory must do."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvpull_async.memory.base import PIECE_BYTES, PIECE_VIEWS, Allocation, Batches, MemoryBackend, Region
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.values import Placement

__all__ = ["MemoryContract"]

T = TypeVar("T")
_PATIENCE = 60.0


class MemoryContract:
    """A memory gives regions, and hands out their bytes in order, in bounded batches."""

    host_views: bool = True
    """Whether `views` works, that is, the host reaches the memory."""
    placement: Placement = Placement.DEVICE
    """Of what the suite allocates."""
    foreign_placement: Placement = Placement.HOST
    """Of what `foreign` gives."""
    out_of_memory: LLMStatusCode = LLMStatusCode.LLM_OUT_OF_MEMORY
    """What an allocation raises that no machine can serve."""

    def make_memory(self) -> MemoryBackend:
        """A new memory without a budget."""
        raise NotImplementedError

    def look(self, memory: MemoryBackend, region: Region) -> NDArray[np.uint8]:
        """The region's bytes, writable, past its landings and lendings. To be overridden where there are no views."""
        return np.frombuffer(memory.views([region])[0], np.uint8)

    def foreign(self, nbytes: int) -> tuple[int, NDArray[np.uint8], object]:
        """Memory of a caller's own, to be adopted: its address, its bytes, and what keeps it alive."""
        owned = np.zeros(nbytes, np.uint8)
        return owned.ctypes.data, owned, owned

    def with_memory(self, check: Callable[[MemoryBackend], None]) -> None:
        memory = self.make_memory()
        self._made: list[Allocation] = []
        try:
            check(memory)
        finally:
            while self._made:
                memory.free(self._made.pop())
            memory.close()

    def test_a_new_allocation_is_zeroed_and_of_the_size_asked_for(self) -> None:
        for nbytes in (1, 4095, 4097, 3 * PIECE_BYTES):
            memory = self.make_memory()
            made = memory.allocate(tensors=3, tensor_nbytes=nbytes, placement=self.placement)
            assert [region.nbytes for region in made.regions] == [nbytes] * 3
            assert made.nbytes >= 3 * nbytes
            spans = sorted((region.address, region.address + nbytes) for region in made.regions)
            assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans)), "regions overlap"
            for tensor in range(3):
                assert not self.look(memory, made.regions[tensor]).any()
                assert not self.read(memory, made.regions, tensor, 0, nbytes).any()
            memory.free(made)
            memory.close()

    def test_what_was_landed_is_lent(self) -> None:
        def check(memory: MemoryBackend) -> None:
            regions = self.regions(memory, tensors=2, nbytes=3 * PIECE_BYTES)
            data = np.random.default_rng(2).integers(0, 256, 2 * PIECE_BYTES + 77).astype(np.uint8)
            self.write(memory, regions, np.array([(1, 5, data.size)], np.int64), data)
            assert np.array_equal(self.look(memory, regions[1])[5 : 5 + data.size], data)
            assert np.array_equal(self.read(memory, regions, 1, 5, data.size), data)
            assert not self.read(memory, regions, 0, 0, 3 * PIECE_BYTES).any()
            assert not self.read(memory, regions, 1, 5 + data.size, 1000).any()

        self.with_memory(check)

    def test_what_stands_in_the_memory_is_lent(self) -> None:
        def check(memory: MemoryBackend) -> None:
            regions = self.regions(memory, tensors=2, nbytes=2 * PIECE_BYTES + 3)
            data = np.random.default_rng(4).integers(0, 256, 2 * PIECE_BYTES + 3).astype(np.uint8)
            for start in (0, 1, 64, PIECE_BYTES - 1):
                self.look(memory, regions[1])[:] = data + np.uint8(start % 251)
                found = self.read(memory, regions, 1, start, data.size - start)
                assert np.array_equal(found, data[start:] + np.uint8(start % 251))

        self.with_memory(check)

    def test_segments_are_handed_out_in_their_order(self) -> None:
        def check(memory: MemoryBackend) -> None:
            regions = self.regions(memory, tensors=2, nbytes=10_000)
            segments = np.array([(1, 9_000, 10), (0, 0, 5), (1, 0, 3), (0, 7_000, 20)], np.int64)
            data = np.arange(1, 39, dtype=np.uint8)
            self.write(memory, regions, segments, data)
            assert self.join(memory.lending(regions, segments)) == data.tobytes()
            assert self.read(memory, regions, 1, 0, 3).tolist() == [16, 17, 18]

        self.with_memory(check)

    def test_batches_are_bounded(self) -> None:
        def check(memory: MemoryBackend) -> None:
            regions = self.regions(memory, tensors=1, nbytes=4 * PIECE_BYTES + 1)
            large = np.array([(0, 0, 4 * PIECE_BYTES + 1)], np.int64)
            small = np.array([(0, i * 64, 32) for i in range(3 * PIECE_VIEWS)], np.int64)
            for segments in (large, small):
                for make in (memory.lending, memory.landing):
                    total = 0
                    with contextlib.closing(make(regions, segments)) as batches:
                        for batch in batches:
                            assert 0 < len(batch) <= PIECE_VIEWS
                            nbytes = sum(view.nbytes for view in batch)
                            assert 0 < nbytes <= PIECE_BYTES
                            total += nbytes
                    assert total == int(segments[:, 2].sum())

        self.with_memory(check)

    def test_a_landing_closed_early_leaves_the_rest_alone(self) -> None:
        def check(memory: MemoryBackend) -> None:
            regions = self.regions(memory, tensors=1, nbytes=3 * PIECE_BYTES)
            told = [0]
            landing = memory.landing(regions, np.array([(0, 0, 3 * PIECE_BYTES)], np.int64), landed=told.append)
            filled = 0
            for view in next(landing):
                np.frombuffer(view, np.uint8)[:] = 7
                filled += view.nbytes
            next(landing)
            landing.close()
            landing.close()
            found = self.look(memory, regions[0])
            assert told[-1] <= filled
            assert (found[: told[-1]] == 7).all()
            assert np.isin(found[told[-1] : filled], (0, 7)).all(), "neither what was there nor what was to come"
            assert not found[filled:].any()

        self.with_memory(check)

    def test_whoever_is_told_that_bytes_landed_finds_them_in_the_memory(self) -> None:
        def check(memory: MemoryBackend) -> None:
            regions = self.regions(memory, tensors=2, nbytes=5 * PIECE_BYTES)
            data = np.random.default_rng(5).integers(1, 256, 5 * PIECE_BYTES + 77).astype(np.uint8)
            segments = np.array([(1, 3, 3 * PIECE_BYTES + 70), (0, 11, 2 * PIECE_BYTES + 7)], np.int64)
            told = [0]

            def landed(nbytes: int) -> None:
                assert nbytes >= told[-1], "it decreased"
                found = np.concatenate([self.look(memory, regions[t])[at : at + n] for t, at, n in segments.tolist()])
                assert np.array_equal(found[:nbytes], data[:nbytes]), "told too early"
                told.append(nbytes)

            self.write(memory, regions, segments, data, landed=landed)
            assert told[-1] == data.size

        self.with_memory(check)

    def test_each_step_may_be_taken_in_another_thread(self) -> None:
        def check(memory: MemoryBackend) -> None:
            regions = self.regions(memory, tensors=1, nbytes=3 * PIECE_BYTES)
            whole = np.array([(0, 0, 3 * PIECE_BYTES)], np.int64)
            landing, data = memory.landing(regions, whole), np.arange(3 * PIECE_BYTES, dtype=np.uint32).astype(np.uint8)
            left = data
            while (batch := _elsewhere(lambda: next(landing, None))) is not None:
                for view in batch:
                    np.frombuffer(view, np.uint8)[:] = left[: view.nbytes]
                    left = left[view.nbytes :]
            assert np.array_equal(self.look(memory, regions[0]), data)
            lending = memory.lending(regions, whole)
            first = _elsewhere(lambda: b"".join(bytes(view) for view in next(lending)))
            assert first == data[: len(first)].tobytes()
            _elsewhere(lending.close)

        self.with_memory(check)

    def test_many_at_once_do_not_mix_their_bytes(self) -> None:
        def check(memory: MemoryBackend) -> None:
            regions = self.regions(memory, tensors=6, nbytes=3 * PIECE_BYTES)
            wrong: list[int] = []

            def work(tensor: int) -> None:
                data = np.random.default_rng(tensor).integers(0, 256, 2 * PIECE_BYTES + 9).astype(np.uint8)
                self.write(memory, regions, np.array([(tensor, tensor, data.size)], np.int64), data)
                if not np.array_equal(self.read(memory, regions, tensor, tensor, data.size), data):
                    wrong.append(tensor)

            threads = [threading.Thread(target=work, args=(tensor,)) for tensor in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(_PATIENCE)
                assert not thread.is_alive(), "they wait for one another"
            assert not wrong
            for tensor in range(6):
                data = np.random.default_rng(tensor).integers(0, 256, 2 * PIECE_BYTES + 9).astype(np.uint8)
                assert np.array_equal(self.look(memory, regions[tensor])[tensor : tensor + data.size], data)

        self.with_memory(check)

    def test_no_segments_are_no_batches(self) -> None:
        def check(memory: MemoryBackend) -> None:
            regions = self.regions(memory, tensors=1, nbytes=100)
            assert list(memory.lending(regions, np.empty((0, 3), np.int64))) == []

        self.with_memory(check)

    def test_too_much_is_out_of_memory(self) -> None:
        def check(memory: MemoryBackend) -> None:
            error = _refused(lambda: memory.allocate(tensors=1, tensor_nbytes=2**55, placement=self.placement))
            assert error.status_code == self.out_of_memory, error

        self.with_memory(check)

    def test_there_are_no_views_where_the_host_does_not_reach(self) -> None:
        def check(memory: MemoryBackend) -> None:
            regions = self.regions(memory, tensors=1, nbytes=100)
            error = _refused(lambda: memory.views(regions))
            assert error.status_code == LLMStatusCode.LLM_FEATURE_NOT_ENABLED, error

        if not self.host_views:
            self.with_memory(check)

    def test_views_stay_readable_after_free(self) -> None:
        if not self.host_views:
            return

        def check(memory: MemoryBackend) -> None:
            made = memory.allocate(tensors=1, tensor_nbytes=100_000, placement=self.placement)
            view = memory.views(made.regions)[0]
            assert not view.readonly
            view[0] = 9
            memory.free(made)
            del made
            assert view[0] == 9

        self.with_memory(check)

    def test_adopted_memory_is_used_where_it_is_and_not_touched_before(self) -> None:
        def check(memory: MemoryBackend) -> None:
            address, owned, keeper = self.foreign(10_000)
            owned[:] = 3
            regions = memory.adopt([address], tensor_nbytes=owned.size, placement=self.foreign_placement)
            assert (owned == 3).all()
            self.write(memory, regions, np.array([(0, 100, 50)], np.int64), np.full(50, 8, np.uint8))
            assert owned.sum() == 3 * owned.size + 5 * 50
            assert self.read(memory, regions, 0, 99, 3).tolist() == [3, 8, 8]
            memory.disown(tuple(regions))
            del keeper

        self.with_memory(check)

    def test_a_copy_inside_moves_its_rows_and_nothing_else_in_bounded_steps(self) -> None:
        def check(memory: MemoryBackend) -> None:
            sources, targets = (self.regions(memory, tensors=2, nbytes=3 * PIECE_BYTES) for _ in range(2))
            data = np.random.default_rng(3).integers(0, 256, 3 * PIECE_BYTES).astype(np.uint8)
            for tensor in range(2):
                self.write(memory, sources, np.array([(tensor, 0, data.size)], np.int64), data + np.uint8(tensor))
            rows = [(1, 5, 0, 9, PIECE_BYTES), (1, 2 * PIECE_BYTES, 0, 2 * PIECE_BYTES, PIECE_BYTES)]
            rows += [(0, 3 * i, 1, 50_000 - 7 * i, 2) for i in range(6000)]
            steps = list(memory.copying(sources, targets, np.array(rows, np.int64)))
            assert sum(steps) == 2 * PIECE_BYTES + 2 * 6000
            assert max(steps) <= PIECE_BYTES
            expected = np.zeros((2, data.size), np.uint8)
            for src, src_at, dst, dst_at, length in rows:
                expected[dst, dst_at : dst_at + length] = data[src_at : src_at + length] + np.uint8(src)
            for tensor in range(2):
                assert np.array_equal(self.read(memory, targets, tensor, 0, data.size), expected[tensor])

        self.with_memory(check)

    def test_a_copy_inside_that_is_closed_early_writes_no_more(self) -> None:
        def check(memory: MemoryBackend) -> None:
            sources, targets = (self.regions(memory, tensors=1, nbytes=4 * PIECE_BYTES) for _ in range(2))
            self.write(
                memory, sources, np.array([(0, 0, 4 * PIECE_BYTES)], np.int64), np.ones(4 * PIECE_BYTES, np.uint8)
            )
            rows = np.array([(0, i * PIECE_BYTES, 0, i * PIECE_BYTES, PIECE_BYTES) for i in range(4)], np.int64)
            with contextlib.closing(memory.copying(sources, targets, rows)) as steps:
                next(steps)
            assert not self.read(memory, targets, 0, 3 * PIECE_BYTES, PIECE_BYTES).any()

        self.with_memory(check)

    def test_adopted_memory_has_its_owners_and_is_reached_where_it_is(self) -> None:
        def check(memory: MemoryBackend) -> None:
            addresses, _, owners = zip(*(self.foreign(100) for _ in range(2)), strict=True)
            regions = memory.adopt(addresses, tensor_nbytes=100, placement=self.foreign_placement, owners=owners)
            assert [region.owner is owner for region, owner in zip(regions, owners, strict=True)] == [True, True]
            for writing in (False, True):
                memory.reach(regions, writing=writing)

        self.with_memory(check)

    def regions(self, memory: MemoryBackend, *, tensors: int, nbytes: int) -> Sequence[Region]:
        self._made.append(memory.allocate(tensors=tensors, tensor_nbytes=nbytes, placement=self.placement))
        return self._made[-1].regions

    def write(
        self,
        memory: MemoryBackend,
        regions: Sequence[Region],
        segments: NDArray[np.int64],
        data: NDArray[np.uint8],
        *,
        landed: Callable[[int], None] | None = None,
    ) -> None:
        """As a path does it."""
        for batch in memory.landing(regions, segments, landed=landed):
            for view in batch:
                np.frombuffer(view, np.uint8)[:] = data[: view.nbytes]
                data = data[view.nbytes :]
        assert not data.size

    def read(
        self, memory: MemoryBackend, regions: Sequence[Region], tensor: int, offset: int, nbytes: int
    ) -> NDArray[np.uint8]:
        segments = np.array([(tensor, offset, nbytes)], np.int64)
        return np.frombuffer(self.join(memory.lending(regions, segments)), np.uint8)

    @staticmethod
    def join(lending: Batches) -> bytes:
        return b"".join(bytes(view) for batch in lending for view in batch)


def _refused(call: Callable[[], object]) -> LLMException:
    try:
        call()
    except LLMException as error:
        return error
    raise AssertionError("it was not refused")


def _elsewhere(call: Callable[[], T]) -> T:
    """In a thread that has never done anything, and ends with it."""
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join(_PATIENCE)
    assert found, "it failed, or never returned"
    return found[0]
