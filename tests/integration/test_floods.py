"""Floods on a real source: its memory stays below a bound, and an honest peer, also a new one, is served meanwhile.

The floods are those of the benchmark of that name, on small numbers; how long anything takes is not looked at here.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvpull_async.protocol import frames
from kvpull_async.protocol.session import Ready, Session
from tests.hostile import MAGIC, OK, Raw, greet, honest_client, honest_pull, link, links_of, pulling, serving
from tests.loop_nodes import event_log
from tests.wire import identity, plain_hello

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


async def test_a_crowd_from_one_address_keeps_out_nobody_from_another() -> None:
    """An honest peer far away takes several round trips; meanwhile others may open connections as fast as they can."""
    loop = asyncio.get_running_loop()
    async with serving() as source:
        honest = await Raw.connect(source.listen_address)
        crowd = []
        for _ in range(300):
            sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            sock.bind(("127.0.0.2", 0))
            await loop.sock_connect(sock, source.listen_address)
            crowd.append(sock)
        ready = await greet(honest, Session(identity(66), dialer=True, asked=1))
        assert isinstance(ready, Ready)
        for sock in (honest.sock, *crowd):
            sock.close()


@pytest.mark.slow
async def test_a_stranger_holds_a_place_no_longer_than_the_handshake_timeout_in_all() -> None:
    """However it divides its time between what comes before the greeting and the greeting."""
    async with serving(handshake_timeout=3000) as source:
        raw = await Raw.connect(source.listen_address, b"")
        began = time.monotonic()
        await asyncio.sleep(2.5)
        await raw.send(MAGIC + b"C")
        await raw.rest()
        assert time.monotonic() - began < 5.0
