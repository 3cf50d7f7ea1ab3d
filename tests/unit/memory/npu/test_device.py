"""One NPU in use: how it is opened beside others who use it, what it says of itself, and what its errors become."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvpull_async._deadline import Deadline
from kvpull_async.memory._acl import MemcpyKind
from kvpull_async.memory.base import Until
from kvpull_async.memory.npu.codes import AclError, meaning
from kvpull_async.memory.npu.device import Device
from kvpull_async.memory.npu.streams import Copies
from kvpull_async.status import LLMException, LLMStatusCode
from tests.emulation import build
from tests.unit.memory.emulated import BOUND, Thread, emulated, eventually, in_a_child, pattern
from tests.unit.memory.npu.device_side import KIB, side

# -- opening -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 100002])
def test_it_does_not_matter_who_initialised_first(code: int) -> None:
    with emulated() as npu:
        if code:
            npu.emulator.inject("aclInit", code)
        device = Device(npu.acl, 1)
        device.open()
        assert device.copiers.close(Deadline.after_ms(BOUND * 1000)) == 0


@pytest.mark.parametrize("number", [-1, 2, 99])
def test_a_device_that_is_not_there_is_named_with_how_many_there_are(number: int) -> None:
    with emulated(devices=2) as npu:
        device = Device(npu.acl, number)
        with pytest.raises(LLMException, match=rf"no device {number}\b.*sees 2") as caught:
            device.open()
        assert caught.value.status_code == LLMStatusCode.LLM_PARAM_INVALID
        assert npu.emulator.count("aclrtSetDevice") == 0


@pytest.mark.parametrize("code", [507033, 107001, 507899])
@pytest.mark.parametrize("function", ["aclInit", "aclrtGetDeviceCount", "aclrtSetDevice", "aclrtCreateStream"])
def test_what_goes_wrong_at_opening_is_said_and_leaves_no_thread(function: str, code: int) -> None:
    with emulated() as npu:
        npu.emulator.inject(function, code, times=-1)
        device = Device(npu.acl, 0)
        with pytest.raises(AclError) as caught:
            device.open()
        assert (caught.value.function, caught.value.code) == (function, code)
        assert caught.value.status_code == meaning(code).status


def test_nobodys_context_changes_by_what_a_device_does() -> None:
    with emulated() as npu:
        thread = Thread()

        def work() -> None:
            device = Device(npu.acl, 0)
            device.open()
            device.describe()
            address, host = device.malloc(KIB), device.malloc_host(KIB)
            device.clear(address, KIB)
            device.copy(_row(address, host, KIB), Until()).result(BOUND)
            device.free(address).result(BOUND)
            device.free_host(host).result(BOUND)
            assert device.copiers.close(Deadline.after_ms(BOUND * 1000)) == 0
            assert npu.context() is None

        thread.run(work)
        thread.close()


def test_torch_npu_initialises_first_where_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    with emulated() as npu:
        seen: list[int] = []
        fake = SimpleNamespace(npu=SimpleNamespace(init=lambda: seen.append(npu.emulator.count("aclInit"))))
        monkeypatch.setitem(sys.modules, "torch", fake)
        monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace())
        device = Device(npu.acl, 0)
        device.open()
        assert seen == [0]
        assert npu.emulator.count("aclInit") == 1
        assert device.copiers.close(Deadline.after_ms(BOUND * 1000)) == 0


@pytest.mark.parametrize("torch", [SimpleNamespace(), SimpleNamespace(npu=SimpleNamespace()), None])
@pytest.mark.parametrize("npu_too", [True, False])
def test_torch_without_an_npu_is_nothing_to_wait_for(
    monkeypatch: pytest.MonkeyPatch, torch: object, *, npu_too: bool
) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    if npu_too:
        monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace())
    with side() as here:
        assert here.device.describe()["device_id"] == 0


def test_torch_alone_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    fake: Any = SimpleNamespace(npu=SimpleNamespace(init=lambda: asked.append(1)))
    monkeypatch.setitem(sys.modules, "torch", fake)
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    with side():
        assert asked == []


def test_p1_nothing_that_others_share_is_ever_ended_not_even_at_exit() -> None:
    """Strict: the emulator ends the process when somebody finalises while another uses it."""
    program = """
        import os
        from kvpull_async._deadline import Deadline
        from kvpull_async.memory._acl import load
        from kvpull_async.memory.npu.device import Device
        from tests.acl_emulator import Emulator
        from pathlib import Path

        Emulator(Path(os.environ["ASCEND_HOME_PATH"])).claim()
        device = Device(load(os.environ), 0)
        device.open()
        address = device.malloc(4096)
        assert device.copiers.close(Deadline.after_ms(20_000)) == 0
        other = Device(load(os.environ), 0)
        other.open()
        other.clear(address, 4096)
        print("done")
    """
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{textwrap.dedent(program)}"],
        env={"ASCEND_HOME_PATH": str(build())},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


# -- what it says of itself --------------------------------------------------------------------------------------------


def test_it_describes_itself() -> None:
    with side(number=1) as here:
        found = here.device.describe()
        assert found["device_id"] == 1
        assert found["library"] == here.npu.acl.path
        assert "Ascend" in str(found["soc"])
        assert str(found["version"]).count(".") == 2
        assert found["missing"] == ", ".join(here.npu.acl.missing)
        assert "Device 1" in repr(here.device)


def test_what_a_release_cannot_say_is_unknown() -> None:
    with side("aclrtGetSocName") as here:
        here.emulator.inject("aclrtGetVersion", 507899)
        found = here.device.describe()
        assert (found["soc"], found["version"]) == ("unknown", "unknown")
        assert "aclrtGetSocName" in str(found["missing"])


# -- memory ------------------------------------------------------------------------------------------------------------


def test_memory_of_both_kinds_comes_and_goes() -> None:
    with side() as here:
        device, host = here.device.malloc(100 * KIB), here.device.malloc_host(50 * KIB)
        left = here.npu.left()
        assert (left["device_bytes"], left["pinned_bytes"]) == (100 * KIB, 50 * KIB)
        assert device % 64 == host % 64 == 0
        here.device.clear(device, 100 * KIB)
        assert not here.npu.look(device, 100 * KIB).any()
        here.device.free(device).result(BOUND)
        here.device.free_host(host).result(BOUND)
        assert here.failures == []


@pytest.mark.parametrize("code", [207001, 207018, 507899, 107002])
@pytest.mark.parametrize(
    ("function", "call"),
    [
        ("aclrtMalloc", lambda device: device.malloc(64)),
        ("aclrtMallocHost", lambda device: device.malloc_host(64)),
        ("aclrtMemset", lambda device: device.clear(1 << 40, 64)),
    ],
)
def test_an_error_is_raised_with_its_meaning(function: str, call: Callable[[Device], object], code: int) -> None:
    with side() as here:
        here.emulator.inject(function, code)
        with pytest.raises(AclError, match=function) as caught:
            call(here.device)
        assert caught.value.code == code
        assert caught.value.status_code == meaning(code).status


@pytest.mark.parametrize("function", ["aclrtFree", "aclrtFreeHost"])
def test_an_error_that_nobody_waits_for_is_told(function: str) -> None:
    with side(clean=False) as here:
        address = here.device.malloc(64) if function == "aclrtFree" else here.device.malloc_host(64)
        here.emulator.inject(function, 207002)
        free = here.device.free if function == "aclrtFree" else here.device.free_host
        with pytest.raises(AclError):
            free(address).result(BOUND)
        (error,) = here.failures
        assert isinstance(error, AclError)
        assert (error.function, error.code) == (function, 207002)
        free(address).result(BOUND)


def test_freeing_never_waits_and_a_closed_device_says_that_it_could_not() -> None:
    with side() as here:
        address = here.device.malloc(64)
        here.device.free(address).result(BOUND)
        assert here.device.copiers.close(Deadline.after_ms(BOUND * 1000)) == 0
        with pytest.raises(LLMException, match="shut down"):
            here.device.free(address).result(BOUND)
        assert len(here.failures) == 1


def _row(into: int, out_of: int, nbytes: int, kind: MemcpyKind = MemcpyKind.HOST_TO_DEVICE) -> Copies:
    def column(value: int) -> Any:
        return np.array([value], np.int64)

    return Copies(column(into), column(out_of), column(nbytes), kind)


def test_a_copy_ends_when_the_bytes_are_there() -> None:
    with side(delay_us=20_000) as here:
        device, host = here.device.malloc(64 * KIB), here.device.malloc_host(64 * KIB)
        data = pattern(64 * KIB)
        ctypes.memmove(host, data.ctypes.data, data.nbytes)
        here.device.copy(_row(device, host, 64 * KIB), Until()).result(BOUND)
        assert np.array_equal(here.npu.look(device, 64 * KIB), data)
        here.device.free(device).result(BOUND)
        here.device.free_host(host).result(BOUND)


def test_p1_what_hangs_and_cannot_be_stopped_keeps_one_thread_and_others_copy_on() -> None:
    with side(abort_works=0) as here:
        device, host = here.device.malloc(64 * KIB), here.device.malloc_host(64 * KIB)
        places = [(device + at * KIB, host + at * KIB) for at in range(8)]
        here.emulator.hang(times=5)
        times = [Until(Deadline.after_ms(wait)) for wait in (20, 20, 20, 20, 2000)]
        hanging = [here.device.copy(_row(*place, KIB), time) for place, time in zip(places, times, strict=False)]
        waiting = [Thread() for _ in hanging]
        ends = [
            thread.begin(partial(here.device.copiers.outcome, copy, time))
            for thread, copy, time in zip(waiting, hanging, times, strict=True)
        ]
        eventually(lambda: here.npu.running() == 5)
        for place in places[5:]:
            here.device.copy(_row(*place, KIB), Until(Deadline.after_ms(BOUND * 1000))).result(BOUND)
        assert not any(copy.done() for copy in hanging)
        here.emulator.resume()
        times[-1].stop()
        for end in ends[:4]:
            assert isinstance(end(), TimeoutError)
        ends[4]()
        for thread in waiting:
            thread.close()
        here.device.free(device).result(BOUND)
        here.device.free_host(host).result(BOUND)


# -- whose memory ------------------------------------------------------------------------------------------------------


def test_memory_of_this_device_is_as_it_should_be() -> None:
    with side() as here:
        address = here.device.malloc(KIB)
        here.device.check_places({0: here.region(address, KIB), 7: here.region(address + 100, 1)}, Until())
        here.device.free(address).result(BOUND)


def test_memory_of_the_host_or_of_another_device_is_refused_and_named() -> None:
    with side() as here:
        other = Device(here.npu.acl, 1)
        other.open()
        foreign, own, pinned = other.malloc(KIB), here.device.malloc(KIB), here.device.malloc_host(KIB)
        plain = np.zeros(KIB, np.uint8)
        wrong = {foreign: "that of device 1", pinned: "no device's", plain.ctypes.data: "no device's"}
        for address, where in wrong.items():
            with pytest.raises(LLMException, match=f"tensor 1 .*first byte.*{where}") as caught:
                here.device.check_places({0: here.region(own, KIB), 1: here.region(address, KIB)}, Until())
            assert ("Placement.HOST" in str(caught.value)) == (where == "no device's")
            assert caught.value.status_code == LLMStatusCode.LLM_PARAM_INVALID
        other.free(foreign).result(BOUND)
        here.device.free(own).result(BOUND)
        here.device.free_host(pinned).result(BOUND)
        assert other.copiers.close(Deadline.after_ms(BOUND * 1000)) == 0


def test_a_region_that_passes_the_end_of_its_memory_is_refused() -> None:
    with side() as here:
        address = here.device.malloc(KIB)
        with pytest.raises(LLMException, match=r"tensor 0 \(last byte.*shorter than cache_desc") as caught:
            here.device.check_places({0: here.region(address, 3 * KIB * KIB)}, Until())
        assert "Placement" not in str(caught.value)
        assert caught.value.status_code == LLMStatusCode.LLM_PARAM_INVALID
        here.device.free(address).result(BOUND)


@pytest.mark.parametrize("way", ["no call", "refused"])
def test_a_release_that_cannot_tell_refuses_nothing(way: str) -> None:
    missing = ("aclrtPointerGetAttributes",) if way == "no call" else ()
    with side(*missing, pointer_attributes=0 if way == "refused" else 1) as here:
        here.device.check_places({0: here.region(4096, KIB)}, Until())


def test_an_error_of_the_question_is_raised() -> None:
    with side() as here:
        here.emulator.inject("aclrtPointerGetAttributes", 507899)
        with pytest.raises(AclError) as caught:
            here.device.check_places({0: here.region(4096, KIB)}, Until())
        assert caught.value.code == 507899


@pytest.mark.parametrize("bare", [107002, 0], ids=["code", "nothing"])
def test_whoever_asks_keeps_its_context_or_has_none(bare: int) -> None:
    with side(bare_context_code=bare) as here:
        address = here.device.malloc(KIB)
        library: Any = ctypes.CDLL(str(here.emulator.path))

        def ask(own: int | None) -> None:
            here.device.check_places({0: here.region(address, KIB)}, Until())
            with pytest.raises(LLMException, match="no device"):
                here.device.check_places({0: here.region(4096, KIB)}, Until())
            assert here.npu.context() == own

        def with_own() -> None:
            here.npu.bind()
            own = ctypes.c_void_p()
            assert library.aclrtCreateContext(ctypes.byref(own), 1) == 0
            ask(own.value)
            assert library.aclrtDestroyContext(own) == 0

        thread = Thread()
        thread.run(lambda: ask(None))
        thread.run(with_own)
        thread.close()
        here.device.free(address).result(BOUND)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_p1_a_forked_child_cannot_open_a_device_either() -> None:
    with side() as here:
        before = here.emulator.counts()

        def check() -> None:
            for _ in range(2):
                with pytest.raises(LLMException, match="forked child"):
                    Device(here.npu.acl, 0).open()
            assert here.emulator.counts() == before

        assert in_a_child(check) == ""


@pytest.mark.parametrize("call", [Device.malloc, Device.malloc_host])
def test_memory_that_cannot_be_had_is_named_with_its_size(call: Callable[[Device, int], int]) -> None:
    with side(device_bytes=KIB, pinned_bytes=KIB) as here:
        with pytest.raises(AclError, match=r"^123456 bytes could not be allocated: aclrtMalloc") as caught:
            call(here.device, 123456)
        assert caught.value.code == 207001
