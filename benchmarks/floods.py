"""Floods against a real source: its memory, and what an honest peer and a new one notice of it.

    python benchmarks/floods.py [--quick] [--only NAME] [--seconds N] [--json FILE]

Prints a line for each flood, and says whether every bound was kept. It must not know how the source defends itself.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from bad_days.attackers import Target, attacker
from figures import percentile, print_table, save
from kv_nodes import AwaitingNode, BlockingNode, entry_key
from kvpull_async import CacheKey, LLMClusterInfo, LLMException, LLMRole
from processes import Child
from workloads import KIB, EntryPull, Shape

SECRET: Final = "a secret of more than sixteen bytes"
SHAPE: Final = Shape(tensors=2, blocks=16, block_nbytes=64 * KIB)
NBYTES: Final = 32 * KIB
HANDSHAKE_MS: Final = 3000
SLACK: Final = 1.5
"""Seconds that a connection may last above the handshake timeout: it waits to be accepted, and hears why it ends."""
DEADLINE_MS, PATIENT_MS = 1000, 20_000
"""Of the honest peer's pulls; the second one in a quick run, which does not look at times."""
OVER_MS: Final = 100
RETRIES: Final = 3
"""How often a new peer dials: from one address all greet in one crowd, and may be pushed out by it."""
LINK_MS: Final = 10_000
GREETING_MIB: Final = 96
"""How much a crowd of strangers may cost. 128 unfinished greetings of at most 512 KiB each, and 32 MiB."""
PEER_MIB: Final = 96
"""How much one peer that was let in may cost: 32 MiB of tables that wait, and on each of two connections a frame of
16 MiB on its way, once as it comes and once as it is read.
"""


@dataclass(frozen=True)
class Flood:
    """`count` connections, or links, at once. The bound is in MiB above what the source had before."""

    name: str
    count: int
    bound: float
    secret: bool
    knows: bool = False

    @property
    def title(self) -> str:
        return f"{self.name}{', secret' if self.secret else ''}"


def floods() -> list[Flood]:
    crowds = ("say nothing", "half a preamble", "half a greeting", "greet and stop")
    found = [Flood(name, 10_000, GREETING_MIB, secret) for name in crowds for secret in (False, True)]
    found += [Flood(name, 400, GREETING_MIB, True) for name in ("large greetings", "too large greetings")]
    found += [Flood(name, 100, GREETING_MIB, True) for name in ("slow preambles", "slow greetings")]
    inside = {"large tails": 4, "slow frames": 50, "never reading": 8, "chatter": 2}
    bounds = {"large tails": 4 * PEER_MIB, "slow frames": 32, "never reading": 64, "chatter": 64}
    return found + [Flood(name, count, bounds[name], True, True) for name, count in inside.items()]


# -- the source, an honest peer, and new ones --------------------------------------------------------------------------


def source_side(secret: str) -> Mapping[str, Callable[..., Any]]:
    extra = {"link_secret": secret} if secret else {}
    node = BlockingNode(
        LLMRole.PROMPT, 1, shape=SHAPE, listen_ip_info="127.0.0.1:0", handshake_timeout=HANDSHAKE_MS, **extra
    )
    kept: list[Any] = []

    def open_() -> tuple[str, int]:
        cache, arena = node.entries(None, entry_key(1), CacheKey(1, 1))
        arena.fill(1)
        kept.append(cache)
        address: tuple[str, int] = tuple(node.datadist.listen_address)
        return address

    return {"open": open_, "close": node.close}


class _Honest:
    """A node that pulls at its ease, or one after another that links, pulls and leaves."""

    def __init__(self, cluster_id: int, secret: str, deadline_ms: int) -> None:
        extra: dict[str, Any] = {"link_secret": secret} if secret else {}
        extra["link_retry_count"] = RETRIES
        self._node = AwaitingNode(LLMRole.DECODER, cluster_id, shape=SHAPE, sync_kv_timeout=deadline_ms, **extra)
        self._cache = self._node.entries(None)[0]
        self._call = self._node.call(EntryPull(range(2), range(2), NBYTES), self._cache, cluster_id=1)

    def link(self, address: tuple[str, int]) -> None:
        self._node.link(1, address)

    def pulls(self, seconds: float) -> dict[str, Any]:
        """Milliseconds of each pull, and the reasons of those that failed."""
        took, failed, until = [], [], time.monotonic() + seconds
        while time.monotonic() < until:
            began = time.monotonic()
            try:
                self._node.do(self._call())
            except LLMException as error:
                failed.append(str(error))
            took.append((time.monotonic() - began) * 1000)
            time.sleep(0.02)
        return {"took": took, "failed": failed}

    def visits(self, address: tuple[str, int], seconds: float) -> dict[str, Any]:
        """Milliseconds of each link made anew, with one pull over it."""
        took, failed, until = [], [], time.monotonic() + seconds
        while time.monotonic() < until:
            began = time.monotonic()
            try:
                self._node.link(1, address)
                self._node.do(self._call())
                took.append((time.monotonic() - began) * 1000)
                self._node.do(self._node.datadist.unlink_clusters([_info(address)], LINK_MS))
            except LLMException as error:
                failed.append(str(error))
            time.sleep(0.1)
        return {"took": took, "failed": failed}


def _info(address: tuple[str, int]) -> Any:
    info = LLMClusterInfo()
    info.remote_cluster_id = 1
    info.append_remote_ip_info(*address)
    return info


def honest_side(cluster_id: int, secret: str, deadline_ms: int) -> Mapping[str, Callable[..., Any]]:
    honest = _Honest(cluster_id, secret, deadline_ms)
    names = ("link", "pulls", "visits")
    return {**{name: getattr(honest, name) for name in names}, "close": honest._node.close}


# -- one flood ---------------------------------------------------------------------------------------------------------


def _memory(pid: int, name: str) -> float:
    """MiB of VmRSS or VmHWM."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith(name):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"no {name} for process {pid}")


def run(flood: Flood, *, seconds: float, deadline_ms: int) -> dict[str, Any]:
    """All of it at the same time: the flood, an honest peer's pulls, and new peers."""
    secret = SECRET if flood.secret else ""
    with (
        Child(source_side, secret) as source,
        Child(honest_side, 1000, secret, deadline_ms) as honest,
        Child(honest_side, 1001, secret, deadline_ms) as fresh,
        Child(attacker, abrupt=True) as hostile,
        concurrent.futures.ThreadPoolExecutor(3) as pool,
    ):
        address = source.ask("open")
        honest.ask("link", address)
        honest.ask("pulls", 0.5)
        before = _memory(source.pid, "VmRSS")
        Path(f"/proc/{source.pid}/clear_refs").write_text("5", encoding="ascii")
        target = Target(address, seconds, flood.count, SECRET.encode() if flood.secret else None)
        if flood.secret and not flood.knows:
            target = replace(target, secret=b"a guess that is not the secret")
        attack = pool.submit(hostile.ask, "attack", flood.name, target, seconds=seconds + 60)
        time.sleep(min(0.5, seconds / 4))
        pulls = pool.submit(honest.ask, "pulls", seconds * 0.8)
        visits = pool.submit(fresh.ask, "visits", address, seconds * 0.8, seconds=seconds + 60)
        found = {"attack": attack.result(), "pulls": pulls.result(), "visits": visits.result()}
        peak = _memory(source.pid, "VmHWM")
        time.sleep(1.0)
        after = _memory(source.pid, "VmRSS")
        return {**found, "before": before, "peak": peak, "after": after}


def verdict(flood: Flood, found: Mapping[str, Any], *, timed: bool) -> list[str]:
    """What was not kept; times only if they are to count."""
    wrong = []
    if found["peak"] - found["before"] > flood.bound:
        wrong.append(f"memory rose by {found['peak'] - found['before']:.0f} MiB, the bound is {flood.bound:.0f}")
    took, failed = found["pulls"]["took"], found["pulls"]["failed"]
    if failed or not took:
        wrong.append(f"{len(failed)} of {len(took)} pulls of the honest peer failed: {failed[:1]}")
    if timed and max(took, default=0) > DEADLINE_MS + OVER_MS:
        wrong.append(f"a pull took {max(took):.0f} ms, its deadline was {DEADLINE_MS}")
    visits = found["visits"]
    if visits["failed"] or not visits["took"]:
        wrong.append(
            f"{len(visits['failed'])} new peers could not link, {len(visits['took'])} did: {visits['failed'][:1]}"
        )
    longest = found["attack"]["longest"]
    queue = flood.count > 1000  # most of the time is spent in the kernel's queue, and in the attacker's own
    if timed and not flood.knows and not queue and longest > HANDSHAKE_MS / 1000 + SLACK:
        wrong.append(f"a stranger kept a connection for {longest:.1f} s")
    if not found["attack"]["connections"]:
        wrong.append("the attacker could not connect at all")
    return wrong


def row(flood: Flood, found: Mapping[str, Any]) -> list[str]:
    pulls, visits, attack = found["pulls"]["took"], found["visits"]["took"], found["attack"]
    return [
        flood.title, str(attack["connections"]), f"{attack['longest']:.1f}",
        f"{found['before']:.0f} / {found['peak']:.0f} / {found['after']:.0f}", f"+{flood.bound:.0f}",
        f"{percentile(pulls, 50):.1f} / {percentile(pulls, 99):.1f} / {max(pulls):.1f}" if pulls else "none",
        str(len(found["pulls"]["failed"])),
        f"{percentile(visits, 50):.0f} / {max(visits):.0f}" if visits else "none",
        f"{len(found['visits']['failed'])} of {len(found['visits']['failed']) + len(visits)}",
    ]  # fmt: skip


HEADS: Final = (
    "flood", "connections", "kept s", "RSS MiB before / peak / after", "bound", "pull ms p50 / p99 / max", "failed",
    "new link ms p50 / max", "failed",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each flood")
    parser.add_argument("--only", action="append", help="floods whose name contains this")
    parser.add_argument("--quick", action="store_true", help="tiny, to see that everything works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there")
    options = parser.parse_args()
    rows: list[list[str]] = []
    wrong: list[str] = []
    kept: dict[str, dict[str, Any]] = {}
    for flood in floods():
        if options.only and not any(text in flood.title for text in options.only):
            continue
        small = replace(flood, count=min(flood.count, 200)) if options.quick else flood
        patience = PATIENT_MS if options.quick else DEADLINE_MS
        found = run(small, seconds=2.0 if options.quick else options.seconds, deadline_ms=patience)
        kept[flood.title] = found
        rows.append(row(small, found))
        print("  ".join(rows[-1]), file=sys.stderr, flush=True)
        wrong += [f"{flood.title}: {text}" for text in verdict(small, found, timed=not options.quick)]
    print_table("Floods", HEADS, rows)
    print("\n".join(wrong) or "every bound was kept")
    save(options.json, options={name: str(value) for name, value in vars(options).items()}, floods=kept, broken=wrong)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
