"""The C interface of AscendCL as ctypes sees it: numbers, structures, signatures, and where the library is found.

It must not call any function of the library: loading initialises nothing. It reads no environment by itself and knows
nothing of what the codes mean (`npu/codes.py`).
"""
# ruff: noqa: N815 -- the attributes of Acl bear the names of the C functions

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from ctypes import POINTER, c_char_p, c_int, c_int32, c_size_t, c_uint8, c_uint32, c_void_p
from enum import IntEnum
from pathlib import PurePath
from typing import Any, ClassVar, Final

__all__ = [
    "OPTIONAL",
    "REQUIRED",
    "Acl",
    "AclMissing",
    "LocationType",
    "MallocPolicy",
    "MemAttr",
    "MemLocation",
    "MemcpyBatchAttr",
    "MemcpyKind",
    "PtrAttributes",
    "StreamStatus",
    "load",
]

# --- numbers ---


class MemcpyKind(IntEnum):
    """aclrtMemcpyKind. Not here: 4, by which the runtime finds the direction itself; not every release has it."""

    HOST_TO_HOST = 0
    HOST_TO_DEVICE = 1
    DEVICE_TO_HOST = 2
    DEVICE_TO_DEVICE = 3


class MallocPolicy(IntEnum):
    """aclrtMemMallocPolicy: the pages of device memory; huge ones, if the device has any left."""

    HUGE_FIRST = 0


class MemAttr(IntEnum):
    """aclrtMemAttr: which memory aclrtGetMemInfo speaks of. HBM is "the device's memory" in every release."""

    HBM = 1


class LocationType(IntEnum):
    """aclrtMemLocationType. HOST is memory of aclrtMallocHost, UNREGISTERED other memory of the host."""

    HOST = 0
    DEVICE = 1
    UNREGISTERED = 2
    MANAGED = 3
    HOST_NUMA = 4


class StreamStatus(IntEnum):
    """aclrtStreamStatus, as aclrtStreamQuery tells it."""

    COMPLETE = 0
    NOT_READY = 1
    RESERVED = 0xFFFF


# --- structures ---


class MemLocation(ctypes.Structure):
    """aclrtMemLocation, 8 bytes: the device's id first (0 for the host), then a LocationType."""

    _fields_: ClassVar = [("id", c_uint32), ("type", c_int)]


class MemcpyBatchAttr(ctypes.Structure):
    """aclrtMemcpyBatchAttr, 32 bytes: the destination first."""

    _fields_: ClassVar = [("dst", MemLocation), ("src", MemLocation), ("reserved", c_uint8 * 16)]


class PtrAttributes(ctypes.Structure):
    """aclrtPtrAttributes, 28 bytes: where an address lies and the size of its pages in bytes."""

    _fields_: ClassVar = [("location", MemLocation), ("page_size", c_uint32), ("reserved", c_uint32 * 4)]


# --- signatures: name -> (what it returns, its arguments in order) ---

_HANDLE = _ADDRESS = c_void_p
_KIND = _CODE = c_int
_OUT_HANDLE = _OUT_ADDRESS = _ADDRESSES = POINTER(c_void_p)
_SIZES = _OUT_SIZE = POINTER(c_size_t)
_OUT_INT32, _OUT_UINT32 = POINTER(c_int32), POINTER(c_uint32)
# destination, room at the destination in bytes, source, bytes to copy, kind
_COPY = (_ADDRESS, c_size_t, _ADDRESS, c_size_t, _KIND)
# destinations, rooms, sources, bytes, their count; attributes, the first index of each, their count; which item failed
_BATCH = (
    *(_ADDRESSES, _SIZES, _ADDRESSES, _SIZES, c_size_t),
    *(POINTER(MemcpyBatchAttr), _SIZES, c_size_t, _OUT_SIZE),
)

Signature = tuple[Any, tuple[Any, ...]]

# aclFinalize and aclrtResetDevice are left out on purpose: both end the runtime for everybody else in the process too.
REQUIRED: Final[dict[str, Signature]] = {
    "aclInit": (_CODE, (c_char_p,)),
    "aclrtGetDeviceCount": (_CODE, (_OUT_UINT32,)),
    "aclrtSetDevice": (_CODE, (c_int32,)),
    "aclrtCreateStream": (_CODE, (_OUT_HANDLE,)),
    "aclrtDestroyStream": (_CODE, (_HANDLE,)),
    "aclrtSynchronizeStream": (_CODE, (_HANDLE,)),
    "aclrtMalloc": (_CODE, (_OUT_ADDRESS, c_size_t, c_int)),
    "aclrtFree": (_CODE, (_ADDRESS,)),
    "aclrtMallocHost": (_CODE, (_OUT_ADDRESS, c_size_t)),
    "aclrtFreeHost": (_CODE, (_ADDRESS,)),
    "aclrtMemset": (_CODE, (_ADDRESS, c_size_t, c_int32, c_size_t)),
    "aclrtMemcpy": (_CODE, _COPY),
    "aclrtMemcpyAsync": (_CODE, (*_COPY, _HANDLE)),
}
OPTIONAL: Final[dict[str, Signature]] = {
    "aclGetRecentErrMsg": (c_char_p, ()),
    "aclrtDestroyStreamForce": (_CODE, (_HANDLE,)),
    "aclrtGetCurrentContext": (_CODE, (_OUT_HANDLE,)),
    "aclrtGetMemInfo": (_CODE, (c_int, _OUT_SIZE, _OUT_SIZE)),
    "aclrtGetSocName": (c_char_p, ()),
    "aclrtGetVersion": (_CODE, (_OUT_INT32, _OUT_INT32, _OUT_INT32)),
    "aclrtMemcpyBatchAsync": (_CODE, (*_BATCH, _HANDLE)),
    "aclrtPointerGetAttributes": (_CODE, (_ADDRESS, POINTER(PtrAttributes))),
    "aclrtStreamAbort": (_CODE, (_HANDLE,)),
    "aclrtStreamQuery": (_CODE, (_HANDLE, POINTER(c_int))),
    "aclrtSynchronizeStreamWithTimeout": (_CODE, (_HANDLE, c_int32)),
}


class Acl:
    """The functions of one loaded library, or of two that belong together, under their C names.

    All take plain ints for handles and addresses and answer a code (0: done), but for the two that answer text. An
    optional function that the library lacks is None and named in ``missing``. ctypes lets other threads run during
    a call.
    """

    aclInit: Callable[..., int]
    aclrtGetDeviceCount: Callable[..., int]
    aclrtSetDevice: Callable[..., int]
    aclrtCreateStream: Callable[..., int]
    aclrtDestroyStream: Callable[..., int]
    aclrtSynchronizeStream: Callable[..., int]
    aclrtMalloc: Callable[..., int]
    aclrtFree: Callable[..., int]
    aclrtMallocHost: Callable[..., int]
    aclrtFreeHost: Callable[..., int]
    aclrtMemset: Callable[..., int]
    aclrtMemcpy: Callable[..., int]
    aclrtMemcpyAsync: Callable[..., int]

    aclGetRecentErrMsg: Callable[[], bytes | None] | None
    aclrtDestroyStreamForce: Callable[..., int] | None
    aclrtGetCurrentContext: Callable[..., int] | None
    aclrtGetMemInfo: Callable[..., int] | None
    aclrtGetSocName: Callable[[], bytes | None] | None
    aclrtGetVersion: Callable[..., int] | None
    aclrtMemcpyBatchAsync: Callable[..., int] | None
    aclrtPointerGetAttributes: Callable[..., int] | None
    aclrtStreamAbort: Callable[..., int] | None
    aclrtStreamQuery: Callable[..., int] | None
    aclrtSynchronizeStreamWithTimeout: Callable[..., int] | None

    def __init__(self, path: str, found: Mapping[str, Any]) -> None:
        """Take the functions in *found*, every required one among them, of the library in the file *path*."""
        self.path = path
        self.missing: tuple[str, ...] = tuple(sorted(OPTIONAL.keys() - found.keys()))
        for name in (*REQUIRED, *OPTIONAL):
            setattr(self, name, found.get(name))

    def has(self, name: str) -> bool:
        """Whether the library has this function of the two tables."""
        return getattr(self, name, None) is not None

    def __repr__(self) -> str:
        return f"<Acl {self.path}>"


class AclMissing(Exception):
    """No library that can be used. ``attempts`` says what was tried, in order, each with its reason."""

    def __init__(self, *attempts: str) -> None:
        super().__init__(*attempts)
        self.attempts = attempts

    def __str__(self) -> str:
        return f"no usable Ascend runtime library; tried: {'; '.join(self.attempts)}"


# --- where it is found ---

_NAMES = ("libascendcl.so", "libacl_rt.so")  # functions moved from one to the other over the releases
_HOMES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
_STUB_FOLDERS = {"devlib", "stub"}  # what lies there is for linking only: it answers every call with 100039

_loaded: dict[str, Acl] = {}
_lock = threading.Lock()


class _Unusable(Exception):
    """One attempt failed; its text says which and why."""


def load(environ: Mapping[str, str]) -> Acl:
    """The runtime library of this process, loaded on the first call; the same object for the same file ever after.

    One that is loaded already, by torch_npu say, is taken as it is: two of them in one process would not know of each
    other. Else what the environment names comes first, as it may differ from what the dynamic loader would find:
    ``$ASCEND_HOME_PATH/lib64``, ``$ASCEND_TOOLKIT_HOME/lib64``, then the loader's own folders. From any thread.

    Raises:
        AclMissing: None was found, or none that has what is required.
    """
    attempts: list[str] = []
    with _lock:
        there = _load_from(None, [], mode=os.RTLD_NOLOAD)
        if there is not None:
            return there
        for folder in _places(environ, attempts):
            acl = _load_from(folder, attempts)
            if acl is not None:
                return acl
    raise AclMissing(*attempts)


def _places(environ: Mapping[str, str], attempts: list[str]) -> Iterator[str | None]:
    """The folders to look into; None is wherever the dynamic loader looks."""
    seen = set()
    for variable in _HOMES:
        home = environ.get(variable)
        if not home:
            attempts.append(f"${variable} is not set")
        elif home not in seen:
            seen.add(home)
            yield os.path.join(home, "lib64")  # noqa: PTH118 -- a path as it was given, to be named so in an error
    yield None


def _load_from(folder: str | None, attempts: list[str], *, mode: int = ctypes.DEFAULT_MODE) -> Acl | None:
    """The library in this folder; None, with the reasons added to *attempts*, if it cannot be used."""
    found: dict[str, Any] = {}
    path = ""
    for name in _NAMES:
        try:
            library, file = _open(name if folder is None else f"{folder}/{name}", mode)
        except _Unusable as error:
            attempts.append(str(error))
            continue
        path = path or file
        _take(library, found)
        if len(found) == len(REQUIRED) + len(OPTIONAL):
            break
    if not path:
        return None
    if lacking := sorted(REQUIRED.keys() - found.keys()):
        attempts.append(f"{path}: lacks {', '.join(lacking)}")
        return None
    return _loaded.setdefault(os.path.realpath(path), Acl(path, found))


def _take(library: ctypes.CDLL, found: dict[str, Any]) -> None:
    """Add to *found* the functions that only this library, or what it depends on, has."""
    for name, (restype, argtypes) in (REQUIRED | OPTIONAL).items():
        if name in found:
            continue
        try:
            function = library[name]
        except AttributeError:
            continue
        function.restype, function.argtypes = restype, argtypes
        found[name] = function


def _open(name: str, mode: int) -> tuple[ctypes.CDLL, str]:
    """The library under a name or path, and the file it really is."""
    _refuse_stub(name)
    try:
        library = ctypes.CDLL(name, mode)
    except OSError as error:
        text = str(error)
        raise _Unusable(text if text.startswith(name) else f"{name}: {text}") from error
    path = _file_of(library) or name
    try:
        _refuse_stub(path)
    except _Unusable:
        # Left loaded it would be what a real library finds for the name.
        ctypes.CDLL(None).dlclose(c_void_p(library._handle))
        raise
    return library, path


def _refuse_stub(path: str) -> None:
    real = os.path.realpath(path) if "/" in path else ""  # a bare name is the loader's, not a file of this folder
    if _STUB_FOLDERS.intersection(PurePath(path).parts + PurePath(real).parts):
        raise _Unusable(f"{path}: skipped: a stub library")


class _LinkMap(ctypes.Structure):
    """The beginning of the dynamic loader's record of a library."""

    _fields_: ClassVar = [("address", c_void_p), ("file", c_char_p)]


_LINK_MAP: Final = 2  # RTLD_DI_LINKMAP


def _file_of(library: ctypes.CDLL) -> str:
    """The file that the dynamic loader chose; empty if it does not tell."""
    record = POINTER(_LinkMap)()
    try:
        answer = ctypes.CDLL(None).dlinfo(c_void_p(library._handle), _LINK_MAP, ctypes.byref(record))
    except AttributeError:
        return ""
    return os.fsdecode(record.contents.file or b"") if answer == 0 and record else ""
