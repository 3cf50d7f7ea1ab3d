"""What the two ends of a side channel say, and the limits on it. It must not know sockets or memory.

One packet is one message in MessagePack, at most PACKET bytes, with at most DESCRIPTORS file descriptors beside it.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

__all__ = [
    "DESCRIPTORS",
    "PACKET",
    "TENSORS",
    "Drop",
    "Dropped",
    "Files",
    "Hello",
    "Layout",
    "Message",
    "Missed",
    "Offer",
    "Opened",
    "Stream",
    "decode",
    "decode_offer",
    "encode",
]

PACKET: Final = 96 * 1024
DESCRIPTORS: Final = 64
TENSORS: Final = 4096
"""Most tensors in one part of a layout."""

_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Id16 = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class Offer(msgspec.Struct, array_like=True, frozen=True):
    """Part of the greeting: where the accepting side waits, and on which machine and as which user."""

    boot_id: Annotated[str, msgspec.Meta(max_length=64)]
    uid: _Number
    name: Annotated[bytes, msgspec.Meta(min_length=16, max_length=64)]


class _Message(msgspec.Struct, array_like=True, frozen=True):
    pass


class Hello(_Message, frozen=True, tag=1):
    """The first message of each side; the page of epochs comes with it.

    The 16 bytes `probe` stand at `probe_address` for whoever can read this process's memory; 0 forbids to try. `reads`
    says whether this side could read the other's; the dialling side does not know yet.
    """

    token: _Id16
    probe_address: Annotated[int, msgspec.Meta(ge=0)]
    probe: _Id16
    reads: bool


class Opened(_Message, frozen=True, tag=2):
    """The dialling side's answer to the other's HELLO."""

    reads: bool


class Files(_Message, frozen=True, tag=3):
    """Memory files, whose descriptors come with it."""

    numbers: Annotated[list[_Number], msgspec.Meta(max_length=DESCRIPTORS)]
    nbytes: Annotated[list[_Number], msgspec.Meta(max_length=DESCRIPTORS)]


class Layout(_Message, frozen=True, tag=4):
    """A part of a publication: for tensors from `first` on, pairs of int64: the index in `files` (numbers of files sent
    before) and the offset there; or -1 and the address in the sender's memory.
    """

    number: _Number
    slot: _Number
    epoch: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    tensor_nbytes: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    tensors: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    first: _Number
    files: Annotated[list[_Number], msgspec.Meta(max_length=TENSORS)]
    places: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16 * TENSORS)]


class Missed(_Message, frozen=True, tag=5):
    """A publication could not be mapped: it is to be sent anew when it is asked for again."""

    number: _Number


class Drop(_Message, frozen=True, tag=6):
    """The publication is over: unmap it."""

    number: _Number


class Dropped(_Message, frozen=True, tag=7):
    number: _Number


class Stream(_Message, frozen=True, tag=8):
    """A connection for bytes that cannot be shared comes with it."""

    lane: Annotated[int, msgspec.Meta(ge=0, le=1)]


Message = Hello | Opened | Files | Layout | Missed | Drop | Dropped | Stream

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Message, strict=True)
_OFFERS = msgspec.msgpack.Decoder(Offer, strict=True)


def encode(message: Message | Offer) -> bytes:
    return _ENCODER.encode(message)


def decode(data: bytes) -> Message:
    """OSError when the peer says what nobody understands."""
    try:
        return _DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConnectionError(f"a malformed message on the side channel: {error}") from error


def decode_offer(data: bytes) -> Offer:
    try:
        return _OFFERS.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConnectionError(f"a malformed offer: {error}") from error
