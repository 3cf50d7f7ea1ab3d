"""The state machine of one connection of a link, for both roles. It must not do I/O or know time.

Bytes go in (`receive`), events and bytes come out (`next_event`, `take_output`). Nothing that a peer sends raises:
the session ends in FAILED with a reason. After each call the owner must send what `take_output` returns.
"""

from __future__ import annotations

import enum
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from kvpull_async.protocol import frames, proof
from kvpull_async.protocol.events import Asked, Event, Failed, Ready, Received
from kvpull_async.protocol.frames import Decoder, Frame, FrameError, Message
from kvpull_async.protocol.identity import Identity, Peer
from kvpull_async.status import LLMStatusCode, status_of

__all__ = ["Asked", "Event", "Failed", "Identity", "Peer", "Ready", "Received", "Session", "State"]

IN_FLIGHT_LIMIT: Final = 64
WATCHES_LIMIT: Final = 4096
FRAMES_AT_ONCE: Final = 128
"""Most frames handled in one step, so that a flood of small ones holds nobody else up."""
TABLES_LIMIT: Final = 2 * frames.TAIL_LIMIT
"""Most bytes of tables that a peer's requests in flight may hold here."""
READY_LIMIT: Final = frames.BODY_LIMIT + frames.TAIL_LIMIT


class State(enum.Enum):
    NEW = "new"
    GREETING = "greeting"
    PROVING = "proving"
    DECIDING = "deciding"
    READY = "ready"
    FAILED = "failed"
    CLOSED = "closed"


_OVER: Final = (State.FAILED, State.CLOSED)


Asking = frames.Request | frames.Offer | frames.Watch | frames.Lease
Answering = frames.Grant | frames.Refuse | frames.Result | frames.Appeared | frames.Accept
_ANSWERS: Final[dict[type[Asking], tuple[type[Answering], ...]]] = {
    frames.Request: (frames.Grant, frames.Refuse),
    frames.Offer: (frames.Accept, frames.Result),
    frames.Watch: (frames.Appeared,),
    frames.Lease: (frames.Result,),
}

_ASKING: Final = (frames.Request, frames.Offer, frames.Watch, frames.Lease)
_ENDING: Final = (frames.Grant, frames.Refuse, frames.Result, frames.Appeared)
"""What ends a request, an offer, a watch or a lease."""
_TO_SERVER: Final = (*_ASKING, frames.Cancel, frames.Done, frames.Check, frames.Read, frames.Bye)
_TO_REQUESTER: Final = (*_ENDING, frames.Accept, frames.Digest, frames.DoneAck, frames.Checked, frames.ByeAck)


class Session:
    """One connection: the greeting, then requests in one direction.

    On lane 0 the side that dialled requests, on lane 1 the side that accepted does.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        dialer: bool,
        asked: int = 0,
        lane: int = 0,
        token: bytes = b"",
        entropy: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self.state: State = State.NEW
        self.late_answers: int = 0
        self.more: bool = False
        """Whether frames may be left that came with the last bytes: call `receive` again, with none."""
        self.misfit: Callable[[int], str] = lambda _: ""
        """Why the peer cannot be that cluster, as far as its connection tells; it then hears nothing of this one."""
        self._identity = identity
        self._dialer = dialer
        self._asked_id = asked
        self._lane = lane
        self._token = token
        self._nonce = entropy(32)
        self._decoder = Decoder()
        self._events: deque[Event] = deque()
        self._output: list[bytes] = []
        self._hello: frames.Hello | None = None
        self._hello_frame = b""
        self._secret: bytes | None = None
        self._challenge: frames.Challenge | None = None
        self._last_request = 0
        self._open: dict[int, int] = {}
        """Requests in flight and, on the serving side, the bytes of their tables."""
        self._sent: int | None = None
        """The last request whose bytes follow its grant: it may be refused yet, when the source cannot go on."""
        self._answers: dict[int, tuple[type[Answering], ...]] = {}
        """What may answer the requests of this side."""
        self._watches: set[int] = set()

    # -- what the owner calls ---------------------------------------------------------------------------------------

    @property
    def requests(self) -> bool:
        """Whether this side is the one that asks on this connection."""
        return (self._lane == 0) == self._dialer

    def start(self) -> None:
        """The dialling side's first step."""
        self._secret = proof.secret_with(self._identity, self._asked_id)
        self._hello = frames.Hello(
            magic=frames.MAGIC,
            version=frames.VERSION,
            cluster_id=self._identity.cluster_id,
            asked=self._asked_id,
            incarnation=self._identity.incarnation,
            nonce=self._nonce,
            lane=self._lane,
            token=self._token,
            authenticates=self._identity.authenticates,
            paths=list(self._identity.paths),
            group=self._identity.group,
            oldest=frames.OLDEST,
        )
        self._hello_frame = frames.encode(self._hello)
        self._output.append(self._hello_frame)
        self.state = State.GREETING

    def receive(self, data: bytes | memoryview) -> None:
        """Take bytes from the peer; afterwards collect the events and send the output."""
        if self.state in _OVER:
            return
        self.more = False
        try:
            frame = self._decoder.whole(data)
            if frame is not None:
                self._handle(frame)
                return
            self._decoder.feed(data)
            for _ in range(FRAMES_AT_ONCE):
                frame = self._decoder.next_frame()
                if frame is not None:
                    self._handle(frame)
                if not self._decoder.buffered or frame is None or self.state in _OVER:
                    break
            else:
                self.more = True
        except FrameError as error:
            self.fail(str(error), LLMStatusCode.LLM_LINK_FAILED)
        self._decoder.keep()

    def receive_eof(self) -> None:
        if self.state not in _OVER:
            what = "during the greeting" if self.state is not State.READY else "without a goodbye"
            self.fail(f"the peer closed the connection {what}", LLMStatusCode.LLM_LINK_FAILED)

    def welcome(self, *, token: bytes, offers: Sequence[tuple[str, bytes]] = ()) -> None:
        """Accept the peer of the last `Asked` event."""
        assert self.state is State.DECIDING
        assert self._hello is not None
        welcome = frames.Welcome(cluster_id=self._identity.cluster_id, proof=b"", token=token, offers=list(offers))
        self._put(msgspec.structs.replace(welcome, proof=self._proof(welcome)))
        self._become_ready(self._peer_of(self._hello, token=token))

    def reject(self, status: LLMStatusCode, reason: str) -> None:
        """Refuse the peer; the owner sends the output and closes."""
        self._put(frames.Reject(status=int(status), reason=reason[: frames.REASON_LIMIT]))
        self.fail(reason, status)

    def send(self, message: Message, *tail: bytes | memoryview) -> None:
        """Queue a message of the READY state. The frames' limits hold here too (FrameError)."""
        if self.state is not State.READY:
            raise FrameError(f"the connection is {self.state.value}")
        self._put(message, *tail)

    def new_request(self, kind: type[Asking] = frames.Request) -> int:
        """A request id never used before on this connection; an answer to that kind will be let through."""
        self._last_request += 1
        self._open[self._last_request] = 0
        self._answers[self._last_request] = _ANSWERS[kind]
        return self._last_request

    def end_request(self, request_id: int) -> None:
        """The request is over on this side: a later answer to it is dropped, or (serving) its place is free."""
        self._open.pop(request_id, None)
        self._answers.pop(request_id, None)
        if request_id == self._sent:
            self._sent = None
        self._watches.discard(request_id)

    def close(self) -> None:
        if self.state is not State.FAILED:
            self.state = State.CLOSED
        self._decoder.clear()

    def fail(self, reason: str, status: LLMStatusCode, *, by_peer: bool = False) -> None:
        if self.state in _OVER:
            return
        self.state = State.FAILED
        self._decoder.clear()  # the owner may keep this for long, and half a frame may be large
        self._events.append(Failed(reason, status, by_peer))

    def next_event(self) -> Event | None:
        """The oldest event not yet taken."""
        return self._events.popleft() if self._events else None

    def take_output(self) -> bytes:
        output, self._output = self._output, []
        return output[0] if len(output) == 1 else b"".join(output)

    @property
    def buffered(self) -> int:
        return self._decoder.buffered

    def __repr__(self) -> str:
        role = "dialer" if self._dialer else "acceptor"
        return f"<Session {role} lane={self._lane} {self.state.value} open={len(self._open)}>"

    # -- the greeting -----------------------------------------------------------------------------------------------

    def _handle(self, frame: Frame) -> None:
        message = frame.message
        if self.state is State.READY:
            self._handle_ready(message, frame.tail)
        elif isinstance(message, frames.Reject) and self._dialer:
            self._rejected(message)
        elif isinstance(message, frames.Hello) and not self._dialer and self.state is State.NEW:
            self._greeted(message, frame.body)
        elif isinstance(message, frames.Challenge) and self._dialer and self.state is State.GREETING:
            self._challenged(message)
        elif isinstance(message, frames.Prove) and not self._dialer and self.state is State.PROVING:
            self._proven(message)
        elif isinstance(message, frames.Welcome) and self._dialer and self.state is State.PROVING:
            self._welcomed(message)
        else:
            self.fail(f"{type(message).__name__} in state {self.state.value}", LLMStatusCode.LLM_LINK_FAILED)

    def _greeted(self, hello: frames.Hello, body: bytes) -> None:
        self._hello, self._hello_frame = hello, proof.framed(body)
        self._lane = hello.lane
        version = proof.agreed(hello)
        if hello.magic != frames.MAGIC:
            self.reject(LLMStatusCode.LLM_LINK_FAILED, "the peer does not speak the kvpull protocol")
        elif version is None:
            theirs = (hello.oldest or hello.version, hello.version)
            reason = proof.versions(dialer=theirs, acceptor=(frames.OLDEST, frames.VERSION))
            self.reject(LLMStatusCode.LLM_LINK_FAILED, reason)
        elif hello.authenticates != self._identity.authenticates:
            who = "accepting" if self._identity.authenticates else "dialling"
            self.reject(LLMStatusCode.LLM_LINK_FAILED, f"only the {who} side has a link secret; give both the same")
        else:
            self._secret = proof.secret_with(self._identity, hello.cluster_id)
            self._challenge = frames.Challenge(
                version=version,
                incarnation=self._identity.incarnation,
                nonce=self._nonce,
                authenticates=self._identity.authenticates,
            )
            self._put(self._challenge)
            self.state = State.PROVING

    def _challenged(self, challenge: frames.Challenge) -> None:
        self._challenge = challenge
        if not frames.OLDEST <= challenge.version <= frames.VERSION:
            theirs = (challenge.version, challenge.version)
            reason = proof.versions(dialer=(frames.OLDEST, frames.VERSION), acceptor=theirs)
            self.fail(reason, LLMStatusCode.LLM_LINK_FAILED)
        elif challenge.authenticates != self._identity.authenticates:
            self.fail("only one side has a link secret; give both the same", LLMStatusCode.LLM_LINK_FAILED)
        else:
            self._put(frames.Prove(proof=self._proof()))
            self.state = State.PROVING

    def _proven(self, prove: frames.Prove) -> None:
        assert self._hello is not None
        if not proof.same(prove.proof, self._proof()):
            self.reject(LLMStatusCode.LLM_LINK_FAILED, "the link secrets of the two sides differ")
            return
        misfit = self.misfit(self._hello.cluster_id)
        if misfit:
            self.reject(LLMStatusCode.LLM_LINK_FAILED, misfit)
            return
        if self._hello.asked != self._identity.cluster_id:
            named = f"this is cluster {self._identity.cluster_id}, not {self._hello.asked} as asked for"
            self.reject(LLMStatusCode.LLM_LINK_FAILED, named)
            return
        self.state = State.DECIDING
        self._events.append(Asked(self._peer_of(self._hello, token=self._hello.token)))

    def _welcomed(self, welcome: frames.Welcome) -> None:
        assert self._challenge is not None
        if not proof.same(welcome.proof, self._proof(welcome)):
            self.fail("the link secrets of the two sides differ", LLMStatusCode.LLM_LINK_FAILED)
            return
        self._become_ready(
            Peer(
                cluster_id=welcome.cluster_id,
                incarnation=self._challenge.incarnation,
                lane=self._lane,
                token=welcome.token,
                offers=tuple(welcome.offers),
                version=self._challenge.version,
            )
        )

    def _rejected(self, reject: frames.Reject) -> None:
        status = status_of(reject.status)
        if status in (LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_FAILED):  # a refusal is never a success
            status = LLMStatusCode.LLM_LINK_FAILED
        self.fail(reject.reason, status, by_peer=True)

    def _become_ready(self, peer: Peer) -> None:
        self.state = State.READY
        self._decoder.limit = READY_LIMIT
        self._events.append(Ready(peer))

    def _peer_of(self, hello: frames.Hello, *, token: bytes) -> Peer:
        assert self._challenge is not None
        paths, version = tuple(hello.paths), self._challenge.version
        return Peer(hello.cluster_id, hello.incarnation, hello.lane, token, paths, group=hello.group, version=version)

    def _proof(self, welcome: frames.Welcome | None = None) -> bytes:
        assert self._challenge is not None
        return proof.proof(self._secret, self._hello_frame, self._challenge, welcome)

    # -- the ready connection ---------------------------------------------------------------------------------------

    def _handle_ready(self, message: Message, tail: bytes | memoryview) -> None:
        expected = _TO_REQUESTER if self.requests else _TO_SERVER
        if isinstance(message, frames.Ping):
            self._put(frames.Pong(message.number))
        elif isinstance(message, frames.Pong):
            self._events.append(Received(message))
        elif not isinstance(message, expected):
            side = "requesting" if self.requests else "serving"
            self.fail(f"{type(message).__name__} sent to the {side} side", LLMStatusCode.LLM_LINK_FAILED)
        elif isinstance(message, (*_ENDING, frames.Accept)):
            self._answered(message, tail)
        elif isinstance(message, _ASKING):
            self._asked(message, bytes(tail))
        elif isinstance(message, frames.Digest) and message.request_id > self._last_request:
            self.fail(f"a digest for request {message.request_id}, never sent", LLMStatusCode.LLM_LINK_FAILED)
        else:
            self._events.append(Received(message))

    def _answered(self, message: Answering, tail: bytes | memoryview) -> None:
        if message.request_id in self._open:
            if not isinstance(message, self._answers[message.request_id]):
                self.fail(f"{type(message).__name__} is no answer to what was asked", LLMStatusCode.LLM_LINK_FAILED)
                return
            if isinstance(message, _ENDING):
                self.end_request(message.request_id)
                if isinstance(message, frames.Grant) and not message.inline:
                    self._sent = message.request_id
            self._events.append(Received(message, tail))
        elif message.request_id == self._sent and isinstance(message, frames.Refuse):
            self._sent = None
            self._events.append(Received(message, tail))
        elif 0 < message.request_id <= self._last_request:
            self.late_answers += 1
        else:
            self.fail(f"an answer to request {message.request_id}, which was never sent", LLMStatusCode.LLM_LINK_FAILED)

    def _asked(self, request: Asking, tail: bytes) -> None:
        if request.request_id <= self._last_request:
            self.fail(f"request id {request.request_id} came out of order", LLMStatusCode.LLM_LINK_FAILED)
        elif isinstance(request, frames.Watch) and len(self._watches) >= WATCHES_LIMIT:
            self.fail(f"more than {WATCHES_LIMIT} watches", LLMStatusCode.LLM_LINK_FAILED)
        elif len(self._open) - len(self._watches) >= IN_FLIGHT_LIMIT:  # a watch lies here for long, in nobody's way
            self.fail(f"more than {IN_FLIGHT_LIMIT} requests in flight", LLMStatusCode.LLM_LINK_FAILED)
        elif tail and sum(self._open.values()) + len(tail) > TABLES_LIMIT:
            self.fail(f"more than {TABLES_LIMIT} bytes of tables in flight", LLMStatusCode.LLM_LINK_FAILED)
        else:
            self._last_request = request.request_id
            if not isinstance(request, frames.Lease):  # that is answered on the spot, and never in flight here
                self._open[request.request_id] = len(tail)
            if isinstance(request, frames.Watch):
                self._watches.add(request.request_id)
            self._events.append(Received(request, tail))

    def _put(self, message: Message, *tail: bytes | memoryview) -> None:
        self._output.append(frames.encode(message, *tail))
