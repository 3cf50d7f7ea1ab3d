"""The parent's side of a chaos run: starts the processes, does the faults, keeps what it hears. It must not judge."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bad_days import layout
from bad_days.decode import NODES, decode
from bad_days.prefill import prefill
from bad_days.process import Message, Peer
from bad_days.schedule import ENDING, LINES, Fault, Target
from kvpull_async.testing.proxy import Fault as Harm
from kvpull_async.testing.proxy import FaultKind, FaultProxy, Way

__all__ = ["Done", "Heard", "Plan", "Run"]

_START: Final = 60.0
_ANSWER: Final = 45.0
_HARM: Final = {"cut": FaultKind.CUT, "close": FaultKind.CLOSE, "half close": FaultKind.HALF_CLOSE}
_SLOW: Final = 2 * 1024 * 1024
"""Bytes/s of a throttled line."""


@dataclass(frozen=True)
class Plan:
    """What kind of run."""

    prefills: int
    decodes: int
    path: str
    seed: int
    workers: int
    pause: float
    sabotage: str
    timing: layout.Timing = field(default_factory=layout.Timing)


@dataclass
class Done:
    """A fault as it really was. Times are those of `time.monotonic`; `again` is when the target could be used again."""

    fault: Fault
    began: float
    again: float = 0.0

    @property
    def target(self) -> Target:
        return self.fault.target


@dataclass
class Heard:
    """What the processes have said, from whatever thread."""

    counts: Counter[str] = field(default_factory=Counter)
    violations: list[tuple[str, str]] = field(default_factory=list)
    late: list[tuple[int, str, float, float, float]] = field(default_factory=list)
    """Decode process, kind, began, ended, ms late."""
    cancels: list[tuple[int, float, float, float]] = field(default_factory=list)
    failures: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    probes: dict[tuple[int, int, int], list[tuple[float, float]]] = field(default_factory=dict)
    """By decode process, source and node: began, ended."""
    linked: list[float] = field(default_factory=list)
    links: list[tuple[int, float, str]] = field(default_factory=list)
    """Decode process, when, and what its library told of a link."""
    finalized: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, number: int, name: str, message: Message) -> None:
        event, fields = message
        with self.lock:
            if event == "violation":
                self.violations.append((fields["kind"], f"{name}: {fields['text']}"))
                print(f"VIOLATION  {fields['kind']}  {name}: {fields['text']}", file=sys.stderr, flush=True)
            elif event == "work":
                self.counts.update(fields["counts"])
                self.late += [(number, *one) for one in fields["late"]]
                self.cancels += [(number, *one) for one in fields["cancels"]]
                self.failures += [(number, one) for one in fields["failures"]]
                for source, kind, began, ended in fields["probes"]:
                    self.probes.setdefault((number, source, kind), []).append((began, ended))
            elif event == "counts":
                self.counts.update(fields["counts"])
            elif event == "linked":
                self.linked.append(fields["ms"])
            elif event == "link":
                self.links.append((number, fields["at"], fields["line"]))
            elif event == "finalized":
                self.finalized.append(fields["seconds"])


class Run:
    """All processes, linked all to all; over TCP every link goes through a fault proxy of its own."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.heard = Heard()
        self.done: list[Done] = []
        self.rests: list[float] = []
        """When it was brought to rest."""
        self.left: list[tuple[str, dict[str, Any]]] = []
        """What processes that ended in peace left behind."""
        self.lines: dict[tuple[int, int], FaultProxy] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="chaos-")
        self._peers: dict[tuple[str, int], Peer] = {}
        self._incarnations: Counter[tuple[str, int]] = Counter()
        self._ports = [0] * plan.prefills
        self._busy: list[threading.Thread] = []
        self._locks: defaultdict[Target, threading.Lock] = defaultdict(threading.Lock)  # one fault of each at a time

    # -- processes --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        for number in range(self.plan.prefills):
            self._start("prefill", number)
        for number in range(self.plan.prefills):
            self._ready("prefill", number)
        for number in range(self.plan.decodes):
            for source in range(self.plan.prefills):
                self.lines[number, source] = FaultProxy(("127.0.0.1", self._ports[source]))
            self._start("decode", number)
        for number in range(self.plan.decodes):
            self._ready("decode", number)
        give_up = time.monotonic() + _START
        links = self.plan.prefills * self.plan.decodes * len(NODES)
        while len(self.heard.linked) < links and time.monotonic() < give_up:
            time.sleep(0.05)

    def _start(self, role: str, number: int) -> None:
        plan = self.plan
        self._incarnations[role, number] += 1
        incarnation = self._incarnations[role, number]
        main, setup = (prefill, self._prefill(number, incarnation)) if role == "prefill" else (
            decode, self._decode(number, incarnation)
        )  # fmt: skip
        name = f"{role} {number}.{incarnation} (seed {plan.seed})"
        self._peers[role, number] = Peer(
            name, main, setup, lambda peer, message: self.heard.take(number, peer.name, message)
        )

    def _prefill(self, number: int, incarnation: int) -> layout.PrefillSetup:
        plan = self.plan
        slots = plan.decodes * plan.workers
        where = (plan.path, self._ports[number], self._office(number))
        return layout.PrefillSetup(number, incarnation, *where, plan.seed, slots, plan.sabotage, plan.timing)

    def _decode(self, number: int, incarnation: int) -> layout.DecodeSetup:
        plan, sources = self.plan, range(self.plan.prefills)
        addresses = tuple(
            self.lines[number, source].address if self.lines else ("127.0.0.1", self._ports[source])
            for source in sources
        )
        offices = tuple(self._office(source) for source in sources)
        return layout.DecodeSetup(
            number,
            incarnation,
            plan.path,
            addresses,
            offices,
            seed=plan.seed,
            workers=plan.workers,
            pause=plan.pause,
            sabotage=plan.sabotage,
            timing=plan.timing,
        )

    def _office(self, number: int) -> str:
        return str(Path(self._folder.name) / f"office-{number}")

    def _ready(self, role: str, number: int) -> float:
        """When it was; for a source also where it listens, and everybody is told that it is another process."""
        peer = self._peers[role, number]
        said = peer.wait_for("ready", _START)
        if said is None:
            state = f"alive, silent for {_START:.0f} s" if peer.alive else f"ended with {peer.status}"
            peer.dump()
            self._violation("start", f"{peer.name} does not start: {state}")
            return time.monotonic()
        if role == "prefill":
            self._ports[number] = said["address"][1]
        return float(said["at"])

    def _tell_of(self, source: int) -> None:
        for (role, _), peer in tuple(self._peers.items()):
            if role == "decode":
                peer.tell("restarted", source=source, incarnation=self._incarnations["prefill", source])

    def _violation(self, kind: str, text: str) -> None:
        self.heard.take(0, "parent", ("violation", {"kind": kind, "text": text}))

    # -- faults -----------------------------------------------------------------------------------------------------

    def suffer(self, faults: list[Fault], began: float) -> None:
        """Do them at their times, and return when the last is over."""
        for fault in faults:
            time.sleep(max(0.0, began + fault.at - time.monotonic()))
            thread = threading.Thread(target=self._do, args=(fault,), name=f"fault-{fault.number}", daemon=True)
            thread.start()
            self._busy.append(thread)
        for thread in self._busy:
            thread.join(_ANSWER + _START)
        self._busy.clear()

    def _do(self, fault: Fault) -> None:
        with self._locks[fault.target]:  # a slow machine may not be done with the one before
            self._now(fault)

    def _now(self, fault: Fault) -> None:
        done = Done(fault, time.monotonic())
        self.done.append(done)
        role, number, _ = fault.target
        try:
            if fault.kind in ENDING:
                done.again = self._restart(role, number, fault)
            elif fault.kind in LINES:
                done.again = self._harm(fault)
            else:
                peer = self._peers[role, number]
                peer.stop()
                time.sleep(fault.lasts)
                done.again = time.monotonic()
                peer.go_on()
        except Exception as error:  # noqa: BLE001  (a fault that could not be done is no run)
            self._violation("fault", f"{fault.describe()} could not be done: {error!r}")

    def _restart(self, role: str, number: int, fault: Fault) -> float:
        peer = self._peers[role, number]
        if fault.kind == "leave":
            self._leave(peer, "leave")
        else:
            peer.kill()
        time.sleep(fault.lasts)
        self._start(role, number)
        ready = self._ready(role, number)
        if role == "prefill":
            self._tell_of(number)
        else:
            for source in range(self.plan.prefills):
                self._tell_of(source)
        return ready

    def _harm(self, fault: Fault) -> float:
        _, number, source = fault.target
        line = self.lines[number, source]
        if fault.kind in _HARM:
            way = Way.THERE if fault.number % 2 else Way.BACK
            line.inflict(Harm(_HARM[fault.kind], way))
            return time.monotonic()
        if fault.kind == "stall":
            line.stall(*((), (Way.THERE,), (Way.BACK,))[fault.number % 3])
        else:
            line.inflict(*(Harm(FaultKind.THROTTLE, way, value=_SLOW) for way in Way))
        time.sleep(fault.lasts)
        line.resume()
        return time.monotonic()

    # -- quiet moments and the end ------------------------------------------------------------------------------------

    def quiet(self) -> dict[tuple[str, int], dict[str, Any]]:
        """Let everything come to rest; what each process holds then, by role, number and incarnation."""
        self.rests.append(time.monotonic())
        found: dict[tuple[str, int], dict[str, Any]] = {}
        for role in ("decode", "prefill"):
            peers = self._of(role)
            for peer in peers.values():
                peer.tell("quiet")
            for number, peer in peers.items():
                said = peer.wait_for("quiet", _ANSWER)
                if said is None:
                    peer.dump()
                    self._violation("hang", f"{peer.name} does not come to rest")
                else:
                    found[role, number] = {**said, "incarnation": self._incarnations[role, number]}
        return found

    def resume(self) -> None:
        for peer in self._peers.values():
            peer.tell("resume")

    def _of(self, role: str) -> dict[int, Peer]:
        return {number: peer for (of, number), peer in self._peers.items() if of == role}

    def _leave(self, peer: Peer, command: str) -> None:
        peer.tell(command)
        said = peer.wait_for("finished", _ANSWER)
        if said is None:
            peer.dump()
            time.sleep(0.5)
            self._violation("hang", f"{peer.name} does not end")
        else:
            self.left.append((peer.name, said["left"]))
        if not peer.end():
            self._violation("leak", f"{peer.name} did not leave by itself: status {peer.status}")

    def finish(self) -> None:
        """Everybody finalizes, the decode processes first, and says what is left."""
        for role in ("decode", "prefill"):
            for peer in self._of(role).values():
                self._leave(peer, "finish")

    @contextlib.contextmanager
    def cleared(self) -> Iterator[None]:
        """Whatever happens, nothing is left of the run."""
        try:
            yield
        finally:
            for peer in self._peers.values():
                if peer.alive:
                    peer.kill()
            for line in self.lines.values():
                line.close()
            self._folder.cleanup()
