"""The side channel of one link: which memory each end publishes to the other, and the descriptors for it.

One Unix packet socket between two processes of one user, on which both ends keep each other up to date. It must not
know grants or how bytes are copied. Used by the core's loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import struct
import weakref
from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from kvpull_async._workers import report_to
from kvpull_async.memory import shared
from kvpull_async.memory.base import Region
from kvpull_async.memory.publications import EPOCHS, Publication, Publications
from kvpull_async.memory.shared import Mapping, SharedFile
from kvpull_async.transport.shm import messages
from kvpull_async.transport.shm.messages import Drop, Dropped, Files, Layout, Message, Missed, Opened, Stream
from kvpull_async.transport.shm.remote import Cache, Incomplete, Mapped, PeerProcess, Private, gone

__all__ = ["Side", "credentials", "receive", "send"]

_UNSENT: Final = 1024
_FILES: Final = 32 * 1024  # half of the mappings that the kernel allows a process by default
_GRANTS: Final = 256
_AT_ONCE: Final = 256
_TURNS: Final = 64
"""How many times so many messages may come before the one that is needed."""
_FAREWELL: Final = 0.1
"""Seconds within which the goodbye on the link's own connection is heard, when the peer ends in good order."""
_ROOM: Final = socket.CMSG_SPACE(messages.DESCRIPTORS * array("i").itemsize)
_CREDENTIALS: Final = struct.Struct("3i")


def credentials(sock: socket.socket) -> tuple[int, int]:
    """Process and user id of the other end, by the kernel's word; process 0 is outside this one's sight."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def send(sock: socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
    sock.sendmsg([messages.encode(message)], beside, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def receive(sock: socket.socket) -> tuple[Message | None, list[int]]:
    """The next message and its descriptors, which are the caller's to close; None at the end. BlockingIOError when
    there is none, OSError for one that was cut off or makes no sense.
    """
    flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    data, beside, answer, _ = sock.recvmsg(messages.PACKET, _ROOM, flags)
    descriptors = _passed(beside)
    try:
        if not data:
            return None, descriptors
        message = messages.decode(data)
        if answer & (socket.MSG_TRUNC | socket.MSG_CTRUNC):  # not all descriptors: this process may have too many
            close(descriptors)
            descriptors = []
        return message, descriptors
    except BaseException:
        close(descriptors)
        raise


def _passed(beside: list[tuple[int, int, bytes]]) -> list[int]:
    """Not by socket.recv_fds, nor socket.send_fds above: they forget the flags."""
    found = array("i")
    for level, kind, data in beside:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return found.tolist()


def close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class Side:
    """This process's end. `page` has the peer's epochs; `process` is its memory, if that may be read."""

    def __init__(
        self,
        sock: socket.socket,
        publications: Publications,
        *,
        page: Mapping,
        process: PeerProcess | None,
        read_by_peer: bool,
    ) -> None:
        self.process = process
        self.read_by_peer: bool = read_by_peer
        self.closed: bool = False
        self.lost: Callable[[str], object] = _nobody
        """Told when the peer ends the channel."""
        self.streams: dict[int, Callable[[socket.socket], None]] = {}
        """Who takes the connections that the peer sends, by lane."""
        self._sock = sock
        self._publications = publications
        self._page = page
        self._loop = asyncio.get_running_loop()
        self._unsent: deque[tuple[Message, tuple[SharedFile, ...]]] = deque()
        self._sent: dict[int, Publication] = {}
        self._held: Counter[SharedFile] = Counter()
        """Files that the peer has, by how many publications."""
        self._files_of: dict[int, tuple[SharedFile, ...]] = {}
        """Those of the publications that have not been withdrawn."""
        self._files: dict[int, Mapping | None] = {}
        self._used: Counter[int] = Counter()
        self._part: Incomplete | None = None
        """The layout that is coming: its parts come one after another."""
        self._caches: dict[int, tuple[Cache, list[int]]] = {}
        self._arrived = select.poll()
        self._arrived.register(sock, select.POLLIN)
        self._dropped: deque[int] = deque(maxlen=_GRANTS)
        """The caches that the peer took back last: grants for them may be on their way."""
        self._loop.add_reader(sock.fileno(), self.drain)

    # -- what this side publishes -----------------------------------------------------------------------------------

    def publish(self, regions: tuple[Region, ...]) -> int | None:
        """Make sure that the peer has a cache's layout; its number, or None when the peer cannot read it by itself.

        ConnectionError when the peer does not take messages.
        """
        made = self._publications.publish(regions)
        if made is None or not (made.files or self.read_by_peer):
            return None
        if made.number not in self._sent:
            self._introduce(made)
        return made.number

    def _introduce(self, made: Publication) -> None:
        new = [file for file in made.files if not self._held[file]]
        for first in range(0, len(new), messages.DESCRIPTORS):
            some = new[first : first + messages.DESCRIPTORS]
            self._send(Files([file.number for file in some], [file.nbytes for file in some]), tuple(some))
        numbers, table = [file.number for file in made.files], made.places.astype("<i8")
        for first in range(0, len(table), messages.TENSORS):
            part = table[first : first + messages.TENSORS].tobytes()
            self._send(Layout(made.number, made.slot, made.epoch, made.tensor_nbytes, len(table), first, numbers, part))
        if self.closed:
            raise ConnectionError("the side channel of shared memory has ended")
        self._sent[made.number] = made
        self._held.update(made.files)
        self._files_of[made.number] = made.files
        made.holders[self] = self._withdrawn
        if self._unsent:
            raise ConnectionError("the peer does not take what is published to it")

    def _withdrawn(self, number: int) -> None:
        """What the peer hears after this may need the same files: it will not have them any more."""
        self._release_files(number)
        self._send(Drop(number))

    def _returned(self, number: int) -> None:
        """The peer has it no more."""
        self._release_files(number)
        made = self._sent.pop(number, None)
        if made is not None:
            made.release(self)

    def _release_files(self, number: int) -> None:
        self._held.subtract(self._files_of.pop(number, ()))
        self._held += Counter()

    # -- what the peer publishes ------------------------------------------------------------------------------------

    def cache(self, number: int) -> Cache:
        """What the peer has published under that number. LLMException when it has taken it back meanwhile,
        ConnectionError when this process could not get it.
        """
        for _ in range(_TURNS):
            self.drain()
            if number in self._caches:
                break
        found = self._caches.get(number)
        if found is None and number in self._dropped:
            raise gone()
        if found is None:
            raise ConnectionError(f"the peer's memory {number} is not mapped here")
        return found[0]

    def _map_files(self, files: Files, descriptors: list[int]) -> None:
        if len(self._files) + len(files.numbers) > _FILES:
            raise ConnectionError(f"the peer has passed more than {_FILES} files")
        for i, (number, nbytes) in enumerate(zip(files.numbers, files.nbytes, strict=True)):
            mapping = None
            if i < len(descriptors):
                with contextlib.suppress(OSError):  # the layouts that need it say so
                    shared.check_sealed(descriptors[i], nbytes)
                    mapping = shared.map_readonly(descriptors[i], nbytes)
            self._files[number] = mapping

    def _add_layout(self, part: Layout) -> None:
        if part.slot >= EPOCHS or part.number in self._caches or len(self._caches) >= EPOCHS:
            raise ConnectionError(f"layout {part.number} with epoch slot {part.slot} makes no sense")
        whole = self._part if self._part is not None else Incomplete(part)
        self._part = None if whole.add(part) else whole
        if self._part is not None:
            return
        cache = self._private(whole) if not part.files else self._mapped(whole)
        if cache is None:
            self._send(Missed(part.number))
            self._forget_files(part.files)
            return
        self._used.update(part.files)
        self._caches[part.number] = cache, part.files

    def _private(self, whole: Incomplete) -> Cache | None:
        if self.process is None:
            return None
        return Private(whole.layout, whole.places[:, 1].copy(), self._page, process=self.process)

    def _mapped(self, whole: Incomplete) -> Cache | None:
        """None when one of its files could not be mapped, or does not hold what it should."""
        layout, places = whole.layout, whole.places
        mappings = [self._files.get(number) for number in layout.files]
        held = [mapping for mapping in mappings if mapping is not None]
        if len(held) < len(mappings) or places[:, 0].min() < 0 or places[:, 0].max() >= len(held):
            return None
        room = np.array([mapping.nbytes for mapping in held], np.int64)[places[:, 0]] - layout.tensor_nbytes
        if (places[:, 1] < 0).any() or (places[:, 1] > room).any():
            return None
        addresses = np.array([mapping.address for mapping in held], np.int64)
        return Mapped(layout, addresses[places[:, 0]] + places[:, 1], self._page, mappings=tuple(held))

    def _drop(self, number: int) -> None:
        """The peer hears that it is unmapped once that is so: a read that runs may still hold it."""
        held = self._caches.pop(number, None)
        if held is None:
            self._send(Dropped(number))
            return
        cache, files = held
        self._used.subtract(files)
        self._used += Counter()
        self._forget_files(files)
        self._dropped.append(number)
        weakref.finalize(cache, report_to, self._loop, self._send, Dropped(number)).atexit = False

    def _forget_files(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if not self._used[number]:
                self._files.pop(number, None)

    # -- the channel ------------------------------------------------------------------------------------------------

    def stream(self, lane: int, sock: socket.socket) -> None:
        """Pass one end of a connection to the peer; it stays the caller's to close."""
        send(self._sock, Stream(lane), [sock.fileno()])

    def drain(self) -> None:
        """Take what the peer has sent so far."""
        if not self._said():
            return
        try:
            for _ in range(_AT_ONCE):
                if self.closed:
                    return
                message, descriptors = receive(self._sock)
                try:
                    self._take(message, descriptors)
                finally:
                    close(descriptors)
        except BlockingIOError:
            return
        except Exception as error:  # noqa: BLE001  (ends the channel, with the reason: the peer may send anything)
            self._ended(str(error) or repr(error))

    def _said(self) -> bool:
        """Mostly nothing: this is cheaper than to be told so by an exception."""
        return not self.closed and bool(self._arrived.poll(0))

    def _take(self, message: Message | None, descriptors: list[int]) -> None:
        if message is None:
            self._ended("the peer closed it")
        elif isinstance(message, Files):
            self._map_files(message, descriptors)
        elif isinstance(message, Layout):
            self._add_layout(message)
        elif isinstance(message, Drop):
            self._drop(message.number)
        elif isinstance(message, (Dropped, Missed)):
            self._returned(message.number)
        elif isinstance(message, Opened):
            self.read_by_peer = message.reads
        elif isinstance(message, Stream):
            self._take_stream(message.lane, descriptors)
        else:
            raise ConnectionError(f"{type(message).__name__} came again")

    def _take_stream(self, lane: int, descriptors: list[int]) -> None:
        take = self.streams.get(lane)
        if descriptors and take is not None:
            sock = socket.socket(fileno=descriptors[0])  # refuses what is no socket
            del descriptors[0]
            take(sock)

    def _send(self, message: Message, files: tuple[SharedFile, ...] = ()) -> None:
        if self.closed:
            return
        self._unsent.append((message, files))
        if len(self._unsent) > _UNSENT:
            self._ended("the peer does not read")
        elif len(self._unsent) == 1:
            self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent:
                message, files = self._unsent[0]
                send(self._sock, message, [file.descriptor for file in files])
                self._unsent.popleft()
        except BlockingIOError:
            self._loop.add_writer(self._sock.fileno(), self._flush)
            return
        except OSError as error:
            self._ended(str(error))
            return
        self._loop.remove_writer(self._sock.fileno())

    def _ended(self, reason: str) -> None:
        """From the peer's side, or by a fault. A peer that ends in good order says so on the link's own connection."""
        if not self.closed:
            lost, self.lost = self.lost, _nobody
            self.close()
            self._loop.call_later(_FAREWELL, lost, f"the side channel of shared memory ended: {reason}")

    def close(self) -> None:
        """May be called twice."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        for number in tuple(self._sent):
            self._returned(number)
        self._unsent.clear()
        self._caches.clear()
        self._files.clear()
        del self._page
        self.lost = _nobody

    def close_after_fork(self) -> None:
        self._sock.close()

    def __repr__(self) -> str:
        return f"<Side published={len(self._sent)} mapped={len(self._caches)}{' closed' if self.closed else ''}>"


def _nobody(reason: str) -> None:
    """Nobody is to be told."""
