"""Hostile clients, written against the wire: crowds that never finish their greeting, and peers that have been let in.

Each attack is a coroutine that goes on for so many seconds, in a process of its own. It must not measure the victim.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import resource
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kvpull_async.protocol import frames
from kvpull_async.protocol.session import Failed, Identity, Ready, Session

__all__ = ["ATTACKS", "Target", "attacker"]

MAGIC: Final = b"KVPULL\x01"
CONTROL: Final = MAGIC + b"C"
MIB: Final = 1 << 20
_RECEIVE: Final = 1 << 16
_AGAIN: Final = 0.02


@dataclass(frozen=True)
class Target:
    """The victim, and what the attack may know: its secret only if the attacker is to be let in."""

    address: tuple[str, int]
    seconds: float
    count: int
    secret: bytes | None = None


@dataclass
class Seen:
    """What the attacker saw: connections made, how long the victim kept them (s), bytes sent, refusals."""

    connections: int = 0
    refused: int = 0
    sent: int = 0
    held: list[float] = field(default_factory=list)
    notes: set[str] = field(default_factory=set)

    def summary(self) -> dict[str, Any]:
        longest = max(self.held, default=0.0)
        return {
            "connections": self.connections, "refused": self.refused, "sent": self.sent, "longest": longest,
            "notes": sorted(self.notes)[:3],
        }  # fmt: skip


# -- crowds: none of them finishes its greeting ------------------------------------------------------------------------


class _Visitor(asyncio.Protocol):
    """One connection that says `first` at once, then the bytes of `rest` one each second."""

    def __init__(self, seen: Seen, first: bytes, rest: bytes = b"") -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._seen, self._first, self._rest = seen, first, rest

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._began = transport, time.monotonic()
        self._seen.connections += 1
        transport.write(self._first)
        if self._rest:
            self._trickle(0)

    def _trickle(self, at: int) -> None:
        if at < len(self._rest) and not self._transport.is_closing():
            self._transport.write(self._rest[at : at + 1])
            asyncio.get_running_loop().call_later(1.0, self._trickle, at + 1)

    def connection_lost(self, error: Exception | None) -> None:
        self._seen.held.append(time.monotonic() - self._began)
        if not self.over.done():
            self.over.set_result(None)

    def leave(self) -> None:
        self._transport.abort()


async def _crowd(target: Target, first: bytes, rest: bytes = b"") -> Seen:
    """As many connections at once as `count` and the descriptors allow, each made anew when the victim ends it."""
    seen, until = Seen(), time.monotonic() + target.seconds
    loop = asyncio.get_running_loop()

    async def visit() -> None:
        while time.monotonic() < until:
            try:
                _, visitor = await loop.create_connection(lambda: _Visitor(seen, first, rest), *target.address)
            except OSError:
                seen.refused += 1
                await asyncio.sleep(_AGAIN)
                continue
            await asyncio.wait([visitor.over], timeout=max(0.1, until - time.monotonic()))
            visitor.leave()
            await asyncio.sleep(_AGAIN)

    visits = [asyncio.ensure_future(visit()) for _ in range(_most(target.count))]
    await asyncio.wait(visits, timeout=target.seconds + 1)
    for one in visits:
        one.cancel()
    await asyncio.gather(*visits, return_exceptions=True)
    return seen


def _most(count: int) -> int:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return min(count, hard - 256)


def _hello(target: Target, **fields: Any) -> frames.Hello:
    base: dict[str, Any] = {
        "magic": frames.MAGIC, "version": frames.VERSION, "cluster_id": 66, "asked": 1,
        "incarnation": secrets.token_bytes(16), "nonce": secrets.token_bytes(32), "lane": 0, "token": b"",
        "authenticates": target.secret is not None, "paths": ["tcp"],
    }  # fmt: skip
    return frames.Hello(**{**base, **fields})


async def say_nothing(target: Target) -> Seen:
    return await _crowd(target, b"")


async def half_a_preamble(target: Target) -> Seen:
    return await _crowd(target, CONTROL[:5])


async def half_a_greeting(target: Target) -> Seen:
    return await _crowd(target, CONTROL + frames.encode(_hello(target))[:-20])


async def greet_and_stop(target: Target) -> Seen:
    """Without a secret it is let in as far as half a link; with one it never proves that it knows it."""
    proof = b"" if target.secret is not None else frames.encode(frames.Prove(b""))
    return await _crowd(target, CONTROL + frames.encode(_hello(target)) + proof)


async def large_greetings(target: Target) -> Seen:
    """All that a greeting may have and a byte less, and as much behind it as the connection takes."""
    head = frames.HEADER.pack(frames.GREETING_LIMIT, frames.Hello.kind, frames.GREETING_LIMIT)
    return await _crowd(target, CONTROL + head + bytes(frames.GREETING_LIMIT - 1))


async def too_large_greetings(target: Target) -> Seen:
    """More than the victim reads at once stands behind a greeting that is right."""
    return await _crowd(target, CONTROL + frames.encode(_hello(target)) + bytes(MIB // 2))


async def slow_preambles(target: Target) -> Seen:
    return await _crowd(target, b"", CONTROL)


async def slow_greetings(target: Target) -> Seen:
    return await _crowd(target, CONTROL, frames.encode(_hello(target)))


# -- peers that have been let in ---------------------------------------------------------------------------------------


class _Peer:
    """A link made by hand: `asks` and `serves` are its two connections."""

    def __init__(self, asks: socket.socket, serves: socket.socket) -> None:
        self.asks, self.serves = asks, serves
        self._numbers = itertools.count(1)

    @classmethod
    async def link(cls, target: Target) -> _Peer:
        mine = Identity(66, secrets.token_bytes(16), ("tcp",), target.secret)
        socks: list[socket.socket] = []
        token = b""
        for lane in (0, 1):
            sock = socket.create_connection(target.address, 10)
            sock.setblocking(False)
            socks.append(sock)
            token = await _greet(sock, Session(mine, dialer=True, asked=1, lane=lane, token=token))
        return cls(*socks)

    def request(self, tail: int = 0, **fields: Any) -> bytes:
        base: dict[str, Any] = {
            "request_id": next(self._numbers), "pull_id": "flood", "traceparent": "", "remaining_ms": 60_000,
            "key": "request", "identity": 1, "model_id": 0, "entry": 0, "first_tensor": -1, "tensors": 1, "size": 1,
            "offset": 0, "offset_pull": True, "blocks": 0, "remote_access": False, "inline_limit": 65536,
        }  # fmt: skip
        return frames.encode(frames.Request(**{**base, **fields}), bytes(tail))

    def watch(self) -> bytes:
        number = next(self._numbers)
        return frames.encode(frames.Watch(number, "request", 10**9 + number, 0, 0))

    def close(self) -> None:
        self.asks.close()
        self.serves.close()


async def _greet(sock: socket.socket, session: Session) -> bytes:
    """As an honest peer would; the token of the link."""
    loop = asyncio.get_running_loop()
    session.start()
    await loop.sock_sendall(sock, CONTROL)
    while True:
        await loop.sock_sendall(sock, session.take_output())
        data = await loop.sock_recv(sock, _RECEIVE)
        if data:
            session.receive(data)
        else:
            session.receive_eof()
        event = session.next_event()
        if isinstance(event, Ready):
            return event.peer.token
        if isinstance(event, Failed):
            raise ConnectionError(event.reason)


async def _peers(target: Target, behave: Callable[[_Peer, Seen], Awaitable[None]]) -> Seen:
    """`count` links, each of which behaves so again and again; one that the victim ends is made anew."""
    seen, until = Seen(), time.monotonic() + target.seconds

    async def one() -> None:
        while time.monotonic() < until:
            try:
                peer = await _Peer.link(target)
            except (OSError, TimeoutError) as error:
                seen.refused += 1
                seen.notes.add(str(error))
                await asyncio.sleep(0.1)
                continue
            seen.connections += 2
            began = time.monotonic()
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                await asyncio.wait_for(behave(peer, seen), max(0.1, until - time.monotonic()))
            seen.held.append(time.monotonic() - began)
            peer.close()

    await asyncio.gather(*(one() for _ in range(target.count)))
    return seen


async def _send(sock: socket.socket, data: bytes, seen: Seen) -> None:
    await asyncio.get_running_loop().sock_sendall(sock, data)
    seen.sent += len(data)


async def _until_ended(sock: socket.socket) -> None:
    while await asyncio.get_running_loop().sock_recv(sock, _RECEIVE):
        pass


async def large_tails(target: Target) -> Seen:
    """The first request waits for a payload connection that never comes; the others fill all that may wait behind it,
    and the frame after them, and one on the other connection, is never finished.
    """

    async def behave(peer: _Peer, seen: Seen) -> None:
        await _send(peer.asks, peer.request(size=MIB, inline_limit=0), seen)
        for _ in range(2):
            await _send(peer.asks, peer.request(frames.TAIL_LIMIT, key="blocks", remaining_ms=60_000), seen)
        await _send(peer.asks, peer.request(frames.TAIL_LIMIT, key="blocks")[:-1], seen)
        grant = frames.encode(frames.Grant(1, bytes(16), 1, 1, True, False), bytes(frames.TAIL_LIMIT))
        await _send(peer.serves, grant[:-1], seen)
        await _until_ended(peer.asks)

    return await _peers(target, behave)


async def slow_frames(target: Target) -> Seen:
    async def behave(peer: _Peer, seen: Seen) -> None:
        for byte in peer.request():
            await _send(peer.asks, bytes([byte]), seen)
            await asyncio.sleep(1.0)

    return await _peers(target, behave)


async def never_reading(target: Target) -> Seen:
    """Small requests, each answered with as much as rides on an answer, of which nothing is read."""

    async def behave(peer: _Peer, seen: Seen) -> None:
        while True:
            await _send(peer.asks, b"".join(peer.request(size=65536) for _ in range(8)), seen)

    return await _peers(target, behave)


async def chatter(target: Target) -> Seen:
    """All that is cheap to say, as fast as it is taken; what comes back is read."""

    async def behave(peer: _Peer, seen: Seen) -> None:
        reading = asyncio.ensure_future(_until_ended(peer.asks))
        try:
            while not reading.done():
                said = [frames.encode(frames.Ping(n)) for n in range(50)]
                said += [frames.encode(frames.Cancel(n)) for n in range(1, 50)]
                said += [peer.request(key="request", identity=10**9) for _ in range(20)]
                said += [frames.encode(frames.Done(secrets.token_bytes(16), "flood")) for _ in range(50)]
                watches = [peer.watch() for _ in range(40)]
                said += watches
                await _send(peer.asks, b"".join(said), seen)
                await asyncio.sleep(0)
        finally:
            reading.cancel()

    return await _peers(target, behave)


ATTACKS: Final[dict[str, Callable[[Target], Awaitable[Seen]]]] = {
    "say nothing": say_nothing,
    "half a preamble": half_a_preamble,
    "half a greeting": half_a_greeting,
    "greet and stop": greet_and_stop,
    "large greetings": large_greetings,
    "too large greetings": too_large_greetings,
    "slow preambles": slow_preambles,
    "slow greetings": slow_greetings,
    "large tails": large_tails,
    "slow frames": slow_frames,
    "never reading": never_reading,
    "chatter": chatter,
}


def attacker() -> Mapping[str, Callable[..., Any]]:
    """What a process of attackers can be asked."""

    def attack(name: str, target: Target) -> dict[str, Any]:
        return asyncio.run(_attack(name, target)).summary()

    return {"attack": attack}


async def _attack(name: str, target: Target) -> Seen:
    return await ATTACKS[name](target)
