"""Real connections between two processes that are harmed on their way: whatever befalls a call, it ends in time with a
reason, its memory is left alone afterwards, and the next call on the link works. KVPULL_PROXY_SEEDS=200 for more seeds.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections import Counter
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from kvpull_async import LLMException, LLMStatusCode, LLMTimeoutError
from kvpull_async.testing.proxy import Fault, FaultKind, Plan, Schedule, Way
from tests import duo
from tests.canaries import intact
from tests.certificates import Authority, cluster
from tests.integration.own_loop import outcome
from tests.integration.proxied import (
    OVER,
    SIZES,
    Proxied,
    Pushed,
    begin,
    check_failure,
    proxied,
    puller,
    pushed,
    source,
)
from tests.loop_nodes import eventually

SEEDS = int(os.environ.get("KVPULL_PROXY_SEEDS", "20"))
FIRST_SEED = int(os.environ.get("KVPULL_PROXY_FIRST_SEED", "1"))
SEED = 4
SHORT = 300.0
THERE, BACK = Way.THERE, Way.BACK
LOSING = (FaultKind.CUT, FaultKind.CLOSE, FaultKind.HALF_CLOSE, FaultKind.SWALLOW)


# --- one fault at a time ---


async def harmed(scene: Proxied, size: str, fault: Fault, kind: str) -> LLMException | None:
    """A pull during which this comes, then the next one; of control connections, once their loss has been noticed."""
    losses = scene.losses
    scene.proxy.inflict(fault, kind=kind)
    cache, error = await scene.try_to_pull(size, timeout=SHORT)
    if kind == "control":
        await eventually(lambda: scene.losses > losses)
    for other in SIZES:
        await scene.check_right(other)
    assert intact(cache), "P1: written after the pull had ended"
    await scene.drop()
    return error


each_loss = pytest.mark.parametrize("kind", LOSING, ids=lambda kind: kind.value)


@each_loss
async def test_p1_p3_p4_p10_a_payload_connection_that_is_lost_at_some_byte(kind: FaultKind) -> None:
    """Back come the head of a grant's bytes and the bytes. Nothing goes there, so that way only 0 is ever reached."""
    head, whole = 24, 2 * SIZES["streamed"]
    async with proxied() as scene:
        await harmed(scene, "streamed", Fault(kind, THERE), "payload")
        for at in (0, 1, head, head + 1, 300_000, head + whole - 1):
            error = await harmed(scene, "streamed", Fault(kind, BACK, at), "payload")
            assert error is not None or not at, f"a pull whose connection was lost after {at} bytes succeeded"
            if error is not None and kind is FaultKind.CUT:
                assert error.status_code is LLMStatusCode.LLM_LINK_FAILED
        assert scene.node.counters["links_up"] == 1, "the control connections were not to blame"


@each_loss
async def test_p1_p3_p4_p10_control_connections_that_are_lost_at_some_byte(kind: FaultKind) -> None:
    async with proxied() as scene:
        offsets = (0,) if kind is FaultKind.SWALLOW else (0, 9, 40)  # which only heartbeats find out
        for size, way, at in product(SIZES, Way, offsets):
            await harmed(scene, size, Fault(kind, way, at), "control")
        assert scene.node.counters["links_up"] == 1 + 4 * len(offsets)
        assert not scene.node.counters.get("incarnation_changes")


async def test_p3_p4_one_direction_that_stands_still_for_a_while() -> None:
    """For less than the heartbeats' patience: it costs pulls and not the link."""
    async with source(heartbeat_timeout=10_000) as there, puller(there, heartbeat_timeout=10_000) as scene:
        assert await scene.link()
        for kind, way in product(("control", "payload"), Way):
            await scene.check_right("streamed")
            scene.proxy.stall(way, kind=kind)
            cache, error = await scene.try_to_pull("streamed", timeout=150)
            if (kind, way) == ("payload", THERE):
                assert error is None, "nothing is said there"
            else:
                assert isinstance(error, LLMTimeoutError), error
            scene.proxy.resume()
            for size in SIZES:
                await scene.check_right(size)
            assert intact(cache)
        assert scene.node.counters["links_up"] == 1


async def test_p10_a_pull_says_why_its_link_was_lost_whichever_connection_it_was() -> None:
    """Each of the two control connections has heartbeats of its own."""
    async with proxied() as scene:
        for number in range(2):
            scene.proxy.inflict(*(Fault(FaultKind.STALL, way) for way in Way), kind="payload")
            control = [one for one in scene.proxy.passing("control") if one.open]
            cache = await scene.cache(SIZES["streamed"])
            pull = begin(scene.pull(cache, 100))
            await eventually(lambda: scene.proxy.passing()[control[0].number].there > control[0].there)  # noqa: B023
            scene.proxy.inflict(Fault(FaultKind.SWALLOW, BACK), number=control[number].number)
            error = await outcome(pull)
            assert isinstance(error, LLMException), error
            assert "silent" in str(error), error
            scene.proxy.resume()
            await scene.check_right("streamed")


async def test_p3_p4_a_slow_line_costs_what_does_not_fit_into_the_deadline() -> None:
    async with proxied() as scene:
        scene.proxy.inflict(Fault(FaultKind.THROTTLE, BACK, value=1_000_000), kind="payload")
        cache, error = await scene.try_to_pull("streamed", timeout=SHORT)
        assert isinstance(error, LLMTimeoutError), error
        await scene.check_right("inline")
        scene.proxy.inflict(Fault(FaultKind.DELAY, BACK, value=10), Fault(FaultKind.DELAY, THERE, value=10))
        for size in SIZES:
            await scene.check_right(size)
        assert intact(cache)
        assert scene.node.counters["links_up"] == 1


@pytest.mark.parametrize("how", ["refused", "silent"])
async def test_p3_p4_a_peer_that_cannot_be_reached_for_a_while(how: str) -> None:
    async with proxied() as scene:
        if how == "refused":
            scene.proxy.refuse()
        else:
            scene.proxy.mute = True
        scene.proxy.cut()
        failed = [await scene.try_to_pull("streamed", timeout=SHORT) for _ in range(3)]
        for _, error in failed:
            assert error is not None
            check_failure(error)
        scene.proxy.mute = False
        scene.proxy.accept()
        if how == "silent":  # an attempt that is under way is lost with the connection that it has
            await eventually(lambda: scene.node.counters.get("reconnects", 0) == 1)
        for size in SIZES:
            await scene.check_right(size)
        assert all(intact(cache) for cache, _ in failed)


async def test_p3_p4_a_link_that_is_made_through_a_line_which_breaks_at_any_byte() -> None:
    """`link_clusters` ends with a code, in time; then it works."""
    async with source() as there, puller(there) as scene:
        for kind in (*LOSING, FaultKind.STALL):
            for way in Way:
                for at in (0, 5, 20, 100):
                    scene.proxy.plans = partial(always, Plan((Fault(kind, way, at),)))
                    began = asyncio.get_running_loop().time()
                    linked = await scene.link(timeout=150)
                    assert asyncio.get_running_loop().time() - began < 0.15 + OVER
                    assert not linked or at == 100, f"linked through {scene.proxy.describe()}"
        scene.proxy.heal()
        assert await scene.link()
        await scene.check_right("streamed")


def always(plan: Plan, number: int) -> Plan:
    return plan


# --- pushes ---


@each_loss
async def test_p1_p2_p4_a_push_whose_connection_is_lost(kind: FaultKind) -> None:
    async with pushed(SIZES["streamed"]) as scene:
        assert await scene.push() is None
        for connection, way, at in product(("control", "payload"), Way, (0, 30, 300_000)):
            if connection == "control" and at > 100:
                continue
            await scene.set_canary()
            losses = scene.node.counters.get("links_lost", 0)
            scene.proxy.inflict(Fault(kind, way, at), kind=connection)
            await judge(scene, await scene.push(timeout=SHORT))
            if connection == "control":
                await eventually(lambda: scene.node.counters.get("links_lost", 0) > losses)  # noqa: B023
            assert await scene.push() is None, scene.proxy.describe()
            assert (await scene.see())["right"]


async def judge(scene: Pushed, error: BaseException | None) -> None:
    if error is None:
        assert (await scene.see())["right"]
        return
    assert isinstance(error, LLMException), repr(error)
    assert str(error)
    if not error.destination_unsafe:
        await scene.set_canary()
        await asyncio.sleep(0.05)
        seen = await scene.see()
        assert seen["untouched"], f"P1: written after a push that had ended: {error}"
        assert not seen["quarantined"]


# --- a byte that is not what it was ---


async def test_p2_p10_a_corrupted_byte_in_a_control_frame_crashes_nothing_and_moves_no_wrong_byte() -> None:
    """(One of payload does move one; that is found with checksums only.) A key that has become another one is asked for
    in earnest, so there is none within one bit of this one.
    """
    numbers, key = random.Random(SEED), 1004
    async with proxied() as scene:
        await scene.there.ask("publish", "published", nbytes=SIZES["streamed"], first=key - 3)
        for _ in range(60):
            way, at, bits = numbers.choice(list(Way)), numbers.randrange(150), 1 << numbers.randrange(8)
            scene.proxy.inflict(Fault(FaultKind.CORRUPT, way, at, bits), kind="control")
            cache = await scene.cache(SIZES["streamed"])
            error = await outcome(begin(scene.pull(cache, key, timeout=SHORT)))
            if error is None:
                assert duo.holds(cache, entry=0, source=3), f"wrong bytes; {scene.proxy.describe()}"
            else:
                assert isinstance(error, LLMException), repr(error)
            await scene.drop()
        await scene.begin_anew()
        for size in SIZES:
            await scene.check_right(size)


async def test_p2_p10_over_tls_a_corrupted_byte_anywhere_is_an_error_and_never_a_wrong_byte(tmp_path: Path) -> None:
    """Of payload too."""
    numbers, office = random.Random(SEED), Authority(tmp_path)
    here, there = (office.issue(f"{number}", *cluster(number)) for number in (duo.DECODER, duo.PROMPT))
    failed: Counter[str] = Counter()
    async with proxied(here=here, **there) as scene:
        for number in range(60):
            way, kind = numbers.choice(list(Way)), numbers.choice(["control", "payload"])
            at = int(2 ** numbers.uniform(0, 8 if kind == "control" else 22))
            scene.proxy.inflict(Fault(FaultKind.CORRUPT, way, at, 1 << numbers.randrange(8)), kind=kind)
            _, error = await scene.try_to_pull("streamed", timeout=duo.TIMEOUT_MS, source=number % 4)
            failed[kind] += error is not None
            await scene.drop()
        assert failed["payload"] > 5, "the test is wrong: nothing came of it"
        await scene.begin_anew()
        for size in SIZES:
            await scene.check_right(size)


# --- many faults at a time, by a seed ---


@pytest.mark.slow
@pytest.mark.timeout(60 + 5 * SEEDS)
async def test_p1_p2_p3_p4_whatever_a_seed_makes_happen() -> None:
    async with source() as there:
        for seed in range(FIRST_SEED, FIRST_SEED + SEEDS):
            try:
                await survive(there, seed)
            except BaseException:
                sys.stdout.write(f"\nKVPULL_PROXY_FIRST_SEED={seed} KVPULL_PROXY_SEEDS=1 replays this\n")
                raise


async def survive(there: Any, seed: int) -> None:
    numbers = random.Random(seed)
    async with puller(there, plans=Schedule(seed, share=0.6)) as scene:
        linked = False
        for _ in range(10):
            linked = linked or await scene.link(timeout=500)
        ended = []
        for _ in range(6 if linked else 0):
            size, entry = numbers.choice(list(SIZES)), numbers.randrange(4)
            ended.append(await scene.try_to_pull(size, timeout=SHORT, source=entry))
        await scene.begin_anew()
        assert linked or await scene.link()
        for size in SIZES:
            await scene.check_right(size)
        assert all(intact(cache) for cache, _ in ended), f"P1: {scene.proxy.describe()}"
