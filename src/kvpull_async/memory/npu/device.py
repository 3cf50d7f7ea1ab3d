"""One NPU as this process uses it: opened, asked for memory, told to copy. It must not know caches or slots.

Memory is freed without anybody waiting for it, and nothing that others in the process share is ever ended: no
aclFinalize, no aclrtResetDevice.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Final

from kvpull_async._deadline import NEVER, Deadline
from kvpull_async.memory._acl import Acl, LocationType, MallocPolicy, PtrAttributes
from kvpull_async.memory.base import Region, Until, forked
from kvpull_async.memory.npu.codes import REPEAT_INITIALIZE, STILL_RUNNING, UNSUPPORTED, AclError, check, drop_message
from kvpull_async.memory.npu.copiers import Copiers
from kvpull_async.memory.npu.streams import Copies, Stream
from kvpull_async.status import LLMException, LLMStatusCode

__all__ = ["Device"]

_OPENING: Final = 2.0
"""Seconds that the threads have to end when a device cannot be opened."""


def _unasked() -> None:
    """Nobody asks whether it has ended."""


_processes: set[int] = set()
"""In which AscendCL was initialised: this one, and the one of which it may be a forked child."""


class Device:
    """`number` as AscendCL counts. Used from any thread. Open it first, which blocks, maybe for seconds."""

    def __init__(self, acl: Acl, number: int) -> None:
        self.number = number
        self.copiers: Copiers = Copiers(acl, number, failed=self._tell)
        self.failed: Callable[[BaseException], object] = _unheard
        """Told of what goes wrong where nobody waits for it."""
        self._acl = acl

    def open(self) -> None:
        """AclError, or LLM_PARAM_INVALID for a device that is not there."""
        _refuse_forked()
        try:
            count = self.copiers.first(self._initialise)
            if not 0 <= self.number < count:
                raise LLMException(
                    f"there is no device {self.number}: AscendCL sees {count}",
                    status_code=LLMStatusCode.LLM_PARAM_INVALID,
                )
            self.copiers.call(_nothing)
        except BaseException:
            self.copiers.close(Deadline.after_ms(_OPENING * 1000))
            raise

    def describe(self) -> dict[str, object]:
        """For the log and for reports: device_id, library, soc, version, missing."""
        acl, numbers = self._acl, [ctypes.c_int32() for _ in range(3)]
        version = acl.aclrtGetVersion
        known = version is not None and self.copiers.call(lambda _: version(*numbers)) == 0
        name = acl.aclrtGetSocName
        soc = self.copiers.call(lambda _: name()) if name is not None else None
        return {
            "device_id": self.number,
            "library": acl.path,
            "soc": soc.decode(errors="replace") if soc else "unknown",
            "version": ".".join(str(number.value) for number in numbers) if known else "unknown",
            "missing": ", ".join(acl.missing),
        }

    def malloc(self, nbytes: int, deadline: Deadline = NEVER) -> int:
        """The address of device memory, with undefined content. What comes after the deadline is freed."""
        call = self._acl.aclrtMalloc
        work = self._taking("aclrtMalloc", nbytes, lambda out: call(out, nbytes, MallocPolicy.HUGE_FIRST))
        return self.copiers.within(work, deadline, late=lambda taking: taking.add_done_callback(self._free_late))

    def malloc_host(self, nbytes: int, until: Until | None = None) -> int:
        """The address of page-locked host memory."""
        work = self._taking("aclrtMallocHost", nbytes, lambda out: self._acl.aclrtMallocHost(out, nbytes))
        return self.copiers.call(work, until)

    def free(self, address: int) -> Future[None]:
        """Soon. What goes wrong is for `failed`."""
        return self._in_time("aclrtFree", lambda: self._acl.aclrtFree(address))

    def free_host(self, address: int) -> Future[None]:
        """Soon. What goes wrong is for `failed`."""
        return self._in_time("aclrtFreeHost", lambda: self._acl.aclrtFreeHost(address))

    def clear(
        self, address: int, nbytes: int, deadline: Deadline = NEVER, *, unsettled: Callable[[], object] = _unasked
    ) -> None:
        """Write zeroes. `unsettled` is called before an error is raised after which they may still be written."""
        call = self._acl.aclrtMemset

        def work(_: Stream) -> None:
            try:
                check(self._acl, "aclrtMemset", call(address, nbytes, 0, nbytes))
            except AclError as error:
                if error.code in STILL_RUNNING:
                    unsettled()
                raise

        self.copiers.within(work, deadline, late=lambda _: unsettled())

    def copy(self, copies: Copies, until: Until) -> Future[None]:
        """Ends when every byte is where it belongs; or with an error once none is read or written any more."""
        return self.copiers.submit(lambda stream: stream.copy(copies, until))

    def check_places(self, regions: Mapping[int, Region], until: Until) -> None:
        """LLM_PARAM_INVALID for what is not memory of this device, where the release can tell. Tensor by tensor."""

        def check_all(_: Stream) -> None:
            for tensor, region in regions.items():
                self._check_place(tensor, region.address, "first")
                self._check_place(tensor, region.address + region.nbytes - 1, "last")

        if self._acl.aclrtPointerGetAttributes is not None:
            self.copiers.call(check_all, until)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _initialise(self) -> int:
        """AscendCL documentation: the first to initialise decides on the configuration, so torch_npu goes first where
        it is loaded.
        """
        torch = sys.modules.get("torch") if "torch_npu" in sys.modules else None
        first = getattr(getattr(torch, "npu", None), "init", None)
        if first is not None:
            _init_torch(first)
        code = self._acl.aclInit(None)
        if code == REPEAT_INITIALIZE:  # AscendCL documentation: by whomever, which is not a failure
            drop_message(self._acl)
        else:
            check(self._acl, "aclInit", code)
        count = ctypes.c_uint32()
        check(self._acl, "aclrtGetDeviceCount", self._acl.aclrtGetDeviceCount(count))
        return count.value

    def _taking(self, function: str, nbytes: int, make: Callable[[ctypes.c_void_p], int]) -> Callable[[Stream], int]:
        def call(_: Stream) -> int:
            address = ctypes.c_void_p()
            try:
                check(self._acl, function, make(address))
            except AclError as error:
                reason = f"{nbytes} bytes could not be allocated: {error}"
                raise type(error)(reason, function=error.function, code=error.code) from error
            assert address.value is not None
            return address.value

        return call

    def _free_late(self, taking: Future[int]) -> None:
        if not taking.cancelled() and taking.exception() is None:
            self.free(taking.result())

    def _in_time(self, function: str, work: Callable[[], int]) -> Future[None]:
        future: Future[None] = Future()
        try:
            future = self.copiers.submit(lambda _: check(self._acl, function, work()), last=True)
        except LLMException as error:
            future.set_exception(error)
        future.add_done_callback(self._told)
        return future

    def _told(self, future: Future[None]) -> None:
        error = None if future.cancelled() else future.exception()
        if error is not None:
            self._tell(error)

    def _tell(self, error: BaseException) -> None:
        self.failed(error)

    def _check_place(self, tensor: int, address: int, which: str) -> None:
        found = PtrAttributes()
        assert self._acl.aclrtPointerGetAttributes is not None
        code = self._acl.aclrtPointerGetAttributes(address, found)
        if code in UNSUPPORTED:
            drop_message(self._acl)
            return
        check(self._acl, "aclrtPointerGetAttributes", code)
        kind, device = found.location.type, found.location.id
        if kind == LocationType.DEVICE and device == self.number:
            return
        hint = ""
        if which == "last":  # the first was this device's
            hint = ": is the allocation shorter than cache_desc says?"
        elif kind != LocationType.DEVICE:
            hint = "; memory of the host is registered with Placement.HOST"
        where = f"that of device {device}" if kind == LocationType.DEVICE else "no device's"
        raise LLMException(
            f"the memory at the address given for tensor {tensor} ({which} byte, {address:#x}) is {where}, this "
            f"node's device is {self.number}{hint}",
            status_code=LLMStatusCode.LLM_PARAM_INVALID,
        )

    def __repr__(self) -> str:
        return f"<Device {self.number} {self.copiers!r}>"


def _refuse_forked() -> None:
    """AscendCL documentation: a forked child of a process that uses it must not."""
    _processes.add(os.getpid())
    if len(_processes) > 1:
        raise forked()


def _init_torch(init: Callable[[], object]) -> None:
    """It may raise anything."""
    try:
        init()
    except Exception as error:
        reason = f"torch_npu could not be initialised: {error!r}"
        raise LLMException(reason, status_code=LLMStatusCode.LLM_FAILED) from error


def _nothing(stream: Stream) -> None:
    """Binds a thread, which shows that the device can be used."""


def _unheard(error: BaseException) -> None:
    """Nobody listens."""
