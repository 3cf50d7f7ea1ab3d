"""A fault proxy: stands between two processes and harms the TCP connections that go through it, on purpose.

    with FaultProxy(("127.0.0.1", 9000), plans=Schedule(7)) as proxy:
        ...link to proxy.address instead of 127.0.0.1:9000, with transfer_backend="tcp"...
        proxy.inflict(Fault(FaultKind.STALL, Way.BACK), kind="payload")

or, by hand, `python -m kvpull_async.testing.proxy --target 127.0.0.1:9000 --seed 7`, which prints its address as its
first line. For tests; nothing but tests may import it. It must not know what the connections say, but for the first
bytes, by which those of a link can be told apart. Bytes keep their order, whatever happens.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

from kvpull_async.testing.proxy_connection import Connection, Passing
from kvpull_async.testing.proxy_plan import QUIET, Fault, FaultKind, Plan, Planner, Schedule, Way

__all__ = ["Fault", "FaultKind", "FaultProxy", "Passing", "Plan", "Planner", "Schedule", "Way"]

T = TypeVar("T")
Address = tuple[str, int]
_KEPT: Final = 10_000
"""Connections that are remembered after their end, and lines of the story."""
_PATIENCE: Final = 10.0


class FaultProxy:
    """Listens at once, on a thread of its own; so it serves tests with a loop and without. All methods may be called
    from any thread; when one returns, what it asked for is in force.

    A fault that is inflicted by hand counts its bytes from then on. At most 64 KiB are on their way through the proxy
    in each direction of a connection, beside what the system's buffers hold.
    """

    def __init__(
        self,
        target: Address,
        *,
        listen: Address = ("127.0.0.1", 0),
        plans: Planner | None = None,
        tell: Callable[[str], object] | None = None,
    ) -> None:
        """Begin to listen.

        Args:
            target: Where connections lead. May be changed later, for those that come then.
            listen: Where; OSError if it cannot. Port 0 is any that is free.
            plans: What befalls each connection, a `Schedule` for instance; nothing if None. May be changed later.
            tell: Called with each line of the story as it happens, on the proxy's thread.
        """
        self.target: Address = target
        self.plans: Planner | None = plans
        self.mute: bool = False
        """Connections that come now are accepted, and nothing is ever said to them."""
        self.story: deque[str] = deque(maxlen=_KEPT)
        """What has happened, in order."""
        self._tell = tell
        self._listener = _bound(listen)
        self.address: Address = self._listener.getsockname()
        """Where it listens."""
        self._listening = False
        self._connections: deque[Connection] = deque(maxlen=_KEPT)
        self._count = 0
        self._running: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self._thread.start()
        self._call(self._listen)

    # -- what a test does -------------------------------------------------------------------------------------------

    def inflict(self, *faults: Fault, kind: str | None = None, number: int | None = None) -> None:
        """On all open connections, or those of this kind ("control", "payload"), or this one."""

        async def plan() -> None:
            chosen = self._chosen(kind, number)
            for one in chosen:
                one.plan(faults)
            for one in chosen:
                if one.ended:  # those that come next must not find it open
                    await one.closed.wait()

        self._await(plan())

    def stall(self, *ways: Way, kind: str | None = None) -> None:
        """Nothing goes on these ways (both if none is named) until `resume`. Connections that come later do."""
        self.inflict(*(Fault(FaultKind.STALL, way) for way in ways or tuple(Way)), kind=kind)

    def swallow(self, *ways: Way, kind: str | None = None) -> None:
        """All that goes these ways (both if none is named) is lost from now on, as on a line that was unplugged."""
        self.inflict(*(Fault(FaultKind.SWALLOW, way) for way in ways or tuple(Way)), kind=kind)

    def cut(self, *, kind: str | None = None) -> None:
        """Reset the open connections."""
        self.inflict(Fault(FaultKind.CUT), kind=kind)

    def resume(self) -> None:
        """End all stalls, delays and throttles. What was swallowed or ended stays so."""

        def resume() -> None:
            for one in self._connections:
                one.resume()

        self._call(resume)

    def heal(self) -> None:
        """Do no more harm: resume, accept again, and forget plans and faults that have not happened yet."""

        def forget() -> None:
            for one in self._connections:
                one.forget()
            self.plans, self.mute = None, False
            self._listen()

        self._call(forget)
        self.resume()

    def refuse(self) -> None:
        """Connections that come now are refused by the system, as where nobody listens."""
        self._call(self._unlisten)

    def accept(self) -> None:
        """No longer."""
        self._call(self._listen)

    @property
    def accepted(self) -> int:
        """How many connections have come."""
        return self._count

    def passing(self, kind: str | None = None) -> list[Passing]:
        """The connections, the oldest first; those that have ended are there too."""
        found = self._call(lambda: [one.passing() for one in self._connections])
        return [one for one in found if kind is None or one.kind == kind]

    def close(self) -> None:
        """Reset all connections and end. Nothing is left then, neither a thread nor a socket."""
        if self._loop.is_closed():
            return
        self._await(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_PATIENCE)
        self._loop.close()

    def describe(self) -> str:
        """The plans and all that has happened, to be printed when a test fails."""
        return "\n".join([repr(self), *self.story])

    def __enter__(self) -> FaultProxy:  # noqa: PYI034  (Self needs Python 3.11)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<FaultProxy {_text(self.address)} -> {_text(self.target)} accepted={self._count} plans={self.plans!r}>"

    # -- on its thread ----------------------------------------------------------------------------------------------

    def _call(self, action: Callable[[], T]) -> T:
        async def run() -> T:
            return action()

        return self._await(run())

    def _await(self, action: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(action, self._loop).result(_PATIENCE)

    def _chosen(self, kind: str | None, number: int | None) -> list[Connection]:
        return [
            one
            for one in self._connections
            if not one.ended and (kind is None or one.kind == kind) and (number is None or one.number == number)
        ]

    def _listen(self) -> None:
        if not self._listening:
            self._listener.listen(512)
            self._loop.add_reader(self._listener.fileno(), self._accept)
            self._listening = True

    def _unlisten(self) -> None:
        if self._listening:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.shutdown(socket.SHUT_RD)  # keeps the port, and refuses
            self._listening = False

    def _accept(self) -> None:
        try:
            client, peer = self._listener.accept()
        except (BlockingIOError, InterruptedError):
            return  # gone again
        except OSError as error:  # out of descriptors
            self._say(f"nothing can be accepted: {error}")
            self._unlisten()
            self._loop.call_later(0.05, self._listen)
            return
        number, self._count = self._count, self._count + 1
        plan = self.plans(number) if self.plans is not None else Plan()
        self._say(f"connection {number} from {_text(peer)}: planned is {plan.describe()}")
        connection = Connection(number, client, self._say)
        connection.plan(plan.faults)
        self._connections.append(connection)
        task = self._loop.create_task(connection.run(None if self.mute else self.target), name=f"connection {number}")
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def _say(self, line: str) -> None:
        self.story.append(line)
        if self._tell is not None:
            self._tell(line)

    async def _end(self) -> None:
        self._unlisten()
        self._listener.close()
        for one in self._connections:
            one.cut()
        if self._running:
            await asyncio.wait(tuple(self._running), timeout=_PATIENCE / 2)


def _bound(address: Address) -> socket.socket:
    """Not listening yet. Bound to a port by number, since a port of the system's choice is lost when one stops."""
    with socket.socket() as first:
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        first.bind(address)
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(first.getsockname())
        except OSError:
            listener.close()
            raise
    return listener


def _text(address: Address) -> str:
    return f"{address[0]}:{address[1]}"


def _address(text: str) -> Address:
    host, _, port = text.rpartition(":")
    return host, int(port)


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    kinds = {kind.value.replace(" ", "-"): kind for kind in FaultKind}
    parser = argparse.ArgumentParser(prog="python -m kvpull_async.testing.proxy", description="A TCP fault proxy.")
    parser.add_argument("--target", type=_address, required=True, help="HOST:PORT where connections lead")
    parser.add_argument("--listen", type=_address, default=("127.0.0.1", 0), help="HOST:PORT; port 0: any")
    parser.add_argument("--seed", type=int, help="makes the plans; nothing happens without it")
    parser.add_argument("--kinds", nargs="+", choices=sorted(kinds), help="of faults; all but corrupt if not given")
    parser.add_argument("--share", type=float, default=0.5, help="of the connections that something happens to, 0 to 1")
    parser.add_argument("--span", type=int, default=4 * 1024 * 1024, help="bytes within which faults begin")
    found = parser.parse_args(given)
    chosen = [kinds[name] for name in found.kinds] if found.kinds else QUIET
    found.plans = None
    if found.seed is not None:
        found.plans = Schedule(found.seed, kinds=chosen, share=found.share, span=found.span)
    return found


def main(given: Sequence[str] | None = None) -> None:
    """Run until SIGTERM or Ctrl-C. Prints its address, then what happens, line by line."""

    def say(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    asked = _arguments(given)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    proxy = FaultProxy(asked.target, listen=asked.listen, plans=asked.plans, tell=say)
    with contextlib.suppress(KeyboardInterrupt), proxy:
        say(_text(proxy.address))
        threading.Event().wait()


if __name__ == "__main__":
    main()
