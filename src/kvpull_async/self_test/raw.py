"""AscendCL's calls one by one, with plain numbers and numpy arrays: what a device really answers.

Of one thread, which they bind. It must not judge what they answer, and the library's own copies go another way
(`memory/npu/streams.py`).
"""

from __future__ import annotations

import ctypes
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvpull_async.memory._acl import Acl, MallocPolicy, MemAttr, MemcpyKind, StreamStatus
from kvpull_async.memory.npu.codes import REPEAT_INITIALIZE, check
from kvpull_async.self_test.lines import Absent

__all__ = ["Raw"]

Bytes = NDArray[np.uint8]
_MISSING: Final = "the library has no {}"


class Raw:
    """What it allocates and creates it keeps until `close`. AclError for every code that nobody expects."""

    def __init__(self, acl: Acl, number: int) -> None:
        self.acl = acl
        self.number = number
        self._blocks: list[int] = []
        self._pinned: list[int] = []
        self._streams: list[int] = []

    def initialise(self) -> bool:
        """Whether nobody had done it before."""
        code = self.acl.aclInit(None)
        if code != REPEAT_INITIALIZE:
            check(self.acl, "aclInit", code)
        return code == 0

    def count(self) -> int:
        """How many devices there are."""
        count = ctypes.c_uint32()
        check(self.acl, "aclrtGetDeviceCount", self.acl.aclrtGetDeviceCount(count))
        return count.value

    def bind(self) -> None:
        """The calling thread and the device."""
        check(self.acl, "aclrtSetDevice", self.acl.aclrtSetDevice(self.number))

    def context(self) -> tuple[int, int | None]:
        """The code and the context of the calling thread. Absent where the library cannot tell."""
        context, call = ctypes.c_void_p(), self.acl.aclrtGetCurrentContext
        if call is None:
            raise Absent(_MISSING.format("aclrtGetCurrentContext"))
        return call(ctypes.byref(context)), context.value

    def soc(self) -> str:
        """The name of the chip; empty where it is not told."""
        name = self.acl.aclrtGetSocName() if self.acl.aclrtGetSocName is not None else None
        return (name or b"").decode(errors="replace")

    def version(self) -> str:
        """That of the interface, not of CANN; empty where it is not told."""
        parts = [ctypes.c_int32() for _ in range(3)]
        if self.acl.aclrtGetVersion is None or self.acl.aclrtGetVersion(*parts) != 0:
            return ""
        return ".".join(str(part.value) for part in parts)

    def memory(self) -> tuple[int, int] | None:
        """Bytes of the device: free, and in all. None where it is not told."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        call = self.acl.aclrtGetMemInfo
        if call is None or call(MemAttr.HBM, free, total) != 0:
            return None
        return free.value, total.value

    # -- memory -----------------------------------------------------------------------------------------------------

    def try_malloc(self, nbytes: int) -> int:
        """The code alone; what was allocated is kept."""
        address = ctypes.c_void_p()
        code = self.acl.aclrtMalloc(ctypes.byref(address), nbytes, MallocPolicy.HUGE_FIRST)
        if code == 0 and address.value is not None:
            self._blocks.append(address.value)
        return code

    def malloc(self, nbytes: int) -> int:
        """The address of device memory."""
        check(self.acl, "aclrtMalloc", self.try_malloc(nbytes))
        return self._blocks[-1]

    def malloc_host(self, nbytes: int) -> Bytes:
        """Page-locked host memory."""
        address = ctypes.c_void_p()
        check(self.acl, "aclrtMallocHost", self.acl.aclrtMallocHost(ctypes.byref(address), nbytes))
        assert address.value is not None
        self._pinned.append(address.value)
        found: Bytes = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address.value))
        return found

    def fill(self, address: int, value: int, nbytes: int) -> None:
        check(self.acl, "aclrtMemset", self.acl.aclrtMemset(address, nbytes, value, nbytes))

    # -- copies -----------------------------------------------------------------------------------------------------

    def copy(self, destination: int, source: int, nbytes: int, kind: MemcpyKind) -> None:
        """Synchronously."""
        check(self.acl, "aclrtMemcpy", self.acl.aclrtMemcpy(destination, nbytes, source, nbytes, kind))

    def issue(self, destination: int, source: int, nbytes: int, *, kind: MemcpyKind, stream: int) -> None:
        """Asynchronously."""
        call = self.acl.aclrtMemcpyAsync
        check(self.acl, "aclrtMemcpyAsync", call(destination, nbytes, source, nbytes, kind, stream))

    def stream(self) -> int:
        """A new one."""
        handle = ctypes.c_void_p()
        check(self.acl, "aclrtCreateStream", self.acl.aclrtCreateStream(ctypes.byref(handle)))
        assert handle.value is not None
        self._streams.append(handle.value)
        return handle.value

    def destroy(self, stream: int) -> None:
        self._streams.remove(stream)
        check(self.acl, "aclrtDestroyStream", self.acl.aclrtDestroyStream(stream))

    def synchronise(self, stream: int, milliseconds: int) -> int:
        """The code: 0 once all is done. Without the call that has a limit it waits for as long as it takes."""
        call = self.acl.aclrtSynchronizeStreamWithTimeout
        return self.acl.aclrtSynchronizeStream(stream) if call is None else call(stream, milliseconds)

    def finish(self, stream: int, milliseconds: int) -> None:
        """All that was issued there, within that time."""
        check(self.acl, "aclrtSynchronizeStreamWithTimeout", self.synchronise(stream, milliseconds))

    def complete(self, stream: int) -> bool:
        """What aclrtStreamQuery says."""
        status = ctypes.c_int(-1)
        assert self.acl.aclrtStreamQuery is not None, _MISSING.format("aclrtStreamQuery")
        check(self.acl, "aclrtStreamQuery", self.acl.aclrtStreamQuery(stream, ctypes.byref(status)))
        return status.value == StreamStatus.COMPLETE

    def abort(self, stream: int) -> int:
        """The code."""
        assert self.acl.aclrtStreamAbort is not None, _MISSING.format("aclrtStreamAbort")
        return self.acl.aclrtStreamAbort(stream)

    def close(self) -> None:
        """Streams first, then memory, which nothing may use any more."""
        while self._streams:
            self.destroy(self._streams[-1])
        while self._blocks:
            check(self.acl, "aclrtFree", self.acl.aclrtFree(self._blocks.pop()))
        while self._pinned:
            check(self.acl, "aclrtFreeHost", self.acl.aclrtFreeHost(self._pinned.pop()))

    def __repr__(self) -> str:
        return f"<Raw device {self.number} {self.acl!r}>"
