"""What tests of lanes and links share: the library's events, a channel under the test's control, and the links of one
engine on the test's own loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvpull_async import LLMRole
from kvpull_async._deadline import Deadline
from kvpull_async._workers import Workers
from kvpull_async.config import Settings
from kvpull_async.lane import Lane
from kvpull_async.linkage import LinkContext, Route
from kvpull_async.links import Codes, Links, Target
from kvpull_async.memory.base import Allocation, Region
from kvpull_async.memory.host import HostMemory
from kvpull_async.observe import Counters, Log
from kvpull_async.protocol import frames
from kvpull_async.protocol.frames import Message
from kvpull_async.protocol.session import Peer, Session
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.transport.arrivals import Arrivals
from kvpull_async.transport.base import Address, ControlChannel, DataPath, Listener, PathKind
from kvpull_async.transport.inproc import InprocTransport
from kvpull_async.transport.tcp import TcpTransport
from kvpull_async.values import Placement
from tests.wire import exchange, identity

TOKEN = b"t" * 16
PATIENCE = 20.0
"""Seconds that a test waits for what must come; reached only when it fails."""


class EventLog(logging.Handler):
    """What the library logged, from whichever thread, as dicts."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.events: list[dict[str, Any]] = []
        self.warnings: list[dict[str, Any]] = []
        """Those of them that are warnings, or worse."""

    def emit(self, record: logging.LogRecord) -> None:
        self.events.append(record.__dict__["kvpull"])
        if record.levelno >= logging.WARNING:
            self.warnings.append(self.events[-1])

    def named(self, name: str, *, text: str = "", **fields: Any) -> list[dict[str, Any]]:
        """The events of that name with these fields, whose reason contains `text`."""
        return [
            event
            for event in tuple(self.events)
            if event["event"] == name
            and text in event.get("reason", "")
            and all(event.get(key) == value for key, value in fields.items())
        ]

    async def first(self, name: str, *, text: str = "", **fields: Any) -> dict[str, Any]:
        """The first such event, waiting for it."""
        await eventually(lambda: bool(self.named(name, text=text, **fields)), f"{name} {text!r} in {self.events}")
        return self.named(name, text=text, **fields)[0]


@contextlib.contextmanager
def event_log() -> Iterator[EventLog]:
    logger, log = logging.getLogger("kvpull"), EventLog()
    level = logger.level
    logger.addHandler(log)
    logger.setLevel(logging.DEBUG)
    try:
        yield log
    finally:
        logger.removeHandler(log)
        logger.setLevel(level)


async def eventually(condition: Callable[[], bool], what: str | Callable[[], str] = "it") -> None:
    """Wait until another thread or the loop has made the condition true."""
    give_up = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < give_up, f"never happened: {what if isinstance(what, str) else what()}"
        await asyncio.sleep(0.002)


# --- a channel under the test's control ---


class ScriptedChannel(ControlChannel):
    """Gives the lane what the test feeds, and keeps what the lane sends. `clogged` makes `send` wait."""

    def __init__(self) -> None:
        self.peer = "scripted"
        self.arrivals = Arrivals(self._taken)
        self.sent: list[bytes] = []
        self.aborted = False
        self.reads = 0
        self.clogged = False
        self._flowing = asyncio.Event()

    @property
    def ready(self) -> bool:
        return not self.clogged and not self.aborted

    async def send(self, data: bytes) -> None:
        while self.clogged and not self.aborted:
            await self._flowing.wait()
        if self.aborted:
            raise ConnectionResetError("aborted")
        self.post(data)

    def post(self, data: bytes) -> None:
        if data:
            self.sent.append(data)

    def abort(self) -> None:
        self.aborted = True
        self._flowing.set()

    def feed(self, *data: bytes | OSError) -> None:
        """Each in a turn of its own; b"" is the end of the stream."""
        for item in data:
            asyncio.get_running_loop().call_soon(self._arrive, item)

    def _arrive(self, item: bytes | OSError) -> None:
        if isinstance(item, OSError) or not item:
            self.arrivals.end(item or None)
        else:
            self.arrivals.put(item)

    def _taken(self, n: int) -> None:
        self.reads += 1

    def unclog(self) -> None:
        self.clogged = False
        self._flowing.set()

    def take(self) -> list[Message]:
        """The messages sent since the last call."""
        decoder, messages = frames.Decoder(limit=1 << 30), []
        for data in self.sent:
            decoder.feed(data)
        self.sent.clear()
        while (frame := decoder.next_frame()) is not None:
            messages.append(frame.message)
        return messages


class LaneScene:
    """A lane, the channel below it, and the peer's session on the other end."""

    def __init__(self, *, dialer: bool = True, lane: int = 0, heartbeat: float = 60.0, silence: float = 120.0) -> None:
        self.channel = ScriptedChannel()
        session = Session(identity(1), dialer=dialer, asked=2, lane=lane)
        self.lane = Lane(self.channel, session, log=Log(), heartbeat=heartbeat, silence=silence)
        self.peer = Session(identity(2), dialer=not dialer, asked=1, lane=lane)
        self.received: list[tuple[Message, bytes]] = []

    async def greet(self) -> LaneScene:
        """Through the greeting, by itself, and into the ready connection."""
        session = self.lane.session
        (session if session._dialer else self.peer).start()
        exchange(session, self.peer)
        acceptor = self.peer if session._dialer else session
        acceptor.welcome(token=TOKEN)
        exchange(session, self.peer)
        while session.next_event() is not None or self.peer.next_event() is not None:
            pass
        self.lane.start(lambda message, tail: self.received.append((message, tail)))
        await asyncio.sleep(0)
        return self

    def say(self, message: Message, tail: bytes = b"") -> None:
        self.channel.feed(frames.encode(message, tail))

    async def heard(self, kind: type[Message]) -> Message:
        """The next message of that kind which the lane sent."""
        seen: list[Message] = []

        def arrived() -> bool:
            seen.extend(self.channel.take())
            return any(isinstance(message, kind) for message in seen)

        await eventually(arrived, kind.__name__)
        return next(message for message in seen if isinstance(message, kind))

    async def lost(self) -> LLMException:
        return await asyncio.wait_for(asyncio.shield(self.lane.lost), 20)


class PlainMemory(HostMemory):
    """Ordinary memory without memory files, so that a module's tests may share it."""

    def allocate(self, *, tensors: int, tensor_nbytes: int, placement: Placement) -> Allocation:
        owner = np.zeros(tensors * tensor_nbytes, np.uint8)
        base = owner.ctypes.data
        regions = tuple(Region(base + i * tensor_nbytes, tensor_nbytes, placement, owner) for i in range(tensors))
        return Allocation(regions, 0, placement)


# --- the links of one engine, on the test's own loop ---

CODES = Codes(
    timeout=LLMStatusCode.LLM_TIMEOUT,
    repeated=LLMStatusCode.LLM_ALREADY_LINK,
    unknown_unlink=LLMStatusCode.LLM_SUCCESS,
    unreachable_unlink=LLMStatusCode.LLM_UNLINK_FAILED,
)


@dataclass
class RecordingServer:
    """Stands for what answers requests: keeps them, and hands BYE on as the real one does."""

    lane: Lane
    peer: Peer
    peer_left: Callable[[bool], None]
    messages: list[Message] = field(default_factory=list)
    aborted: bool = False

    def receive(self, message: Message, tail: bytes) -> None:
        self.messages.append(message)
        if isinstance(message, frames.Done):
            self.lane.post(frames.DoneAck(message.grant_id))
        elif isinstance(message, frames.Bye):
            self.lane.post(frames.ByeAck())
            self.peer_left(message.returns)

    def abort(self) -> None:
        self.aborted = True


class LoopNode:
    """`Links` with a real transport and a recording server. `kinds` are the kinds of path beside it, if not its own."""

    def __init__(
        self,
        cluster_id: int,
        *,
        transport: str = "tcp",
        kinds: tuple[PathKind, ...] | None = None,
        incarnation: bytes | None = None,
        secret: bytes | None = None,
        **settings: Any,
    ) -> None:
        self.log = Log()
        self.counters = Counters()
        self.servers: list[RecordingServer] = []
        self.workers = Workers(1)
        self.settings = Settings(LLMRole.DECODER, cluster_id, **settings)
        inproc = transport == "inproc"
        self.transport = InprocTransport(self.log) if inproc else TcpTransport(self.log, greeting_timeout=3.0)
        self.route = Route(self.transport, (self.transport,) if kinds is None else kinds)
        self.context = LinkContext(
            identity=identity(cluster_id, secret=secret, incarnation=incarnation),
            settings=self.settings,
            log=self.log,
            counters=self.counters,
            workers=self.workers,
            routes=(self.route,),
            serve=self._serve,
            gone=lambda link: self.links.gone(link),  # noqa: PLW0108  (made below)
        )
        self.links = Links(self.context, CODES)
        self.listener: Listener | None = None

    def _serve(self, lane: Lane, path: DataPath, peer: Peer, peer_left: Callable[[bool], None]) -> RecordingServer:
        server = RecordingServer(lane, peer, peer_left)
        self.servers.append(server)
        return server

    async def listen(self, address: Address = ("127.0.0.1", 0)) -> Address:
        self.listener = await self.transport.listen(address, lambda c: self.links.accept(self.route, c))
        return self.listener.address

    @property
    def target(self) -> Target:
        assert self.listener is not None
        return Target(self.settings.cluster_id, self.listener.address)

    async def link(self, *others: LoopNode | Target, timeout_ms: int = 15000) -> list[LLMStatusCode]:
        targets = [other if isinstance(other, Target) else other.target for other in others]
        return await self.links.link(targets, Deadline.after_ms(timeout_ms))

    async def unlink(self, cluster_id: int, *, force: bool = False, timeout_ms: int = 15000) -> LLMStatusCode:
        target = Target(cluster_id, None)
        return (await self.links.unlink([target], Deadline.after_ms(timeout_ms), force=force))[0]

    async def stop_listening(self) -> None:
        listener, self.listener = self.listener, None
        if listener is not None:
            await listener.aclose()

    async def die(self) -> None:
        """End as a killed process does: without a word to the peers."""
        for link in self.links.all():
            link.wave = lambda **_: None  # type: ignore[method-assign]
        await self.close()

    async def close(self) -> None:
        await self.stop_listening()
        await self.links.close(Deadline.after_ms(5000))
        self.workers.close(5.0)


@contextlib.asynccontextmanager
async def loop_nodes(*nodes: LoopNode, listen: bool = True) -> AsyncIterator[None]:
    """The nodes listen, and are closed at the end."""
    try:
        for node in nodes if listen else ():
            await node.listen()
        yield
    finally:
        for node in nodes:
            await node.close()
