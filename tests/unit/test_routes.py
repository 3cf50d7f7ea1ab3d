"""Which transports and kinds of path an engine has, by its settings, and in which order."""

from __future__ import annotations

from typing import Any

import pytest

from kvpull_async import LLMRole
from kvpull_async._deadline import Deadline
from kvpull_async.config import Settings
from kvpull_async.memory.host import HostMemory
from kvpull_async.memory.publications import Publications
from kvpull_async.observe import Log
from kvpull_async.routes import Routes
from tests.unit.kinds import ScriptedKind


def routes(backend: str, **settings: Any) -> Routes:
    made = Routes(Settings(LLMRole.DECODER, 1, transfer_backend=backend, **settings), Log())
    made.begin(HostMemory(), Publications())
    return made


def names(made: Routes) -> list[tuple[str, tuple[str, ...]]]:
    return [(route.transport.name, route.names) for route in made]


async def test_memory_to_memory_comes_first_and_tcp_is_the_last_resort() -> None:
    assert names(routes("auto")) == [("inproc", ("inproc",)), ("tcp", ("shm", "tcp"))]


async def test_there_is_no_way_before_it_is_known_what_peers_may_read() -> None:
    made = Routes(Settings(LLMRole.DECODER, 1), Log())
    assert names(made) == []
    await made.aclose(Deadline.after_ms(1000))
    made.close_after_fork()
    made.begin(HostMemory(), Publications())
    assert names(made) == names(routes("auto"))


async def test_the_originals_name_means_whatever_works_best() -> None:
    assert names(routes("hixl")) == names(routes("auto"))


@pytest.mark.parametrize("backend", ["tcp", "inproc"])
async def test_a_backend_that_is_named_is_the_only_one(backend: str) -> None:
    assert names(routes(backend)) == [(backend, (backend,))]


async def test_a_kind_beside_a_transport_of_another_name_keeps_that_transport() -> None:
    """Control goes over TCP however the payload does."""
    for transport, kinds in names(routes("auto")):
        for kind in kinds:
            assert names(routes(kind)) == [(transport, (kind,))]


async def test_every_kind_says_why_it_is_taken() -> None:
    reasons = [kind.why for route in routes("auto") for kind in route.kinds]
    assert all(reasons)
    assert len(set(reasons)) == len(reasons)


async def test_the_end_of_the_engine_and_a_fork_reach_transports_and_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    class Recorded(ScriptedKind):
        """A transport that is a kind of path too, as TCP is."""

        def __init__(self, *_: object, **__: object) -> None:
            super().__init__("tcp")

    monkeypatch.setattr("kvpull_async.routes.TcpTransport", Recorded)
    made = routes("tcp")
    ((kind,),) = (route.kinds for route in made)
    assert isinstance(kind, Recorded)
    made.close_after_fork()
    assert kind.forked >= 1  # once as a transport, once as a kind
    await made.aclose(Deadline.after_ms(1000))
    assert kind.closed == 1
