"""AscendCL's calls with plain numbers: what the emulator answers comes through, and all that was taken goes back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from kvpull_async.memory._acl import MemcpyKind, load
from kvpull_async.memory.npu.codes import CONTEXT_NULL, AclError
from kvpull_async.self_test.lines import Absent
from kvpull_async.self_test.raw import Raw
from tests.acl_emulator import Emulator
from tests.emulation import build


@pytest.fixture
def emulator() -> Iterator[Emulator]:
    found = Emulator(build())
    found.reset()
    found.configure(abort_on_violation=0)
    yield found
    found.resume()
    assert found.violations() == []
    assert not any(found.left().values())
    found.reset()


@pytest.fixture
def raw(emulator: Emulator) -> Raw:
    return Raw(load({"ASCEND_HOME_PATH": str(emulator.home)}), 0)


def apart(work: Callable[[], None]) -> None:
    """In a thread of its own, which ends with whatever it has bound."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  (raised where it is waited for)
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def opened(raw: Raw) -> None:
    raw.initialise()
    raw.bind()


def test_bytes_go_to_the_device_and_back(raw: Raw) -> None:
    def work() -> None:
        opened(raw)
        device, pinned, stream = raw.malloc(4096), raw.malloc_host(8192), raw.stream()
        here = int(pinned.ctypes.data)
        pinned[:4096], pinned[4096:] = 7, 0
        raw.issue(device, here, 4096, kind=MemcpyKind.HOST_TO_DEVICE, stream=stream)
        raw.finish(stream, 10_000)
        raw.copy(here + 4096, device, 4096, MemcpyKind.DEVICE_TO_HOST)
        assert raw.complete(stream)
        assert pinned.min() == 7
        raw.close()

    apart(work)


def test_what_the_device_tells_of_itself(raw: Raw) -> None:
    def work() -> None:
        opened(raw)
        assert raw.count() == 2
        assert raw.soc()
        assert raw.version()
        free, total = raw.memory() or (0, 0)
        assert 0 < free <= total
        assert raw.initialise() is False

    apart(work)


def test_a_thread_that_binds_nothing_has_no_context(raw: Raw) -> None:
    def work() -> None:
        raw.initialise()
        assert raw.context() == (CONTEXT_NULL, None)
        assert raw.try_malloc(64) == CONTEXT_NULL
        raw.bind()
        code, context = raw.context()
        assert code == 0
        assert context

    apart(work)


def test_codes_that_nobody_expects_are_raised(raw: Raw, emulator: Emulator) -> None:
    def work() -> None:
        opened(raw)
        emulator.inject("aclrtMalloc", 207001)
        with pytest.raises(AclError, match="207001"):
            raw.malloc(64)

    apart(work)


def test_a_copy_that_hangs_is_not_finished_in_time_and_can_be_aborted(raw: Raw, emulator: Emulator) -> None:
    def work() -> None:
        opened(raw)
        device, pinned, stream = raw.malloc(64), raw.malloc_host(64), raw.stream()
        emulator.hang()
        raw.issue(device, int(pinned.ctypes.data), 64, kind=MemcpyKind.HOST_TO_DEVICE, stream=stream)
        assert raw.synchronise(stream, 1) == 507046
        assert not raw.complete(stream)
        assert raw.abort(stream) == 0
        raw.destroy(stream)
        raw.close()

    apart(work)


def test_without_its_calls_nothing_is_told(emulator: Emulator) -> None:
    home = build(without=("aclrtGetSocName", "aclrtGetVersion", "aclrtGetMemInfo", "aclrtGetCurrentContext"))
    bare = Raw(load({"ASCEND_HOME_PATH": str(home)}), 0)

    def work() -> None:
        opened(bare)
        assert (bare.soc(), bare.version(), bare.memory()) == ("", "", None)
        with pytest.raises(Absent, match="aclrtGetCurrentContext"):
            bare.context()

    apart(work)
