"""The way to the office of a prefill process: a socket beside the library. It must not know what is asked for."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any, Final

__all__ = ["OfficeLine"]

_PATIENCE: Final = 2.0


class OfficeLine:
    """One connection to it, made when it is needed. `incarnation` is that of the last answer."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.incarnation = 0
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any] | None]] = {}
        self._orphans: set[int] = set()
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._connecting = asyncio.Lock()

    async def ask(self, what: str, *, seconds: float = _PATIENCE, **fields: Any) -> dict[str, Any] | None:
        """The answer; None when nobody is there, or none comes."""
        try:
            writer = await self._connected()
        except OSError:
            return None
        request = next(self._ids)
        answer = self._waiting[request] = asyncio.get_running_loop().create_future()
        self._send(writer, {"id": request, "what": what, **fields})
        try:
            return await asyncio.wait_for(answer, seconds)
        except asyncio.TimeoutError:
            if what == "lock":
                self._orphans.add(request)
            return None
        finally:
            self._waiting.pop(request, None)

    @contextlib.asynccontextmanager
    async def locked(self) -> AsyncIterator[dict[str, Any] | None]:
        """Meanwhile what is written in place stays as it is."""
        told = await self.ask("lock")
        try:
            yield told
        finally:
            if told is not None and told["incarnation"] == self.incarnation:
                self._unlock()

    def _unlock(self) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._send(self._writer, {"id": next(self._ids), "what": "unlock"})

    async def _connected(self) -> asyncio.StreamWriter:
        async with self._connecting:
            if self._writer is None or self._writer.is_closing():
                reader, self._writer = await asyncio.open_unix_connection(self._path)
                self._reading = asyncio.ensure_future(self._read(reader, self._writer))
            return self._writer

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while line := await reader.readline():
                answer = json.loads(line)
                self.incarnation = answer["incarnation"]
                if answer["id"] in self._orphans:
                    self._orphans.discard(answer["id"])
                    self._unlock()
                waiting = self._waiting.get(answer["id"])
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        writer.close()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result(None)

    @staticmethod
    def _send(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
        writer.write(json.dumps(message).encode() + b"\n")

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading], timeout=_PATIENCE)
