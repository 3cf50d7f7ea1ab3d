"""Nodes with comms on the test's own loop."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvpull_async._deadline import Deadline
from kvpull_async.comms import Comms
from kvpull_async.config.rank_table import Gathering, gathering
from kvpull_async.linkage import LinkState
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.values import RegisterMemStatus
from tests.loop_nodes import LoopNode, eventually, loop_nodes
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
        await eventually(lambda: self.now(comm_id) is status, f"comm {comm_id} {status}")

    def now(self, comm_id: int) -> RegisterMemStatus:
        return self.comms._find(comm_id).status()

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


def refused(error: pytest.ExceptionInfo[LLMException], status: LLMStatusCode) -> str:
    assert error.value.status_code is status
    return str(error.value)


def apart(ip: str) -> str:
    """Two servers whose devices have the same address."""
    return table([device(0, ip)], [device(1, ip)])
