"""A device that does not answer, or of which others say what is wrong: bounded, and told whose memory is at stake."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from kvpull_async._deadline import Deadline
from kvpull_async.memory.base import Until
from kvpull_async.memory.npu.codes import AclError
from kvpull_async.memory.npu.device import Device
from kvpull_async.status import LLMException, LLMStatusCode, LLMTimeoutError
from tests.unit.memory.emulated import BOUND, emulated, eventually
from tests.unit.memory.npu.device_side import KIB, side


def test_memory_that_comes_too_late_is_freed() -> None:
    with side(call_us=300_000) as here:
        with pytest.raises(LLMTimeoutError):
            here.device.malloc(KIB, Deadline.after_ms(50))
        eventually(lambda: here.emulator.count("aclrtFree") == 1)


def test_p1_clearing_that_does_not_end_in_time_is_said_to_be_unsettled() -> None:
    with side() as here:
        address, told = here.device.malloc(KIB), list[int]()
        here.emulator.hang_sync()
        with pytest.raises(LLMTimeoutError):
            here.device.clear(address, KIB, Deadline.after_ms(50), unsettled=lambda: told.append(1))
        assert told == [1]
        here.emulator.resume()
        here.device.free(address).result(BOUND)


@pytest.mark.parametrize(("code", "unsettled"), [(507010, True), (107020, True), (507899, False), (107000, False)])
def test_p1_clearing_whose_end_nobody_saw_is_unsettled(code: int, *, unsettled: bool) -> None:
    with side() as here:
        address, told = here.device.malloc(KIB), list[int]()
        here.emulator.inject("aclrtMemset", code)
        with pytest.raises(AclError):
            here.device.clear(address, KIB, unsettled=lambda: told.append(1))
        assert told == [1] * unsettled
        here.device.free(address).result(BOUND)


def test_torch_npu_that_cannot_be_initialised_is_an_error_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise ImportError("libhccl.so: cannot open shared object file")

    torch = SimpleNamespace(npu=SimpleNamespace(init=init))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace())
    with emulated() as npu:
        with pytest.raises(LLMException, match=r"torch_npu could not be initialised.*libhccl") as caught:
            Device(npu.acl, 0).open()
        assert caught.value.status_code == LLMStatusCode.LLM_FAILED


def test_messages_of_what_was_no_failure_are_not_those_of_the_next_error() -> None:
    with side(pointer_attributes=0) as here:
        here.device.check_places({0: here.region(4096, KIB)}, Until())
        here.emulator.inject("aclrtMalloc", 207001)
        with pytest.raises(AclError) as caught:
            here.device.malloc(KIB)
        assert "PointerGetAttributes" not in str(caught.value)
        assert str(caught.value).count("207000") == 0
