"""What the protocol's tests share: one frame of every kind, their mutations, and pairs of sessions without I/O."""

from __future__ import annotations

import random
import secrets
import struct
from typing import Any

import msgspec
import numpy as np

from kvpull_async.protocol import frames
from kvpull_async.protocol.frames import Frame, Message
from kvpull_async.protocol.session import Asked, Failed, Identity, Session, State
from kvpull_async.status import LLMStatusCode


def framed(message: Message, tail: bytes = b"") -> Frame:
    """The frame of a message as a decoder gives it."""
    return Frame(message, tail, msgspec.msgpack.encode(message) if isinstance(message, frames.Hello) else b"")


_ID16, _NONCE, _PROOF = bytes(range(16)), bytes(range(32)), b"\xaa" * 32
_REQUEST = frames.Request(
    request_id=1, pull_id="0123456789abcdef", traceparent="00-" + "a" * 32 + "-" + "b" * 16 + "-01",
    remaining_ms=1000, key="request", identity=7, model_id=0, entry=0, first_tensor=-1, tensors=2, size=64,
    offset=0, offset_pull=False, blocks=0, remote_access=False, inline_limit=65536,
)  # fmt: skip
_OFFER = frames.Offer(
    request_id=1, grant_id=_ID16, pull_id="0123456789abcdef", traceparent="", remaining_ms=1000, key="blocks",
    identity=0, model_id=3, entry=0, first_tensor=2, tensors=2, per_tensor=64, blocks=2, block_nbytes=32, src_tensor=1,
    start=0, src_blocks=2, inline=False, begun=False, ticket=b"a ticket",
)  # fmt: skip
SAMPLES: dict[str, Frame] = {
    type(frame.message).__name__: frame
    for frame in (
        framed(frames.Hello("kvpull", frames.VERSION, 5, 2, _ID16, _NONCE, 0, b"", True, ["tcp"])),
        Frame(frames.Challenge(frames.VERSION, _ID16, _NONCE, True)),
        Frame(frames.Prove(_PROOF)),
        Frame(frames.Welcome(2, _PROOF, _ID16, [("tcp", b""), ("shm", b"a name")])),
        Frame(frames.Reject(int(LLMStatusCode.LLM_LINK_FAILED), "the link secrets of the two sides differ")),
        Frame(frames.Ping(2**64 - 1)),
        Frame(frames.Pong(3)),
        Frame(_REQUEST, frames.encode_table(np.arange(20, dtype=np.int64))),
        Frame(frames.Grant(1, _ID16, 2, 64, True, True), bytes(128)),
        Frame(frames.Refuse(1, int(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST), "req_id 7 of model 0 is not here")),
        Frame(frames.Cancel(1)),
        Frame(frames.Done(_ID16, "0123456789abcdef")),
        Frame(frames.DoneAck(_ID16)),
        Frame(frames.Bye()),
        Frame(frames.ByeAck()),
        Frame(frames.Check(_ID16)),
        Frame(frames.Checked(_ID16, False)),
        Frame(frames.Read(3, 2, 4096, ["0123456789abcdef"])),
        Frame(_OFFER, frames.encode_table(np.array([5, 1, 0, 3], dtype=np.int64))),
        Frame(frames.Accept(1)),
        Frame(frames.Result(1, int(LLMStatusCode.LLM_PARAM_INVALID), "block 5: the receiver has 4", unsafe=False)),
        Frame(frames.Watch(2, "request", 7, 0, 0)),
        Frame(frames.Appeared(2)),
        Frame(frames.Digest(2, b"12345678")),
        Frame(frames.Lease(9, "pull-9", "request", 7, 0, 0, 5000)),
    )
}
"""One frame of every kind, by the message's name."""


def sample(name: str) -> bytes:
    return frames.encode(SAMPLES[name].message, SAMPLES[name].tail)


_EDGES = (0, 1, 0x7F, 0x80, 0xFF, 0x100, 0xFFFF, 0x10000, 0x1000000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)


def mutate(data: bytes, rng: random.Random) -> bytes:
    """One to three small damages: bits, bytes, lengths, pieces removed, doubled or put in."""
    damaged = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(damaged)) if damaged else 0
        kind = rng.randrange(7)
        if kind == 0 and damaged:
            damaged[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and damaged:
            damaged[at] = rng.randrange(256)
        elif kind == 2:
            struct.pack_into("<I", head := bytearray(4), 0, rng.choice(_EDGES))
            offset = rng.choice((0, 5, at))
            damaged[offset : offset + 4] = head
        elif kind == 3:
            del damaged[at : at + rng.randint(1, 16)]
        elif kind == 4:
            damaged[at:at] = damaged[at : at + rng.randint(1, 64)]
        elif kind == 5:
            damaged[at:at] = rng.randbytes(rng.randint(1, 16))
        else:
            del damaged[at:]
    return bytes(damaged)


# --- sessions without I/O ---


def identity(cluster_id: int, *, secret: bytes | None = None, incarnation: bytes | None = None) -> Identity:
    return Identity(cluster_id, incarnation or secrets.token_bytes(16), ("tcp",), secret)


def exchange(one: Session, other: Session) -> None:
    """Carry output to and fro until both are silent."""
    while (there := one.take_output()) or (back := other.take_output()):
        if there:
            other.receive(there)
        else:
            one.receive(back)


def greeted(
    *, lane: int = 0, dialer: Identity | None = None, acceptor: Identity | None = None, token: bytes = b"t" * 16
) -> tuple[Session, Session]:
    """A dialling and an accepting session that are READY, their events taken."""
    mine, theirs = dialer or identity(1), acceptor or identity(2)
    dialling = Session(mine, dialer=True, asked=theirs.cluster_id, lane=lane, token=token if lane else b"")
    accepting = Session(theirs, dialer=False)
    dialling.start()
    exchange(dialling, accepting)
    assert isinstance(accepting.next_event(), Asked)
    accepting.welcome(token=token)
    exchange(dialling, accepting)
    assert dialling.state is accepting.state is State.READY
    drained(dialling), drained(accepting)
    return dialling, accepting


def drained(session: Session) -> list[Any]:
    events = []
    while (event := session.next_event()) is not None:
        events.append(event)
    return events


def deliver(session: Session, message: Message, tail: bytes = b"") -> list[Any]:
    """The events that a message causes."""
    session.receive(frames.encode(message, tail))
    return drained(session)


def at(role: str, state: str) -> Session:
    """A session brought into a state by an honest peer; without secrets, so that any proof is as good as none."""
    if state in ("asks", "serves"):
        lane = 0 if (role == "dialer") == (state == "asks") else 1
        pair = greeted(lane=lane)
        return pair[0] if role == "dialer" else pair[1]
    session = Session(identity(2 if role == "acceptor" else 1), dialer=role == "dialer", asked=2)
    if state == "new":
        return session
    if role == "dialer":
        session.start()
        if state == "proving":
            deliver(session, frames.Challenge(frames.VERSION, b"i" * 16, b"n" * 32, authenticates=False))
    else:
        deliver(session, plain_hello())
        if state == "deciding":
            deliver(session, frames.Prove(b""))
    assert session.state is State(state)
    session.take_output()
    return session


def plain_hello(**fields: Any) -> frames.Hello:
    hello = frames.Hello("kvpull", frames.VERSION, 1, 2, b"i" * 16, b"n" * 32, 0, b"", False, ["tcp"])
    return msgspec.structs.replace(hello, **fields)


PLAIN: dict[str, Message] = {name: frame.message for name, frame in SAMPLES.items()} | {
    "Hello": plain_hello(),
    "Challenge": frames.Challenge(frames.VERSION, b"i" * 16, b"n" * 32, authenticates=False),
    "Prove": frames.Prove(b""),
    "Welcome": frames.Welcome(2, b"", _ID16, [("tcp", b"")]),
}
"""A message of every kind, as peers without a secret send it."""


def refused(dialer: Session, acceptor: Session) -> tuple[Failed, Failed]:
    """Greet to the end; both sides must have failed. What the dialling and what the accepting side says."""
    dialer.start()
    exchange(dialer, acceptor)
    mine, theirs = drained(dialer), drained(acceptor)
    assert [type(event) for event in (*mine, *theirs)] == [Failed, Failed]
    return mine[0], theirs[0]


def sent(session: Session) -> list[Message]:
    decoder = frames.Decoder(1 << 30)
    decoder.feed(session.take_output())
    found = []
    while (frame := decoder.next_frame()) is not None:
        found.append(frame.message)
    return found
