"""Two sessions that talk, in every order and cut anywhere, against a model of what each must be told."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpull_async.protocol import frames
from kvpull_async.protocol.session import Asked, Failed, Ready, Received, Session, State
from kvpull_async.status import LLMStatusCode
from tests.wire import PLAIN, drained, identity

SECRET = b"correct horse battery staple"
MOST = 16
"""Asked at once: far below what ends a connection."""
ASKING = (frames.Request, frames.Offer, frames.Watch, frames.Lease)
TOKEN = b"t" * 16


def numbered(kind: type[Any], number: int) -> Any:
    """An ordinary message of that kind with this request id."""
    sample: Any = PLAIN[kind.__name__]
    fields = {name: getattr(sample, name) for name in sample.__struct_fields__}
    return kind(**{**fields, "request_id": number})


@dataclass
class Way:
    """What has been said in one direction and has not arrived yet: bytes, and which messages they are."""

    pipe: bytearray = field(default_factory=bytearray)
    said: deque[tuple[int, Any, bytes]] = field(default_factory=deque)
    """Where in the stream each message ends, the message, its tail."""
    sent: int = 0
    arrived: int = 0

    def put(self, message: Any, tail: bytes, data: bytes) -> None:
        assert data == frames.encode(message, tail)
        self.pipe += data
        self.sent += len(data)
        self.said.append((self.sent, message, tail))


class Conversation(RuleBasedStateMachine):
    """`asker` requests, `server` answers; which of them dialled depends on the lane."""

    lane: ClassVar[int] = 0

    @initialize(secret=st.booleans(), chunk=st.integers(1, 200))
    def greet(self, secret: bool, chunk: int) -> None:
        """Through the greeting, in pieces."""
        key = SECRET if secret else None
        dialer = Session(
            identity(1, secret=key), dialer=True, asked=2, lane=self.lane, token=TOKEN if self.lane else b""
        )
        acceptor = Session(identity(2, secret=key), dialer=False)
        dialer.start()
        ready = []
        for _ in range(8):
            for one, other in ((dialer, acceptor), (acceptor, dialer)):
                data = one.take_output()
                for at in range(0, len(data), chunk):
                    other.receive(data[at : at + chunk])
                for event in drained(other):
                    if isinstance(event, Asked):
                        other.welcome(token=TOKEN)
                    else:
                        assert isinstance(event, Ready), event
                        ready.append(event.peer.cluster_id)
        assert sorted(ready) == [1, 2]
        self.asker, self.server = (dialer, acceptor) if self.lane == 0 else (acceptor, dialer)
        assert self.asker.requests
        assert not self.server.requests
        self.there, self.back = Way(), Way()
        self.open: dict[int, type[Any]] = {}
        """What the asker waits for."""
        self.serving: dict[int, type[Any]] = {}
        """What the server has heard of and not answered."""
        self.newest = self.late = 0
        self.over = False

    # -- what either says -------------------------------------------------------------------------------------------

    def _say(self, session: Session, way: Way, message: Any, tail: bytes = b"") -> None:
        session.send(message, tail)
        way.put(message, tail, session.take_output())

    @precondition(lambda self: not self.over and len(self.open) + len(self.serving) < MOST)
    @rule(kind=st.sampled_from(ASKING), tail=st.integers(0, 40))
    def ask(self, kind: type[Any], tail: int) -> None:
        number = self.asker.new_request(kind)
        assert number == self.newest + 1
        self.newest, self.open[number] = number, kind
        rides = bytes(tail) if kind in (frames.Request, frames.Offer) else b""
        self._say(self.asker, self.there, numbered(kind, number), rides)

    @precondition(lambda self: not self.over and self.open)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.open)))
        del self.open[number]
        self.asker.end_request(number)
        self._say(self.asker, self.there, frames.Cancel(number))

    @precondition(lambda self: not self.over and self.serving)
    @rule(data=st.data(), refused=st.booleans(), payload=st.integers(0, 40))
    def answer(self, data: st.DataObject, refused: bool, payload: int) -> None:
        number = data.draw(st.sampled_from(sorted(self.serving)))
        kind, tail = self.serving[number], b""
        if kind is frames.Request and not refused:
            answer, tail = numbered(frames.Grant, number), bytes(payload)
        elif kind is frames.Request:
            answer = numbered(frames.Refuse, number)
        elif kind is frames.Watch:
            answer = frames.Appeared(number)
        elif kind is frames.Offer and not refused:
            self._say(self.server, self.back, frames.Accept(number))
            return
        else:
            answer = numbered(frames.Result, number)
        del self.serving[number]
        self.server.end_request(number)
        self._say(self.server, self.back, answer, tail)

    @precondition(lambda self: not self.over)
    @rule(name=st.sampled_from(["Ping", "Pong", "Done", "Check", "Read", "Bye"]))
    def tell_server(self, name: str) -> None:
        self._say(self.asker, self.there, PLAIN[name])

    @precondition(lambda self: not self.over)
    @rule(name=st.sampled_from(["Ping", "Pong", "DoneAck", "Checked", "ByeAck"]))
    def tell_asker(self, name: str) -> None:
        self._say(self.server, self.back, PLAIN[name])

    # -- the wire ---------------------------------------------------------------------------------------------------

    @precondition(lambda self: not self.over and self.there.pipe)
    @rule(count=st.integers(1, 2000), view=st.booleans())
    def arrives_there(self, count: int, view: bool) -> None:
        for message, tail in self._carry(self.server, self.there, self.back, count, view=view):
            number = getattr(message, "request_id", 0)
            if isinstance(message, ASKING):
                self.serving[number] = type(message)
                assert bytes(tail) == bytes(len(tail))
            elif isinstance(message, frames.Cancel):
                self.serving.pop(number, None)
                self.server.end_request(number)

    @precondition(lambda self: not self.over and self.back.pipe)
    @rule(count=st.integers(1, 2000), view=st.booleans())
    def arrives_back(self, count: int, view: bool) -> None:
        self._carry(self.asker, self.back, self.there, count, view=view)

    def _carry(self, session: Session, way: Way, other: Way, count: int, *, view: bool) -> list[tuple[Any, bytes]]:
        """Some bytes of one direction; what the session tells of them must be what the model expects."""
        data = bytes(way.pipe[:count])
        del way.pipe[:count]
        way.arrived += len(data)
        session.receive(memoryview(data) if view else data)
        heard = [(event.message, bytes(event.tail)) for event in drained(session) if isinstance(event, Received)]
        while session.more:
            session.receive(b"")
            heard += [(event.message, bytes(event.tail)) for event in drained(session)]
        expected, pongs = [], []
        while way.said and way.said[0][0] <= way.arrived:
            _, message, tail = way.said.popleft()
            if isinstance(message, frames.Ping):
                pongs.append(frames.Pong(message.number))
            elif self._counts(message):
                expected.append((message, tail))
        assert heard == expected
        output = session.take_output()
        assert output == b"".join(map(frames.encode, pongs))
        for pong in pongs:
            other.put(pong, b"", frames.encode(pong))
        return expected

    def _counts(self, message: Any) -> bool:
        """Whether it is told: an answer to what was given up is not."""
        answers = (frames.Grant, frames.Refuse, frames.Result, frames.Appeared, frames.Accept)
        if not isinstance(message, answers):
            return True
        if message.request_id not in self.open:
            self.late += 1
            return False
        if not isinstance(message, frames.Accept):
            del self.open[message.request_id]
        return True

    # -- the end ----------------------------------------------------------------------------------------------------

    @precondition(lambda self: not self.over)
    @rule(server=st.booleans(), likely=st.integers(0, 9))
    def hangs_up(self, server: bool, likely: int) -> None:
        """One side's connection ends: it is told once, and nothing after that."""
        if likely:
            return
        session = self.server if server else self.asker
        session.receive_eof()
        (failed,) = drained(session)
        assert failed == Failed("the peer closed the connection without a goodbye", LLMStatusCode.LLM_LINK_FAILED)
        self.over, self.ended = True, session

    @precondition(lambda self: self.over)
    @rule(name=st.sampled_from(sorted(PLAIN)))
    def says_more(self, name: str) -> None:
        """To a session that is over nothing means anything any more."""
        if self.ended.state is State.FAILED:
            self.ended.receive(frames.encode(PLAIN[name]))
            self.ended.receive_eof()
            assert drained(self.ended) == []
            assert self.ended.take_output() == b""

    @precondition(lambda self: not self.over and self.there.pipe)
    @rule(data=st.data(), likely=st.integers(0, 4))
    def is_damaged(self, data: st.DataObject, likely: int) -> None:
        """Whatever a bit turned on the way becomes, nothing raises, and the session still ends in a state it knows."""
        if likely:
            return
        damaged = bytearray(self.there.pipe)
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        self.server.receive(bytes(damaged))
        assert self.server.state in (State.READY, State.FAILED)
        assert sum(isinstance(event, Failed) for event in drained(self.server)) == (self.server.state is State.FAILED)
        self.server.take_output()
        self.over, self.ended = True, self.server

    @invariant()
    def both_agree(self) -> None:
        if not hasattr(self, "over") or self.over:
            return
        assert self.asker.state is self.server.state is State.READY
        assert self.asker.late_answers == self.late
        assert len(self.asker._open) == len(self.open)
        in_flight = [kind for kind in self.serving.values() if kind is not frames.Lease]  # that is answered on the spot
        assert len(self.server._open) == len(in_flight)
        if not self.there.pipe:
            assert not self.there.said
            assert self.server.buffered == 0


class OnLaneOne(Conversation):
    lane = 1


@pytest.mark.parametrize("machine", [Conversation, OnLaneOne])
def test_two_sessions_tell_each_other_just_what_was_said(machine: type[Conversation]) -> None:
    case = machine.TestCase()
    case.settings = settings(
        max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
    )
    case.runTest()
