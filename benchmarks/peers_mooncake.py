"""Mooncake's transfer engine over TCP as a contender, in its best settings. It must not be imported without it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from processes import Unavailable
from sides import Puller, Source, repeat
from workloads import Arena, Shape, Workload, own_memory

__all__ = ["ENV", "MooncakePuller", "MooncakeSource"]

HOST: Final = "127.0.0.1"
ENV: Final = {
    "MC_TCP_BIND_ADDRESS": HOST,
    "MC_TCP_LANES_PER_PEER": "16",
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "16384",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "16384",
    "GLOG_minloglevel": "2",
    "MC_LOG_LEVEL": "ERROR",
}
"""More lanes than it takes by itself, and queues that hold the thousands of blocks of W2: it refuses them otherwise."""


def _engine(arena: Arena) -> Any:
    try:
        from mooncake.engine import TransferEngine  # noqa: PLC0415  (not everybody has it)
    except ImportError as error:
        why = f"not installed ({error}): pip install mooncake-transfer-engine-non-cuda"
        raise Unavailable(why) from error
    engine = TransferEngine()
    _checked(engine.initialize(HOST, "P2PHANDSHAKE", "tcp", ""), "initialize")
    for address, nbytes in arena.spans:
        _checked(engine.register_memory(address, nbytes), "register_memory")
    return engine


def _checked(code: int, what: str) -> None:
    if code:
        raise RuntimeError(f"Mooncake's {what} returned {code}")


class MooncakeSource(Source):
    def __init__(self, *, huge: bool = False) -> None:
        self._huge = huge

    def open(self, shape: Shape, works: Sequence[Workload], *, seed: int) -> Any:
        self._arena = own_memory(shape, huge=self._huge)
        self._arena.fill(seed)
        self._engine = _engine(self._arena)
        return f"{HOST}:{self._engine.get_rpc_port()}", self._arena.addresses

    def arenas(self) -> Sequence[Arena]:
        return [self._arena]


class MooncakePuller(Puller):
    """One batch read for each pull, out of Python lists that are made beforehand."""

    def __init__(self, *, huge: bool = False) -> None:
        self._huge = huge

    def open(self, shape: Shape, works: Sequence[Workload], *, told: Any) -> None:
        self._peer, self._remote = told
        self._shape = shape
        self._arena = own_memory(shape, huge=self._huge)
        self._engine = _engine(self._arena)

    def arena(self, work: Workload) -> Arena:
        return self._arena

    def pull(self, work: Workload, count: int, mode: str = "") -> list[float]:
        here, there = self._arena.addresses, self._remote
        calls = []
        for pull in work.pulls:
            segments = pull.segments(self._shape)
            local = [here[dst] + at for _, _, dst, at, _ in segments]
            remote = [there[src] + start for src, start, *_ in segments]
            calls.append(partial(self._read, local, remote, [segment[-1] for segment in segments]))
        return repeat(calls, count, budget=work.budget)

    def _read(self, local: list[int], remote: list[int], nbytes: list[int]) -> None:
        _checked(self._engine.batch_transfer_sync_read(self._peer, local, remote, nbytes), "batch read")
