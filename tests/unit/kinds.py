"""Kinds of data path for tests of how a link agrees on one: they keep what is asked of them and carry nothing."""

from __future__ import annotations

import asyncio

from kvpull_async._deadline import Deadline
from kvpull_async.memory.base import Batches
from kvpull_async.transport.base import DataPath, PathKind, PathSeed, Transfer


class ScriptedPath(DataPath):
    """One lane's half of a path that only exists."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.aborted = False

    async def ready(self, deadline: Deadline) -> None: ...

    def fetch(self, grant_id: bytes, landing: Batches, nbytes: int) -> Transfer:
        raise NotImplementedError

    def serve(self, grant_id: bytes, lending: Batches, nbytes: int) -> Transfer:
        raise NotImplementedError

    def abort(self) -> None:
        self.aborted = True

    async def aclose(self, deadline: Deadline) -> None: ...


class ScriptedKind(PathKind):
    """Works, unless one of `no_offer`, `no_meeting` and `no_path` says why it does not, or its meeting `hangs`."""

    def __init__(
        self,
        name: str,
        *,
        no_offer: OSError | None = None,
        no_meeting: OSError | None = None,
        no_path: OSError | None = None,
        hangs: bool = False,
    ) -> None:
        self.name = name
        self.why = f"{name} is what there is"
        self.no_offer, self.no_meeting, self.no_path, self.hangs = no_offer, no_meeting, no_path, hangs
        self.offered: list[bytes] = []
        self.met: list[tuple[bytes, bytes]] = []
        self.seeds: list[PathSeed] = []
        self.paths: list[ScriptedPath] = []
        self.forgotten: list[bytes] = []
        self.closed = 0
        self.forked = 0

    def offer(self, token: bytes) -> bytes:
        self.offered.append(token)
        if self.no_offer is not None:
            raise self.no_offer
        return f"come to {self.name}".encode()

    async def meet(self, token: bytes, offer: bytes) -> None:
        self.met.append((token, offer))
        if self.no_meeting is not None:
            raise self.no_meeting
        if self.hangs:
            await asyncio.Event().wait()

    def path(self, seed: PathSeed) -> ScriptedPath:
        self.seeds.append(seed)
        if self.no_path is not None:
            raise self.no_path
        self.paths.append(ScriptedPath(self.name))
        return self.paths[-1]

    def forget(self, token: bytes) -> None:
        self.forgotten.append(token)

    def close_after_fork(self) -> None:
        self.forked += 1

    async def aclose(self, deadline: Deadline) -> None:
        self.closed += 1
