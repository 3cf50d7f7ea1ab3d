"""What the tests of choosing a memory share: a library whose device is out of order, and memory that stands for one."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import pytest

from kvpull_async.memory._acl import REQUIRED
from kvpull_async.memory.host import HostMemory
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.values import Placement
from tests.acl_libraries import Library, at

BUDGETS: Mapping[Placement, int | None] = {Placement.DEVICE: 4096, Placement.HOST: 8192}
SICK = 507033
"""DEV_SETUP_ERROR."""


def without(*names: str) -> set[str]:
    return set(REQUIRED) - set(names)


def sick_library(library: Library, *, takes_ms: int = 0) -> dict[str, str]:
    """The environment with a library whose device cannot be opened, which takes that long to say."""
    body = f"(void)path; usleep({takes_ms * 1000}); return {SICK};"
    code = f"#include <unistd.h>\nint aclInit(const char *path) {{ {body} }}\n"
    return at(library("sick", functions=without("aclInit"), code=code))


class Device(HostMemory):
    """Stands for the memory of a device: what matters here is who opens and closes it, and where."""

    def __init__(self, *, describes: bool = True, gate: threading.Event | None = None) -> None:
        super().__init__()
        self.closed = 0
        self.threads: list[str] = []
        self._describes = describes
        self._gate = gate

    def opened(self, acl: object, *, device_id: int, budgets: Mapping[Placement, int | None]) -> Device:
        self.threads.append(threading.current_thread().name)
        assert (device_id, budgets) == (0, BUDGETS)
        assert self._gate is None or self._gate.wait(20)
        return self

    def describe(self) -> dict[str, object]:
        if not self._describes:
            raise LLMException("it cannot say", status_code=LLMStatusCode.LLM_FAILED)
        return {"device_id": 0, "library": "/x.so", "soc": "Ascend910B4", "version": "1.17.0", "missing": "a, b"}

    def close(self) -> None:
        self.closed += 1
        self.threads.append(threading.current_thread().name)
        super().close()


def device(monkeypatch: pytest.MonkeyPatch, **given: Any) -> Device:
    made = Device(**given)
    monkeypatch.setattr("kvpull_async.memory.ascend.open_memory", made.opened)
    return made
