"""The greeting of one connection, for both sides: the session's first steps over a control channel. It must not know
what the connection is for afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvpull_async._deadline import Deadline
from kvpull_async.observe import Log
from kvpull_async.protocol.session import Asked, Event, Failed, Peer, Ready, Session, State
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.transport.base import ControlChannel

__all__ = ["Greeting"]


class Greeting:
    """A connection that begins."""

    def __init__(self, channel: ControlChannel, session: Session, *, log: Log) -> None:
        self.channel = channel
        self.session = session
        session.misfit = self._misfit
        self._log = log

    async def dial(self, deadline: Deadline) -> Peer:
        """Greet as the side that dialled. LLMException when the peer refuses, OSError when the connection breaks."""
        self.session.start()
        event = await self._greeting(deadline)
        assert isinstance(event, Ready)
        if misfit := self._misfit(event.peer.cluster_id):
            raise LLMException(misfit, status_code=LLMStatusCode.LLM_LINK_FAILED, peer=self.channel.peer)
        return event.peer

    async def accept(self, deadline: Deadline) -> Peer:
        """Greet as the side that was dialled: who asks. Answer with `welcome` or `reject`."""
        if self.channel.unfit:
            await self.reject(LLMStatusCode.LLM_LINK_FAILED, self.channel.unfit)
            raise LLMException(self.channel.unfit, status_code=LLMStatusCode.LLM_LINK_FAILED, peer=self.channel.peer)
        event = await self._greeting(deadline)
        assert isinstance(event, Asked)
        return event.peer

    def _misfit(self, cluster_id: int) -> str:
        """Why the peer cannot be who it says it is, or ""."""
        if self.channel.speaks_for(cluster_id):
            return ""
        return f"the certificate of {self.channel.peer} does not name kvpull:cluster:{cluster_id}"

    def welcome(self, *, token: bytes, offers: Sequence[tuple[str, bytes]] = ()) -> Peer:
        """Let the peer in. LLMException when it sent more before it was answered, which no honest peer does."""
        if self.session.state is not State.DECIDING:
            raise LLMException(
                "the peer did not wait for the answer to its greeting", status_code=LLMStatusCode.LLM_LINK_FAILED
            )
        self.session.welcome(token=token, offers=offers)
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
                output = self.session.take_output()
                if output or not self.session.requests:
                    await self.channel.send(output)
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
