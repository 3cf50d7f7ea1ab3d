"""One stream of an NPU: copies issued on it, waited for with a bound, and the proof that it touches memory no more.

A stream belongs to one thread, which has bound its device. It must not know caches, slots or who waits.
"""

from __future__ import annotations

import ctypes
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvpull_async.memory._acl import Acl, LocationType, MemcpyBatchAttr, MemcpyKind, MemLocation, StreamStatus
from kvpull_async.memory.base import Until
from kvpull_async.memory.npu.codes import STILL_RUNNING, UNSUPPORTED, AclError, check, drop_message
from kvpull_async.memory.npu.layout import aligned
from kvpull_async.status import LLMException, LLMStatusCode, LLMTimeoutError

__all__ = ["LONGEST", "Copies", "Stream", "Unsettled", "ended"]

LONGEST: Final = 30.0
"""Seconds that one call's copies may take at most: a piece of memory takes less than a thousandth of it."""
_SLICE_MS: Final = 10
"""How long the first wait may take before somebody who has stopped it is noticed."""
_POLL: Final = 0.001
_RARELY: Final = 0.05
"""Most seconds between two looks at what cannot be stopped."""
_TOO_SHORT: Final = frozenset({107019, 507046})
"""What a wait answers whose limit has passed. Any other code, and these before that, is how the copies have ended: that
is told once, and asked again the stream may say that all is well.
"""
_ABORTED: Final = frozenset({107022, 107023})
"""What a wait answers when the tasks have been ended."""
_ABOUT: Final = 0.8
"""The part of a wait's limit after which it counts as passed."""
_BATCH: Final = 4096
"""Most copies in one batch call."""
_ADDRESSES: Final = ctypes.POINTER(ctypes.c_void_p)
_SIZES: Final = ctypes.POINTER(ctypes.c_size_t)


@dataclass(frozen=True)
class Copies:
    """Rows of addresses and lengths (bytes), all in one direction: `kind` is one of aclrtMemcpyKind. `ordered`: a row
    may write what an earlier one has written, and the later one counts.
    """

    destinations: NDArray[np.int64]
    sources: NDArray[np.int64]
    lengths: NDArray[np.int64]
    kind: MemcpyKind
    ordered: bool = False


class Unsettled(LLMException):
    """A copy that could not be stopped when the memory was closed, or whose end nobody has seen: what it touches must
    never be given back.
    """

    def __init__(self, error: AclError | None = None) -> None:
        super().__init__(
            "a copy of the device runs still, and cannot be stopped" if error is None else f"{error}: it may run still",
            status_code=LLMStatusCode.LLM_ENGINE_FINALIZED if error is None else error.status_code,
            destination_unsafe=True,
        )


def ended(until: Until) -> LLMException:
    """Why the bytes are not waited for any more."""
    if until.stopped:
        return LLMException("the copy was stopped", status_code=LLMStatusCode.LLM_FAILED, retry_safe=True)
    return LLMTimeoutError("the device did not copy the bytes in time", retry_safe=True)


class Stream:
    """`closing` is set when the memory ends: then what cannot be stopped is left."""

    def __init__(self, acl: Acl, device: int, *, closing: threading.Event) -> None:
        self._acl = acl
        self._device = device
        self._closing = closing
        self._batches = acl.has("aclrtMemcpyBatchAsync")
        self._query = acl.aclrtStreamQuery
        self._unseen = False
        """Whether a wait was over though nobody has seen the copies end. Then what further waits say proves nothing."""
        self._handle: ctypes.c_void_p | None = self._create()

    def copy(self, copies: Copies, until: Until) -> None:
        """Return when every byte is where it belongs. What it raises comes once no byte is read or written any more;
        only when the memory closes meanwhile is that left open.
        """
        if until.over:
            raise ended(until)
        if self._handle is None:
            self._handle = self._create()
        try:
            if self._issue(copies, until):
                self._wait(until)
        except BaseException:
            self._settle()
            raise

    def close(self) -> None:
        """In the stream's thread, when nothing runs on it."""
        handle, self._handle = self._handle, None
        if handle is not None:
            check(self._acl, "aclrtDestroyStream", self._acl.aclrtDestroyStream(handle))

    # -- issuing ----------------------------------------------------------------------------------------------------

    def _issue(self, copies: Copies, until: Until) -> bool:
        """Whether something was left to run. Synchronous copies are for rows that asynchronous ones may spoil, and for
        those whose order counts.
        """
        fit = aligned(copies.destinations, copies.sources)
        if copies.ordered:
            fit[:] = False
        if len(fit) == 1 and fit[0]:
            dst, src, nbytes = int(copies.destinations[0]), int(copies.sources[0]), int(copies.lengths[0])
            code = self._acl.aclrtMemcpyAsync(dst, nbytes, src, nbytes, copies.kind, self._handle)
            check(self._acl, "aclrtMemcpyAsync", code)
            return True
        if not fit.all():
            self._copy_now(copies, np.flatnonzero(~fit), until)
        rows = np.flatnonzero(fit)
        if not len(rows):
            return False
        if len(rows) > 1 and self._batches and copies.kind != MemcpyKind.DEVICE_TO_DEVICE:
            rows = self._issue_batches(copies, rows)
        call, handle, kind = self._acl.aclrtMemcpyAsync, self._handle, copies.kind
        columns = (copies.destinations[rows], copies.sources[rows], copies.lengths[rows])
        for i, (dst, src, nbytes) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
            if not i % 64 and until.over:
                raise ended(until)
            check(self._acl, "aclrtMemcpyAsync", call(dst, nbytes, src, nbytes, kind, handle))
        return True

    def _copy_now(self, copies: Copies, rows: NDArray[np.intp], until: Until) -> None:
        call, kind = self._acl.aclrtMemcpy, copies.kind
        columns = (copies.destinations[rows], copies.sources[rows], copies.lengths[rows])
        for dst, src, nbytes in zip(*(column.tolist() for column in columns), strict=True):
            if until.over:
                raise ended(until)
            try:
                check(self._acl, "aclrtMemcpy", call(dst, nbytes, src, nbytes, kind))
            except AclError as error:
                if error.code in STILL_RUNNING:  # no stream that could be asked: it hangs, for all that is known
                    self._closing.wait()
                    raise Unsettled(error) from error
                raise

    def _issue_batches(self, copies: Copies, rows: NDArray[np.intp]) -> NDArray[np.intp]:
        """The rows that are left, since this device or release refuses batches."""
        for start in range(0, len(rows), _BATCH):
            code = self._issue_batch(copies, rows[start : start + _BATCH])
            if code in UNSUPPORTED:
                self._batches = False
                drop_message(self._acl)
                return rows[start:]
            check(self._acl, "aclrtMemcpyBatchAsync", code)
        return rows[:0]

    def _issue_batch(self, copies: Copies, rows: NDArray[np.intp]) -> int:
        call = self._acl.aclrtMemcpyBatchAsync
        assert call is not None
        destinations, sources, sizes = (
            np.ascontiguousarray(column[rows]) for column in (copies.destinations, copies.sources, copies.lengths)
        )
        into, out_of = (column.ctypes.data_as(_ADDRESSES) for column in (destinations, sources))
        lengths = sizes.ctypes.data_as(_SIZES)
        host, npu = MemLocation(0, LocationType.HOST), MemLocation(self._device, LocationType.DEVICE)
        upward = copies.kind == MemcpyKind.HOST_TO_DEVICE
        attr = MemcpyBatchAttr(*((npu, host) if upward else (host, npu)))
        index, failed, count = ctypes.c_size_t(0), ctypes.c_size_t(0), len(rows)
        return call(into, lengths, out_of, lengths, count, attr, index, 1, failed, self._handle)

    # -- waiting ----------------------------------------------------------------------------------------------------

    def _wait(self, until: Until) -> None:
        """AscendCL documentation: what a task does wrong is told by the call that waits for it."""
        ends = until.deadline.sooner(LONGEST)
        while not self._synchronized(ends.remaining):
            if until.over or ends.remaining < _POLL:
                raise ended(until)
            self._poll(until, ends.at)

    def _synchronized(self, remaining: float) -> bool:
        """False when it runs still. A time below 1 ms counts as over, since the meaning of 0 is not documented."""
        call = self._acl.aclrtSynchronizeStreamWithTimeout
        if call is None:
            if self._query is not None and not self._complete():
                return False
            code = self._acl.aclrtSynchronizeStream(self._handle)
            self._unseen = code in STILL_RUNNING
            check(self._acl, "aclrtSynchronizeStream", code)
            return True
        milliseconds = min(int(remaining * 1000), _SLICE_MS)
        if milliseconds < 1:
            return False
        began = time.monotonic()
        code = call(self._handle, milliseconds)
        if code in _TOO_SHORT and time.monotonic() - began >= _ABOUT * milliseconds / 1000:
            drop_message(self._acl)
            return False
        self._unseen = code in STILL_RUNNING
        check(self._acl, "aclrtSynchronizeStreamWithTimeout", code)
        return True

    def _poll(self, until: Until, ends: float) -> None:
        """Until it is complete, or not waited for any more. Whoever waits for the stream itself sees no stop."""
        while self._query is not None and not self._complete() and not until.over and time.monotonic() < ends:
            time.sleep(_POLL)

    def _complete(self) -> bool:
        """Whether that is known."""
        status = ctypes.c_int(-1)
        assert self._query is not None
        code = self._query(self._handle, ctypes.byref(status))
        if code in UNSUPPORTED:
            self._query = None
            drop_message(self._acl)
            return False
        check(self._acl, "aclrtStreamQuery", code)
        return status.value == StreamStatus.COMPLETE

    # -- ending early -----------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Return once nothing of this stream touches memory any more, with a new stream for the next copies."""
        abort = self._acl.aclrtStreamAbort
        if (abort is None or abort(self._handle) != 0) and not self._idle():
            self._outlast()
        self._renew()
        drop_message(self._acl)

    def _outlast(self) -> None:
        pause = _POLL
        while not self._closing.wait(pause):
            if self._idle():
                return
            pause = min(2 * pause, _RARELY)
        self._handle = None
        raise Unsettled

    def _idle(self) -> bool:
        """Whether that is known. A device that cannot even be asked may still write. A stream that has failed may say
        so to every question, but whoever waits for it hears that it has ended.
        """
        with suppress(AclError):
            if self._query is not None:
                return self._complete()
        if self._unseen:
            return False
        try:
            return self._synchronized(_SLICE_MS / 1000)
        except AclError as error:
            return error.code in _ABORTED

    def _renew(self) -> None:
        """AscendCL documentation: destroying a stream waits for its tasks. One that cannot be destroyed is left."""
        handle, self._handle = self._handle, None
        self._unseen = False
        if handle is not None and self._acl.aclrtDestroyStream(handle) != 0:
            force = self._acl.aclrtDestroyStreamForce
            if force is not None:
                force(handle)

    def _create(self) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        check(self._acl, "aclrtCreateStream", self._acl.aclrtCreateStream(ctypes.byref(handle)))
        return handle

    def __repr__(self) -> str:
        return f"<Stream of device {self._device}{'' if self._handle else ' without a handle'}>"
