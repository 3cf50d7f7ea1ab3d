"""Blocks that are kept for a while: who gets which, when they go back, and that none goes back while it is written."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from kvpull_async._deadline import NEVER, Deadline
from kvpull_async.memory.npu.pool import Block, Pool
from kvpull_async.status import LLMException, LLMStatusCode

KIB, MIB, GIB = 1024, 1024**2, 1024**3
OWN = 64
"""Bytes that the device takes beside each block."""


class Memory:
    """Stands for a device's: so many bytes, which come back a while after they were freed."""

    def __init__(self, room: int = 64 * GIB, *, slow: float = 0.0) -> None:
        self.room = room
        self.blocks: dict[int, int] = {}
        self.freed: list[int] = []
        self.asked: list[int] = []
        self._next = 4096
        self._lock = threading.Lock()
        self._slow = slow
        self._threads = ThreadPoolExecutor(1)

    def make(self, nbytes: int, deadline: Deadline = NEVER) -> int:
        with self._lock:
            self.asked.append(nbytes)
            if sum(self.blocks.values()) + nbytes > self.room:
                raise LLMException("no memory", status_code=LLMStatusCode.LLM_OUT_OF_MEMORY)
            self._next += 2 * nbytes
            self.blocks[self._next] = nbytes
            return self._next

    def free(self, address: int) -> Future[None]:
        self.freed.append(address)
        if self._slow:
            return self._threads.submit(self._free, address)
        done: Future[None] = Future()
        self._free(address)
        done.set_result(None)
        return done

    def _free(self, address: int) -> None:
        time.sleep(self._slow)
        with self._lock:
            del self.blocks[address]  # KeyError: freed twice

    def close(self) -> None:
        self._threads.shutdown()


def pool(memory: Memory) -> Pool:
    return Pool(memory.make, memory.free)


# -- taking and giving -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nbytes", "size"),
    [
        (1, 64 * KIB),
        (64 * KIB - OWN, 64 * KIB),
        (64 * KIB, 128 * KIB),
        (MIB - OWN, MIB),
        (MIB, 2 * MIB),
        (2 * MIB - OWN, 2 * MIB),
        (2 * MIB, 4 * MIB),
        (5 * MIB, 6 * MIB),
    ],
)
def test_a_block_fills_the_devices_pages_with_what_the_device_adds(nbytes: int, size: int) -> None:
    memory = Memory()
    assert pool(memory).take(nbytes).nbytes == size - OWN >= nbytes
    assert memory.asked == [size - OWN]


def test_what_is_given_back_is_taken_again() -> None:
    memory = Memory()
    blocks = pool(memory)
    first = blocks.take(int(2.5 * MIB))
    blocks.give(first)
    assert blocks.take(4 * MIB - OWN) is first
    assert len(memory.asked) == 1


def test_two_never_have_the_same_block() -> None:
    blocks = pool(Memory())
    first = blocks.take(MIB)
    blocks.give(first)
    assert blocks.take(MIB) is first
    assert blocks.take(MIB) is not first


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    memory = Memory()
    blocks = pool(memory)
    held = [blocks.take(nbytes * MIB) for nbytes in (39, 33, 37, 35)]
    for block in held:
        blocks.give(block)
    assert blocks.take(34 * MIB + 1).nbytes == 36 * MIB - OWN


def test_a_block_that_is_much_too_large_is_left_for_others() -> None:
    memory = Memory()
    blocks = pool(memory)
    blocks.give(blocks.take(15 * MIB))
    assert blocks.take(13 * MIB).nbytes == 14 * MIB - OWN
    blocks.give(blocks.take(31 * MIB))
    assert blocks.take(29 * MIB).nbytes == 32 * MIB - OWN


def test_no_more_than_a_gibibyte_is_kept() -> None:
    memory = Memory()
    blocks = pool(memory)
    held = [blocks.take(400 * MIB) for _ in range(3)]
    for block in held:
        blocks.give(block)
    assert memory.freed == [held[2].address]


def test_giving_twice_is_giving_once() -> None:
    memory = Memory()
    blocks = pool(memory)
    block = blocks.take(2 * GIB)
    blocks.give(block)
    blocks.give(block)
    assert memory.freed == [block.address]


# -- a device that is full ---------------------------------------------------------------------------------------------


def test_what_is_kept_goes_back_when_the_device_has_no_more() -> None:
    memory = Memory(room=100 * MIB)
    blocks = pool(memory)
    kept = blocks.take(60 * MIB)
    blocks.give(kept)
    assert blocks.take(90 * MIB).nbytes >= 90 * MIB
    assert memory.freed == [kept.address]


@pytest.mark.parametrize("kept", [True, False])
def test_memory_that_is_on_its_way_back_is_waited_for(*, kept: bool) -> None:
    memory = Memory(room=3 * GIB, slow=0.05)
    blocks = pool(memory)
    blocks.give(blocks.take((1 if kept else 2) * GIB))
    blocks.take(int(2.5 * GIB))
    memory.close()


def test_a_device_that_is_full_says_so() -> None:
    memory = Memory(room=100 * MIB)
    blocks = pool(memory)
    blocks.take(60 * MIB)
    with pytest.raises(LLMException, match="no memory") as caught:
        blocks.take(60 * MIB)
    assert caught.value.status_code == LLMStatusCode.LLM_OUT_OF_MEMORY
    assert len(memory.asked) == 2


def test_another_error_frees_nothing() -> None:
    memory = Memory()
    freed = memory.freed

    def failing(nbytes: int, deadline: Deadline) -> int:
        if memory.asked:
            raise LLMException("the device is lost", status_code=LLMStatusCode.LLM_FAILED)
        return memory.make(nbytes)

    blocks = Pool(failing, memory.free)
    blocks.give(blocks.take(MIB))
    with pytest.raises(LLMException, match="lost"):
        blocks.take(8 * MIB)
    assert freed == []


# -- the end -----------------------------------------------------------------------------------------------------------


def test_closing_gives_all_of_it_back_whoever_has_it() -> None:
    memory = Memory()
    blocks = pool(memory)
    idle, held = blocks.take(MIB), blocks.take(MIB)
    blocks.give(idle)
    blocks.close()
    assert sorted(memory.freed) == sorted([idle.address, held.address])
    blocks.give(held)
    assert len(memory.freed) == 2


def test_p1_what_is_abandoned_never_goes_back() -> None:
    memory = Memory()
    blocks = pool(memory)
    idle, held, large = blocks.take(MIB), blocks.take(MIB), blocks.take(2 * GIB)
    blocks.give(idle)
    blocks.abandon()
    blocks.give(held)
    blocks.give(large)
    blocks.close()
    assert memory.freed == []


def test_p1_what_comes_back_while_the_end_is_being_decided_stays_until_then() -> None:
    memory = Memory()
    blocks = pool(memory)
    held, large = blocks.take(MIB), blocks.take(2 * GIB)
    blocks.hold()
    blocks.give(held)
    blocks.give(large)
    assert memory.freed == []
    blocks.close()
    assert sorted(memory.freed) == sorted([held.address, large.address])


def test_p1_a_lost_block_is_nobodys_for_ever() -> None:
    memory = Memory()
    blocks = pool(memory)
    lost = blocks.take(MIB)
    blocks.lose(lost)
    blocks.give(lost)
    assert blocks.take(MIB) is not lost
    blocks.close()
    assert lost.address not in memory.freed


@pytest.mark.parametrize("end", [Pool.hold, Pool.close, Pool.abandon])
def test_nothing_is_taken_after_the_end(end: object) -> None:
    memory = Memory()
    blocks = pool(memory)
    blocks.give(blocks.take(MIB))
    assert callable(end)
    end(blocks)
    for nbytes in (MIB, 8 * MIB):
        with pytest.raises(LLMException, match="closed") as caught:
            blocks.take(nbytes)
        assert caught.value.status_code == LLMStatusCode.LLM_ENGINE_FINALIZED
    blocks.close()


def test_a_block_that_comes_when_the_end_has_begun_goes_back() -> None:
    memory = Memory()
    blocks: Pool

    def late(nbytes: int, deadline: Deadline) -> int:
        blocks.close()
        return memory.make(nbytes)

    blocks = Pool(late, memory.free)
    with pytest.raises(LLMException, match="closed"):
        blocks.take(MIB)
    assert memory.blocks == {}


def test_threads_never_share_a_block_and_none_is_lost() -> None:
    memory = Memory(room=200 * MIB)
    blocks = pool(memory)
    held: set[Block] = set()
    clashes: list[Block] = []
    lock = threading.Lock()

    def work(seed: int) -> None:
        for turn in range(200):
            try:
                block = blocks.take((1 + (seed * 7 + turn * 5) % 40) * MIB)
            except LLMException:
                continue
            with lock:
                clashes.extend(held & {block})
                held.add(block)
            with lock:
                held.discard(block)
            blocks.give(block)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not clashes
    assert "taken=0" in repr(blocks)
    blocks.close()
    assert memory.blocks == {}


def test_p1_what_is_lost_stays_lost_whoever_gives_it_back_and_whatever_ends() -> None:
    memory = Memory()
    blocks = pool(memory)
    lost, given = blocks.take(KIB), blocks.take(KIB)
    blocks.lose(lost)
    assert not blocks.give(lost)
    assert blocks.give(given)
    assert blocks.take(KIB) is given
    blocks.close()
    assert memory.freed == [given.address]
    assert not blocks.give(lost)
    memory.close()


def test_the_device_hears_by_when_the_memory_is_wanted() -> None:
    heard: list[Deadline] = []

    def make(nbytes: int, deadline: Deadline) -> int:
        heard.append(deadline)
        return nbytes

    memory, until = Memory(), Deadline.after_ms(1000)
    Pool(make, memory.free).take(KIB, until)
    assert heard == [until]
    memory.close()
