"""Fuzz targets: what a linked peer may ask of a node, or push to it. The messages are well-formed, their words not."""

from __future__ import annotations

import asyncio
from typing import Any, Final, cast

import numpy as np

from kvpull_async import aims, offers
from kvpull_async._workers import Workers
from kvpull_async.lane import Lane
from kvpull_async.memory.base import Region
from kvpull_async.memory.host import HostMemory
from kvpull_async.observe import Counters, Log
from kvpull_async.offers import PeerRecord
from kvpull_async.protocol import frames
from kvpull_async.registry import Registry
from kvpull_async.serve import Serving
from kvpull_async.status import LLMException
from kvpull_async.values import BlocksCacheKey, CacheDesc, CacheKey, DataType, Placement
from tests.fuzz.arena import MARK, Arena
from tests.fuzz.making import Input, message_maker
from tests.serving import FakeLane, FakePath, FakeTransfer

STRIDE, ENTRIES, TENSORS = 64, 4, 2
NBYTES: Final = STRIDE * ENTRIES
PEER: Final = 66
_ARENA: Final = Arena(7 * TENSORS, NBYTES)
_CLOSED: Final = {TENSORS * cache + tensor for cache in (2, 3, 5, 6) for tensor in range(TENSORS)}
"""Regions of caches that are not remote accessible or not for this peer: they are never written."""
HIDDEN: Final = 0xE7
"""What the caches that are for others are full of; no other byte here is that."""
_HIDDEN_KEYS: Final = (4711, 4712)
_HIDDEN_CACHES: Final = (6, 7)
_HIDDEN_MODEL: Final = 4
for _number in range(5 * TENSORS, 7 * TENSORS):
    _ARENA.fill(_number, HIDDEN)
_ADDRESSES: Final = [_ARENA.address(n) + delta for n in range(_ARENA.count) for delta in (0, 1, 64, 255, 256, -1)]
_NUMBERS: Final = np.array([*range(-1, 6), 2**31, 2**62, 2**63 - 1, -(2**63), *_ADDRESSES], np.int64)
_KEYS: Final = ("request", "prefix", "cache", "blocks", "address", "key")
_WORDS: Final[dict[str, tuple[Any, ...]]] = {
    "tensors": (2, 1), "per_tensor": (64, 128, 256, 257, 32), "size": (64, 128, 256, 257, 32), "key": _KEYS,
    "identity": (1, 2, 3, 4, 5, 6, 7, 4711), "model_id": (0, 1, _HIDDEN_MODEL),
    "entry": (0, 1, 3, 4), "blocks": (0, 1, 2, 4),
    "block_nbytes": (64, 0, 32), "src_blocks": (0, 1, 2), "first_tensor": (0, -1, 1, 2), "offset": (0, 32, 192, 193),
    "inline_limit": (65536, 0), "remaining_ms": (60_000, 0, 1), "start": (0, 64), "src_tensor": (0, 1),
    "verify": ("", "crc32", "xxh3", "md5"), "ticket": (b"a ticket",),
}  # fmt: skip
_KINDS: Final = {kind: message_maker(kind, _WORDS) for kind in frames.MESSAGES.values() if kind is not frames.Hello}
_SERVED: Final = (
    frames.Request, frames.Request, frames.Offer, frames.Offer, frames.Done, frames.Check, frames.Cancel,
    frames.Watch, frames.Read, frames.Bye, frames.Lease,
)  # fmt: skip


_MEMORY: Final = HostMemory()
_DESC: Final = CacheDesc(TENSORS, [ENTRIES, STRIDE], DataType.DT_INT8)
_CACHES: Final = [
    (
        _MEMORY.adopt(
            [_ARENA.address(number * TENSORS + tensor) for tensor in range(TENSORS)],
            tensor_nbytes=NBYTES,
            placement=Placement.HOST,
        ),
        [CacheKey(1, key) for key in (_HIDDEN_KEYS if number == 5 else (2 * number + 1, 2 * number + 2))],
        {3: BlocksCacheKey(1, 0), 4: BlocksCacheKey(1, 1), 6: BlocksCacheKey(1, _HIDDEN_MODEL)}.get(number),
    )
    for number in range(7)
]


def registry() -> Registry:
    """Caches 1 to 7: two that may be pushed into, two that may not, and one of blocks that may; so is the fourth one,
    which may not. The last two, one of entries and one of blocks, are for another cluster.
    """
    made = Registry(_MEMORY)
    for number, (regions, keys, blocks) in enumerate(_CACHES):
        allowed = frozenset({PEER + 1}) if number >= 5 else None
        entry = made.add(
            _DESC, regions, blocks=blocks is not None, remote_accessible=number not in (2, 3), allowed=allowed
        )
        entry.reached = entry.writable = True  # it is there: asking the kernel each time costs most of the time
        if blocks is not None:
            made.bind_blocks(entry, blocks)
        else:
            made.bind(entry, keys)
    return made


_REGISTRY: Final = registry()
_TABLE_LENGTHS: Final = (0, 1, 2, 3, 4, 8, 64, 300)


def table(given: Input) -> bytes:
    """Numbers, most of them of blocks and addresses that exist or nearly do."""
    count = given.one_of(_TABLE_LENGTHS)
    chosen = _NUMBERS[[given.byte() % len(_NUMBERS) for _ in range(count)]] if count else _NUMBERS[:0]
    return chosen.astype("<i8").tobytes() + bytes(given.byte() % 9 if given.byte() > 0xE0 else 0)


def said(given: Input, kind: type[Any]) -> tuple[Any, bytes] | None:
    """A message of that kind and its tail, as they come out of a decoder; None where that refuses them."""
    message = _KINDS[kind](given)
    decoder = frames.Decoder(1 << 30)
    decoder.feed(frames.encode(message, _tail_of(given, message)))
    try:
        frame = decoder.next_frame()
    except frames.FrameError:
        return None
    assert frame is not None
    return frame.message, bytes(frame.tail)


def _tail_of(given: Input, message: Any) -> bytes:
    """What a peer may put behind a message: the table that it announces, or another; and its bytes."""
    if isinstance(message, frames.Request):
        return table(given) if message.key == "blocks" or given.byte() > 0xD0 else b""
    if not isinstance(message, frames.Offer):
        return b""
    announced = max(message.tensors, 0) * (message.key == "address") + message.blocks + message.src_blocks
    if not 0 <= announced <= 300 or given.byte() > 0xE0:
        numbers = table(given)
    else:
        numbers = _NUMBERS[[given.byte() % len(_NUMBERS) for _ in range(announced)]].tobytes() if announced else b""
    inline = message.tensors * message.per_tensor if message.inline else 0
    return numbers + bytes([given.byte() & 0x7F]) * (inline if 0 <= inline < 5000 else given.byte())


def find(data: bytes) -> None:
    """What is found for a request or an offer lies inside the caches that are here, whatever it says."""
    given = Input(data)
    while given.left:
        frame = said(given, frames.Offer if given.byte() & 1 else frames.Request)
        if frame is None:
            continue
        message, tail = frame
        try:
            if isinstance(message, frames.Request):
                _check_offer(offers.find(_REGISTRY, message, tail, peer=PEER), message)
            else:
                _check_place(aims.find(_REGISTRY, message, tail, by_key=bool(given.byte() & 3), peer=PEER), message)
        except LLMException:
            pass


def _check_offer(found: offers.Offer, request: Any) -> None:
    assert found.entry.cache_id not in _HIDDEN_CACHES
    rows = found.plan()
    _check_rows(rows, found.entry.regions)
    assert int(rows[:, 2].sum()) == found.nbytes
    assert found.nbytes <= max(NBYTES * TENSORS, len(found.tensors) * found.per_tensor)
    offers.consumes(request, found)


def _check_place(place: aims.Place, offer: Any) -> None:
    rows = place.rows()
    _check_rows(rows, place.regions)
    assert int(rows[:, 2].sum()) == place.nbytes
    assert len(rows) <= place.most_rows
    known = [(region.address, region.address + region.nbytes) for entry in place.entries for region in entry.regions]
    for region in place.regions:
        assert any(first <= region.address and region.address + region.nbytes <= last for first, last in known)
    assert all(entry.remote_accessible for entry in place.entries)
    assert not any(entry.cache_id in _HIDDEN_CACHES for entry in place.entries)
    if place.start is not None:
        assert place.start + place.nbytes // len(place.regions) <= min(region.nbytes for region in place.regions)
    assert len(place.payload) == (place.nbytes if offer.inline else 0)


def _check_rows(rows: Any, regions: tuple[Region, ...]) -> None:
    assert (rows >= 0).all()
    assert (rows[:, 0] < len(regions)).all()
    sizes = np.array([region.nbytes for region in regions], np.int64)[rows[:, 0]]
    assert (rows[:, 1] <= sizes - rows[:, 2]).all()


# --- a whole serving lane ---


class Service:
    """A loop that is run by hand, and the parts that all inputs share."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.workers = Workers(1)

    def __call__(self, data: bytes) -> None:
        self.loop.run_until_complete(self._serve(Input(data)))

    def close(self) -> None:
        self.workers.close(5.0)
        self.loop.close()

    async def _serve(self, given: Input) -> None:
        lane, path = FakeLane(), FakePath()
        mode = given.byte()
        path.ticket = b"a ticket" if mode & 1 else None
        path.stuck, path.opens = bool(mode & 2), bool(mode & 4)
        caches, record = registry(), PeerRecord()
        serving = Serving(
            cast("Lane", lane), path, registry=caches, record=record, workers=self.workers, log=Log(),
            counters=Counters(), inline_limit=0 if mode & 8 else 4096, lease_margin=1.0, settle_timeout=0.0,
            pushes_by_key=bool(mode & 16), peer_left=lambda _: None, peer=PEER,
        )  # fmt: skip
        self._last = steps = 0
        self._hidden: set[int] = set()
        while given.left:
            await self._step(given, serving, lane, path)
            steps += 1
        await _turns(3)
        self._check(lane, path)
        for transfer in path.transfers:
            transfer.abort()
        serving.abort()
        await _turns(6)
        assert not caches._watches
        for _ in range(2000):  # what a thread sums up may take a moment
            if not any(entry.busy for entry in caches.entries()):
                break
            await asyncio.sleep(0.001)
        assert not any(entry.busy for entry in caches.entries()), caches.entries()
        assert len(record.issued) <= steps
        self._check(lane, path)
        _ARENA.restore()

    async def _step(self, given: Input, serving: Serving, lane: FakeLane, path: FakePath) -> None:
        choice = given.byte()
        lane.turns += choice & 1
        if choice < 0xC0:
            self._hear(given, serving, _SERVED[choice % len(_SERVED)])
            for heard, _ in lane.said[-2:]:
                if isinstance(heard, frames.Grant):
                    given.ids.append(heard.grant_id)
        elif choice < 0xE0:
            await _turns(choice & 3)
        elif path.transfers:
            self._move(path.transfers[choice % len(path.transfers)], whole=bool(choice & 1))

    def _hear(self, given: Input, serving: Serving, kind: type[Any]) -> None:
        frame = said(given, kind)
        if frame is None:
            return
        message, tail = frame
        if isinstance(message, (frames.Request, frames.Offer, frames.Watch, frames.Lease)):
            if message.request_id <= self._last:  # the session ends the connection for that
                return
            self._last = message.request_id
            if _is_hidden(message):
                self._hidden.add(message.request_id)
        serving.receive(message, tail)

    @staticmethod
    def _move(transfer: FakeTransfer, *, whole: bool) -> None:
        """Bytes come for a push, or the transfer breaks."""
        if not whole or transfer.done.done() or transfer._landing is None:
            transfer.abort()
            return
        for batch in transfer._landing:
            for view in batch:
                view[:] = bytes([5]) * len(view)
        transfer.finish()

    def _check(self, lane: FakeLane, path: FakePath) -> None:
        assert not lane.aborted, lane.aborted
        assert not (_ARENA.changed() & _CLOSED)
        for message, tail in lane.said:
            assert MARK not in tail
            assert HIDDEN not in tail
            if getattr(message, "request_id", 0) in self._hidden:
                assert isinstance(message, (frames.Refuse, frames.Result)), message
                assert message.status
            if isinstance(message, frames.Refuse):
                assert not any(str(key) in message.reason.split("held:")[-1] for key in _HIDDEN_KEYS) or (
                    "held:" not in message.reason
                )
            if isinstance(message, frames.Grant) and message.inline:
                assert len(tail) == message.tensors * message.per_tensor
        assert MARK not in getattr(path, "bytes", b"")
        assert HIDDEN not in getattr(path, "bytes", b"")


def _is_hidden(message: Any) -> bool:
    """Whether what is named there is for others only."""
    key, number = message.key, message.identity
    if key == "blocks":
        return bool(message.model_id == _HIDDEN_MODEL)
    return (key == "request" and number in _HIDDEN_KEYS) or (key == "cache" and number in _HIDDEN_CACHES)


async def _turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def serving() -> Service:
    return Service()
