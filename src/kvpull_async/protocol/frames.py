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
    "Check",
    "Checked",
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
    "Read",
    "Refuse",
    "Reject",
    "Request",
    "Welcome",
    "decode_table",
    "encode",
    "encode_table",
]

MAGIC: Final = "kvpull"
VERSION: Final = 2
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
Offers = Annotated[list[tuple[Name, Annotated[bytes, msgspec.Meta(max_length=512)]]], msgspec.Meta(max_length=4)]


class FrameError(ValueError):
    """The bytes are not a frame of this protocol; the connection cannot be used any more."""


class _Body(msgspec.Struct, array_like=True, frozen=True):
    kind: ClassVar[int]


class Hello(_Body, frozen=True):
    """The dialling side's first frame. `asked` is the cluster id that it expects to find. `token` is empty on a link's
    first connection and names the link afterwards. `paths` are the kinds of data path it can use, best first; on the
    second connection it is the one that was chosen.
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
    paths: Names


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
    """`offers` names the kinds of data path that both sides can use, each with what the dialling side needs for it."""

    kind: ClassVar[int] = 4
    cluster_id: U64
    proof: Proof
    token: Token
    offers: Offers


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
    """The source's consent: `per_tensor` bytes of each of `tensors` tensors follow, in the tail when `inline`.

    With a `ticket` the puller reads them by itself: from byte `start` of each source tensor on, or, for blocks, where
    it asked for them. With `entry_nbytes`, the size of the cache's batch entries, it may read the whole cache again
    without asking.
    """

    kind: ClassVar[int] = 9
    request_id: U64
    grant_id: Id16
    tensors: Count
    per_tensor: Count
    inline: bool
    wants_done: bool
    ticket: Annotated[bytes, msgspec.Meta(max_length=4096)] | None = None
    start: Count = 0
    entry_nbytes: Count = 0


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


class Check(_Body, frozen=True):
    """Is the memory of that grant still what it was? Asked after reading it, where nothing else can tell."""

    kind: ClassVar[int] = 16
    grant_id: Id16


class Checked(_Body, frozen=True):
    kind: ClassVar[int] = 17
    grant_id: Id16
    valid: bool


class Read(_Body, frozen=True):
    """Reads of a cache that were not asked for one by one, since the last such report; some have their pull's id."""

    kind: ClassVar[int] = 18
    cache_id: Count
    pulls: Count
    nbytes: Count
    pull_ids: Annotated[list[Name], msgspec.Meta(max_length=64)]


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
    | Check
    | Checked
    | Read
    | Bye
    | ByeAck
)
MESSAGES: Final[dict[int, type[Message]]] = {
    message.kind: message
    for message in (
        Hello, Challenge, Prove, Welcome, Reject, Ping, Pong, Request, Grant, Refuse, Cancel, Done, DoneAck, Check,
        Checked, Read, Bye, ByeAck,
    )
}  # fmt: skip
_DECODERS = {kind: msgspec.msgpack.Decoder(message, strict=True) for kind, message in MESSAGES.items()}
_ENCODER = msgspec.msgpack.Encoder()
_WITH_TAIL = (Request.kind, Grant.kind)


class Frame(msgspec.Struct, frozen=True):
    message: Message
    tail: bytes | memoryview = b""


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
        return Frame(_DECODERS[kind].decode(body), tail)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(f"a malformed {MESSAGES[kind].__name__} frame: {error}") from error
