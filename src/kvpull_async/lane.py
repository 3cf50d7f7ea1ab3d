"""One connection of a link: drives the session's state machine over a control channel. It must not know caches.

A lane carries requests in one direction. It matches answers to requests, answers heartbeats, notices a silent peer,
and ends once, with a reason, in `lost`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvpull_async._deadline import Deadline
from kvpull_async.observe import Log
from kvpull_async.protocol import frames
from kvpull_async.protocol.frames import FrameError, Message
from kvpull_async.protocol.session import Asked, Event, Failed, Peer, Ready, Received, Session, State
from kvpull_async.status import LLMException, LLMStatusCode, fresh, status_of
from kvpull_async.transport.base import ControlChannel

__all__ = ["Answer", "Lane"]

Answer = tuple[frames.Grant, bytes]
OnMessage = Callable[[Message, bytes], None]


class Lane:
    """Used by one event loop. `abort` ends it at any time."""

    def __init__(
        self, channel: ControlChannel, session: Session, *, log: Log, heartbeat: float, silence: float
    ) -> None:
        self.channel = channel
        self.session = session
        self.lost: asyncio.Future[LLMException] = asyncio.get_running_loop().create_future()
        self._log = log
        self._heartbeat = heartbeat
        self._silence = silence
        self._on_message: OnMessage | None = None
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        self._pongs: dict[int, asyncio.Future[None]] = {}
        self._pings = 0
        self._reader: asyncio.Task[None] | None = None
        self._beat: asyncio.TimerHandle | None = None
        self._heard = 0.0
        self._due = 0.0

    # -- the greeting -----------------------------------------------------------------------------------------------

    async def dial(self, deadline: Deadline) -> Peer:
        """Greet as the side that dialled. LLMException when the peer refuses, OSError when the connection breaks."""
        self.session.start()
        event = await self._greeting(deadline)
        assert isinstance(event, Ready)
        return event.peer

    async def accept(self, deadline: Deadline) -> Peer:
        """Greet as the side that was dialled: who asks. Answer with `welcome` or `reject`."""
        event = await self._greeting(deadline)
        assert isinstance(event, Asked)
        return event.peer

    def welcome(self, *, token: bytes, path: str) -> Peer:
        """Let the peer in. LLMException when it sent more before it was answered, which no honest peer does."""
        if self.session.state is not State.DECIDING:
            raise LLMException(
                "the peer did not wait for the answer to its greeting", status_code=LLMStatusCode.LLM_LINK_FAILED
            )
        self.session.welcome(token=token, path=path)
        self.channel.post(self.session.take_output())
        ready = self.session.next_event()
        assert isinstance(ready, Ready)
        return ready.peer

    async def reject(self, status: LLMStatusCode, reason: str) -> None:
        """Refuse the peer, and give it a moment to read why before the connection breaks."""
        self.session.reject(status, reason)
        await self._farewell()

    async def _greeting(self, deadline: Deadline) -> Event:
        async with deadline.scope():
            while True:
                event = self.session.next_event()
                if isinstance(event, Failed):
                    await self._farewell()
                    reason = f"{self.channel.peer} refused: {event.reason}" if event.by_peer else event.reason
                    raise LLMException(reason, status_code=event.status, peer=self.channel.peer)
                await self._flush()
                if event is not None:
                    return event
                data = await self.channel.receive()
                if data:
                    self.session.receive(data)
                else:
                    self.session.receive_eof()

    async def _farewell(self) -> None:
        """Send what is left to say and wait, bounded, for the peer to hang up: a reset would destroy the message."""
        last_words = self.session.take_output()
        if not last_words:
            return
        self.channel.post(last_words)
        try:
            async with Deadline.after_ms(500).scope():
                while await self.channel.receive():
                    pass
        except (OSError, asyncio.TimeoutError) as error:
            self._log.debug("link.farewell_unheard", peer=self.channel.peer, reason=repr(error))

    # -- the ready connection ---------------------------------------------------------------------------------------

    def start(self, on_message: OnMessage) -> None:
        """Begin to read. Requests, their ends and acknowledgements go to `on_message`; answers to who asked."""
        loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._heard = loop.time()
        self._due = self._heard + self._heartbeat
        self._reader = loop.create_task(self._read(), name="kvpull-lane")
        self._beat = loop.call_later(self._heartbeat, self._tick)

    def ask(self, request: Callable[[int], frames.Request], tail: bytes) -> tuple[int, bytes, asyncio.Future[Answer]]:
        """Register a request: its id, its bytes (for `send`) and the future of its answer (LLMException: refused)."""
        self._check()
        request_id = self.session.new_request()
        try:
            self.session.send(request(request_id), tail)
        except FrameError as error:
            self.session.end_request(request_id)
            raise LLMException(str(error), status_code=LLMStatusCode.LLM_PARAM_INVALID) from error
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answers[request_id] = answer
        return request_id, self.session.take_output(), answer

    def give_up(self, request_id: int, *, tell: bool) -> None:
        """The request is over here; with `tell`, the peer must stop working on it."""
        self.session.end_request(request_id)
        self._answers.pop(request_id, None)
        if tell:
            self.post(frames.Cancel(request_id))

    def post(self, message: Message, tail: bytes = b"") -> None:
        """Send a small message without waiting; nothing happens on a connection that is over."""
        if not self.lost.done() and self.session.state is State.READY:
            self.session.send(message, tail)
            self.channel.post(self.session.take_output())

    async def send(self, message: Message, tail: bytes = b"") -> None:
        self._check()
        self.session.send(message, tail)
        await self.channel.send(self.session.take_output())

    async def ping(self, deadline: Deadline) -> None:
        """One round trip. asyncio.TimeoutError or LLMException when the peer does not answer."""
        self._check()
        self._pings += 1
        number = self._pings
        self._pongs[number] = pong = asyncio.get_running_loop().create_future()
        try:
            async with deadline.scope():
                await self.send(frames.Ping(number))
                await pong
        finally:
            self._pongs.pop(number, None)

    def abort(self, reason: str = "the link was closed") -> None:
        """Break the connection now; everything that waits on it ends with an LLMException."""
        self._end(self._broken(reason))
        if self._reader is not None:
            self._reader.cancel()

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        return [self._reader] if self._reader is not None else []

    def _check(self) -> None:
        if self.lost.done():
            raise fresh(self.lost.result())
        if self.session.state is not State.READY:  # failed, and the reader is about to say why in `lost`
            raise self._broken("the connection is ending")

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        reason = "the connection was closed here"
        try:
            while self._dispatch():
                await self._flush()
                if self.session.more:
                    await asyncio.sleep(0)
                    self.session.receive(b"")
                    continue
                data = await self.channel.receive()
                self._heard = loop.time()
                if data:
                    self.session.receive(data)
                else:
                    self.session.receive_eof()
        except OSError as error:
            reason = f"the connection broke: {error}"
        except Exception as error:  # noqa: BLE001  (ends the lane, with the reason in the log)
            reason = f"internal error while reading: {error!r}"
            self._log.error("link.bug", peer=self.channel.peer, reason=repr(error))
        finally:
            self._end(self._broken(reason))

    def _broken(self, reason: str, status: LLMStatusCode = LLMStatusCode.LLM_LINK_FAILED) -> LLMException:
        """What was asked and not answered has not happened, so it may be asked again."""
        return LLMException(reason, status_code=status, peer=self.channel.peer, retry_safe=True)

    async def _flush(self) -> None:
        """Send what the session owes. The serving side also waits until the peer has read its earlier answers, so that
        a peer which only asks and never reads cannot make them pile up here.
        """
        output = self.session.take_output()
        if output or not self.session.requests:
            await self.channel.send(output)

    def _dispatch(self) -> bool:
        """Hand out what arrived; False when the session has failed."""
        while (event := self.session.next_event()) is not None:
            if isinstance(event, Failed):
                self._end(self._broken(event.reason, event.status))
                return False
            assert isinstance(event, Received)
            self._deliver(event.message, event.tail)
        return True

    def _deliver(self, message: Message, tail: bytes) -> None:
        if isinstance(message, (frames.Grant, frames.Refuse)):
            answer = self._answers.pop(message.request_id, None)
            if answer is None or answer.done():
                return
            if isinstance(message, frames.Grant):
                answer.set_result((message, tail))
            else:
                answer.set_exception(self._refusal(message))
        elif isinstance(message, frames.Pong):
            pong = self._pongs.get(message.number)
            if pong is not None and not pong.done():
                pong.set_result(None)
        else:
            assert self._on_message is not None
            self._on_message(message, tail)

    def _refusal(self, message: frames.Refuse) -> LLMException:
        status = status_of(message.status)
        if status is LLMStatusCode.LLM_SUCCESS:  # a refusal is never a success
            status = LLMStatusCode.LLM_FAILED
        again = status is not LLMStatusCode.LLM_PARAM_INVALID  # the same request would be refused again
        return LLMException(message.reason, status_code=status, peer=self.channel.peer, retry_safe=again)

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        now, due = loop.time(), self._due
        self._due = now + self._heartbeat
        if now - due > self._heartbeat:  # this side itself was held up: what came meanwhile has not been read yet
            self._heard += now - due
        silent = now - self._heard
        if silent > self._silence:
            self.abort(f"the peer was silent for {silent:.1f} s")
            return
        self.post(frames.Ping(0))  # by this side's own clock: the peer may ask less often than this side gives it up
        self._beat = loop.call_later(self._heartbeat, self._tick)

    def _end(self, error: LLMException) -> None:
        if self.lost.done():
            return
        self.lost.set_result(error)
        self.session.close()
        self.channel.abort()
        if self._beat is not None:
            self._beat.cancel()
        waiting: list[asyncio.Future[Answer] | asyncio.Future[None]] = [*self._answers.values(), *self._pongs.values()]
        self._answers.clear()
        for future in waiting:
            if not future.done():
                future.set_exception(fresh(error))
                future.exception()  # who asked may have been cancelled meanwhile

    def __repr__(self) -> str:
        return f"<Lane {self.channel.peer} {self.session!r}>"
