"""Whole nodes for tests, and peers on raw sockets that say whatever a test wants them to."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import struct
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np

from kvpull_async import (
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    KvCache,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
)
from kvpull_async._deadline import Deadline
from kvpull_async.protocol import frames
from kvpull_async.protocol.frames import Message
from kvpull_async.protocol.session import Asked, Failed, Identity, Ready, Session, State
from kvpull_async.transport.base import Address
from tests.wire import identity

MAGIC = b"KVPULL\x01"
TENSORS, ENTRIES, STRIDE = 2, 4, 1024
DESC = CacheDesc(TENSORS, [ENTRIES, STRIDE], DataType.DT_INT8)
TIMEOUT_MS = 20_000
OK = LLMStatusCode.LLM_SUCCESS
_requests = itertools.count(1)


# --- whole nodes ---


@contextlib.asynccontextmanager
async def node(
    cluster_id: int, role: LLMRole = LLMRole.DECODER, *, listen: str | None = None, **properties: Any
) -> AsyncIterator[LLMDataDist]:
    """An initialised node, finalised at the end; `properties` are those of LLMConfig."""
    config = LLMConfig()
    config.sync_kv_timeout = TIMEOUT_MS
    if listen is not None:
        config.listen_ip_info = listen
    for name, value in properties.items():
        setattr(config, name, value)
    async with LLMDataDist(role, cluster_id) as made:
        await made.init(config.generate_options())
        yield made


def serving(cluster_id: int = 1, **properties: Any) -> contextlib.AbstractAsyncContextManager[LLMDataDist]:
    """A prefill node on a free port of this machine, over TCP."""
    return node(cluster_id, LLMRole.PROMPT, listen="127.0.0.1:0", **{"transfer_backend": "tcp", **properties})


def pulling(cluster_id: int = 2, **properties: Any) -> contextlib.AbstractAsyncContextManager[LLMDataDist]:
    return node(cluster_id, LLMRole.DECODER, **{"transfer_backend": "tcp", **properties})


def info(cluster_id: int, address: Address | None = None) -> LLMClusterInfo:
    one = LLMClusterInfo()
    one.remote_cluster_id = cluster_id
    if address is not None:
        one.append_remote_ip_info(*address)
    return one


def info_of(target: LLMDataDist) -> LLMClusterInfo:
    assert target.listen_address is not None
    return info(target.cluster_id, target.listen_address)


async def link(one: LLMDataDist, *targets: LLMDataDist | LLMClusterInfo, timeout: int = TIMEOUT_MS) -> Any:
    """The codes of the clusters, or the only one."""
    clusters = [target if isinstance(target, LLMClusterInfo) else info_of(target) for target in targets]
    _, codes = await one.link_clusters(clusters, timeout)
    return codes[0] if len(targets) == 1 else codes


async def unlink(one: LLMDataDist, cluster_id: int, *, force: bool = False, timeout: int = TIMEOUT_MS) -> LLMStatusCode:
    _, codes = await one.unlink_clusters([info(cluster_id)], timeout, force)
    return codes[0]


def links_of(one: LLMDataDist) -> list[Any]:
    """The links of a node; what tests of the public API need no more than a look at."""
    return one._core.engine.links.all()


async def publish(source: LLMDataDist, fill: int) -> tuple[CacheKey | CacheKeyByIdAndIndex, KvCache]:
    """A cache of one value, and the key to its first entry: a fresh one, or its id where the role has no keys."""
    keys = [CacheKey(source.cluster_id, next(_requests))] if source._core.engine.node.role is LLMRole.PROMPT else []
    cache = await source.kv_cache_manager.allocate_cache(DESC, keys)
    for tensor in range(TENSORS):
        source.kv_cache_manager.get_cache_tensors(cache, tensor)[0].numpy()[:] = fill
    return keys[0] if keys else CacheKeyByIdAndIndex(source.cluster_id, cache.cache_id, 0), cache


def content(puller: LLMDataDist, cache: KvCache | Cache) -> set[int]:
    """Every value that stands in a cache's first entry."""
    tensors = [puller.kv_cache_manager.get_cache_tensors(cache, tensor)[0].numpy() for tensor in range(TENSORS)]
    return set(np.unique(np.concatenate([tensor[0] for tensor in tensors])).tolist())


async def honest_pull(puller: LLMDataDist, source: LLMDataDist, fill: int) -> None:
    """Publish, pull, and check the bytes."""
    key, published = await publish(source, fill)
    into = await puller.kv_cache_manager.allocate_cache(DESC)
    try:
        await puller.kv_cache_manager.pull_cache(key, into)
        assert content(puller, into) == {fill}
    finally:
        await puller.kv_cache_manager.deallocate_cache(into)
        await source.kv_cache_manager.deallocate_cache(published)


async def honest_client(source: LLMDataDist, fill: int = 7, **properties: Any) -> None:
    """A new node links, pulls and leaves."""
    async with pulling(99, **properties) as puller:
        assert await link(puller, source) == OK
        await honest_pull(puller, source, fill)
        assert await unlink(puller, source.cluster_id) == OK


# --- raw peers ---


class Raw:
    """A plain TCP client."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    @classmethod
    async def connect(cls, address: Address | None, data: bytes = MAGIC + b"C") -> Raw:
        assert address is not None
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        raw = cls(sock)
        try:
            await asyncio.get_running_loop().sock_connect(sock, address)
            await raw.send(data)
        except BaseException:
            sock.close()
            raise
        return raw

    async def send(self, data: bytes) -> None:
        """All of it, unless the peer hangs up meanwhile."""
        with contextlib.suppress(ConnectionError):
            await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def receive(self) -> bytes:
        """Some bytes; none after the peer has hung up."""
        try:
            async with Deadline.after_ms(TIMEOUT_MS).scope():  # wait_for may swallow a cancellation, before 3.12
                return await asyncio.get_running_loop().sock_recv(self.sock, 65536)
        except ConnectionError:
            return b""

    async def rest(self) -> bytes:
        """Everything until the peer hangs up, which it must."""
        said = b""
        while data := await self.receive():
            said += data
        self.close()
        return said

    def hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.sock.close()


def messages(data: bytes) -> list[Message]:
    decoder, found = frames.Decoder(1 << 30), []
    decoder.feed(data)
    while (frame := decoder.next_frame()) is not None:
        found.append(frame.message)
    return found


async def greet(raw: Raw, session: Session) -> Any:
    """Greet as an honest peer would; the event that ends the greeting."""
    session.start()
    while True:
        await raw.send(session.take_output())
        data = await raw.receive()
        if data:
            session.receive(data)
        else:
            session.receive_eof()
        event = session.next_event()
        if event is not None:
            return event


class RawPeer:
    """A peer that has linked by hand: `asks` is its requesting connection, `serves` the other one."""

    def __init__(self, asks: Raw, serves: Raw) -> None:
        self.asks = asks
        self.serves = serves

    def close(self) -> None:
        self.asks.close()
        self.serves.close()


async def raw_peer(address: Address | None, *, who: Identity | None = None, asked: int = 1) -> RawPeer:
    mine = who or identity(66)
    raws: list[Raw] = []
    token = b""
    for lane in (0, 1):
        raws.append(await Raw.connect(address))
        ready = await greet(raws[-1], Session(mine, dialer=True, asked=asked, lane=lane, token=token))
        assert isinstance(ready, Ready), ready
        token = ready.peer.token
    return RawPeer(*raws)


Answer = Callable[[frames.Request], "list[tuple[Message, bytes]] | bytes"]
"""Frames with their tails, or bytes as they are."""


class HostileSource:
    """Accepts links as cluster 1 and answers requests as the test says. `payload` is sent on payload connections."""

    def __init__(self) -> None:
        self.answer: Answer = lambda _: []
        self.payload = b""
        self.cancelled: list[int] = []
        self.address: Address = ("", 0)
        self._identity = identity(1)
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[HostileSource]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = server.sockets[0].getsockname()
        try:
            yield self
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            preamble = await reader.readexactly(8)
            if preamble[7:] == b"P":
                await reader.readexactly(17)
                writer.write(b"\x06" + self.payload)
                await reader.read()
            else:
                await self._link(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        session = Session(self._identity, dialer=False)
        while session.state is not State.FAILED:
            event = session.next_event()
            if isinstance(event, Asked):
                session.welcome(token=event.peer.token or b"t" * 16, offers=[("tcp", b"")])
            elif event is not None and hasattr(event, "message"):
                self._handle(session, event.message, writer)
            if event is None or session.state is State.READY:
                writer.write(session.take_output())
            if event is None:
                data = await reader.read(65536)
                if not data:
                    return
                session.receive(data)

    def _handle(self, session: Session, message: Message, writer: asyncio.StreamWriter) -> None:
        if isinstance(message, frames.Request):
            answer = self.answer(message)
            raw = isinstance(answer, bytes)
            writer.write(answer if raw else b"".join(frames.encode(one, tail) for one, tail in answer))
            session.end_request(message.request_id)
        elif isinstance(message, frames.Cancel):
            self.cancelled.append(message.request_id)
        elif isinstance(message, frames.Done):
            session.send(frames.DoneAck(message.grant_id))
        elif isinstance(message, frames.Bye):
            session.send(frames.ByeAck())


def payload_head(grant_id: bytes, nbytes: int) -> bytes:
    return struct.pack("<16sQ", grant_id, nbytes)


__all__ = [
    "DESC", "ENTRIES", "MAGIC", "OK", "STRIDE", "TENSORS", "TIMEOUT_MS", "Failed", "HostileSource", "Raw", "RawPeer",
    "content", "greet", "honest_client", "honest_pull", "info", "info_of", "link", "links_of", "messages", "node",
    "payload_head", "publish", "pulling", "raw_peer", "serving", "unlink",
]  # fmt: skip
