"""Two and three hosts with a network between them: pulled cables, lost packets, lines that carry one direction, hosts
that come back with another process. Skipped, with the reason, where there can be no network namespaces.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from tests.integration.netns import Host, hosts
from tests.integration.processes import Child, child

QUICK: dict[str, Any] = {"heartbeat_interval": 150, "heartbeat_timeout": 1000, "handshake_timeout": 800}
PATIENT: dict[str, Any] = {"heartbeat_interval": 500, "heartbeat_timeout": 6000, "handshake_timeout": 3000}
NBYTES = 3 * 1024 * 1024
"""Of an entry of each of two tensors."""
SLACK = 2.0
"""Seconds that a slow machine may need beyond what was promised."""
NOTICED = QUICK["heartbeat_timeout"] / 1000 + SLACK
"""Seconds within which a peer that has gone without a word is missed."""
GONE = {"LLM_LINK_FAILED", "LLM_WAIT_PROCESS_TIMEOUT"}
DECODER = 9

pytestmark = pytest.mark.slow


@pytest.fixture
def two() -> Iterator[list[Host]]:
    with hosts(2) as made:
        yield made


@contextlib.asynccontextmanager
async def prefill(host: Host, cluster: int = 1, *, port: int = 0, **options: Any) -> AsyncIterator[Child]:
    """With four keys, from 0 on."""
    given = {**QUICK, "transport": "tcp", "link_secret": "of the test", **options}
    given["listen_ip_info"] = f"{host.address}:{port}"
    async with child("PROMPT", cluster, program="host", before=host.before, **given) as made:
        await made.ask("publish", "published", nbytes=NBYTES, first=0)
        yield made


@contextlib.asynccontextmanager
async def decode(host: Host, **options: Any) -> AsyncIterator[Child]:
    given = {**QUICK, "transport": "tcp", "link_secret": "of the test", **options}
    async with child("DECODER", DECODER, program="host", before=host.before, **given) as made:
        yield made


async def link(here: Child, there: Child, cluster: int = 1, *, timeout: int = 10_000) -> dict[str, Any]:
    await here.ask("begin_link", "linking", cluster=cluster, address=list(there.address), timeout=timeout)
    return await here.hear("linked")


async def begin_pull(here: Child, key: int, *, cluster: int = 1, timeout: float = 10_000) -> None:
    await here.ask("begin_pull", "pulling", cluster=cluster, key=key, nbytes=NBYTES, timeout=timeout)


async def pull(here: Child, key: int, *, cluster: int = 1, timeout: float = 10_000) -> dict[str, Any]:
    """How it ended; in time, in any case."""
    await begin_pull(here, key, cluster=cluster, timeout=timeout)
    ended = await here.hear("ended")
    assert ended["ms"] < timeout + 1000 * SLACK, ended
    assert ended["right"] is (not ended["status"]), ended
    return ended


async def check_right(here: Child, key: int = 3, *, cluster: int = 1) -> None:
    ended = await pull(here, key, cluster=cluster)
    assert not ended["status"], ended


async def comes_to(peer: Child, condition: Callable[[dict[str, Any]], bool], *, within: float = 15.0) -> float:
    """Until its counters are so: after how many seconds."""
    began = time.monotonic()
    while not condition(told := await peer.ask("counters", "counters")):
        assert time.monotonic() - began < within, told
        await asyncio.sleep(0.02)
    return time.monotonic() - began


def lost(times: int = 1) -> Callable[[dict[str, Any]], bool]:
    return lambda told: told.get("links_lost", 0) >= times


def back(times: int = 1) -> Callable[[dict[str, Any]], bool]:
    return lambda told: told.get("reconnects", 0) >= times


async def check_back(here: Child, *, times: int = 1) -> None:
    """The link comes back by itself; nothing was written meanwhile."""
    await comes_to(here, back(times))
    await check_right(here)
    assert (await here.ask("look", "looked"))["intact"], "P1: written after a pull had ended"


# --- a pulled cable ---


async def test_p3_p4_a_cable_pulled_while_nothing_goes_on(two: list[Host]) -> None:
    """Both sides notice within the heartbeats' patience, though nobody got a reset, and again when it is back."""
    async with prefill(two[0]) as there, decode(two[1]) as here:
        await link(here, there)
        await check_right(here)
        two[0].unplug()
        began = time.monotonic()
        await asyncio.gather(*(comes_to(peer, lost(), within=NOTICED) for peer in (here, there)))
        assert time.monotonic() - began >= 0.5, "it was lost before anything could be missed"
        ended = await pull(here, 1, timeout=500)
        assert ended["status"] in GONE, ended
        two[0].plug()
        await check_back(here)


async def test_p1_p3_p4_a_cable_pulled_in_the_middle_of_a_pull(two: list[Host]) -> None:
    async with prefill(two[0]) as there, decode(two[1]) as here:
        await link(here, there)
        await check_right(here)
        await there.ask("hold", "holding", where="lending")
        await begin_pull(here, 1)
        await there.hear("held")
        two[1].unplug()
        await there.ask("let_go", "let_go")
        ended = await here.hear("ended")
        assert ended["status"] == "LLM_LINK_FAILED", ended
        assert "silent" in ended["reason"], ended
        assert ended["ms"] < 1000 * NOTICED, "it waited for its own deadline, not for the heartbeats"
        await comes_to(there, lost(), within=NOTICED)
        two[1].plug()
        await check_back(here)


async def test_p3_a_pull_ends_at_its_deadline_when_the_cable_is_pulled_and_nobody_has_noticed(two: list[Host]) -> None:
    async with prefill(two[0], **PATIENT) as there, decode(two[1], **PATIENT) as here:
        await link(here, there)
        await check_right(here)
        two[0].unplug()
        for _ in range(2):
            ended = await pull(here, 1, timeout=300)
            assert ended["status"] == "LLM_WAIT_PROCESS_TIMEOUT", ended
        two[0].plug()
        await check_right(here)
        told = await here.ask("counters", "counters")
        assert told["links_up"] == 1, "it was away for less than the heartbeats' patience"
        assert (await here.ask("look", "looked"))["intact"]


async def test_p4_a_short_interruption_costs_nothing(two: list[Host]) -> None:
    async with prefill(two[0], **PATIENT) as there, decode(two[1], **PATIENT) as here:
        await link(here, there)
        await check_right(here)
        two[0].unplug()
        await begin_pull(here, 2)
        await asyncio.sleep(0.3)
        two[0].plug()
        ended = await here.hear("ended")
        assert not ended["status"], ended
        assert ended["right"]
        assert (await here.ask("counters", "counters"))["links_up"] == 1


async def test_p3_p4_linking_to_a_host_whose_cable_is_out(two: list[Host]) -> None:
    async with prefill(two[0]) as there, decode(two[1]) as here:
        two[0].unplug()
        told = await link(here, there, timeout=700)
        assert told["codes"][1] in GONE, told
        assert told["ms"] < 700 + 1000 * SLACK
        two[0].plug()
        assert (await link(here, there))["codes"] == ["LLM_SUCCESS", "LLM_SUCCESS"]
        await check_right(here)


# --- one direction only ---


@pytest.mark.parametrize("way", ["requests", "answers"])
async def test_p3_p4_a_line_that_carries_one_direction_only(two: list[Host], way: str) -> None:
    async with prefill(two[0]) as there, decode(two[1]) as here:
        await link(here, there)
        await check_right(here)
        sender, receiver = (two[1], two[0]) if way == "requests" else (two[0], two[1])
        sender.lose_what_goes_to(receiver)
        ended = await pull(here, 1, timeout=400)
        assert ended["status"] in GONE, ended
        await asyncio.gather(*(comes_to(peer, lost(), within=NOTICED) for peer in (here, there)))
        told = await link(here, there, timeout=500)
        assert told["codes"][0] != "LLM_SUCCESS", "linked over a line that carries nothing back"
        assert told["ms"] < 500 + 1000 * SLACK
        sender.find(receiver)
        await check_back(here)


# --- another process at the same address ---


async def test_p4_a_host_that_comes_back_with_another_process(two: list[Host]) -> None:
    """The old process ends while its cable is out, so nothing tells the other side of its end."""
    async with decode(two[1], **{**QUICK, "reconnect_grace": 10_000}) as here:
        async with prefill(two[0]) as there:
            await link(here, there)
            await check_right(here)
            await there.ask("hold", "holding", where="lending")
            await begin_pull(here, 1)
            await there.hear("held")
            two[0].unplug()
            there.kill()
        async with prefill(two[0], port=there.address[1]):
            two[0].plug()
            ended = await here.hear("ended")
            assert ended["status"] == "LLM_LINK_FAILED", ended
            await check_back(here)
            assert (await here.ask("counters", "counters"))["incarnation_changes"] == 1


# --- three hosts ---


async def test_p5_a_host_that_is_unplugged_delays_nobody_else() -> None:
    with hosts(3) as (first, second, third):
        async with prefill(first, 1) as gone, prefill(second, 2) as other, decode(third) as here:
            for cluster, there in ((1, gone), (2, other)):
                await link(here, there, cluster)
                await check_right(here, cluster=cluster)
            await gone.ask("hold", "holding", where="lending")
            await begin_pull(here, 1, timeout=30_000)
            await gone.hear("held")
            first.unplug()
            ended: list[dict[str, Any]] = []
            until = time.monotonic() + NOTICED
            while time.monotonic() < until and not any(one["cluster"] == 1 for one in ended):
                ended += await pulled_beside(here, len(ended) % 4)
            others = [one for one in ended if one["cluster"] == 2]
            assert len(others) >= 3, ended
            assert not any(one["status"] for one in others), others
            assert [one["status"] for one in ended if one["cluster"] == 1] == ["LLM_LINK_FAILED"]
            assert not (await other.ask("counters", "counters")).get("links_lost")
            await gone.ask("let_go", "let_go")
            first.plug()
            await check_back(here)


async def pulled_beside(here: Child, key: int) -> list[dict[str, Any]]:
    """A pull from cluster 2, and what else ended meanwhile."""
    here.tell("begin_pull", cluster=2, key=key, nbytes=NBYTES, timeout=1000)
    ended: list[dict[str, Any]] = []
    while not any(one["cluster"] == 2 for one in ended):
        said = await here.hear("pulling", "ended")
        if said["event"] == "ended":
            ended.append(said)
    return ended


# --- packets that are lost ---


def lossy(host: Host) -> str:
    """Some of what this host sends is lost: at random, or where the kernel cannot, when a short queue is full."""
    try:
        host.shape("netem", "delay", "5ms", "loss", "3%")
    except subprocess.SubprocessError:
        host.shape("tbf", "rate", "200mbit", "burst", "8kb", "limit", "12kb")
        return "tbf, since the kernel has no netem"
    return "netem"


async def test_p2_p4_packets_that_are_lost_cost_time_and_nothing_else(two: list[Host]) -> None:
    async with prefill(two[0], **PATIENT) as there, decode(two[1], **PATIENT) as here:
        how = [lossy(host) for host in two]
        sys.stdout.write(f"packets are lost by {how[0]}\n")
        await link(here, there)
        for number in range(8):
            await check_right(here, number % 4)
        assert two[0].dropped() > 0, "the test is wrong: nothing was lost"
        told = await here.ask("counters", "counters")
        assert told["links_up"] == 1
        assert not told.get("links_lost")
        assert not told.get("pulls_failed")


async def test_p3_a_slow_network_costs_a_pull_its_deadline_and_the_next_one_nothing(two: list[Host]) -> None:
    async with prefill(two[0], **PATIENT) as there, decode(two[1], **PATIENT) as here:
        await link(here, there)
        await check_right(here)
        two[0].shape("tbf", "rate", "20mbit", "burst", "32kb", "latency", "50ms")
        ended = await pull(here, 1, timeout=300)
        assert ended["status"] == "LLM_WAIT_PROCESS_TIMEOUT", ended
        two[0].shape("pfifo")
        await check_right(here)
        assert (await here.ask("counters", "counters"))["links_up"] == 1
        assert (await here.ask("look", "looked"))["intact"]
