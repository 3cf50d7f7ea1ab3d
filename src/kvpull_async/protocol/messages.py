"""The messages of the protocol, as msgspec reads and writes them. They must not know bytes, states or caches."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final

import msgspec

__all__ = [
    "MESSAGES",
    "Accept",
    "Appeared",
    "Bye",
    "ByeAck",
    "Cancel",
    "Challenge",
    "Check",
    "Checked",
    "Digest",
    "Done",
    "DoneAck",
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
]

Text = Annotated[str, msgspec.Meta(max_length=1024)]
Name = Annotated[str, msgspec.Meta(max_length=64)]
Id16 = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Token = Annotated[bytes, msgspec.Meta(max_length=32)]
Nonce = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Sum = Annotated[bytes, msgspec.Meta(max_length=64)]
Proof = Annotated[bytes, msgspec.Meta(max_length=32)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
U64 = Annotated[int, msgspec.Meta(ge=0)]
Names = Annotated[list[Name], msgspec.Meta(max_length=32)]
Layout = tuple[int, Annotated[list[Count], msgspec.Meta(max_length=32)]]
Offers = Annotated[list[tuple[Name, Annotated[bytes, msgspec.Meta(max_length=512)]]], msgspec.Meta(max_length=4)]


class _Body(msgspec.Struct, array_like=True, frozen=True):
    kind: ClassVar[int]


class Hello(_Body, frozen=True):
    """The dialling side's first frame. `asked` is the cluster id that it expects to find. `token` is empty on a link's
    first connection and names the link afterwards. `paths` are the kinds of data path it can use, best first; on the
    second connection it is the one that was chosen. `group` names the meeting it comes to, "" the ordinary listener.
    `version` is the newest that it speaks, `oldest` the oldest.
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
    group: Name = ""
    oldest: int = 0
    """0: no older one than `version`."""


class Challenge(_Body, frozen=True):
    """`version` is the one that both sides speak from here on."""

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
    layout: Layout | None = None
    """Refuse unless the source's data type and the shape of its entries are these; an empty shape is any."""
    waits: bool = False
    """A refusal for want of the key is no failure: the puller waits until it is here, and asks again."""
    verify: Name = ""
    """The sum over the granted bytes, in the order of the request, that the source is to send in a DIGEST, or none."""


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


class Digest(_Body, frozen=True):
    """The sum over a grant's bytes at the source, if it was asked for: as soon as it is known, beside GRANT. Empty
    where none could be made.
    """

    kind: ClassVar[int] = 24
    request_id: U64
    digest: Sum


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


class Offer(_Body, frozen=True):
    """A push: take `per_tensor` bytes of each of `tensors` tensors from this side.

    `key` says how the destination is named: "cache" (`identity` is the cache id, `entry` the batch index), "blocks"
    (`model_id`) or "address" (the receiver looks each up among its caches). With `blocks` they fill so many blocks of
    `block_nbytes` bytes each, the last maybe not to its end, else they are one run.

    The bytes come in one of three ways: at the end of the tail when `inline`; read by the receiver with a `ticket`,
    from byte `start` of each tensor from `src_tensor` on, or from `src_blocks` blocks; or sent on the data path, at
    once when `begun`, else after ACCEPT. The tail begins with int64 values: an address for each tensor when so named,
    the destination's blocks, and the source's blocks.
    """

    kind: ClassVar[int] = 19
    request_id: U64
    grant_id: Id16
    pull_id: Name
    traceparent: Name
    remaining_ms: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
    key: Name
    identity: int
    model_id: U64
    entry: Count
    first_tensor: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
    tensors: Count
    per_tensor: Count
    blocks: Count
    block_nbytes: Count
    src_tensor: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
    start: Count
    src_blocks: Count
    inline: bool
    begun: bool
    ticket: Annotated[bytes, msgspec.Meta(max_length=4096)] | None = None
    verify: Name = ""
    """The sum over the bytes, in the order of the offer, that the receiver is to return in its RESULT, or none."""


class Accept(_Body, frozen=True):
    """The receiver of an offer is ready for its bytes on the data path."""

    kind: ClassVar[int] = 20
    request_id: U64


class Result(_Body, frozen=True):
    """What became of an offer, or a lease; nothing writes to an offer's destination any more, unless it is `unsafe`."""

    kind: ClassVar[int] = 21
    request_id: U64
    status: int
    reason: Text
    unsafe: bool
    digest: Sum = b""


class Lease(_Body, frozen=True):
    """Keep what is named, as in a REQUEST, for `lease_ms` from now on, or, with 0, give it up: nobody will pull it."""

    kind: ClassVar[int] = 25
    request_id: U64
    pull_id: Name
    key: Name
    identity: int
    model_id: U64
    entry: Count
    lease_ms: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class Watch(_Body, frozen=True):
    """Say once what is named, as in a REQUEST, is here; ended by CANCEL."""

    kind: ClassVar[int] = 22
    request_id: U64
    key: Name
    identity: int
    model_id: U64
    entry: Count


class Appeared(_Body, frozen=True):
    kind: ClassVar[int] = 23
    request_id: U64


class Bye(_Body, frozen=True):
    """This side ends the link; or, if it `returns`, ends itself, and may be found again at its address."""

    kind: ClassVar[int] = 14
    returns: bool = False


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
    | Digest
    | Refuse
    | Cancel
    | Done
    | DoneAck
    | Check
    | Checked
    | Read
    | Offer
    | Accept
    | Result
    | Lease
    | Watch
    | Appeared
    | Bye
    | ByeAck
)
MESSAGES: Final[dict[int, type[Message]]] = {
    message.kind: message
    for message in (
        Hello, Challenge, Prove, Welcome, Reject, Ping, Pong, Request, Grant, Refuse, Cancel, Done, DoneAck, Check,
        Checked, Read, Offer, Accept, Result, Watch, Appeared, Digest, Lease, Bye, ByeAck,
    )
}  # fmt: skip
