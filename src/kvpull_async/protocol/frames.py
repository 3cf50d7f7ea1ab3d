"""Messages to and from bytes, and every limit on them. It must not know states, sockets or caches.

A frame: 4-byte length of what follows the header, 1-byte kind, 4-byte length of the MessagePack body (all little
endian), the body, then a tail: the kind decides whether it is a table of int64 values or payload bytes.
"""

from __future__ import annotations

import struct
from typing import Annotated, ClassVar, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

__all__ = [
    "GREETING_LIMIT",
    "HEADER",
    "MAGIC",
    "MESSAGES",
    "TAIL_LIMIT",
    "VERSION",
    "Bye",
    "ByeAck",
    "Cancel",
    "Challenge",
    "Decoder",
    "Done",
    "DoneAck",
    "Frame",
    "FrameError",
    "Grant",
    "Hello",
    "Message",
    "Ping",
    "Pong",
    "Prove",
    "Refuse",
    "Reject",
    "Request",
    "Welcome",
    "decode_table",
    "encode",
    "encode_table",
]

MAGIC: Final = "kvpull"
VERSION: Final = 1
HEADER: Final = struct.Struct("<IBI")
BODY_LIMIT: Final = 64 * 1024
GREETING_LIMIT: Final = 4 * 1024
"""Largest frame before the peer has been authenticated."""
TAIL_LIMIT: Final = 16 * 1024 * 1024
"""Largest table (two million blocks) or payload that may ride on a frame."""

Text = Annotated[str, msgspec.Meta(max_length=1024)]
Name = Annotated[str, msgspec.Meta(max_length=64)]
Id16 = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Token = Annotated[bytes, msgspec.Meta(max_length=32)]
Nonce = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Proof = Annotated[bytes, msgspec.Meta(max_length=32)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
U64 = Annotated[int, msgspec.Meta(ge=0)]
Names = Annotated[list[Name], msgspec.Meta(max_length=32)]


class FrameError(ValueError):
    """The bytes are not a frame of this protocol; the connection cannot be used any more."""


class _Body(msgspec.Struct, array_like=True, frozen=True):
    kind: ClassVar[int]


class Hello(_Body, frozen=True):
    """The dialling side's first frame. `asked` is the cluster id that it expects to find. `token` is empty on a link's
    first connection and names the link afterwards.
    """

    kind: ClassVar[int] = 1
    magic: Name
    version: int
    cluster_id: U64
    asked: U64
    incarnation: Id16
    nonce: Nonce
    lane: Annotated[int, msgspec.Meta(ge=0, le=1)]
    token: Token
    authenticates: bool
    capabilities: Names


class Challenge(_Body, frozen=True):
    kind: ClassVar[int] = 2
    version: int
    incarnation: Id16
    nonce: Nonce
    authenticates: bool


class Prove(_Body, frozen=True):
    kind: ClassVar[int] = 3
    proof: Proof


class Welcome(_Body, frozen=True):
    kind: ClassVar[int] = 4
    cluster_id: U64
    proof: Proof
    token: Token
    capabilities: Names
    path: Name


class Reject(_Body, frozen=True):
    """The link is refused; `status` is an LLMStatusCode."""

    kind: ClassVar[int] = 5
    status: int
    reason: Text


class Ping(_Body, frozen=True):
    kind: ClassVar[int] = 6
    number: U64


class Pong(_Body, frozen=True):
    kind: ClassVar[int] = 7
    number: U64


class Request(_Body, frozen=True):
    """Ask for `size` bytes of each of `tensors` tensors, or for the blocks listed in the tail.

    `key` says how `identity` is read: "request" (req_id), "prefix" (prefix_id), "cache" (cache_id; `entry` is the
    batch index) or "blocks" (no identity, the model's blocks cache). `first_tensor` is -1 for "all tensors".
    `blocks` is the number of destination blocks when a contiguous entry is cut into blocks of `size` bytes.
    """

    kind: ClassVar[int] = 8
    request_id: U64
    pull_id: Name
    traceparent: Name
    remaining_ms: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
    key: Name
    identity: int
    model_id: U64
    entry: Count
    first_tensor: Annotated[int, msgspec.Meta(ge=-1, le=2**32 - 1)]
    tensors: Count
    size: Count
    offset: Count
    offset_pull: bool
    blocks: Count
    remote_access: bool
    inline_limit: Count


class Grant(_Body, frozen=True):
    """The source's consent: `per_tensor` bytes of each of `tensors` tensors follow, in the tail when `inline`. The
    `ticket` is what a one-sided path needs to find them by itself.
    """

    kind: ClassVar[int] = 9
    request_id: U64
    grant_id: Id16
    tensors: Count
    per_tensor: Count
    inline: bool
    wants_done: bool
    ticket: Annotated[bytes, msgspec.Meta(max_length=4096)] = b""


class Refuse(_Body, frozen=True):
    kind: ClassVar[int] = 10
    request_id: U64
    status: int
    reason: Text


class Cancel(_Body, frozen=True):
    kind: ClassVar[int] = 11
    request_id: U64


class Done(_Body, frozen=True):
    """Every byte of the grant has landed. Idempotent; repeated until acknowledged."""

    kind: ClassVar[int] = 12
    grant_id: Id16
    pull_id: Name


class DoneAck(_Body, frozen=True):
    kind: ClassVar[int] = 13
    grant_id: Id16


class Bye(_Body, frozen=True):
    kind: ClassVar[int] = 14


class ByeAck(_Body, frozen=True):
    kind: ClassVar[int] = 15


Message = (
    Hello
    | Challenge
    | Prove
    | Welcome
    | Reject
    | Ping
    | Pong
    | Request
    | Grant
    | Refuse
    | Cancel
    | Done
    | DoneAck
    | Bye
    | ByeAck
)
MESSAGES: Final[dict[int, type[Message]]] = {
    message.kind: message
    for message in (
        Hello, Challenge, Prove, Welcome, Reject, Ping, Pong, Request, Grant, Refuse, Cancel, Done, DoneAck, Bye, ByeAck
    )
}  # fmt: skip
_DECODERS = {kind: msgspec.msgpack.Decoder(message, strict=True) for kind, message in MESSAGES.items()}
_ENCODER = msgspec.msgpack.Encoder()
_WITH_TAIL = (Request.kind, Grant.kind)


class Frame(msgspec.Struct, frozen=True):
    message: Message
    tail: bytes = b""


def encode(message: Message, tail: bytes = b"") -> bytes:
    """One frame as bytes. Raises FrameError when it would exceed what a peer accepts."""
    body = _ENCODER.encode(message)
    if len(body) > BODY_LIMIT or len(tail) > TAIL_LIMIT:
        raise FrameError(f"a {type(message).__name__} frame of {len(body)} + {len(tail)} bytes exceeds the limits")
    return HEADER.pack(len(body) + len(tail), message.kind, len(body)) + body + tail


def encode_table(values: NDArray[np.int64]) -> bytes:
    return np.ascontiguousarray(values, dtype="<i8").tobytes()


def decode_table(tail: bytes) -> NDArray[np.int64]:
    """The int64 values of a tail, without a loop. Raises FrameError for a partial value."""
    if len(tail) % 8:
        raise FrameError(f"a table of {len(tail)} bytes is not made of 8-byte values")
    return np.frombuffer(tail, dtype="<i8").astype(np.int64, copy=False)


class Decoder:
    """Collects bytes and yields frames. Memory stays below one frame of the current `limit` plus what was fed."""

    def __init__(self, limit: int = GREETING_LIMIT) -> None:
        self.limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    @property
    def buffered(self) -> int:
        return len(self._buffer)

    def next_frame(self) -> Frame | None:
        """The next whole frame, None when more bytes are needed, FrameError when this can never become one."""
        if len(self._buffer) < HEADER.size:
            return None
        length, kind, body_length = HEADER.unpack_from(self._buffer)
        self._check(length, kind, body_length)
        if len(self._buffer) < HEADER.size + length:
            return None
        body_end = HEADER.size + body_length
        body = bytes(memoryview(self._buffer)[HEADER.size : body_end])
        tail = bytes(memoryview(self._buffer)[body_end : HEADER.size + length])
        del self._buffer[: HEADER.size + length]
        try:
            return Frame(_DECODERS[kind].decode(body), tail)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise FrameError(f"a malformed {MESSAGES[kind].__name__} frame: {error}") from error

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
