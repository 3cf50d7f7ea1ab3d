"""Memory on the emulated NPU of this process, as tests see it: where none is emulated, it is memory of the host.

The library takes the emulator for the NPU when KVPULL_DEVICE_BACKEND and ASCEND_HOME_PATH say so, in a process that a
test starts, too. The host cannot touch device memory; a test looks at it with the emulator's own eye.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache as remembered
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray

from kvpull_async.values import Placement

if TYPE_CHECKING:
    from tests.acl_emulator import Emulator

__all__ = ["VARIANTS", "Variant", "address", "addresses", "emulated", "eye", "give_back", "room", "tensors", "used"]

T = TypeVar("T")
Bytes = NDArray[np.uint8]
_SLACK: Final = 64
BATCH: Final = ("aclrtMemcpyBatch", "aclrtMemcpyBatchAsync")
NEWEST: Final = "9.0"


@dataclass(frozen=True)
class Variant:
    """One way in which the installations of users differ."""

    name: str
    release: str = NEWEST
    without: tuple[str, ...] = ()
    settings: Mapping[str, int] = field(default_factory=dict)

    def home(self) -> Path:
        """What ASCEND_HOME_PATH is to name."""
        from tests.emulation import build

        return build(release=self.release, without=self.without)


VARIANTS: Final = (
    *(Variant(release, release) for release in ("8.0", "8.2", "8.5", NEWEST)),
    Variant("8.5 without batches", "8.5", BATCH),
    Variant("without batches", without=BATCH),
    Variant("batches are refused", settings={"batch_supported": 0}),
    Variant("without abort", without=("aclrtStreamAbort",)),
    Variant("aborts are refused", settings={"abort_works": 0}),
    Variant("without query", without=("aclrtStreamQuery",)),
    Variant("queries are refused", settings={"query_works": 0}),
    Variant("without timeouts", without=("aclrtSynchronizeStreamWithTimeout",)),
    Variant("without timeouts and query", without=("aclrtSynchronizeStreamWithTimeout", "aclrtStreamQuery")),
    Variant("without attributes of addresses", without=("aclrtPointerGetAttributes",)),
    Variant("a bare thread has no context and no error", settings={"bare_context_code": 0}),
    Variant("8.0 with nothing that is optional", "8.0", ("aclrtStreamQuery", "aclrtSynchronizeStreamWithTimeout")),
)
_seen: dict[int, tuple[int, int]] = {}
"""Where an eye's views begin: the memory's own address and its bytes."""
_rooms: dict[int, Emulator] = {}


def emulated(environ: Mapping[str, str] = os.environ) -> Emulator | None:
    """The emulator that serves this process as its NPU; None where the library is to use memory of the host."""
    home = environ.get("ASCEND_HOME_PATH")
    return _emulator(home) if home and environ.get("KVPULL_DEVICE_BACKEND") == "acl" else None


@remembered
def _emulator(home: str) -> Emulator:
    from tests.acl_emulator import Emulator

    return Emulator(Path(home))


@contextmanager
def serving(variant: Variant, *, left: bool = False, **settings: int) -> Iterator[Emulator]:
    """Meanwhile this process has that NPU. Nothing may be done to it that hardware forbids, nor be left on it in the
    end, unless `left` allows that.
    """
    home = str(variant.home())
    emulator = _emulator(home)
    emulator.reset()
    emulator.configure(abort_on_violation=0, **variant.settings, **settings)
    environ = pytest.MonkeyPatch()
    environ.setenv("KVPULL_DEVICE_BACKEND", "acl")
    environ.setenv("ASCEND_HOME_PATH", home)
    try:
        yield emulator
        emulator.resume()
        give_back()
        assert not emulator.violations(), emulator.violations()
        assert left or not any(emulator.left().values()), emulator.left()
    finally:
        environ.undo()
        emulator.reset()


def eye(address: int, nbytes: int) -> Bytes | None:
    """What stands at an address of device memory, writable; None where there is no such memory."""
    emulator = emulated()
    if emulator is None:
        return None
    try:
        found = emulator.memory(address, nbytes)
    except ValueError:
        return None
    _seen[found.ctypes.data] = address, nbytes
    return found


def tensors(cache: Any) -> list[Bytes]:
    """The bytes of each tensor of a cache, wherever they are."""
    found = getattr(cache, "tensor_addrs", None) or (getattr(cache, "per_device_tensor_addrs", None) or [[]])[0]
    nbytes = cache.cache_desc.size
    eyed = [eye(place, nbytes) for place in found]
    if eyed and eyed[0] is not None:
        return [bytes_ for bytes_ in eyed if bytes_ is not None]
    manager = cache._manager
    views = [manager.get_cache_tensors(cache, tensor)[0].view() for tensor in range(cache.cache_desc.num_tensors)]
    return [view.reshape(-1).view(np.uint8) for view in views]


def room(*shape: int, fill: int = 0) -> Bytes:
    """Memory of a test's own for bytes of that shape: on the NPU if there is one. `address` says where it is."""
    emulator = emulated()
    if emulator is None:
        return np.full(shape, fill, np.uint8)
    nbytes = int(np.prod(shape))
    place = _elsewhere(lambda: _allocated(emulator, nbytes + _SLACK))
    _rooms[place] = emulator
    found = eye(place, nbytes)
    assert found is not None, "the emulator does not know its own memory"
    found[:] = fill
    return found.reshape(shape)


def give_back() -> None:
    """All rooms of this process: nothing uses them any more."""
    while _rooms:
        place, emulator = _rooms.popitem()
        _elsewhere(partial(_called, emulator, "aclrtFree", ctypes.c_void_p(place)))
    _seen.clear()


def used(memory: Any, *placements: Placement) -> int:
    """Bytes that caches of these placements, or of all, count against their budgets."""
    inner = getattr(memory, "_inner", memory)
    budgets = {**getattr(inner, "_host", inner)._budgets}
    if hasattr(inner, "_budget"):
        budgets[Placement.DEVICE] = inner._budget
    return sum(budgets[placement].used for placement in placements or Placement)


def address(array: NDArray[Any]) -> int:
    """Where the library is to look for the bytes of an array: of a `room`, of what `tensors` gave, or of any other."""
    place = int(array.ctypes.data)
    for start, (own, nbytes) in _seen.items():
        if start <= place < start + nbytes:
            return own + place - start
    return place


def addresses(arrays: Sequence[NDArray[Any]] | NDArray[Any]) -> list[int]:
    """Of each row."""
    return [address(array) for array in arrays]


def _allocated(emulator: Emulator, nbytes: int) -> int:
    place = ctypes.c_void_p()
    huge_first = 0
    _called(emulator, "aclrtMalloc", ctypes.byref(place), ctypes.c_size_t(nbytes), ctypes.c_int(huge_first))
    assert place.value
    return place.value


def _called(emulator: Emulator, function: str, *arguments: Any) -> None:
    library = ctypes.CDLL(str(emulator.path))
    repeated = 100002
    assert library.aclInit(None) in (0, repeated)
    assert library.aclrtSetDevice(ctypes.c_int(0)) == 0
    code = library[function](*arguments)
    assert code == 0, f"{function} answered {code}"


def _elsewhere(call: Callable[[], T]) -> T:
    """In a thread of its own, so that no thread of the test has a context that the library might use."""
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(call()), name="room")
    thread.start()
    thread.join()
    return found[0]
