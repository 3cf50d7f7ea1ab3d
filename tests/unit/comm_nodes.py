"""Nodes with comms on the test's own loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvpull_async._deadline import Deadline
from kvpull_async.comms import Comms
from kvpull_async.config.rank_table import Gathering, gathering
from kvpull_async.linkage import LinkState
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.transport.base import Address
from kvpull_async.values import RegisterMemStatus
from tests.loop_nodes import PATIENCE, EventLog, LoopNode, loop_nodes
from tests.ranks import device, table, together

OK, PREPARING, FAILED = RegisterMemStatus.OK, RegisterMemStatus.PREPARING, RegisterMemStatus.FAILED
BOTH = {1: 0, 2: 1}


class Node(LoopNode):
    """A node with comms."""

    def __init__(self, cluster_id: int, **options: Any) -> None:
        super().__init__(cluster_id, **options)
        self.comms = Comms(self.links, self.context)

    def wanted(self, name: str, ranks: dict[int, int] | None = None, text: str = "", **more: Any) -> Gathering:
        base = self.settings.rank_port_base
        own = self.settings.cluster_id
        return gathering(name, ranks or BOTH, text or together(), own=own, port_base=base, renamed={}, **more)

    async def meet(self, name: str, ranks: dict[int, int] | None = None, text: str = "") -> int:
        return await self.comms.link(self.wanted(name, ranks, text))

    async def becomes(self, comm_id: int, status: RegisterMemStatus = OK) -> None:
        """Wait until it has that status."""
        give_up = time.monotonic() + PATIENCE
        while (now := await self.now(comm_id)) is not status:
            assert time.monotonic() < give_up, f"comm {comm_id} is {now}, never {status}"
            await asyncio.sleep(0.002)

    async def now(self, comm_id: int) -> RegisterMemStatus:
        return await self.comms.status(comm_id)

    async def close(self) -> None:
        await self.comms.close(Deadline.after_ms(5000))
        await super().close()


@contextlib.asynccontextmanager
async def nodes(*made: Node) -> AsyncIterator[None]:
    async with loop_nodes(*made, listen=False):
        yield


def ready(*made: Node) -> list[int]:
    return [sum(link.state is LinkState.READY for link in node.links.all()) for node in made]


async def met(one: Node, two: Node, name: str) -> tuple[int, int]:
    comms = await one.meet(name), await two.meet(name)
    await one.becomes(comms[0])
    await two.becomes(comms[1])
    return comms


def doors(events: EventLog, name: str) -> list[Address]:
    """Where members of that comm listen for others."""
    addresses = " ".join(event["addresses"] for event in events.named("comm.linking", comm_name=name))
    return [(host, int(port)) for host, _, port in (text.rpartition(":") for text in addresses.split())]


async def is_closed(node: Node, address: Address) -> None:
    """Wait until nobody listens there."""
    give_up = time.monotonic() + PATIENCE
    while True:
        with contextlib.suppress(ConnectionResetError):  # in that very moment
            try:
                (await node.transport.dial(address)).abort()
            except ConnectionRefusedError:
                return
        assert time.monotonic() < give_up, f"{address} is still listened on"
        await asyncio.sleep(0.002)


def refused(error: pytest.ExceptionInfo[LLMException], status: LLMStatusCode) -> str:
    assert error.value.status_code is status
    return str(error.value)


def apart(ip: str) -> str:
    """Two servers whose devices have the same address."""
    return table([device(0, ip)], [device(1, ip)])
