"""An AscendCL library for machines without an NPU, built from the C files beside this one, and its remote control.

It keeps the rules that hardware keeps and says which were broken (`Emulator.violations`). It must not import the
packages under test: they load the library as they would load the real one.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

HERE = Path(__file__).parent
NAME = "libascendcl.so"
CFLAGS = ("-O2", "-Wall", "-Wextra", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-std=gnu11")
BATCH = ("aclrtMemcpyBatch", "aclrtMemcpyBatchAsync")
NEWEST = ("aclFinalizeReference", "aclrtHostRegisterV2", "aclrtMemcpyBatchV2", "aclrtMemcpyBatchAsyncV2")

# Each release, its number for the C side and what it lacks.
RELEASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "8.0": (80, (*BATCH, *NEWEST, "aclrtStreamAbort", "aclrtPointerGetAttributes")),
    "8.2": (82, (*NEWEST, "aclrtPointerGetAttributes")),
    "8.5": (85, NEWEST),
    "9.0": (90, ()),
}
_COMPILING = 300.0
"""Seconds after which gcc is given up."""
LEFT = ("device_blocks", "device_bytes", "pinned_blocks", "pinned_bytes", "streams", "running")


class NoCompiler(RuntimeError):
    """There is no gcc, and nobody has built it before."""


def functions() -> frozenset[str]:
    """What the newest release exports."""
    found = (
        re.findall(r"^EXPORT .*?\b(acl\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE)
        for path in HERE.glob("*.c")
    )
    return frozenset(name for names in found for name in names if not name.startswith("acl_emulator_"))


def build(*, release: str = "9.0", without: Sequence[str] = ()) -> Path:
    """Compile the library, once for each content of the sources, and return the folder that ASCEND_HOME_PATH names.

    `without` names functions that the library does not have. Raises ValueError for an unknown release or function,
    NoCompiler without gcc, RuntimeError if it fails.
    """
    if release not in RELEASES:
        raise ValueError(f"release is {release!r}; known are {', '.join(RELEASES)}")
    unknown = set(without) - functions()
    if unknown:
        raise ValueError(f"without names {', '.join(sorted(unknown))}, which the library never has")
    number, lacking = RELEASES[release]
    return _built(number, sorted({*lacking, *without}))


def _built(number: int, missing: list[str]) -> Path:
    sources = sorted(HERE.glob("*.[ch]"))
    digest = hashlib.sha256(repr((CFLAGS, number, missing)).encode())
    for source in sources:
        digest.update(source.read_bytes())
    root = Path(tempfile.gettempdir()) / f"acl-emulator-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    if root.stat().st_uid != os.getuid():
        raise PermissionError(f"{root} belongs to somebody else")
    home = root / digest.hexdigest()[:24]
    if not (home / "lib64" / NAME).exists():
        _compile(home, number, missing)
    return home


def _compile(home: Path, number: int, missing: list[str]) -> None:
    """In a folder beside; whoever is first to rename it wins, and all have built the same."""
    scratch = Path(tempfile.mkdtemp(dir=home.parent))
    try:
        (scratch / "lib64").mkdir()
        exports = scratch / "exports.map"
        hidden = "".join(f" {name};" for name in missing)
        exports.write_text(f"{{ global: acl*; local:{hidden} *; }};\n", encoding="ascii")
        command = ["gcc", *CFLAGS, f"-DACL_RELEASE={number}", f"-Wl,-Bsymbolic,--version-script={exports}"]
        command += ["-o", str(scratch / "lib64" / NAME), *map(str, sorted(HERE.glob("*.c")))]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_COMPILING)
        except FileNotFoundError as error:
            raise NoCompiler("the emulated AscendCL is built with gcc, which is not there") from error
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"gcc has not ended within {_COMPILING:g} s") from error
        if done.returncode:
            raise RuntimeError(f"gcc failed:\n{done.stderr}")
        try:
            scratch.rename(home)
        except OSError:
            if not (home / "lib64" / NAME).exists():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


class Emulator:
    """The control of the library at `home` in this process: the one that a program gets that loads it by its path."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.path = home / "lib64" / NAME
        self._lib = ctypes.CDLL(str(self.path))
        many, text, number = ctypes.c_longlong, ctypes.c_char_p, ctypes.c_int
        room, pointer = ctypes.c_size_t, ctypes.c_void_p
        self._configure = self._function("configure", number, text, many)
        self._inject = self._function("inject", None, text, number, many, many)
        self._hang = self._function("hang", None, many, many)
        self._hang_sync = self._function("hang_sync", None, many)
        self._resume = self._function("resume", None)
        self._calls = self._function("calls", room, text, room)
        self._violations = self._function("violations", room, text, room)
        self._left = self._function("left", None, ctypes.POINTER(many))
        self._memory = self._function("memory", pointer, pointer, room)
        self._claim = self._function("claim", None)
        self._reset = self._function("reset", None)

    def _function(self, name: str, result: Any, *arguments: Any) -> ctypes._NamedFuncPointer:
        function = self._lib[f"acl_emulator_{name}"]
        function.restype, function.argtypes = result, arguments
        return function

    def configure(self, **settings: int) -> None:
        """Change settings; `delay_us` stands for both ends. emulator.h has the list. ValueError for an unknown one."""
        for name, value in settings.items():
            if self._configure(name.encode(), int(value)):
                raise ValueError(f"the emulator has no setting {name}")

    def inject(self, function: str, code: int, *, after: int = 0, times: int = 1) -> None:
        """The call answers `code` and does nothing: `times` calls (-1: all), `after` so many good ones.

        "task" for the function: the async copy itself fails half way, and the next synchronise says so.
        """
        if function != "task" and not hasattr(self._lib, function):
            raise ValueError(f"the library has no {function}")
        self._inject(function.encode(), code, after, times)

    def hang(self, *, after: int = 0, times: int = 1) -> None:
        """Async tasks to come stall half way, until `resume` or an abort that works."""
        self._hang(after, times)

    def hang_sync(self, *, times: int = 1) -> None:
        """Synchronous copies to come do not return until `resume`."""
        self._hang_sync(times)

    def resume(self) -> None:
        """Let everything go on that hangs; nothing hangs from now on until the next `hang`."""
        self._resume()

    def count(self, function: str) -> int:
        """Calls since the last reset, whatever they answered."""
        return self.counts().get(function, 0)

    def counts(self) -> dict[str, int]:
        return {name: int(calls) for name, calls, *_ in self._called()}

    def threads(self, function: str) -> set[int]:
        """The native ids of the threads that called it since the last reset."""
        return {int(thread) for name, _, *threads in self._called() if name == function for thread in threads}

    def _called(self) -> list[list[str]]:
        return [line.split() for line in self._text(self._calls)]

    def violations(self) -> list[str]:
        """What the program did that hardware forbids, one sentence each."""
        return self._text(self._violations)

    @staticmethod
    def _text(function: ctypes._NamedFuncPointer) -> list[str]:
        room = 0
        while True:
            buffer = ctypes.create_string_buffer(room + 1)
            needed = function(buffer, room)
            if needed <= room:
                return buffer.value.decode(errors="replace").splitlines()
            room = needed

    def left(self) -> dict[str, int]:
        """What is allocated, open and in flight now."""
        numbers = (ctypes.c_longlong * len(LEFT))()
        self._left(numbers)
        return dict(zip(LEFT, numbers, strict=True))

    def memory(self, address: int, nbytes: int) -> NDArray[np.uint8]:
        """These bytes of the device, writable until `reset`, even once freed. ValueError if not in one allocation."""
        where = self._memory(address, nbytes)
        if not where:
            raise ValueError(f"{nbytes} bytes at {address:#x} are not in one allocation")
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(where))

    def claim(self) -> None:
        """As if torch_npu had initialised the library: from now on nobody may finalise it or reset a device."""
        self._claim()

    def reset(self) -> None:
        """Settings, injections, hangs, counts, violations and the claim as at the beginning; allocations stay."""
        self._reset()
