"""What every control channel and its listener must do. Every wait is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable

from kvpull_async._deadline import Deadline
from kvpull_async.testing.contracts._waiting import PATIENCE, unwanted, within
from kvpull_async.transport.base import Address, ControlChannel, Transport

__all__ = ["ControlContract"]


class ControlContract:
    """A control channel is a reliable, ordered stream of bytes between two ends, and breaks loudly."""

    address: Address = ("127.0.0.1", 0)
    """Where the listening transport is asked to listen."""

    def make_transport(self) -> Transport:
        """A new transport; called once for each side."""
        raise NotImplementedError

    @contextlib.asynccontextmanager
    async def channels(self) -> AsyncIterator[tuple[ControlChannel, ControlChannel]]:
        """Both ends of one connection: the dialling one first."""
        accepted: asyncio.Queue[ControlChannel] = asyncio.Queue()
        listener = await self.make_transport().listen(self.address, accepted.put)
        near = await within(self.make_transport().dial(listener.address))
        near.post(b"!")  # some transports hand a connection on only once it has spoken
        far = await within(accepted.get())
        assert await within(far.receive()) == b"!"
        try:
            yield near, far
        finally:
            near.abort()
            far.abort()
            await within(listener.aclose())
            await asyncio.sleep(0)

    async def test_bytes_arrive_in_order_both_ways(self) -> None:
        async with self.channels() as (near, far):
            for sender, receiver in ((near, far), (far, near)):
                parts = [bytes([i]) * (1 + 997 * i) for i in range(64)]
                whole = b"".join(parts)
                reading = asyncio.ensure_future(self.read(receiver, len(whole)))
                for i, part in enumerate(parts):
                    if i % 2:
                        sender.post(part)
                    else:
                        await within(sender.send(part))
                assert await within(reading) == whole

    async def test_a_frame_of_sixteen_megabytes_passes(self) -> None:
        async with self.channels() as (near, far):
            data = secrets.token_bytes(1024) * (16 * 1024)
            reading = asyncio.ensure_future(self.read(far, len(data)))
            await within(near.send(data))
            assert await within(reading) == data

    async def test_send_waits_for_a_peer_that_does_not_read_and_a_cancelled_one_sent_nothing(self) -> None:
        async with self.channels() as (near, far):
            sent, piece = 0, bytes(range(256)) * 1024
            sending = asyncio.ensure_future(near.send(piece))
            while await self.finishes(sending):
                sent += len(piece)
                assert sent < 256 * 1024 * 1024, "send never waits, so memory grows with what a silent peer was sent"
                sending = asyncio.ensure_future(near.send(piece))
            sending.cancel()
            await asyncio.wait([sending])
            assert await self.read(far, sent) == piece * (sent // len(piece))
            await within(near.send(b"whole"))
            assert await self.read(far, 5) == b"whole"

    async def test_a_cancelled_receive_loses_nothing(self) -> None:
        async with self.channels() as (near, far):
            for i in range(20):
                waiting = asyncio.ensure_future(far.receive())
                await asyncio.sleep(0)
                if i % 2:
                    near.post(b"?")
                waiting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    assert await waiting == b"?"
                    continue
                if i % 2:
                    assert await self.read(far, 1) == b"?"

    async def test_callbacks_get_what_comes_in_order_and_then_the_end(self) -> None:
        async with self.channels() as (near, far):
            whole, got = secrets.token_bytes(300_000), bytearray()
            ended: asyncio.Future[OSError | None] = asyncio.get_running_loop().create_future()
            near.post(whole[:1000])
            far.deliver(got.extend, ended.set_result)
            for at in range(1000, len(whole), 7000):
                await within(near.send(whole[at : at + 7000]))
            await self.until(lambda: len(got) >= len(whole))
            assert got == whole
            assert near.ready
            near.abort()
            assert isinstance(await within(ended), (OSError, type(None)))
            assert not near.ready

    async def test_a_paused_end_is_not_called_back_and_its_peer_has_to_wait(self) -> None:
        async with self.channels() as (near, far):
            got, sent, piece = bytearray(), 0, bytes(range(256)) * 1024
            far.deliver(got.extend, lambda _: None)
            far.pause()
            sending = asyncio.ensure_future(near.send(piece))
            while await self.finishes(sending):
                sent += len(piece)
                assert sent < 256 * 1024 * 1024, "pausing does not reach the peer"
                sending = asyncio.ensure_future(near.send(piece))
            assert not near.ready
            assert not got, "called back although paused"
            far.resume()
            await within(sending)
            await self.until(lambda: len(got) >= sent + len(piece))
            assert got == piece * (sent // len(piece) + 1)

    async def test_all_who_wait_for_room_are_sent_in_the_order_in_which_they_came(self) -> None:
        async with self.channels() as (near, far):
            got, filler = bytearray(), bytes(1024 * 1024)
            far.deliver(got.extend, lambda _: None)
            far.pause()
            while near.ready:
                near.post(filler)
                await asyncio.sleep(0)
            waiting = []
            for number in range(8):
                waiting.append(asyncio.ensure_future(near.send(b"send %d;" % number)))
                await asyncio.sleep(0)
                near.post(b"post %d;" % number)
            far.resume()
            await within(asyncio.gather(*waiting))
            expected = b"".join(b"send %d;post %d;" % (number, number) for number in range(8))
            await self.until(lambda: got.endswith(expected))

    async def test_the_peer_reads_what_was_sent_and_then_the_end(self) -> None:
        async with self.channels() as (near, far):
            near.abort()
            with contextlib.suppress(OSError):
                assert await within(far.receive()) == b""

    async def test_after_an_abort_send_fails_post_is_silent_and_receive_ends(self) -> None:
        async with self.channels() as (near, far):
            waiting = asyncio.ensure_future(near.receive())
            await asyncio.sleep(0)
            near.abort()
            near.abort()
            near.post(b"nobody hears this")
            await self.expect_oserror(near)
            with contextlib.suppress(OSError):
                assert await within(waiting) == b""
            with contextlib.suppress(OSError):
                while await within(far.receive()):
                    pass
            await self.expect_oserror(far)
            far.post(b"nobody hears this either")

    async def test_both_ends_name_their_peer(self) -> None:
        async with self.channels() as (near, far):
            assert near.peer
            assert far.peer

    async def test_nobody_to_dial_is_an_oserror(self) -> None:
        listener = await self.make_transport().listen(self.address, unwanted)
        assert listener.address[1] != 0
        await within(listener.aclose())
        await within(listener.aclose())
        try:
            channel = await within(self.make_transport().dial(listener.address))
        except OSError:
            return
        channel.abort()
        raise AssertionError("a closed listener was dialled")

    async def test_an_address_in_use_is_an_oserror(self) -> None:
        listener = await self.make_transport().listen(self.address, unwanted)
        try:
            second = await self.make_transport().listen(listener.address, unwanted)
        except OSError:
            return
        else:
            await within(second.aclose())
            raise AssertionError("two listeners hold one address")
        finally:
            await within(listener.aclose())

    async def test_connections_of_one_listener_are_independent(self) -> None:
        async with self.channels() as (near, far), self.channels() as (other_near, other_far):
            near.abort()
            await within(other_near.send(b"still here"))
            assert await self.read(other_far, 10) == b"still here"
            del far

    @staticmethod
    async def read(channel: ControlChannel, nbytes: int) -> bytes:
        """Exactly `nbytes`; nothing more may have arrived."""
        data = bytearray()
        while len(data) < nbytes:
            more = await within(channel.receive())
            assert more, f"the stream ended after {len(data)} of {nbytes} bytes"
            data += more
        assert len(data) == nbytes
        return bytes(data)

    @staticmethod
    async def until(condition: Callable[[], bool]) -> None:
        give_up = Deadline.after_ms(PATIENCE * 1000)
        while not condition():
            assert not give_up.expired, "never happened"
            await asyncio.sleep(0.002)

    @staticmethod
    async def finishes(task: asyncio.Future[None]) -> bool:
        """Whether it ends without anything else happening."""
        done, _ = await asyncio.wait([task], timeout=0.3)
        return bool(done)

    @staticmethod
    async def expect_oserror(channel: ControlChannel) -> None:
        """The end of the other side may need a moment to be known here."""
        give_up = Deadline.after_ms(PATIENCE * 1000)
        while not give_up.expired:
            try:
                await within(channel.send(b"?"))
            except OSError:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("send on a broken channel does not fail")
