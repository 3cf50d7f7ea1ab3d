"""Fuzz targets: the decoder, and one session in either role, from before the greeting until it is over."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Final

from kvpull_async.protocol import frames
from kvpull_async.protocol import session as session_module
from kvpull_async.protocol.frames import Decoder, FrameError
from kvpull_async.protocol.session import Asked, Failed, Identity, Ready, Received, Session, State
from kvpull_async.status import LLMStatusCode
from tests.fuzz.making import Input, message_maker

READY_LIMIT: Final = session_module.READY_LIMIT
WATCHES, TABLES = 40, 16 * 1024
"""Smaller than the real limits, so that short inputs reach them."""
_PENDING: Final = 24 * 1024
_TAILS: Final = (0, 0, 8, 16, 24, 7, 64, 1024, 4096, 8192)
_ORDER: Final = {state: number for number, state in enumerate(State)}
_OVER: Final = (State.FAILED, State.CLOSED)
_ASKED: Final = {frames.Request: (frames.Grant, frames.Refuse), frames.Watch: (frames.Appeared,)} | {
    frames.Offer: (frames.Accept, frames.Result),
    frames.Lease: (frames.Result,),
}
_SECRET: Final = b"correct horse battery"
_ME: Final = {"version": (frames.VERSION,), "magic": (frames.MAGIC,), "cluster_id": (1, 2), "asked": (2, 1)}
KINDS: Final = [(kind, message_maker(kind, {**_ME, "incarnation": (b"i" * 16,)})) for kind in frames.MESSAGES.values()]


def decoder(data: bytes) -> None:
    """Cut anywhere, bytes are the same frames, or are refused at the same one."""
    if not data:
        return
    chunk, limit = data[0] % 64 + 1, (frames.GREETING_LIMIT, READY_LIMIT, 64, 1)[data[0] >> 6]
    stream = data[1:]
    pieces = [stream[at : at + chunk] for at in range(0, min(len(stream), 40 * chunk), chunk)]
    stream = b"".join(pieces)
    at_once, cut = _decoded([stream], limit), _decoded(pieces, limit)
    assert at_once == cut, (at_once, cut)
    assert _decoded([memoryview(stream)], limit) == at_once


def _decoded(pieces: list[Any], limit: int) -> list[Any]:
    found: list[Any] = []
    made = Decoder(limit)
    try:
        for piece in pieces:
            frame = made.whole(piece)
            if frame is None:
                made.feed(piece)
                frame = made.next_frame()
            while frame is not None:
                found.append((frame.message, bytes(frame.tail)))
                frame = made.next_frame()
            made.keep()
            assert made.buffered <= limit + frames.HEADER.size + len(piece)
    except FrameError:
        found.append("refused")
    return found


def session(data: bytes) -> None:
    with low_limits():
        given = Input(data)
        talk = Talk(given)
        while given.left and talk.going:
            talk.step()
        talk.deliver()


@contextlib.contextmanager
def low_limits() -> Iterator[None]:
    """So that a short input can reach them; for this input only."""
    before = session_module.WATCHES_LIMIT, session_module.TABLES_LIMIT
    session_module.WATCHES_LIMIT, session_module.TABLES_LIMIT = WATCHES, TABLES  # type: ignore[misc]
    try:
        yield
    finally:
        session_module.WATCHES_LIMIT, session_module.TABLES_LIMIT = before  # type: ignore[misc]


class Talk:
    """One session and what a hostile peer says to it. The first bytes choose the role and how far an honest greeting
    goes before the hostile part begins.
    """

    def __init__(self, given: Input) -> None:
        mode, honest = given.byte(), given.byte() % 5
        self._given = given
        self._dialer, self._lane = bool(mode & 1), mode >> 1 & 1
        self._secret = _SECRET if mode & 4 else None
        self.session = _session(self._dialer, self._lane, self._secret)
        self._pending = bytearray()
        self._last: tuple[Any, bytes] | None = None
        self._said = Decoder(READY_LIMIT)
        self._asked: dict[int, type[Any]] = {}
        self._sent: int | None = None
        self._ready = self._failed = False
        self._order = self._fed = self._newest = 0
        self._steps: tuple[Callable[[], None], ...] = (
            *([self._message] * 7), self._raw, self.deliver, self._chunks, self._ask, self._end, self._decide,
            self._own, self._repeat, self._damage,
        )  # fmt: skip
        self._greet(honest)

    @property
    def going(self) -> bool:
        return self.session.state not in _OVER or not self._failed

    def step(self) -> None:
        self._steps[self._given.byte() % len(self._steps)]()

    # -- what the peer does -----------------------------------------------------------------------------------------

    def _greet(self, honest: int) -> None:
        """So many frames of an honest greeting. Only a peer that has the secret says these."""
        self._proves = honest >= 2  # of either side the second frame is the proof
        if self._dialer:
            self.session.start()
            self._check()
        for number, said in enumerate(_honest(self._dialer, self._lane, self._secret)[:honest]):
            self.session.receive(said)
            self._check()
            if self.session.state is State.DECIDING and honest > 2:
                assert number == 1
                self.session.welcome(token=b"t" * 16)
                self._check()

    def _message(self) -> None:
        kind, make = self._given.one_of(KINDS)
        tail = bytes(self._given.one_of(_TAILS)) if kind in (frames.Request, frames.Offer, frames.Grant) else b""
        self._last = (make(self._given), tail)
        self._put()

    def _repeat(self) -> None:
        """The last one again and again, with the next request ids if it has one."""
        if self._last is None:
            return
        message, tail = self._last
        for _ in range(self._given.one_of((2, 3, 10, 45, 70))):
            if hasattr(message, "request_id"):
                number = min(message.request_id + 1, 2**64 - 1)
                message = type(message)(number, *[getattr(message, name) for name in message.__struct_fields__[1:]])
            self._last = (message, tail)
            self._put()

    def _put(self) -> None:
        assert self._last is not None
        message, tail = self._last
        if len(self._pending) > _PENDING:  # what takes long is tried too seldom
            return
        try:
            self._pending += frames.encode(message, tail)
        except FrameError:
            assert len(tail) + 2**15 > frames.BODY_LIMIT  # nothing here is that large

    def _raw(self) -> None:
        self._pending += self._given.take(self._given.byte() % 40)

    def _damage(self) -> None:
        if self._pending:
            self._pending[self._given.number() % len(self._pending)] ^= 1 << self._given.byte() % 8

    def deliver(self) -> None:
        self._feed(bytes(self._pending))
        self._pending.clear()

    def _chunks(self) -> None:
        data, size = memoryview(bytes(self._pending)), self._given.byte() + 1
        self._pending.clear()
        for at in range(0, min(len(data), size * 64), size):
            self._feed(data[at : at + size])
        self._feed(data[size * 64 :])

    def _feed(self, data: bytes | memoryview) -> None:
        over = self.session.state in _OVER
        before = self.session.buffered
        self.session.receive(data)
        if over:
            assert self.session.buffered == before
        self._check(len(data))
        while self.session.more and self.session.state not in _OVER:
            self.session.receive(b"")
            self._check(len(data))
        if self.session.state not in _OVER:
            assert self.session.buffered <= self._limit + frames.HEADER.size

    @property
    def _limit(self) -> int:
        return READY_LIMIT if self._ready else frames.GREETING_LIMIT

    # -- what the session's owner does ------------------------------------------------------------------------------

    def _ask(self) -> None:
        if self.session.state is State.READY and self.session.requests:
            kind, make = self._given.one_of([item for item in KINDS if item[0] in _ASKED])
            number = self.session.new_request(kind)
            message = make(self._given)
            if not _well_formed(message):
                message = make(Input(b""))
            message = kind(number, *[getattr(message, name) for name in message.__struct_fields__[1:]])
            self._given.numbers.append(number - 1)
            self._asked[number], self._newest = kind, number
            self.session.send(message)
            self._check()

    def _end(self) -> None:
        number = self._given.numbers[-1 - self._given.byte() % len(self._given.numbers)]
        self.session.end_request(number)
        self._asked.pop(number, None)
        if number == self._sent:
            self._sent = None
        self._check()

    def _decide(self) -> None:
        if self.session.state is State.DECIDING:
            if self._given.byte() % 4:
                self.session.welcome(token=b"t" * 16, offers=[("tcp", b"")])
            else:
                self.session.reject(LLMStatusCode.LLM_LINK_FAILED, "no" * self._given.byte())
            self._check()

    def _own(self) -> None:
        what = self._given.byte() % 16
        if what == 0:
            self.session.receive_eof()
        elif what == 1:
            self.session.close()
            self._failed = True  # nothing more is told
        elif self.session.state is State.READY:
            message = frames.Ping(what) if what % 2 else frames.Cancel(what)
            self.session.send(message)
        self._check()

    # -- what must hold ---------------------------------------------------------------------------------------------

    def _check(self, fed: int = 0) -> None:
        session = self.session
        order = _ORDER[session.state]
        assert order >= self._order, session.state
        self._order = order
        while (event := session.next_event()) is not None:
            self._heard(event)
        self._output()
        self._fed = self._fed if session.state in _OVER else 0
        self._fed = max(self._fed, fed)
        assert session.buffered <= self._limit + frames.HEADER.size + self._fed
        open_, watches = len(session._open), len(session._watches)
        if not session.requests:
            assert open_ - watches <= session_module.IN_FLIGHT_LIMIT
            assert watches <= WATCHES
            assert sum(session._open.values()) <= TABLES
        if session.state is State.FAILED:
            assert self._failed

    def _heard(self, event: Any) -> None:
        assert not self._failed, event
        if isinstance(event, Failed):
            self._failed = True
            assert event.status is not LLMStatusCode.LLM_SUCCESS
        elif isinstance(event, Asked):
            assert not self._ready
            assert self._secret is None or self._proves, "let in without the secret"
        elif isinstance(event, Ready):
            assert not self._ready
            assert self._secret is None or self._proves, "ready without the secret"
            self._ready = True
        else:
            assert isinstance(event, Received)
            assert self._ready
            self._received(event.message)

    def _received(self, message: Any) -> None:
        number = getattr(message, "request_id", None)
        if not self.session.requests or number is None:
            return
        if isinstance(message, frames.Digest):  # whoever waits for it knows; for others it is nothing
            assert number <= self._newest
            return
        if isinstance(message, frames.Refuse) and number == self._sent:  # the source could not go on
            self._sent = None
            return
        assert isinstance(message, _ASKED[self._asked[number]]), (message, self._asked)
        if isinstance(message, frames.Grant) and not message.inline:
            self._sent = number
        if not isinstance(message, frames.Accept):
            del self._asked[number]

    def _output(self) -> bytes:
        """What the session says is whole frames."""
        said = self.session.take_output()
        self._said.feed(said)
        while self._said.next_frame() is not None:
            pass
        assert not self._said.buffered
        return said


def _session(dialer: bool, lane: int, secret: bytes | None) -> Session:
    """Always the same one, so that an honest peer always says the same to it."""
    mine = Identity(1 if dialer else 2, (b"m" if dialer else b"p") * 16, ("tcp", "shm"), secret)
    token = b"t" * 16 if lane and dialer else b""
    return Session(mine, dialer=dialer, asked=2, lane=lane, token=token, entropy=_entropy)


@functools.cache
def _honest(dialer: bool, lane: int, secret: bytes | None) -> list[bytes]:
    """The two frames that an honest peer of such a session says while it greets."""
    here, there = _session(dialer, lane, secret), _session(not dialer, lane, secret)
    (here if dialer else there).start()
    said: list[bytes] = []
    for _ in range(6):
        there.receive(here.take_output())
        if isinstance(there.next_event(), Asked):
            there.welcome(token=b"t" * 16)
        if data := there.take_output():
            said.append(data)
            here.receive(data)
        if here.state is State.DECIDING:
            here.welcome(token=b"t" * 16)
    assert here.state is there.state is State.READY
    assert len(said) == 2
    return said


def _well_formed(message: Any) -> bool:
    decoder = Decoder(READY_LIMIT)
    decoder.feed(frames.encode(message))
    try:
        return decoder.next_frame() is not None
    except FrameError:
        return False


def _entropy(n: int) -> bytes:
    return b"e" * n
