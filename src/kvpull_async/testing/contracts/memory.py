"""What every memory must do."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvpull_async.memory.base import PIECE_BYTES, PIECE_VIEWS, Batches, MemoryBackend, Region
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.values import Placement

__all__ = ["MemoryContract"]


class MemoryContract:
    """A memory gives regions, and hands out their bytes in order, in bounded batches."""

    host_views: bool = True
    """Whether `views` works, that is, the host reaches the memory."""

    def make_memory(self) -> MemoryBackend:
        """A new memory without a budget."""
        raise NotImplementedError

    def with_memory(self, check: Callable[[MemoryBackend], None]) -> None:
        memory = self.make_memory()
        try:
            check(memory)
        finally:
            memory.close()

    def test_a_new_allocation_is_zeroed_and_of_the_size_asked_for(self) -> None:
        for nbytes in (1, 4095, 4097, 3 * PIECE_BYTES):
            memory = self.make_memory()
            made = memory.allocate(tensors=3, tensor_nbytes=nbytes, placement=Placement.DEVICE)
            assert [region.nbytes for region in made.regions] == [nbytes] * 3
            assert made.nbytes >= 3 * nbytes
            spans = sorted((region.address, region.address + nbytes) for region in made.regions)
            assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans)), "regions overlap"
            for tensor in range(3):
                assert not self.read(memory, made.regions, tensor, 0, nbytes).any()
            memory.free(made)
            memory.close()

    def test_what_was_landed_is_lent(self) -> None:
        def check(memory: MemoryBackend) -> None:
            regions = self.regions(memory, tensors=2, nbytes=3 * PIECE_BYTES)
            data = np.random.default_rng(2).integers(0, 256, 2 * PIECE_BYTES + 77).astype(np.uint8)
            self.write(memory, regions, np.array([(1, 5, data.size)], np.int64), data)
            assert np.array_equal(self.read(memory, regions, 1, 5, data.size), data)
            assert not self.read(memory, regions, 0, 0, 3 * PIECE_BYTES).any()
            assert not self.read(memory, regions, 1, 5 + data.size, 1000).any()

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
            landing = memory.landing(regions, np.array([(0, 0, 3 * PIECE_BYTES)], np.int64))
            for view in next(landing):
                np.frombuffer(view, np.uint8)[:] = 7
            next(landing)
            landing.close()
            landing.close()
            assert (self.read(memory, regions, 0, 0, PIECE_BYTES) == 7).all()
            assert not self.read(memory, regions, 0, 2 * PIECE_BYTES, PIECE_BYTES).any()

        self.with_memory(check)

    def test_no_segments_are_no_batches(self) -> None:
        def check(memory: MemoryBackend) -> None:
            regions = self.regions(memory, tensors=1, nbytes=100)
            assert list(memory.lending(regions, np.empty((0, 3), np.int64))) == []

        self.with_memory(check)

    def test_too_much_is_out_of_memory(self) -> None:
        def check(memory: MemoryBackend) -> None:
            try:
                memory.allocate(tensors=1, tensor_nbytes=2**55, placement=Placement.DEVICE)
            except LLMException as error:
                assert error.status_code == LLMStatusCode.LLM_OUT_OF_MEMORY  # noqa: PT017
            else:
                raise AssertionError("32 PiB were allocated")

        self.with_memory(check)

    def test_views_stay_readable_after_free(self) -> None:
        if not self.host_views:
            return

        def check(memory: MemoryBackend) -> None:
            made = memory.allocate(tensors=1, tensor_nbytes=100_000, placement=Placement.DEVICE)
            view = memory.views(made.regions)[0]
            assert not view.readonly
            view[0] = 9
            memory.free(made)
            del made
            assert view[0] == 9

        self.with_memory(check)

    def test_adopted_memory_is_used_where_it_is_and_not_touched_before(self) -> None:
        if not self.host_views:
            return

        def check(memory: MemoryBackend) -> None:
            owned = np.full(10_000, 3, np.uint8)
            regions = memory.adopt([owned.ctypes.data], tensor_nbytes=owned.size, placement=Placement.HOST)
            assert (owned == 3).all()
            self.write(memory, regions, np.array([(0, 100, 50)], np.int64), np.full(50, 8, np.uint8))
            assert owned.sum() == 3 * owned.size + 5 * 50
            assert self.read(memory, regions, 0, 99, 3).tolist() == [3, 8, 8]

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
        if not self.host_views:
            return

        def check(memory: MemoryBackend) -> None:
            owned = [np.zeros(100, np.uint8) for _ in range(2)]
            addresses = [array.ctypes.data for array in owned]
            regions = memory.adopt(addresses, tensor_nbytes=100, placement=Placement.HOST, owners=owned)
            assert [region.owner is array for region, array in zip(regions, owned, strict=True)] == [True, True]
            for writing in (False, True):
                memory.reach(regions, writing=writing)

        self.with_memory(check)

    def regions(self, memory: MemoryBackend, *, tensors: int, nbytes: int) -> Sequence[Region]:
        return memory.allocate(tensors=tensors, tensor_nbytes=nbytes, placement=Placement.DEVICE).regions

    def write(
        self, memory: MemoryBackend, regions: Sequence[Region], segments: NDArray[np.int64], data: NDArray[np.uint8]
    ) -> None:
        """As a path does it."""
        for batch in memory.landing(regions, segments):
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
