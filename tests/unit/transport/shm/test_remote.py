"""The peer's memory: copies out of it, and how its end is noticed."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvpull_async.memory.copying import CancelFlag, store_word
from kvpull_async.memory.publications import EPOCHS
from kvpull_async.memory.shared import SharedFile, map_readonly
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.transport.shm.messages import Layout
from kvpull_async.transport.shm.remote import Incomplete, Mapped, PeerProcess, Private
from tests import memfds
from tests.copies import at, noise, words
from tests.sides import view

PROBE = b"sixteen bytes ok"
SLOT, EPOCH = 5, 77

_PEER = """
import ctypes, sys, time
probe = ctypes.create_string_buffer(b"sixteen bytes ok", 16)
data = ctypes.create_string_buffer(bytes(range(256)) * 16, 4096)
print(ctypes.addressof(probe), ctypes.addressof(data), flush=True)
sys.stdin.read()
"""


class Source:
    """What one process shares: a page of epochs and a file of four tensors of 1024 bytes."""

    def __init__(self) -> None:
        self.page, self.file = SharedFile(EPOCHS * 8), SharedFile(4096)
        self.content = np.frombuffer(view(self.file), np.uint8)
        self.content[:] = noise(4096)
        self.seen = map_readonly(self.page.descriptor, self.page.nbytes)
        self.set_epoch(EPOCH)

    def set_epoch(self, epoch: int) -> None:
        store_word(self.page.address + SLOT * 8, epoch)

    def mapped(self) -> Mapped:
        mapping = map_readonly(self.file.descriptor, self.file.nbytes)
        bases = np.arange(4, dtype=np.int64) * 1024 + mapping.address
        return Mapped(layout(), bases, self.seen, mappings=(mapping,))

    def private(self, process: PeerProcess, *bases: int) -> Private:
        return Private(layout(), words(*bases), self.seen, process=process)


def layout(**other: object) -> Layout:
    values = {"number": 1, "slot": SLOT, "epoch": EPOCH, "tensor_nbytes": 1024, "tensors": 4, "first": 0}
    return Layout(**{**values, "files": [1], "places": bytes(64), **other})  # type: ignore[arg-type]


class Peer:
    """Another process, with a probe and 4096 bytes."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", _PEER], stdin=-1, stdout=-1, text=True)
        assert self.process.stdout is not None
        self.probe, self.data = map(int, self.process.stdout.readline().split())

    def memory(self, probe: bytes = PROBE) -> PeerProcess:
        return PeerProcess(self.process.pid, probe_address=self.probe, probe=probe)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(20)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def peer() -> Iterator[Peer]:
    made = Peer()
    try:
        made.memory().check()
    except PermissionError:
        made.end()
        pytest.skip("the kernel lets no process read another's memory")
    yield made
    made.end()


def gone(cache: Mapped | Private) -> None:
    with pytest.raises(LLMException, match="took its cache away") as caught:
        cache.check()
    assert caught.value.status_code == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    assert caught.value.retry_safe
    assert not cache.valid


# -- mapped ------------------------------------------------------------------------------------------------------------


def test_rows_are_copied_out_of_the_mapping() -> None:
    source, target = Source(), np.zeros(300, np.uint8)
    cache = source.mapped()
    places = words(at(target), at(target) + 100)
    assert cache.copy(places, cache.bases[[3, 0]] + 24, words(100, 200), CancelFlag()) == 300
    assert np.array_equal(target, np.concatenate((source.content[3096:3196], source.content[24:224])))


def test_a_flag_that_is_set_stops_the_copy() -> None:
    source, target, flag = Source(), np.zeros(100, np.uint8), CancelFlag()
    cache = source.mapped()
    flag.set()
    assert cache.copy(words(at(target)), cache.bases[:1], words(100), flag) == 0
    assert not target.any()


@pytest.mark.parametrize("epoch", [0, EPOCH - 1, EPOCH + 1, 2**64 - 1])
def test_any_other_word_means_that_the_cache_is_gone(epoch: int) -> None:
    source = Source()
    cache = source.mapped()
    cache.check()
    assert cache.valid
    source.set_epoch(epoch)
    gone(cache)


def test_the_words_of_other_slots_do_not_matter() -> None:
    source = Source()
    cache = source.mapped()
    for slot in (SLOT - 1, SLOT + 1):
        store_word(source.page.address + slot * 8, 0)
    cache.check()


def test_a_cache_keeps_its_memory_though_the_source_has_dropped_it() -> None:
    source, target = Source(), np.zeros(1024, np.uint8)
    cache, expected = source.mapped(), source.content[:1024].copy()
    del source
    cache.copy(words(at(target)), cache.bases[:1], words(1024), CancelFlag())
    assert np.array_equal(target, expected)
    cache.check()


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_small_read_fills_each_destination_from_its_tensor(count: int) -> None:
    source, target = Source(), np.zeros((4, 100), np.uint8)
    assert source.mapped().read(4 - count, 24, [at(row) for row in target[:count]], 100)
    expected = source.content.reshape(4, 1024)[4 - count :, 24:124]
    assert np.array_equal(target[:count], expected)
    assert not target[count:].any()


@pytest.mark.parametrize("count", [1, 2])
def test_a_small_read_of_a_cache_that_is_gone_does_not_count_and_writes_nothing(count: int) -> None:
    source, target = Source(), np.zeros((2, 100), np.uint8)
    cache = source.mapped()
    source.set_epoch(0)
    assert not cache.read(0, 0, [at(row) for row in target[:count]], 100)
    assert not target.any()


@pytest.mark.parametrize(
    ("first", "start", "count", "nbytes"),
    [
        (4, 0, 1, 1),
        (3, 0, 2, 1),
        (-1, 0, 1, 1),
        (0, -1, 1, 1),
        (0, 1024, 1, 1),
        (0, 0, 1, 1025),
        (0, 1, 1, 1024),
        (0, 2**63 - 1, 1, 2**63 - 1),
        (0, 0, 1, 0),
        (0, 0, 1, -1),
        (2**70, 0, 1, 1),
    ],
)
def test_a_small_read_never_leaves_its_tensor(first: int, start: int, count: int, nbytes: int) -> None:
    source, target = Source(), np.zeros(4096, np.uint8)
    process = PeerProcess(os.getpid(), probe_address=0, probe=PROBE)
    for cache in (source.mapped(), source.private(process, *[source.file.address] * 4)):
        with pytest.raises(ValueError, match="not there"):
            cache.read(first, start, [at(target)] * count, nbytes)
    assert not target.any()


# -- through the kernel ------------------------------------------------------------------------------------------------


def test_another_process_is_read(peer: Peer) -> None:
    cache, target = Source().private(peer.memory(), peer.data, peer.data + 1024), np.zeros(300, np.uint8)
    cache.check()
    places = words(at(target), at(target) + 100)
    assert cache.copy(places, cache.bases[[1, 0]] + 7, words(100, 200), CancelFlag()) == 300
    content = np.arange(4096, dtype=np.uint32).astype(np.uint8)
    assert np.array_equal(target, np.concatenate((content[1031:1131], content[7:207])))


def test_a_small_read_of_another_process_is_checked_before_and_after(peer: Peer) -> None:
    source, target = Source(), np.zeros((2, 50), np.uint8)
    cache = source.private(peer.memory(), peer.data, peer.data + 1024)
    assert cache.read(0, 3, [at(row) for row in target], 50)
    assert target[0].tolist() == target[1].tolist() == list(range(3, 53))
    source.set_epoch(0)
    target[:] = 0
    assert not cache.read(0, 3, [at(row) for row in target], 50)
    assert not target.any()


def test_an_epoch_that_is_over_is_noticed_without_the_process(peer: Peer) -> None:
    source = Source()
    cache = source.private(peer.memory(), peer.data)
    source.set_epoch(0)
    gone(cache)


def test_a_process_that_has_died_is_an_error(peer: Peer) -> None:
    cache, target = Source().private(peer.memory(), peer.data), np.zeros(64, np.uint8)
    peer.process.kill()
    peer.process.wait(20)
    with pytest.raises(OSError, match=r"\w") as caught:
        cache.check()
    assert caught.value.errno == errno.ESRCH
    with pytest.raises(OSError, match=r"\w"):
        cache.copy(words(at(target)), cache.bases, words(64), CancelFlag())
    with pytest.raises(OSError, match=r"\w"):
        cache.read(0, 0, [at(target)], 64)


def test_a_process_that_was_killed_but_not_waited_for_is_an_error(peer: Peer) -> None:
    cache = Source().private(peer.memory(), peer.data)
    peer.process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, peer.process.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(OSError, match=r"\w"):
        cache.check()


def test_another_program_in_the_same_process_id_is_noticed(peer: Peer) -> None:
    other = peer.memory(probe=b"sixteen bytes no")
    with pytest.raises(ConnectionError, match="not the peer"):
        other.check()
    elsewhere = PeerProcess(os.getpid(), probe_address=peer.probe, probe=PROBE)
    with pytest.raises(OSError, match=r"\w"):  # this process has something else there, or nothing
        elsewhere.check()


def test_a_read_that_succeeds_in_the_wrong_program_does_not_count(peer: Peer) -> None:
    cache, target = Source().private(peer.memory(probe=b"sixteen bytes no"), peer.data), np.zeros(64, np.uint8)
    with pytest.raises(ConnectionError, match="not the peer"):
        cache.read(0, 0, [at(target)], 64)


@pytest.mark.parametrize("address", [8, 2**47, 2**63, 2**64 - 4096])
def test_an_address_that_is_not_there_is_an_error_not_a_crash(peer: Peer, address: int) -> None:
    process, target = peer.memory(), np.zeros(64, np.uint8)
    with pytest.raises(OSError, match=r"\w"):
        process.read(words(at(target)), np.array([address], np.uint64), words(64), CancelFlag())
    with pytest.raises(OSError, match=r"\w"):
        PeerProcess(peer.process.pid, probe_address=address, probe=PROBE).check()


def test_the_first_process_is_not_readable_for_those_who_may_not() -> None:
    if os.geteuid():
        pytest.skip("needs to become another user")

    def child() -> str:
        os.setresuid(65534, 65534, 65534)
        try:
            PeerProcess(os.getppid(), probe_address=8, probe=PROBE).check()
        except OSError as error:
            return str(error.errno)
        return "read"

    assert memfds.in_child(child) == str(errno.EPERM)


# -- memory that is not there ------------------------------------------------------------------------------------------

NOWHERE = 4096
"""No process has memory at this address."""


def test_memory_that_was_taken_back_and_is_gone_says_that_it_was_taken_back(peer: Peer) -> None:
    source = Source()
    cache = source.private(peer.memory(), NOWHERE)
    source.set_epoch(0)
    into = np.zeros(8, np.uint8)
    with pytest.raises(LLMException, match="took its cache away") as raised:
        cache.copy(words(into.ctypes.data), words(NOWHERE), words(8), CancelFlag())
    assert raised.value.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    assert not cache.read(0, 0, [into.ctypes.data], 8)


def test_a_wrong_address_is_blamed_on_the_side_that_has_it(peer: Peer) -> None:
    source, into = Source(), np.zeros(8, np.uint8)
    wrong = source.private(peer.memory(), NOWHERE)
    copies: tuple[Callable[[], object], ...] = (
        lambda: wrong.copy(words(into.ctypes.data), words(NOWHERE), words(8), CancelFlag()),
        lambda: wrong.read(0, 0, [into.ctypes.data], 8),
    )
    for copy in copies:
        with pytest.raises(LLMException, match="the source's memory cannot be read") as raised:
            copy()
        assert raised.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
    right = source.private(peer.memory(), peer.data)
    with pytest.raises(OSError, match="address") as blamed:
        right.copy(words(NOWHERE), words(peer.data), words(8), CancelFlag())
    assert blamed.value.errno == errno.EFAULT


# -- layouts in parts --------------------------------------------------------------------------------------------------


def places(*pairs: tuple[int, int]) -> bytes:
    return np.array(pairs, "<i8").tobytes()


def test_parts_make_a_whole_in_order() -> None:
    first = layout(tensors=3, places=places((0, 1), (1, 2)))
    whole = Incomplete(first)
    assert not whole.add(first)
    assert whole.add(layout(tensors=3, first=2, places=places((0, 2**63 - 1))))
    assert whole.places.tolist() == [[0, 1], [1, 2], [0, 2**63 - 1]]
    assert whole.places.dtype == np.int64


@pytest.mark.parametrize(
    "second",
    [
        {"first": 1},
        {"first": 0},
        {"first": 3},
        {"first": 2**63 - 1},
        {"first": 2, "places": places((0, 0), (0, 0), (0, 0))},
        {"first": 2, "number": 2},
        {"first": 2, "slot": 6},
        {"first": 2, "epoch": 78},
        {"first": 2, "tensor_nbytes": 2048},
        {"first": 2, "tensors": 5},
        {"first": 2, "files": [2]},
        {"first": 2, "files": []},
        {"first": 2, "places": bytes(17)},
        {"first": 2, "places": bytes(31)},
    ],
)
def test_a_part_that_does_not_belong_here_is_refused(second: dict[str, object]) -> None:
    first = layout(places=places((0, 0), (0, 8)))
    whole = Incomplete(first)
    assert not whole.add(first)
    with pytest.raises(ConnectionError, match=r"layout [12]"):
        whole.add(layout(**{"places": places((0, 0)), **second}))


def test_a_first_part_that_is_not_the_first_or_too_long_is_refused() -> None:
    for wrong in (layout(first=1, places=places((0, 0))), layout(places=places(*[(0, 0)] * 5))):
        with pytest.raises(ConnectionError, match="layout 1"):
            Incomplete(wrong).add(wrong)


def test_a_promise_of_very_many_tensors_takes_no_memory() -> None:
    first = layout(tensors=2**31 - 1)
    whole = Incomplete(first)
    assert not whole.add(first)
    assert whole.places.nbytes == 64
