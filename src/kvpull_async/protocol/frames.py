"""Messages to and from bytes, and every limit on frames. It must not know states, sockets or caches.

A frame: 4-byte length of what follows the header, 1-byte kind, 4-byte length of the MessagePack body (all little
endian), the body, then a tail: the kind decides whether it is a table of int64 values or payload bytes.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvpull_async.protocol.messages import (
    MESSAGES,
    Accept,
    Appeared,
    Bye,
    ByeAck,
    Cancel,
    Challenge,
    Check,
    Checked,
    Digest,
    Done,
    DoneAck,
    Grant,
    Hello,
    Lease,
    Message,
    Offer,
    Ping,
    Pong,
    Prove,
    Read,
    Refuse,
    Reject,
    Request,
    Result,
    Watch,
    Welcome,
)

__all__ = [
    "GREETING_LIMIT",
    "HEADER",
    "INLINE_MOST",
    "MAGIC",
    "MESSAGES",
    "OLDEST",
    "REASON_LIMIT",
    "TAIL_LIMIT",
    "VERSION",
    "Accept",
    "Appeared",
    "Bye",
    "ByeAck",
    "Cancel",
    "Challenge",
    "Check",
    "Checked",
    "Decoder",
    "Digest",
    "Done",
    "DoneAck",
    "Frame",
    "FrameError",
    "Grant",
    "Hello",
    "Lease",
    "Message",
    "Offer",
    "Ping",
    "Pong",
    "Prove",
    "Read",
    "Refuse",
    "Reject",
    "Request",
    "Result",
    "Watch",
    "Welcome",
    "decode_table",
    "encode",
    "encode_table",
]

MAGIC: Final = "kvpull"
VERSION: Final = 4
OLDEST: Final = 4
"""The oldest version that is still spoken. A new version appends fields, with defaults, and kinds of message; it sends
them only to a peer that speaks it, and readers skip fields that they do not know.
"""
HEADER: Final = struct.Struct("<IBI")
BODY_LIMIT: Final = 64 * 1024
GREETING_LIMIT: Final = 4 * 1024
"""Largest frame before the peer has been authenticated."""
TAIL_LIMIT: Final = 16 * 1024 * 1024
"""Largest table (two million blocks) or payload that may ride on a frame."""
INLINE_MOST: Final = 2**20
"""Most bytes of a cache that ride on a grant or an offer."""
REASON_LIMIT: Final = 1000
"""Most characters of a reason that a peer is told."""


class FrameError(ValueError):
    """The bytes are not a frame of this protocol; the connection cannot be used any more."""


_DECODERS = {kind: msgspec.msgpack.Decoder(message, strict=True) for kind, message in MESSAGES.items()}
_ENCODER = msgspec.msgpack.Encoder()
_WITH_TAIL = (Request.kind, Grant.kind, Offer.kind)


class Frame(msgspec.Struct, frozen=True):
    message: Message
    tail: bytes | memoryview = b""
    body: bytes = b""
    """As it came, of a HELLO only: it may say more than this version knows, and all of it is proven."""


def encode(message: Message, *tail: bytes | memoryview) -> bytes:
    """One frame as bytes; the tail may come in pieces. FrameError when it would exceed what a peer accepts."""
    body, tail_size = _ENCODER.encode(message), sum(map(len, tail))
    if len(body) > BODY_LIMIT or tail_size > TAIL_LIMIT:
        raise FrameError(f"a {type(message).__name__} frame of {len(body)} + {tail_size} bytes exceeds the limits")
    return b"".join((HEADER.pack(len(body) + tail_size, message.kind, len(body)), body, *tail))


def encode_table(values: NDArray[np.int64]) -> bytes:
    return np.ascontiguousarray(values, dtype="<i8").tobytes()


def decode_table(tail: bytes) -> NDArray[np.int64]:
    """The int64 values of a tail, without a loop. Raises FrameError for a partial value."""
    if len(tail) % 8:
        raise FrameError(f"a table of {len(tail)} bytes is not made of 8-byte values")
    return np.frombuffer(tail, dtype="<i8").astype(np.int64, copy=False)


class Decoder:
    """Takes bytes and yields frames. Memory stays below one frame of the current `limit` plus what was fed."""

    def __init__(self, limit: int = GREETING_LIMIT) -> None:
        self.limit = limit
        self._buffer = bytearray()
        self._fed: bytes | memoryview = b""
        self._at = 0

    def feed(self, data: bytes | memoryview) -> None:
        """Frames that are whole are read where they are, and their tails stay there: see `keep`."""
        self.keep()
        if self._buffer:
            self._buffer += data
        else:
            self._fed, self._at = data, 0

    def keep(self) -> None:
        """What was fed last and is left of it will not be valid for longer."""
        if self._at < len(self._fed):
            self._buffer += self._fed[self._at :]
        self._fed, self._at = b"", 0

    def clear(self) -> None:
        """Nothing more will be asked for: give up what has come of a frame."""
        self._buffer = bytearray()
        self._fed, self._at = b"", 0

    @property
    def buffered(self) -> int:
        return len(self._buffer) + len(self._fed) - self._at

    def next_frame(self) -> Frame | None:
        """The next whole frame, None when more bytes are needed, FrameError when this can never become one."""
        source = self._buffer or self._fed
        body_at = self._at + HEADER.size
        if len(source) < body_at:
            return None
        length, kind, body_length = HEADER.unpack_from(source, self._at)
        self._check(length, kind, body_length)
        body_end, end = body_at + body_length, body_at + length
        if len(source) < end:
            return None
        body = source[body_at:body_end]
        if isinstance(source, bytearray):
            tail: bytes | memoryview = bytes(source[body_end:end])
            del self._buffer[:end]
        else:
            tail = source[body_end:end]
            self._at = end
        return _frame(kind, body, tail)

    def whole(self, data: bytes | memoryview) -> Frame | None:
        """What `feed` and `next_frame` would give for bytes that are just one frame, as nearly all are; None for other
        bytes, which must be fed.
        """
        if self._buffer or self._at < len(self._fed) or len(data) < HEADER.size:
            return None
        length, kind, body_length = HEADER.unpack_from(data)
        if len(data) != HEADER.size + length:
            return None
        self._check(length, kind, body_length)
        return _frame(kind, data[HEADER.size : HEADER.size + body_length], data[HEADER.size + body_length :])

    def _check(self, length: int, kind: int, body_length: int) -> None:
        if length > self.limit:
            raise FrameError(
                f"a frame of {length} bytes exceeds the limit of {self.limit}; "
                f"perhaps the peer does not speak the kvpull protocol"
            )
        if kind not in _DECODERS:
            raise FrameError(f"frame kind {kind} is unknown; perhaps the peer does not speak the kvpull protocol")
        if body_length > min(length, BODY_LIMIT):
            raise FrameError(f"a body of {body_length} bytes in a frame of {length} (limit {BODY_LIMIT})")
        if body_length != length and kind not in _WITH_TAIL:
            raise FrameError(f"a {MESSAGES[kind].__name__} frame carries no tail, {length - body_length} bytes came")


def _frame(kind: int, body: bytes | bytearray | memoryview, tail: bytes | memoryview) -> Frame:
    try:
        return Frame(_DECODERS[kind].decode(body), tail, bytes(body) if kind == Hello.kind else b"")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(f"a malformed {MESSAGES[kind].__name__} frame: {error}") from error
