"""What every data path must do, for pulls and for pushes, also when a transfer is stopped in its middle. Every wait is
bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvpull_async._deadline import Deadline, absorb
from kvpull_async._workers import Workers
from kvpull_async.memory.base import PIECE_BYTES, PIECE_VIEWS, Batches, MemoryBackend, Region, Span
from kvpull_async.memory.host import HostMemory
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.testing.contracts._waiting import PATIENCE, unwanted, within
from kvpull_async.testing.contracts.ends import Ends, rows, viewed
from kvpull_async.testing.faults import Gate, GatedMemory
from kvpull_async.transport.base import Address, DataPath, PathKind, PathSeed, Transfer, Transport
from kvpull_async.values import Placement

__all__ = ["DataPathContract", "Ends"]

_CANARY: Final = 0xA5


class DataPathContract:
    """A path moves exactly the bytes of one grant at a time, tells when it is over, and then touches nothing more."""

    address: Address = ("127.0.0.1", 0)
    stoppable: bool = True
    """False for a path whose fetches may refuse to abort."""
    reads_itself: bool = False
    """True for a path whose puller reads the source's memory by itself: no lending is ever asked for pieces."""
    fills_itself: bool = False
    """True for a path that writes the destination by itself: no landing is ever asked for pieces."""
    nbytes: int = 6 * PIECE_BYTES + 12345
    """The size of both memories."""

    def make_transport(self) -> Transport:
        """A new transport; called once for each side."""
        raise NotImplementedError

    def make_kind(self, transport: Transport) -> PathKind:
        """The kind of path of one side; by default the transport is one itself."""
        assert isinstance(transport, PathKind)
        return transport

    def make_memory(self) -> MemoryBackend:
        """The memory of both sides."""
        return HostMemory()

    def look(self, memory: MemoryBackend, region: Region) -> NDArray[np.uint8]:
        """The region's bytes, writable, past its landings and lendings. To be overridden where there are no views."""
        return viewed(memory, region)

    @contextlib.asynccontextmanager
    async def ends(self, *, puller_dials: bool = True) -> AsyncIterator[Ends]:
        """Both ends of a path. The dialling side of a link may be the puller or the source."""
        workers = Workers(4, name="contract-worker")
        listening, dialling = self.make_transport(), self.make_transport()
        listener = await listening.listen(self.address, unwanted)
        token = secrets.token_bytes(16)
        accepting, meeting = self.make_kind(listening), self.make_kind(dialling)
        await within(meeting.meet(token, accepting.offer(token)))
        accepted = accepting.path(PathSeed(token, 0, False, None, workers))
        dialled = meeting.path(PathSeed(token, 0, True, listener.address, workers))
        memory = GatedMemory(self.make_memory())
        made = [memory.allocate(tensors=1, tensor_nbytes=self.nbytes, placement=Placement.DEVICE) for _ in range(2)]
        puller, source = (dialled, accepted) if puller_dials else (accepted, dialled)
        itself = {"reads": self.reads_itself, "fills": self.fills_itself}
        ends = Ends(puller, source, memory, made[0].regions, made[1].regions, self.look, **itself)
        ends.original[:] = np.arange(self.nbytes, dtype=np.uint32).astype(np.uint8)
        try:
            yield ends
        finally:
            for gate in (self.writing_gate(ends), memory.landing_gate, memory.lending_gate):
                gate.open()
            await self.end((dialled, accepted), (meeting, accepting))
            await within(listener.aclose())
            assert await asyncio.to_thread(workers.close, PATIENCE) == 0
            for allocation in made:
                memory.free(allocation)
            memory.close()

    async def end(self, paths: Sequence[DataPath], kinds: Sequence[PathKind]) -> None:
        for path in paths:
            path.abort()
            path.abort()
        for path in paths:
            await within(path.aclose(Deadline.after_ms(PATIENCE * 1000)))
        for kind in kinds:
            await within(kind.aclose(Deadline.after_ms(PATIENCE * 1000)))
            await within(kind.aclose(Deadline.after_ms(PATIENCE * 1000)))

    def writing_gate(self, ends: Ends) -> Gate:
        """Where writes to the destination can be held; another one for a path that `fills_itself`."""
        return ends.memory.landing_gate

    async def test_a_pull_delivers_its_bytes_and_no_others(self) -> None:
        for puller_dials in (True, False):
            async with self.ends(puller_dials=puller_dials) as ends:
                ends.destination[:] = _CANARY
                await ends.pull(rows((7, 3_000_000)), rows((1_000_001, 3_000_000)))
                expected = np.full(self.nbytes, _CANARY, np.uint8)
                expected[1_000_001:4_000_001] = ends.original[7:3_000_007]
                assert np.array_equal(ends.destination, expected)

    async def test_scattered_pieces_land_in_stream_order(self) -> None:
        async with self.ends() as ends:
            count, size = 2 * PIECE_VIEWS + 3, 1000
            order = np.random.default_rng(1).permutation(count)
            source = rows(*((int(i) * size, size) for i in order))
            target = rows(*((i * 2 * size, size // 2) for i in range(2 * count)))
            ends.destination[:] = _CANARY
            await ends.pull(source, target)
            stream = np.concatenate([ends.original[o : o + n] for _, o, n in source.tolist()])
            expected = np.full(self.nbytes, _CANARY, np.uint8)
            for i, (_, offset, n) in enumerate(target.tolist()):
                expected[offset : offset + n] = stream[i * n : (i + 1) * n]
            assert np.array_equal(ends.destination, expected)

    async def test_many_pulls_in_turn_use_one_path(self) -> None:
        async with self.ends() as ends:
            for i in range(20):
                await ends.pull(rows((i * 1000, 70_000)), rows((0, 70_000)))
                assert np.array_equal(ends.destination[:70_000], ends.original[i * 1000 : i * 1000 + 70_000])

    async def test_an_aborted_fetch_settles_and_writes_nothing_more(self) -> None:
        for puller_dials in (True, False):
            async with self.ends(puller_dials=puller_dials) as ends:
                await self.stop_fetch_in_the_middle(ends)
                await ends.check_next()

    async def stop_fetch_in_the_middle(self, ends: Ends) -> None:
        """Held in the destination's memory: only once it lets go can anything settle."""
        whole = rows((0, self.nbytes))
        self.writing_gate(ends).close()
        serving, fetching = await ends.start(whole, whole)
        await self.writing_gate(ends).reached(timeout=PATIENCE)
        stopping = fetching.abort()
        assert stopping is fetching.abort(), "abort may be called twice"
        assert stopping or not self.stoppable
        await asyncio.sleep(0)
        assert not fetching.settled.done(), "it says that it has settled while it holds a piece of the destination"
        self.writing_gate(ends).open()
        serving.abort()  # what the source does when the puller's CANCEL arrives
        await within(asyncio.shield(fetching.settled))
        ends.destination[:] = _CANARY
        assert await self.failed(fetching) or not stopping
        await within(asyncio.shield(serving.settled))
        assert (ends.destination == _CANARY).all(), "written after it had settled"

    async def test_an_aborted_source_fails_the_puller_and_settles_once_nothing_reads(self) -> None:
        if self.reads_itself:
            await self.take_the_source_away()
            return
        async with self.ends() as ends:
            whole = rows((0, self.nbytes))
            ends.memory.lending_gate.close()
            serving, fetching = await ends.start(whole, whole)
            await ends.memory.lending_gate.reached(timeout=PATIENCE)
            assert serving.abort()
            await asyncio.sleep(0)
            assert not serving.settled.done(), "it says that it has settled while a piece of the source is being read"
            ends.memory.lending_gate.open()
            assert await self.failed(fetching), "the puller believes in bytes that the source never gave"
            fetching.abort()
            await within(asyncio.shield(fetching.settled))
            await within(asyncio.shield(serving.settled))
            await ends.check_next()

    async def take_the_source_away(self) -> None:
        """The cache is released while it is read."""
        async with self.ends() as ends:
            whole = rows((0, self.nbytes))
            self.writing_gate(ends).close()
            _, fetching = await ends.start(whole, whole)
            await self.writing_gate(ends).reached(timeout=PATIENCE)
            self.withdraw(ends)
            self.writing_gate(ends).open()
            assert await self.failed(fetching), "the puller believes in bytes that the source no longer has"
            await within(asyncio.shield(fetching.settled))
            await ends.check_next()

    def withdraw(self, ends: Ends) -> None:
        """What a path that `reads_itself` does at the source when a cache is released."""
        raise NotImplementedError

    async def test_a_lending_that_fails_fails_both_ends(self) -> None:
        if self.reads_itself:
            return
        async with self.ends() as ends:
            whole = rows((0, self.nbytes))
            serving, fetching = await ends.start(whole, whole, lending=_broken(ends.lending(whole)))
            assert await self.failed(fetching)
            serving.abort()
            fetching.abort()
            await within(asyncio.shield(serving.settled))
            await within(asyncio.shield(fetching.settled))
            await ends.check_next()

    async def test_a_landing_that_fails_fails_the_puller(self) -> None:
        if self.fills_itself:
            return
        async with self.ends() as ends:
            whole = rows((0, self.nbytes))
            serving, fetching = await ends.start(whole, whole, landing=_broken(ends.landing(whole)))
            assert await self.failed(fetching)
            fetching.abort()
            serving.abort()
            await within(asyncio.shield(fetching.settled))
            await within(asyncio.shield(serving.settled))
            await ends.check_next()

    async def test_bytes_of_a_grant_that_was_given_up_never_land_in_the_next_pull(self) -> None:
        """The puller was cancelled between its request and the grant; the source has sent, or sends, the bytes."""
        for puller_dials in (True, False):
            async with self.ends(puller_dials=puller_dials) as ends:
                grant, _, serving = await ends.grant(rows((0, 3 * PIECE_BYTES)))
                ends.puller.give_up()
                await asyncio.wait([serving.done], timeout=0.05)
                serving.abort()
                ends.source.release(grant)
                await within(asyncio.shield(serving.settled))
                await ends.check_next()

    async def test_a_push_delivers_its_bytes_and_no_others(self) -> None:
        for puller_dials in (True, False):
            async with self.ends(puller_dials=puller_dials) as ends:
                ends.destination[:] = _CANARY
                await ends.push(rows((7, 3_000_000)), rows((1_000_001, 3_000_000)))
                expected = np.full(self.nbytes, _CANARY, np.uint8)
                expected[1_000_001:4_000_001] = ends.original[7:3_000_007]
                assert np.array_equal(ends.destination, expected)

    async def test_pushes_and_pulls_in_turn_use_one_path(self) -> None:
        for puller_dials in (True, False):
            async with self.ends(puller_dials=puller_dials) as ends:
                for i in range(12):
                    move = ends.push if i % 3 else ends.pull
                    await move(rows((i * 1000, 70_000)), rows((0, 70_000)))
                    assert np.array_equal(ends.destination[:70_000], ends.original[i * 1000 : i * 1000 + 70_000])

    async def test_an_aborted_push_settles_and_writes_nothing_more(self) -> None:
        for puller_dials in (True, False):
            async with self.ends(puller_dials=puller_dials) as ends:
                whole = rows((0, self.nbytes))
                self.writing_gate(ends).close()
                serving, fetching = await ends.start_push(whole, whole)
                await self.writing_gate(ends).reached(timeout=PATIENCE)
                serving.abort()  # the pusher gives up, and the receiver hears of it
                stopping = fetching.abort()
                ends.source.give_up()
                await asyncio.sleep(0)
                assert not fetching.settled.done(), "it says that it has settled while it holds a piece"
                self.writing_gate(ends).open()
                await within(asyncio.shield(fetching.settled))
                ends.destination[:] = _CANARY
                assert await self.failed(fetching) or not stopping
                await within(asyncio.shield(serving.settled))
                assert (ends.destination == _CANARY).all(), "written after it had settled"
                await ends.check_next_push()
                await ends.check_next()

    async def test_bytes_of_a_push_that_nobody_took_never_land_in_the_next(self) -> None:
        """It was cancelled between the offer and its beginning at the receiver; its bytes may be on their way."""
        for puller_dials in (True, False):
            for first in ("push", "pull"):
                async with self.ends(puller_dials=puller_dials) as ends:
                    await ends.check_next_push()  # so that the pusher may begin at once
                    grant, _, serving = await ends.offer(rows((0, 3 * PIECE_BYTES)))
                    if serving is not None:
                        await asyncio.wait([serving.done], timeout=0.05)
                        serving.abort()
                    ends.source.give_up()
                    ends.puller.release(grant)
                    if serving is not None:
                        await within(asyncio.shield(serving.settled))
                    await (ends.check_next_push() if first == "push" else ends.check_next())

    async def test_a_pusher_that_stops_fails_the_receiver(self) -> None:
        if self.reads_itself:
            return
        for puller_dials in (True, False):
            async with self.ends(puller_dials=puller_dials) as ends:
                whole = rows((0, self.nbytes))
                ends.memory.lending_gate.close()
                serving, fetching = await ends.start_push(whole, whole)
                await ends.memory.lending_gate.reached(timeout=PATIENCE)
                serving.abort()
                ends.memory.lending_gate.open()
                assert await self.failed(fetching), "the receiver believes in bytes that never came"
                fetching.abort()
                ends.source.give_up()
                await within(asyncio.shield(fetching.settled))
                await within(asyncio.shield(serving.settled))
                await ends.check_next_push()

    async def test_an_unknown_grant_writes_nothing(self) -> None:
        async with self.ends() as ends:
            whole = rows((0, self.nbytes))
            ends.destination[:] = _CANARY
            _, ticket, serving = await ends.grant(whole)
            unknown = secrets.token_bytes(16)
            if ticket is not None:
                forged = secrets.token_bytes(16)
                ends.puller.expect(unknown, forged, lambda: whole, Span(tuple(ends.writing), lambda: whole, ends.fills))
            with contextlib.suppress(OSError):
                fetching = ends.puller.fetch(unknown, ends.landing(whole), self.nbytes)
                assert await self.failed(fetching)
                fetching.abort()
                await within(asyncio.shield(fetching.settled))
            assert (ends.destination == _CANARY).all()
            serving.abort()

    async def test_a_broken_path_ends_its_transfers_and_refuses_new_ones(self) -> None:
        async with self.ends() as ends:
            whole = rows((0, self.nbytes))
            self.writing_gate(ends).close()
            serving, fetching = await ends.start(whole, whole)
            await self.writing_gate(ends).reached(timeout=PATIENCE)
            ends.source.abort()
            ends.puller.abort()
            self.writing_gate(ends).open()
            assert await self.failed(fetching)
            await within(asyncio.shield(fetching.settled))
            await within(asyncio.shield(serving.settled))
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                await ends.start(whole, whole)
                raise AssertionError("a broken path began a transfer")

    async def test_close_waits_for_a_running_transfer_no_longer_than_its_bound(self) -> None:
        async with self.ends() as ends:
            whole = rows((0, self.nbytes))
            self.writing_gate(ends).close()
            _, fetching = await ends.start(whole, whole)
            await self.writing_gate(ends).reached(timeout=PATIENCE)
            await within(ends.puller.aclose(Deadline.after_ms(50)))
            assert not fetching.settled.done()
            self.writing_gate(ends).open()
            await within(ends.puller.aclose(Deadline.after_ms(PATIENCE * 1000)))
            assert fetching.settled.done()

    @staticmethod
    async def failed(transfer: Transfer) -> bool:
        """Whether `done` ended with an error or a cancellation; the error of a broken connection is an OSError."""
        assert await absorb([transfer.done], Deadline.after_ms(PATIENCE * 1000)), "the transfer never ended"
        return transfer.done.cancelled() or transfer.done.exception() is not None


def _broken(batches: Batches) -> Batches:
    """Fails after the first batch, as memory whose device went away."""
    with contextlib.closing(batches):
        yield next(batches)
        raise LLMException("the device is gone", status_code=LLMStatusCode.LLM_DEVICE_MEM_ERROR)
