"""NIXL as a contender, in its best settings for two processes of one host. It must not be imported without it.

Both sides run without a progress thread, except the source over TCP, where reads are made of messages that somebody
has to answer. A source without one looks for messages once a millisecond, as a serving loop would.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from processes import Unavailable
from sides import Puller, Source, repeat
from workloads import Arena, Segment, Shape, Workload, own_memory

__all__ = ["ENV", "TCP_ENV", "NixlPuller", "NixlSource"]

ENV: Final = {"UCX_NET_DEVICES": "lo", "UCX_LOG_LEVEL": "error", "NIXL_LOG_LEVEL": "ERROR"}
TCP_ENV: Final = {
    **ENV,
    "UCX_TLS": "tcp",
    "UCX_TCP_TX_SEG_SIZE": "512k",
    "UCX_TCP_RX_SEG_SIZE": "512k",
    "UCX_TCP_SNDBUF": "4m",
    "UCX_TCP_RCVBUF": "4m",
}
"""Larger segments and buffers than UCX takes by itself: 8 KiB segments are what slows it down over TCP."""
POLL: Final = 0.001
LOCAL: Final = "NIXL_INIT_AGENT"
Rows = NDArray[np.uint64]


def _agent(name: str, arena: Arena, *, progress: bool) -> Any:
    try:
        from nixl_cu12._api import nixl_agent, nixl_agent_config  # noqa: PLC0415  (not everybody has it)
    except ImportError as error:
        raise Unavailable(f"not installed ({error}): pip install nixl-cu12") from error
    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=progress, backends=[]))
    agent.create_backend("UCX", {"ucx_error_handling_mode": "peer"})
    agent.register_memory([(address, nbytes, 0, "") for address, nbytes in arena.spans], "DRAM")
    return agent


class NixlSource(Source):
    def __init__(self, *, tcp: bool = False, huge: bool = False) -> None:
        self._tcp = tcp
        self._huge = huge
        self._closing = threading.Event()

    def open(self, shape: Shape, works: Sequence[Workload], *, seed: int) -> Any:
        self._arena = own_memory(shape, huge=self._huge)
        self._arena.fill(seed)
        self._agent = _agent("prompt", self._arena, progress=self._tcp)
        if not self._tcp:
            threading.Thread(target=self._look, daemon=True).start()
        return self._agent.get_agent_metadata(), self._arena.addresses

    def _look(self) -> None:
        while not self._closing.wait(POLL):
            self._agent.get_new_notifs()

    def arenas(self) -> Sequence[Arena]:
        return [self._arena]

    def close(self) -> None:
        self._closing.set()


class NixlPuller(Puller):
    """Mode "prepared": descriptor lists once, a handle for each pull. "fresh": both for each pull."""

    def __init__(self, *, huge: bool = False) -> None:
        self._huge = huge

    def open(self, shape: Shape, works: Sequence[Workload], *, told: Any) -> None:
        metadata, self._remote = told
        self._shape = shape
        self._arena = own_memory(shape, huge=self._huge)
        self._agent = _agent("decoder", self._arena, progress=False)
        self._peer = self._agent.add_remote_agent(metadata)

    def arena(self, work: Workload) -> Arena:
        return self._arena

    def pull(self, work: Workload, count: int, mode: str = "prepared") -> list[float]:
        make = self._prepared if mode == "prepared" else self._fresh
        return repeat(make([pull.segments(self._shape) for pull in work.pulls]), count, budget=work.budget)

    def _rows(self, segments: Sequence[Segment]) -> tuple[Rows, Rows]:
        """Destination and source: address, bytes and device 0 of each segment."""
        here, there = self._arena.addresses, self._remote
        local = [(here[dst] + at, n, 0) for _, _, dst, at, n in segments]
        remote = [(there[src] + start, n, 0) for src, start, _, _, n in segments]
        return np.array(local, np.uint64), np.array(remote, np.uint64)

    def _prepared(self, pulls: Sequence[Sequence[Segment]]) -> list[Callable[[], None]]:
        local, remote = self._rows([segment for pull in pulls for segment in pull])
        lists = (
            self._agent.prep_xfer_dlist(LOCAL, local, "DRAM"),
            self._agent.prep_xfer_dlist(self._peer, remote, "DRAM"),
        )
        ends = np.cumsum([0, *map(len, pulls)])
        picked = [np.arange(first, last, dtype=np.int32) for first, last in pairwise(ends)]
        return [partial(self._pull_prepared, *lists, indices) for indices in picked]

    def _pull_prepared(self, local: Any, remote: Any, indices: Any) -> None:
        self._finish(self._agent.make_prepped_xfer("READ", local, indices, remote, indices))

    def _fresh(self, pulls: Sequence[Sequence[Segment]]) -> list[Callable[[], None]]:
        return [partial(self._pull_fresh, *self._rows(segments)) for segments in pulls]

    def _pull_fresh(self, local: Rows, remote: Rows) -> None:
        agent = self._agent
        ours, theirs = agent.get_xfer_descs(local, "DRAM"), agent.get_xfer_descs(remote, "DRAM")
        self._finish(agent.initialize_xfer("READ", ours, theirs, self._peer))

    def _finish(self, handle: Any) -> None:
        """Post and wait without a pause, which is its fastest; then give the handle back."""
        agent = self._agent
        state, end = agent.transfer(handle), time.monotonic() + 60
        while state == "PROC" and time.monotonic() < end:
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"NIXL transfer ended as {state}")
        agent.release_xfer_handle(handle)
