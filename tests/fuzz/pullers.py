"""Fuzz targets: what a hostile source, which has been let in, can do to the side that pulls from it.

`puller`: it answers with any grant, and says anything on the side channel of shared memory, with any descriptors.
`payload`: it sends anything on a payload connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import os
import socket
from types import SimpleNamespace
from typing import Any, Final

import msgspec
import numpy as np

from kvpull_async import plan
from kvpull_async._deadline import Deadline
from kvpull_async._prompt import Prompt
from kvpull_async._workers import Workers
from kvpull_async.config import Settings
from kvpull_async.managers.destinations import IntoBlocks, IntoEntry
from kvpull_async.memory.base import Region
from kvpull_async.memory.host import HostMemory
from kvpull_async.memory.publications import EPOCHS, Publications
from kvpull_async.memory.shared import SharedFile, map_readonly
from kvpull_async.observe import Report
from kvpull_async.protocol import frames
from kvpull_async.pull import Pull
from kvpull_async.registry import Registry
from kvpull_async.status import LLMException
from kvpull_async.transport.base import PathSeed
from kvpull_async.transport.payload import receive_into
from kvpull_async.transport.shm import messages, side
from kvpull_async.transport.shm.path import ShmPath
from kvpull_async.transport.shm.side import Side
from kvpull_async.values import BlocksCacheKey, CacheDesc, CacheKey, CacheKeyByIdAndIndex, DataType, LLMRole, Placement
from tests import memfds
from tests.fuzz.arena import Arena
from tests.fuzz.making import Input, message_maker
from tests.pull_link import LoopLane, LoopLink

STRIDE, ENTRIES, TENSORS = 64, 4, 2
NBYTES: Final = STRIDE * ENTRIES
PAGE: Final = 4096
SHARED, SENT = 0x90, 0xA0
"""What the hostile source's memory is full of, and what it sends; the destination has neither."""
_GRANT: Final = message_maker(
    frames.Grant,
    {
        "tensors": (TENSORS, 1, 3), "per_tensor": (STRIDE, 63, 65, 128), "start": (0, 64, 192, 193, 2**62),
        "entry_nbytes": (0, STRIDE, 1), "ticket": tuple(msgspec.msgpack.encode(n) for n in (1, 2, 3, -1, 2**63)),
    },
)  # fmt: skip
_WORDS: Final[dict[str, tuple[Any, ...]]] = {
    "number": (1, 2, 3), "slot": (0, 1, EPOCHS - 1, EPOCHS), "epoch": (1, 2), "tensor_nbytes": (NBYTES, STRIDE, PAGE),
    "tensors": (TENSORS, 1, 3), "first": (0, 1, 2), "files": (1, 2, 3, 4), "numbers": (1, 2, 3, 4),
    "nbytes": (PAGE, 1, 2 * PAGE, 0),
}  # fmt: skip
_SAID: Final = [
    message_maker(kind, _WORDS)
    for kind in (
        messages.Files, messages.Files, messages.Layout, messages.Layout, messages.Drop, messages.Dropped,
        messages.Missed, messages.Opened, messages.Stream, messages.Hello,
    )
]  # fmt: skip
_PLACES: Final = np.array([0, 1, 2, -1, 64, 256, 3840, 4096, 4095, 2**62, -(2**63), 2**63 - 1], np.int64)


class Link(LoopLink):
    """What a pull needs of a link; it answers at once, as the hostile source wants."""

    def __init__(self, given: Input, path: ShmPath) -> None:
        super().__init__(inline_limit=65536)
        self.lane = Lane(self)
        self.path = path  # type: ignore[assignment]
        self.given = given

    def broken(self, error: OSError) -> LLMException:
        return LLMException(str(error))


class Lane(LoopLane):
    def ask(self, request: Any, tail: bytes) -> Any:
        given = self._link.given  # type: ignore[attr-defined]
        asked = request(len(self.requests) + 1)
        self.requests.append(asked)
        answer: Prompt[Any] = Prompt(loop=asyncio.get_running_loop())
        grant = _GRANT(given)
        expected = TENSORS * STRIDE
        nbytes = (expected, grant.tensors * grant.per_tensor, given.byte(), 0)[given.byte() % 4]
        payload = bytes([SENT]) * max(0, min(nbytes, 4096)) if grant.inline else b""
        answer.hand((grant, payload))
        return asked.request_id, b"request", answer


def _shared(nbytes: int) -> int:
    """A memory file as an honest source passes it."""
    descriptor = memfds.memfd(nbytes, seals=0)
    os.pwrite(descriptor, bytes([SHARED]) * nbytes, 0)
    fcntl.fcntl(descriptor, memfds.ADD_SEALS, memfds.ALL)
    return descriptor


class Puller:
    """What all inputs share: a loop, a destination with guards, and the files that the source passes."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._workers = Workers(1)
        self._arena = Arena(2 * TENSORS, NBYTES)
        self._memory = HostMemory()
        self._published = Publications()
        self._page = SharedFile(EPOCHS * 8)
        self._words = np.frombuffer((ctypes.c_ubyte * self._page.nbytes).from_address(self._page.address), np.int64)
        self._mapped = map_readonly(self._page.descriptor, self._page.nbytes)
        reading, writing = os.pipe()
        os.close(writing)
        good = [_shared(PAGE), _shared(2 * PAGE)]
        self._passed = [*good, memfds.memfd(PAGE, seals=memfds.SEAL), memfds.memfd(PAGE, allocated=0), reading]
        self._registry = Registry(self._memory)
        desc = CacheDesc(TENSORS, [ENTRIES, STRIDE], DataType.DT_INT8)
        self._entries = []
        for number in range(2):
            addresses = [self._arena.address(number * TENSORS + tensor) for tensor in range(TENSORS)]
            regions = self._memory.adopt(addresses, tensor_nbytes=NBYTES, placement=Placement.HOST)
            self._entries.append(self._registry.add(desc, regions, blocks=bool(number)))
        self._node = SimpleNamespace(settings=Settings(LLMRole.DECODER, 2), registry=self._registry)

    def __call__(self, data: bytes) -> None:
        self._loop.run_until_complete(self._talk(Input(data)))

    def close(self) -> None:
        self._workers.close(5.0)
        self._registry.close()
        self._published.close()
        self._memory.close()
        side.close(self._passed)
        self._loop.close()

    async def _talk(self, given: Input) -> None:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        here.setblocking(False)
        self._words[:] = 1
        end = Side(here, self._published, page=self._mapped, process=None, read_by_peer=bool(given.byte() & 1))
        link: Link | None = None
        try:
            seed = PathSeed(b"t" * 16, 0, True, None, self._workers, lambda _: None)
            link = Link(given, ShmPath(end, seed, forget=lambda _: None))
            while given.left:
                await self._step(given, end, link, there)
        finally:
            if link is not None:
                link.standing.clear()
                link.path.abort()  # type: ignore[attr-defined]
            end.close()
            there.close()
        assert not any(entry.busy for entry in self._entries)

    async def _step(self, given: Input, end: Side, link: Link, there: socket.socket) -> None:
        choice = given.byte()
        if choice < 0x80:
            self._say(given, there)
        elif choice < 0x90:
            with contextlib.suppress(OSError):
                beside = [self._passed[given.byte() % len(self._passed)]] if choice & 1 else []
                socket.send_fds(there, [given.take(given.byte() % 60)], beside)
        elif choice < 0x9C:
            self._introduce(given, there)
        elif choice < 0xA0:
            end.drain()
        elif choice < 0xA8:
            self._words[choice & 1] = given.byte() & 1
        elif choice < 0xAC:
            end.publish(self._entries[0].regions) if not end.closed else None
        else:
            await self._pull(given, link)

    def _introduce(self, given: Input, there: socket.socket) -> None:
        """As an honest source does: two files, and a cache in the first one."""
        number, epoch = given.byte() % 3 + 1, 1 + given.byte() // 0xF0
        with contextlib.suppress(OSError):
            side.send(there, messages.Files([1, 2], [PAGE, 2 * PAGE]), self._passed[:2])
            places = np.array([[n, n * NBYTES] for n in range(TENSORS)], "<i8").tobytes()
            side.send(there, messages.Layout(number, 0, epoch, NBYTES, TENSORS, 0, [1, 2], places))

    def _say(self, given: Input, there: socket.socket) -> None:
        message = given.one_of(_SAID)(given)
        if isinstance(message, messages.Layout):
            pairs = [given.one_of(_PLACES) for _ in range(2 * (given.byte() % 5 or TENSORS))]
            numbers = [int(number) for number in pairs]
            places = np.array(numbers, "<i8").tobytes() + bytes(given.byte() // 0xF0)
            files = message.files if given.byte() & 1 else [1]
            message = msgspec.structs.replace(message, places=places, files=files)
        count = given.byte() % 5 if isinstance(message, messages.Files | messages.Stream) else given.byte() // 0xF0
        descriptors = [self._passed[given.byte() % len(self._passed)] for _ in range(count)]
        with contextlib.suppress(OSError):  # it has hung up
            side.send(there, message, descriptors)

    async def _pull(self, given: Input, link: Link) -> None:
        blocks, entry, opens = bool(given.byte() & 1), given.byte() % ENTRIES, bool(given.byte() & 1)
        if blocks:
            key: Any = BlocksCacheKey(1) if given.byte() & 1 else CacheKey(1, 7)
        else:
            key = CacheKeyByIdAndIndex(1, 1, given.byte() % ENTRIES)
        src = np.array([0] if isinstance(key, BlocksCacheKey) else [], np.int64)
        draft: Any = SimpleNamespace(
            key=key, src_tensors=None, dst_tensors=None, per_layer=1, batch_index=entry, dst_offset=0, size=-1,
            src_offset=0, offset_pull=False, remote_access=opens, strict_layout=False, wait_for_key=False,
            traceparent="", src_blocks=src, dst_blocks=np.array([entry], np.int64), verify="",
        )  # fmt: skip
        into = IntoBlocks(draft, self._entries[1]) if blocks else IntoEntry(draft, self._entries[0])
        wanted = into.to_link(self._node, Report("pull_cache", "pull"), Deadline.after_ms(60_000))
        whole, failed = False, ""
        try:
            await Pull(link, wanted).run()  # type: ignore[arg-type]
            whole = not blocks or src.size > 0  # an entry that is cut into blocks may end within the last one
        except LLMException as error:
            failed = str(error)
        assert "internal error" not in failed, failed
        self._check(first=TENSORS if blocks else 0, entry=entry, whole=whole)

    def _check(self, *, first: int, entry: int, whole: bool) -> None:
        """Nothing but the asked entry has changed, and what stands there has been sent or shared."""
        assert self._arena.changed() <= {first, first + 1}
        for number in (first, first + 1):
            held = np.frombuffer(ctypes.string_at(self._arena.address(number), NBYTES), np.uint8)
            asked = slice(entry * STRIDE, (entry + 1) * STRIDE)
            before = (np.arange(NBYTES) + 37 * number) % 0x80
            rest = held != before
            rest[asked] = False
            assert not rest.any(), "bytes beside the asked entry were written"
            came = held[asked][held[asked] >= 0x80]
            assert ((came == SHARED) | (came == SENT)).all()
            assert not whole or len(came) == STRIDE, "a pull returned and is not whole"
        self._arena.restore()


class _Transfer:
    def check(self) -> None: ...


_TARGET: Final = Arena(TENSORS, NBYTES)
_REGIONS: Final = tuple(Region(_TARGET.address(n), NBYTES, Placement.HOST) for n in range(TENSORS))
_HOST: Final = HostMemory()


def payload(data: bytes) -> None:
    """Whatever comes, the bytes of a grant land where they belong, or an OSError ends the transfer."""
    given = Input(data)
    size, start = given.byte() % NBYTES + 1, given.byte() % NBYTES
    size = min(size, NBYTES - start)
    rows = plan.run_segments(range(TENSORS), start=start, size=size)
    here, there = socket.socketpair()
    with here, there:
        grant, nbytes = b"g" * 16, TENSORS * size
        if given.byte() & 1:
            there.sendall(grant + nbytes.to_bytes(8, "little"))
        sent = given.take(given.byte() * 4)
        there.sendall(bytes(byte | 0x80 for byte in sent))
        there.shutdown(socket.SHUT_WR)
        with contextlib.suppress(OSError):
            receive_into(_HOST.landing(_REGIONS, rows), grant, nbytes)(here, _Transfer())  # type: ignore[arg-type]
            assert len(sent) >= nbytes
    _TARGET.changed()
    for number in range(TENSORS):
        held = np.frombuffer(ctypes.string_at(_TARGET.address(number), NBYTES), np.uint8)
        assert (held[:start] < 0x80).all()
        assert (held[start + size :] < 0x80).all()
    _TARGET.restore()


def puller() -> Puller:
    return Puller()
