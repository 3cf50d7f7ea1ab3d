"""A peer that speaks the protocol by its own means: sockets, TLS, `struct` and hashes, and nothing of the library. What
the library's two sides got wrong alike would show here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import secrets
import select
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

Address = tuple[str, int]
MAGIC = b"KVPULL\x01"
AGREED, REFUSED = b"\x06", b"\x15"
HELLO, CHALLENGE, PROVE, WELCOME, REJECT, PING, PONG, REQUEST, GRANT, REFUSE = range(1, 11)
DONE, DONE_ACK, BYE, BYE_ACK = 12, 13, 14, 15
PATIENCE = 20.0
"""Seconds after which a wait fails the test."""


# --- MessagePack, as much of it as the greeting needs ---


def pack(value: Any) -> bytes:
    if value is None:
        return b"\xc0"
    if isinstance(value, bool):
        return b"\xc3" if value else b"\xc2"
    if isinstance(value, int):
        return _integer(value)
    if isinstance(value, bytes):
        return _sized(len(value), 0xC4, 0xC5) + value
    if isinstance(value, str):
        text = value.encode()
        return (bytes([0xA0 | len(text)]) if len(text) < 32 else _sized(len(text), 0xD9, 0xDA)) + text
    items = b"".join(pack(item) for item in value)
    return (bytes([0x90 | len(value)]) if len(value) < 16 else struct.pack(">BH", 0xDC, len(value))) + items


def _sized(length: int, small: int, large: int) -> bytes:
    return struct.pack(">BB", small, length) if length < 256 else struct.pack(">BH", large, length)


def _integer(value: int) -> bytes:
    if -32 <= value < 128:
        return struct.pack("b", value)
    unsigned, signed = ((0xCC, "B"), (0xCD, "H"), (0xCE, "I"), (0xCF, "Q")), ((0xD0, "b"), (0xD1, "h"), (0xD2, "i"))
    for code, size in unsigned if value >= 0 else signed:
        with contextlib.suppress(struct.error):
            return struct.pack(f">B{size}", code, value)
    return struct.pack(">Bq", 0xD3, value)


_SCALARS = {0xCC: "B", 0xCD: "H", 0xCE: "I", 0xCF: "Q", 0xD0: "b", 0xD1: "h", 0xD2: "i", 0xD3: "q"}
_SIZED = {0xC4: "B", 0xC5: "H", 0xC6: "I", 0xD9: "B", 0xDA: "H", 0xDB: "I", 0xDC: "H", 0xDD: "I"}


def unpack(data: bytes) -> Any:
    value, end = _value(data, 0)
    assert end == len(data), "something stands behind the message"
    return value


def _value(data: bytes, at: int) -> tuple[Any, int]:
    code, at = data[at], at + 1
    if code < 0x80 or code >= 0xE0:
        return (code if code < 0x80 else code - 256), at
    if code in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[code], at
    if code in _SCALARS:
        size = struct.calcsize(_SCALARS[code])
        return struct.unpack(f">{_SCALARS[code]}", data[at : at + size])[0], at + size
    if code in _SIZED:
        size = struct.calcsize(_SIZED[code])
        (length,), at = struct.unpack(f">{_SIZED[code]}", data[at : at + size]), at + size
    else:
        length = code & (0x1F if code >= 0xA0 else 0x0F)
    if code in (0xDC, 0xDD) or 0x90 <= code < 0xA0:
        items = []
        for _ in range(length):
            item, at = _value(data, at)
            items.append(item)
        return items, at
    assert 0xA0 <= code < 0xC0 or code in (0xC4, 0xC5, 0xC6, 0xD9, 0xDA, 0xDB), f"MessagePack code {code:#x}"
    raw = data[at : at + length]
    return (raw if code in (0xC4, 0xC5, 0xC6) else raw.decode()), at + length


# --- frames ---


@dataclass(frozen=True)
class Said:
    """A frame that came."""

    kind: int
    fields: list[Any]
    tail: bytes
    raw: bytes


def frame(kind: int, *fields: Any, tail: bytes = b"") -> bytes:
    body = pack(fields)
    return struct.pack("<IBI", len(body) + len(tail), kind, len(body)) + body + tail


def frames_in(data: bytes) -> list[Said]:
    """Whole frames, to the last byte."""
    found = []
    while data:
        length, kind, body = struct.unpack_from("<IBI", data)
        assert len(data) >= 9 + length, "half a frame"
        found.append(Said(kind, unpack(data[9 : 9 + body]), data[9 + body : 9 + length], data[: 9 + length]))
        data = data[9 + length :]
    return found


def proof(secret: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA-256 over the frames said so far."""
    return hmac.new(secret, b"kvpull link 1" + b"".join(parts), hashlib.sha256).digest()


# --- connections ---


class Wire(contextlib.AbstractContextManager["Wire"]):
    """One TCP connection, blocking, maybe with TLS."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.settimeout(PATIENCE)

    @classmethod
    def open(cls, address: Address | None, first: bytes = MAGIC + b"C") -> Wire:
        assert address is not None
        wire = cls(socket.create_connection(address, timeout=PATIENCE))
        wire.send(first)
        return wire

    @classmethod
    def over_tls(cls, address: Address | None, context: ssl.SSLContext, kind: bytes = b"S") -> Wire:
        """With the listener's consent, and the client's side of the handshake over. ssl.SSLError when it fails."""
        wire = cls.open(address, MAGIC + kind)
        try:
            assert wire.take(1) == AGREED
            wire.secure(context)
        except BaseException:
            wire.close()
            raise
        return wire

    def secure(self, context: ssl.SSLContext, *, accepting: bool = False) -> None:
        self.sock = context.wrap_socket(self.sock, server_side=accepting)

    def send(self, data: bytes) -> None:
        """All of it, unless the peer has hung up."""
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            self.sock.sendall(data)

    def take(self, n: int) -> bytes:
        """n bytes; fewer at the end. An end of the connection is no more than that, however it came."""
        data = b""
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            while len(data) < n and (more := self.sock.recv(n - len(data))):
                data += more
        return data

    def read(self) -> Said | None:
        """The next frame; None when the peer has hung up."""
        head = self.take(9)
        if len(head) < 9:
            return None
        body = self.take(struct.unpack_from("<I", head)[0])
        return frames_in(head + body)[0]

    def rest(self) -> bytes:
        """Everything until the peer hangs up, which it must."""
        data = b""
        while more := self.take(65536):
            data += more
        self.close()
        return data

    def reset(self) -> None:
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def below_tls(self) -> socket.socket:
        """The connection without its TLS, whose keys are forgotten here."""
        return socket.socket(fileno=self.sock.detach())

    def pass_on(self, other: Wire) -> None:
        """What either says to the other one, until one of them hangs up."""
        while True:
            for one in select.select([self.sock, other.sock], [], [], PATIENCE)[0]:
                try:
                    data = one.recv(65536)
                except ConnectionError:
                    data = b""
                (other if one is self.sock else self).send(data)
                if not data:
                    (other if one is self.sock else self).hang_up()
                    return

    def hang_up(self) -> None:
        """Nothing more comes from here."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.sock, socket.SHUT_WR)

    def close(self) -> None:
        self.sock.close()

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class Peer:
    """Who dials, and its secret."""

    cluster_id: int = 66
    asked: int = 1
    secret: bytes | None = None
    incarnation: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    lane: int = 0
    token: bytes = b""
    version: int = 4
    oldest: int = 4
    authenticates: bool | None = None
    paths: tuple[str, ...] = ("tcp",)
    group: str = ""
    magic: str = "kvpull"
    more: tuple[Any, ...] = ()
    """Fields behind those that there are."""

    def but(self, **fields: Any) -> Peer:
        return dataclasses.replace(self, **fields)

    @property
    def hello(self) -> bytes:
        known = self.secret is not None if self.authenticates is None else self.authenticates
        return frame(
            HELLO, self.magic, self.version, self.cluster_id, self.asked, self.incarnation, self.nonce, self.lane,
            self.token, known, self.paths, self.group, self.oldest, *self.more,
        )  # fmt: skip

    def proves(self, challenge: bytes, *, hello: bytes | None = None) -> bytes:
        """PROVE, as an honest peer has to say it."""
        return frame(PROVE, b"" if self.secret is None else proof(self.secret, hello or self.hello, challenge))

    def greets(self, wire: Wire) -> Said:
        """The WELCOME, with a proof that is right, or the REJECT."""
        wire.send(self.hello)
        challenge = wire.read()
        assert challenge is not None
        if challenge.kind != CHALLENGE:
            return challenge
        wire.send(self.proves(challenge.raw))
        answer = wire.read()
        assert answer is not None
        if answer.kind == WELCOME and self.secret is not None:
            cluster_id, shown, token, offers = answer.fields
            text = self.hello + challenge.raw + frame(WELCOME, cluster_id, b"", token, offers)
            assert shown == proof(self.secret, text), "the node does not prove that it has the secret"
        return answer


@dataclass
class Linked(contextlib.AbstractContextManager["Linked"]):
    """Both connections of a link made by hand: `asks` carries this side's requests."""

    asks: Wire
    serves: Wire
    token: bytes

    def leave(self) -> None:
        """Say goodbye, and wait until it is heard."""
        self.asks.send(frame(BYE, False))
        self.asks.read()
        self.close()

    def close(self) -> None:
        self.asks.close()
        self.serves.close()

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.leave()
        else:
            self.close()


def linked(peer: Peer, connect: Callable[[], Wire]) -> Linked:
    asks, serves = connect(), connect()
    try:
        first = peer.greets(asks)
        assert first.kind == WELCOME, first
        second = peer.but(lane=1, token=first.fields[2], nonce=secrets.token_bytes(32)).greets(serves)
        assert second.kind == WELCOME, second
    except BaseException:
        asks.close()
        serves.close()
        raise
    return Linked(asks, serves, first.fields[2])


def request(number: int, key: int, *, tensors: int, size: int, inline: bool = True) -> bytes:
    """A pull of `size` bytes of each tensor of what was published under the request id `key`."""
    return frame(
        REQUEST, number, "by hand", "", 10_000, "request", key, 0, 0, -1, tensors, size, 0, False, 0, False,
        65536 if inline else 0, None, False, "",
    )  # fmt: skip


# --- the side that listens ---


class Server:
    """Listens, and does with each connection what the test says, in a thread each."""

    def __init__(self, script: Callable[[Wire, bytes], object]) -> None:
        self._script = script
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.address: Address = self._sock.getsockname()
        self.left: int = 0
        """Connections whose peer has hung up, after the script was over."""
        self.preambles: list[bytes] = []
        self.errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it is closed
            while True:
                sock, _ = self._sock.accept()
                thread = threading.Thread(target=self._talk, args=(Wire(sock),))
                self._threads.append(thread)
                thread.start()

    def _talk(self, wire: Wire) -> None:
        try:
            with wire:
                preamble = wire.take(8)
                self.preambles.append(preamble)
                self._script(wire, preamble[7:])
                if wire.sock.fileno() >= 0:  # a handshake that failed has closed it
                    wire.rest()
                self.left += 1
        except Exception as error:  # noqa: BLE001  (told to the test)
            self.errors.append(error)

    def close(self) -> None:
        self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        for thread in self._threads:
            thread.join(PATIENCE)


@contextlib.contextmanager
def server(script: Callable[[Wire, bytes], object]) -> Iterator[Server]:
    """Fails when a script did, or when the peer left a connection open."""
    one = Server(script)
    try:
        yield one
    finally:
        one.close()
    assert one.errors == []
    assert one.left == len(one.preambles)
