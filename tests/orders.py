"""In which order a transfer is broken off: it is aborted before its memory is told to wait no more, so that another
engine that reads the memory, and is stopped, finds that it was withdrawn.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvpull_async.memory.base import Until


def endings(monkeypatch: pytest.MonkeyPatch, transfer: type[Any]) -> list[str]:
    """From now on hears "abort" of every transfer of that kind, and "stop" of every wait."""
    heard: list[str] = []
    _listen(monkeypatch, transfer, "abort", heard)
    _listen(monkeypatch, Until, "stop", heard)
    return heard


def _listen(monkeypatch: pytest.MonkeyPatch, kind: type[Any], name: str, heard: list[str]) -> None:
    call = getattr(kind, name)

    def listening(self: Any) -> Any:
        heard.append(name)
        return call(self)

    monkeypatch.setattr(kind, name, listening)
