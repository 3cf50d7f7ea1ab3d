"""The greeting of a connection by itself, before it is read as a lane: both sides, refusals, and a silent end."""

from __future__ import annotations

import asyncio

import pytest

from kvpull_async._deadline import Deadline
from kvpull_async.greeting import Greeting
from kvpull_async.observe import Log
from kvpull_async.protocol import frames
from kvpull_async.protocol.session import Session, State
from kvpull_async.status import LLMException, LLMStatusCode
from tests.loop_nodes import TOKEN, ScriptedChannel, event_log, eventually
from tests.wire import identity

SECRET = b"between the two"


def soon() -> Deadline:
    return Deadline.after_ms(20_000)


class Ends:
    """Two greetings whose channels feed each other."""

    def __init__(self, *, asked: int = 2, secrets: tuple[bytes | None, bytes | None] = (None, None)) -> None:
        self.channels = ScriptedChannel(), ScriptedChannel()
        dialling = Session(identity(1, secret=secrets[0]), dialer=True, asked=asked)
        accepting = Session(identity(2, secret=secrets[1]), dialer=False)
        self.dialling, self.accepting = (
            Greeting(channel, session, log=Log())
            for channel, session in zip(self.channels, (dialling, accepting), strict=True)
        )
        self.wires = [asyncio.create_task(self._carry(*pair)) for pair in (self.channels, self.channels[::-1])]

    async def _carry(self, source: ScriptedChannel, target: ScriptedChannel) -> None:
        while True:
            for data in source.sent:
                target.feed(data)
            source.sent.clear()
            await asyncio.sleep(0)

    async def close(self) -> None:
        for wire in self.wires:
            wire.cancel()
        await asyncio.gather(*self.wires, return_exceptions=True)


@pytest.mark.parametrize("secret", [None, SECRET], ids=["open", "with a secret"])
async def test_both_sides_learn_who_the_other_is(secret: bytes | None) -> None:
    ends = Ends(secrets=(secret, secret))
    dialled = asyncio.create_task(ends.dialling.dial(soon()))
    asking = await ends.accepting.accept(soon())
    assert (asking.cluster_id, asking.paths) == (1, ("tcp",))
    ends.accepting.welcome(token=TOKEN, offers=[("tcp", b"x")])
    peer = await dialled
    assert (peer.cluster_id, peer.token, peer.offers) == (2, TOKEN, (("tcp", b"x"),))
    assert ends.dialling.session.state is ends.accepting.session.state is State.READY
    await ends.close()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"secrets": (SECRET, b"another")}, "the link secrets of the two sides differ"),
        ({"secrets": (SECRET, None)}, "only the dialling side has a link secret"),
        ({"asked": 7}, "this is cluster 2, not 7"),
    ],
)
async def test_both_sides_hear_why_it_came_to_nothing(given: dict[str, object], text: str) -> None:
    ends = Ends(**given)  # type: ignore[arg-type]
    accepting = asyncio.create_task(ends.accepting.accept(soon()))
    with pytest.raises(LLMException, match=f"scripted refused: {text}") as caught:
        await ends.dialling.dial(soon())
    assert (caught.value.status_code, caught.value.peer) == (LLMStatusCode.LLM_LINK_FAILED, "scripted")
    ends.channels[1].feed(b"")  # the refused side hangs up
    with pytest.raises(LLMException, match=text) as other:
        await accepting
    assert "refused" not in str(other.value)
    await ends.close()


@pytest.mark.parametrize("asked", [2, 7])
async def test_a_dialler_whose_certificate_names_others_is_refused(asked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Ends(asked=asked)
    monkeypatch.setattr(ends.channels[1], "speaks_for", lambda cluster_id: cluster_id != 1)
    accepting = asyncio.create_task(ends.accepting.accept(soon()))
    words = "the certificate of scripted does not name kvpull:cluster:1"
    with pytest.raises(LLMException, match=f"scripted refused: {words}"):
        await ends.dialling.dial(soon())
    ends.channels[1].feed(b"")
    with pytest.raises(LLMException, match=rf"^{words}") as caught:
        await accepting
    assert (caught.value.status_code, caught.value.peer) == (LLMStatusCode.LLM_LINK_FAILED, "scripted")
    await ends.close()


async def test_who_is_dialled_must_be_who_its_certificate_names(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Ends()
    monkeypatch.setattr(ends.channels[0], "speaks_for", lambda cluster_id: cluster_id != 2)
    dialled = asyncio.create_task(ends.dialling.dial(soon()))
    await ends.accepting.accept(soon())
    ends.accepting.welcome(token=TOKEN)
    with pytest.raises(LLMException, match=r"^the certificate of scripted does not name kvpull:cluster:2"):
        await dialled
    await ends.close()


async def test_a_refusal_reaches_the_dialling_side_with_its_status() -> None:
    ends = Ends()
    dialled = asyncio.create_task(ends.dialling.dial(soon()))
    await ends.accepting.accept(soon())
    rejecting = asyncio.create_task(ends.accepting.reject(LLMStatusCode.LLM_ALREADY_LINK, "we have one"))
    with pytest.raises(LLMException, match="scripted refused: we have one") as caught:
        await dialled
    assert caught.value.status_code == LLMStatusCode.LLM_ALREADY_LINK
    assert not rejecting.done()
    ends.channels[1].feed(b"")
    await rejecting
    await ends.close()


async def test_a_refused_side_that_never_hangs_up_is_not_waited_for_long() -> None:
    ends = Ends()
    dialled = asyncio.create_task(ends.dialling.dial(soon()))
    await ends.accepting.accept(soon())
    with event_log() as events:
        await ends.accepting.reject(LLMStatusCode.LLM_LINK_FAILED, "no")
        await events.first("link.farewell_unheard", peer="scripted")
    with pytest.raises(LLMException, match="refused: no"):
        await dialled
    await ends.close()


async def test_a_greeting_that_is_cut_short_leaves_nothing_running() -> None:
    channel = ScriptedChannel()
    greeting = Greeting(channel, Session(identity(1), dialer=True, asked=2), log=Log())
    task = asyncio.create_task(greeting.dial(soon()))
    await eventually(lambda: bool(channel.sent))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [type(message) for message in channel.take()] == [frames.Hello]
