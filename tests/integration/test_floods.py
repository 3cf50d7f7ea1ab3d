"""Floods on a real source: its memory stays below a bound, and an honest peer, also a new one, is served meanwhile.

The floods are those of the benchmark of that name, on small numbers; how long anything takes is not looked at here.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from kvpull_async.protocol import frames
from tests.hostile import MAGIC, OK, Raw, honest_client, honest_pull, link, links_of, pulling, serving
from tests.loop_nodes import event_log
from tests.wire import plain_hello

FLOODS = Path(__file__).parents[2] / "benchmarks" / "floods.py"
SECONDS = 100


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["half a greeting, secret", "greet and stop", "too large greetings", "large tails", "never reading", "chatter"],
)
def test_p5_p8_a_flood_costs_a_bounded_amount_of_memory_and_no_honest_peer(name: str) -> None:
    command = [sys.executable, str(FLOODS), "--quick", "--only", name]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False, env=os.environ)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "every bound was kept" in ran.stdout


async def test_11_4_strangers_who_greet_and_stop_are_capped_and_dropped_and_a_real_peer_still_links() -> None:
    """Without a secret they get as far as half a link, of which there are fewer than there may be links."""
    with event_log() as events:
        async with serving(handshake_timeout=2000) as source, pulling() as known:
            assert await link(known, source) == OK
            strangers = []
            for _ in range(700):
                hello = plain_hello(asked=1, cluster_id=66, incarnation=secrets.token_bytes(16))
                greeting = frames.encode(hello) + frames.encode(frames.Prove(b""))
                strangers.append(await Raw.connect(source.listen_address, MAGIC + b"C" + greeting))
            await honest_client(source)
            await honest_pull(known, source, 5)
            await asyncio.gather(*(raw.rest() for raw in strangers))  # each is hung up on
            assert [one.cluster_id for one in links_of(source)] == [2]
            assert events.named("link.rejected", text="links without their second connection")
            assert not events.named("link.rejected", text="links already")
