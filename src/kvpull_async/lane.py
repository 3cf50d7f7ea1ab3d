"""One connection of a link: drives the session's state machine over a control channel. It must not know caches.

A lane carries requests in one direction. It matches answers to requests, answers heartbeats, notices a silent peer,
and ends once, with a reason, in `lost`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final

from kvpull_async._deadline import Deadline
from kvpull_async._prompt import Prompt
from kvpull_async.answers import Answer, Answers
from kvpull_async.greeting import Greeting
from kvpull_async.observe import Log
from kvpull_async.protocol import frames
from kvpull_async.protocol.frames import FrameError, Message
from kvpull_async.protocol.session import WATCHES_LIMIT, Asking, Failed, Received, Session, State
from kvpull_async.status import LLMException, LLMStatusCode, fresh
from kvpull_async.transport.base import ControlChannel

__all__ = ["Answer", "Lane"]

OnMessage = Callable[[Message, bytes], None]
_SOON: Final = 0.001
"""Seconds for which a message that nobody waits for may wait for another one."""


class Lane(Greeting):
    """Used by one event loop. `abort` ends it at any time."""

    def __init__(
        self, channel: ControlChannel, session: Session, *, log: Log, heartbeat: float, silence: float
    ) -> None:
        super().__init__(channel, session, log=log)
        self.lost: asyncio.Future[LLMException] = asyncio.get_running_loop().create_future()
        self._heartbeat = heartbeat
        self._silence = silence
        self._on_message: OnMessage | None = None
        self._pings = 0
        self._loop = asyncio.get_running_loop()
        self._answers = Answers(self._loop, channel.peer)
        self._paused = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._handing = False
        self.turns: int = 0
        """How often something has been handed out."""
        self._mentioned: list[Message] = []
        self._soon: asyncio.TimerHandle | None = None
        self._beat: asyncio.TimerHandle | None = None
        self._heard = 0.0
        self._due = 0.0

    # -- the ready connection ---------------------------------------------------------------------------------------

    def start(self, on_message: OnMessage) -> None:
        """Begin to read. Requests, their ends and acknowledgements go to `on_message`; answers to who asked."""
        loop = self._loop
        self._on_message = on_message
        self._heard = loop.time()
        self._due = self._heard + self._heartbeat
        self._beat = loop.call_later(self._heartbeat, self._tick)
        self._pause()
        self.channel.deliver(self._arrived, self._ended)
        self._run(self._live())
        loop.call_soon(self._go_on)  # first with what came on the heels of the greeting

    def ask(self, request: Callable[[int], frames.Request], tail: bytes) -> tuple[int, bytes, Prompt[Answer]]:
        """Register a request: its id, its bytes (for `send`) and the future of its answer (LLMException: refused)."""
        request_id, data = self._register(request, tail)
        return request_id, data, self._answers.of_request(request_id)

    def digest(self, request_id: int) -> asyncio.Future[bytes]:
        """For a request with a sum, right after `ask`: the future of the source's. Empty if the source made none."""
        return self._answers.digest_of(request_id)

    def refusal(self, request_id: int) -> asyncio.Future[LLMException]:
        """For a request whose bytes are sent: the future of the source's word, after its grant, that they do not all
        come. To be cancelled in the end.
        """
        return self._answers.refusal_of(request_id)

    def offer(
        self, offer: Callable[[int], frames.Offer], *tail: bytes | memoryview, accepted: Callable[[], None]
    ) -> tuple[int, bytes, Prompt[frames.Result]]:
        """The same for an offer; `accepted` is called when the peer waits for its bytes on the data path."""
        request_id, data = self._register(offer, *tail, kind=frames.Offer)
        return request_id, data, self._answers.of_result(request_id, accepted)

    def lease(self, lease: Callable[[int], frames.Lease]) -> tuple[int, bytes, Prompt[frames.Result]]:
        """The same for a lease, which the peer answers at once."""
        request_id, data = self._register(lease, kind=frames.Lease)
        return request_id, data, self._answers.of_result(request_id)

    async def appeared(self, name: object, watch: Callable[[int], frames.Watch]) -> None:
        """Wait until the peer has what is named. Those who wait for one name share a watch.

        LLMException: the connection is lost, or (LLM_LINK_BUSY) too many names are waited for.
        """
        self._check()
        appeared = self._answers.of_watch(name, partial(self._watch, watch))
        try:
            await appeared
        finally:
            request_id = self._answers.unwatch(name, appeared)
            if request_id is not None:
                self.give_up(request_id, tell=True)

    def _watch(self, watch: Callable[[int], frames.Watch]) -> int:
        if self._answers.watches >= WATCHES_LIMIT:
            reason = f"{WATCHES_LIMIT} names are waited for on the link already"
            raise LLMException(reason, status_code=LLMStatusCode.LLM_LINK_BUSY, retry_safe=True)
        request_id, data = self._register(watch, kind=frames.Watch)
        self.channel.post(data)
        return request_id

    def _register(
        self, make: Callable[[int], Asking], *tail: bytes | memoryview, kind: type[Asking] = frames.Request
    ) -> tuple[int, bytes]:
        self._check()
        if self.channel.ready:
            self._recall()
        else:  # what was said before must not be taken back with this
            self._say()
        request_id = self.session.new_request(kind)
        try:
            self.session.send(make(request_id), *tail)
        except FrameError as error:
            self.session.end_request(request_id)
            if recalled := self.session.take_output():
                self.channel.post(recalled)
            raise LLMException(str(error), status_code=LLMStatusCode.LLM_PARAM_INVALID) from error
        return request_id, self.session.take_output()

    def give_up(self, request_id: int, *, tell: bool) -> None:
        """The request is over here; with `tell`, the peer must stop working on it."""
        self.session.end_request(request_id)
        self._answers.forget(request_id)
        if tell:
            self.post(frames.Cancel(request_id))

    def post(self, message: Message, *tail: bytes | memoryview) -> None:
        """Send without waiting: a small message, or when the channel is ready. The tail may come in pieces. Nothing
        happens on a connection that is over.
        """
        if not self.lost.done() and self.session.state is State.READY:
            self._recall()
            self.session.send(message, *tail)
            if tail or not self._handing:  # what is said to what has come goes out together, but does not pile up
                self._say()

    def mention(self, message: Message) -> None:
        """Send with the next message, or by itself before long: nobody waits for it."""
        if not self.lost.done() and self.session.state is State.READY:
            self._mentioned.append(message)
            if self._soon is None:
                self._soon = self._loop.call_later(_SOON, self._say)

    def _recall(self) -> None:
        """What was mentioned comes before what is said next."""
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
            for message in self._mentioned:
                self.session.send(message)
            self._mentioned.clear()

    def _say(self) -> None:
        """Send what waits to be sent."""
        self._recall()
        output = self.session.take_output()
        if output:
            self.channel.post(output)

    async def send(self, message: Message, tail: bytes = b"") -> None:
        self._check()
        self._say()  # not what may be taken back with this
        self.session.send(message, tail)
        await self.channel.send(self.session.take_output())

    async def ping(self, deadline: Deadline) -> None:
        """One round trip. asyncio.TimeoutError or LLMException when the peer does not answer."""
        self._check()
        self._pings += 1
        number = self._pings
        with self._answers.of_ping(number) as pong:
            async with deadline.scope():
                await self.send(frames.Ping(number))
                await pong

    async def check(self, grant_id: bytes) -> bool:
        """Whether the source has held the memory of a grant until now. One round trip; LLMException when it is lost."""
        self._check()
        with self._answers.of_check(grant_id) as check:
            await self.send(frames.Check(grant_id))
            return await check

    def abort(self, reason: str = "the link was closed") -> None:
        """Break the connection now; everything that waits on it ends with an LLMException."""
        self._end(self._broken(reason))

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        return list(self._tasks)

    def _check(self) -> None:
        if self.lost.done():
            raise fresh(self.lost.result())
        if self.session.state is not State.READY:  # failed, and about to say why in `lost`
            raise self._broken("the connection is ending")

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine, name="kvpull-lane")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _live(self) -> None:
        """Until it is lost. What comes does not pass here: it is for the loop, whose own end then ends the lane."""
        try:
            await asyncio.wait([self.lost])
        finally:
            self._end(self._broken("the connection was closed here"))

    def _arrived(self, data: bytes | memoryview) -> None:
        self._heard = time.monotonic()
        self._take(data)

    def _ended(self, error: OSError | None) -> None:
        if error is not None:
            self._end(self._broken(f"the connection broke: {error}"))
        else:
            self.session.receive_eof()
            self._dispatch()

    def _take(self, data: bytes | memoryview) -> None:
        if self.lost.done():
            return
        self._handing = True
        self.turns += 1
        try:
            self.session.receive(data)
            if self._dispatch():
                self._flush()
        except Exception as error:  # noqa: BLE001  (ends the lane, with the reason in the log)
            self._log.error("link.bug", peer=self.channel.peer, reason=repr(error))
            self._end(self._broken(f"internal error while reading: {error!r}"))
        finally:
            self._handing = False

    def _flush(self) -> None:
        """Send what the session owes. As long as frames are left for the next turn of the loop nothing more is read.
        The serving side also waits until the peer has read its earlier answers, so that a peer which only asks and
        never reads cannot make them pile up here.
        """
        output = self.session.take_output()
        if self.channel.ready:
            if output:
                self.channel.post(output)
            if self.session.more:
                self._pause()
                self._loop.call_soon(self._go_on)
        elif output or self.session.more or not self.session.requests:
            self._pause()
            self._run(self._wait(output))

    def _pause(self) -> None:
        self._paused = True
        self.channel.pause()

    async def _wait(self, output: bytes) -> None:
        """Until the peer has read, and then go on."""
        try:
            await self.channel.send(output)
        except OSError as error:
            self._end(self._broken(f"the connection broke: {error}"))
        self._go_on()

    def _go_on(self) -> None:
        self._paused = False
        self._take(b"")
        if not self._paused and not self.lost.done():
            self.channel.resume()

    def _broken(self, reason: str, status: LLMStatusCode = LLMStatusCode.LLM_LINK_FAILED) -> LLMException:
        """What was asked and not answered has not happened, so it may be asked again."""
        return LLMException(reason, status_code=status, peer=self.channel.peer, retry_safe=True)

    def _dispatch(self) -> bool:
        """Hand out what arrived; False when the session has failed."""
        answered = self._answers.deliver
        while (event := self.session.next_event()) is not None:
            if isinstance(event, Failed):
                self._end(self._broken(event.reason, event.status))
                return False
            assert isinstance(event, Received)
            if not answered(event.message, event.tail):
                assert self._on_message is not None
                self._on_message(event.message, bytes(event.tail))
        return True

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
        if self.session.state is State.READY:
            self._say()
        elif self._soon is not None:
            self._soon.cancel()
        self.lost.set_result(error)
        self.session.close()
        self.channel.abort()
        if self._beat is not None:
            self._beat.cancel()
        self._answers.fail(error)

    def __repr__(self) -> str:
        return f"<Lane {self.channel.peer} {self.session!r}>"
