"""Field reports of theme 3: peers that die, and processes that end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvpull_async import CacheDesc, CacheKey, LLMException, LLMRole, LLMStatusCode
from tests import duo
from tests.conformance.api import Api
from tests.integration.own_loop import outcome, within
from tests.integration.processes import Child, child, mappings
from tests.integration.rig import (
    OK,
    SOON,
    STEADY,
    Here,
    begin,
    each_face,
    each_path,
    each_process_path,
    link_failed,
    nodes,
)
from tests.integration.test_blocking import puller, source
from tests.integration.test_exit import program
from tests.loop_nodes import event_log, eventually

NBYTES = 1024 * 1024
ENGINES = ("nixl", "mooncake")
"""Native engines that a later version will have. Their reports are about what such an engine does to a process."""


# --- 3.1, 3.2 ---


@each_face
@pytest.mark.parametrize("engine", ENGINES)
def test_3_1_and_3_2_native_engines_are_refused_and_none_runs_in_this_process(api: Api, engine: str) -> None:
    async def body() -> None:
        node = api.package.LLMDataDist(LLMRole.DECODER, duo.DECODER)
        with pytest.raises(LLMException) as caught:
            await api.do(node.init, duo.options(transport=engine))
        assert caught.value.status_code is LLMStatusCode.LLM_FEATURE_NOT_ENABLED
        assert "not in this version" in str(caught.value)
        assert engine not in sys.modules
        await api.do(node.init, duo.options())
        await api.do(node.finalize)

    api.run(body())


@pytest.mark.slow
@each_process_path
async def test_3_1_and_3_2_a_peer_killed_and_started_again_over_and_over_costs_pulls_and_nothing_else(
    path: str,
) -> None:
    """The survivor is in the middle of pulls, and in whatever state of connecting, each time."""
    async with duo.node(LLMRole.DECODER, duo.DECODER, transport=path) as node:
        here, listen, right = Here(node), None, 0
        cache, stop = await here.cache(NBYTES), asyncio.Event()
        filled = -1
        """Which of the processes has filled its cache. It has the keys a moment before."""

        async def pull() -> None:
            nonlocal right
            while not stop.is_set():
                before = filled
                error = await outcome(here.pull(cache, 3, timeout=2000))
                assert error is None or isinstance(error, LLMException), error
                if error is None and before == filled >= 0:
                    assert duo.holds(cache, entry=0, source=3)
                    right += 1
                await asyncio.sleep(0)

        for number in range(4):
            where: dict[str, Any] = {"listen": True} if listen is None else {"listen_ip_info": listen}
            async with child("PROMPT", duo.PROMPT, transport=path, **where) as prefill:
                listen = f"{prefill.address[0]}:{prefill.address[1]}"
                await prefill.ask("publish", "published", nbytes=NBYTES, first=0)
                if not number:
                    await here.link(prefill)
                    pulling = begin(pull())
                filled, enough = number, right + 3
                await eventually(lambda: right >= enough or pulling.done())  # noqa: B023
                filled = -1
                prefill.kill()
        stop.set()
        await within(pulling)
        assert node.counters["incarnation_changes"] == 3


# --- 3.3, 3.6 ---


@contextlib.asynccontextmanager
async def several(path: str, **properties: Any) -> AsyncIterator[tuple[Here, Child, list[int]]]:
    """A decoder linked to a process that is to die, and to two other nodes."""
    async with (
        duo.node(LLMRole.DECODER, 99, transport=path, **properties) as node,
        child("PROMPT", duo.PROMPT, listen=True, transport=path, **properties) as doomed,
        duo.node(LLMRole.PROMPT, 11, listen=True, transport=path) as one,
        duo.node(LLMRole.PROMPT, 12, listen=True, transport=path) as two,
    ):
        here, shape = Here(node), CacheDesc(2, [4, NBYTES], duo.SMALL.data_type)
        await doomed.ask("publish", "published", nbytes=NBYTES, first=0)
        await here.link(doomed)
        for other in (one, two):
            keys = [CacheKey(other.cluster_id, entry) for entry in range(4)]
            here.kept.append(await other.kv_cache_manager.allocate_cache(shape, keys))
            duo.fill(here.kept[-1])
            await node.link_clusters([duo.cluster(other.cluster_id, other.listen_address)], raise_on_error=True)
        yield here, doomed, [11, 12]


@pytest.mark.parametrize(("path", "how"), [("tcp", "killed"), ("shm", "killed"), ("tcp", "stopped")])
async def test_3_3_one_dead_peer_of_three_changes_nothing_for_the_other_two(path: str, how: str) -> None:
    async with several(path, heartbeat_timeout=60_000) as (here, doomed, others):
        await here.check_right(NBYTES)
        (doomed.kill if how == "killed" else doomed.stop)()
        waiting = [here.pull(await here.cache(NBYTES)) for _ in range(4)]
        assert await slowest(here, others) < 15, "they waited for the dead one, which has 30 s"
        for pull in waiting:
            if how == "stopped":
                assert not pull.done()
                pull.cancel()
                assert isinstance(await outcome(pull), asyncio.CancelledError)
            else:
                link_failed(await outcome(pull))
        assert here.node.counters["pulls_finished"] == 1 + 10
        if how == "stopped":
            doomed.go_on()


async def slowest(here: Here, clusters: list[int], *, pulls: int = 10) -> float:
    """Seconds of the slowest of some pulls, all of them right."""
    took = []
    for number in range(pulls):
        began = time.monotonic()
        await here.check_right(NBYTES, number % 4, cluster=clusters[number % len(clusters)])
        took.append(time.monotonic() - began)
    return max(took)


@each_process_path
async def test_3_6_pulls_to_a_peer_that_is_gone_fail_fast_after_the_first_loss_until_it_is_back(path: str) -> None:
    grace = 100
    async with several(path, reconnect_grace=grace, **STEADY) as (here, doomed, others):
        cache = await here.cache(NBYTES)
        doomed.stop()
        first = await outcome(here.pull(cache, timeout=5000))  # it learns of the loss, from silent heartbeats
        assert isinstance(first, LLMException), first
        await asyncio.sleep(grace / 1000)
        for _ in range(5):
            error = await outcome(here.pull(cache, timeout=30_000))
            link_failed(error)
            assert isinstance(error, LLMException)
            assert (error.elapsed_ms or 0) < 15_000  # one attempt to connect, which has 400 ms
            await slowest(here, others, pulls=2)
        doomed.go_on()
        give_up = time.monotonic() + 15
        while (error := await outcome(here.pull(cache, 3, timeout=2000))) is not None:
            assert time.monotonic() < give_up, error
        assert duo.holds(cache, entry=0, source=3)


# --- 3.4 ---


@each_face
@each_path
def test_3_4_a_pull_from_a_peer_that_is_gone_leaves_its_caller_free_to_compute_it_anew(api: Api, path: str) -> None:
    """The error is an exception of the call alone: it says that nothing is written any more, and all else goes on."""

    async def body() -> None:
        async with nodes(api, path, reconnect_grace=100) as two:
            await two.publish(duo.BIG)
            cache = await two.destination(duo.BIG)
            await api.do(two.prompt.finalize)
            error = link_failed(await _outcome(two.pull(cache, timeout=3000)))
            assert not isinstance(error, (SystemExit, asyncio.CancelledError))
            for array in duo.arrays(cache):  # computed anew, into the same memory
                array[:] = 0xA5
            node = two.decoder.kv_cache_manager
            other = await two.destination(duo.BIG)
            await api.do(node.copy_cache, other, cache)
            assert all(bool((array[0] == 0xA5).all()) for array in duo.arrays(other))
            assert not cache.quarantined

    api.run(body())


async def _outcome(call: Any) -> BaseException | None:
    try:
        await call
    except Exception as error:  # noqa: BLE001  (the test judges it)
        return error
    return None


# --- 3.5 ---


@each_face
@pytest.mark.parametrize("kind", ["control", "payload", None], ids=["control", "payload", "all"])
def test_3_5_connections_that_are_cut_now_and_then_heal_and_are_told_once_each(api: Api, kind: str | None) -> None:
    cuts, between = 8, 40

    async def body() -> None:
        with event_log() as log:
            async with nodes(api, through=True, inline_limit=0) as two:
                await two.publish()
                await two.check_right()
                for cut in range(1, cuts + 1):
                    two.proxy.cut(kind=kind)
                    if kind != "payload":
                        await two.counted("reconnects", cut)
                    for number in range(between):
                        await two.check_right(key=number % 4)
                assert two.decoder.counters["pulls_finished"] == 1 + cuts * between
                told = [event["event"] for event in log.warnings if event["local_cluster_id"] == duo.DECODER]
                assert told == ["link.lost"] * (0 if kind == "payload" else cuts)

    api.run(body())


# --- 3.7, 3.8 ---


@pytest.mark.parametrize("big", [False, True], ids=["inline", "streamed"])
def test_3_7_sigterm_with_a_pull_in_flight_ends_the_process_in_time_with_its_status(*, big: bool) -> None:
    """(How many more ways a program may end is in tests/integration: test_exit.py, test_shutdown.py.)"""
    with source(big=big) as made, program("handles_a_signal", made, big=big) as running, duo.frozen(made.node):
        running.tell()
        running.hear("pulling")
        began = time.monotonic()
        running.signal(signal.SIGTERM)
        status, errors = running.end()
        assert (status, errors) == (6, "")
        assert time.monotonic() - began < SOON + 2


def test_3_8_ctrl_c_while_it_links_and_while_it_pulls_is_obeyed_and_leaves_all_in_order() -> None:
    with source() as made, socket.create_server(("127.0.0.1", 0)) as silent:
        with puller("link", made, silent=silent.getsockname()) as running:
            running.hear("begun")
            began = time.monotonic()
            running.signal(signal.SIGINT)
            assert running.hear("interrupted")["raised"] == "KeyboardInterrupt"
            assert time.monotonic() - began < SOON
            assert running.hear("pulled")["right"]
            assert running.end() == (0, "")
        with puller("pull", made) as running:
            running.hear("linked")
            with duo.frozen(made.node):
                running.tell()
                running.hear("begun")
                began = time.monotonic()
                running.signal(signal.SIGINT)
                told = running.hear("interrupted")
                assert time.monotonic() - began < SOON
            assert (told["raised"], told["quarantined"]) == ("KeyboardInterrupt", False)
            running.tell()
            assert running.hear("pulled")["right"]
            assert running.end() == (0, "")


# --- 3.9 ---


def test_3_9_an_engine_that_is_installed_and_was_not_chosen_is_not_even_imported(tmp_path: Path) -> None:
    for engine in (*ENGINES, "acl", "torch", "torch_npu", "llm_datadist"):
        (tmp_path / f"{engine}.py").write_text("import os\nos.abort()\n")
    lines = [
        f"import sys; sys.path[:0] = {[str(tmp_path), *sys.path]!r}",
        "import asyncio, kvpull_async, kvpull_sync",
        "from tests import duo",
        "async def main():",
        "    async with duo.duo(transport='auto') as pair:",
        "        await pair.publish(); cache = await pair.destination()",
        "        await pair.decoder.kv_cache_manager.pull_cache(kvpull_async.CacheKey(duo.PROMPT, 1), cache)",
        "asyncio.run(main())",
    ]
    for program_lines in (lines[:2], lines):
        command = [sys.executable, "-W", "error", "-c", "\n".join(program_lines)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# --- 3.10 ---


@each_face
@pytest.mark.parametrize("side", ["prompt", "decoder"])
@pytest.mark.parametrize("desc", [duo.SMALL, duo.BIG], ids=["inline", "streamed"])
def test_3_10_an_internal_error_in_what_serves_a_link_fails_its_pulls_and_not_the_link(
    api: Api, side: str, desc: CacheDesc
) -> None:
    """It is told as a bug, the connection ends, and the next one works."""

    async def body() -> None:
        with event_log() as log:
            async with nodes(api) as two:
                await two.publish(desc)
                await two.check_right(desc)
                cache = await two.destination(desc)
                (link,) = duo.engine_of(getattr(two, side)).links.all()
                if side == "prompt":
                    link._server.receive = _raises
                    for lane in link._lanes.values():
                        lane._on_message = _raises
                else:
                    for lane in link._lanes.values():
                        lane.session.receive = _raises
                link_failed(await _outcome(two.pull(cache)))
                await two.check_right(desc)
                await two.check_right(desc)
                bugs = [event for event in log.events if event["event"].endswith(".bug")]
                assert bugs
                assert all("of a test" in event["reason"] for event in bugs)

    api.run(body())


def _raises(*_: Any) -> Any:
    raise RuntimeError("of a test")


# --- 3.12 ---


async def test_3_12_a_process_that_shared_memory_and_ends_takes_it_from_nobody(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """By its own will or killed. Nobody keeps a list of segments that could be wrong, and complain."""
    async with (
        duo.node(LLMRole.PROMPT, duo.PROMPT, listen=True, transport="shm") as prompt,
        child("DECODER", 5, transport="shm") as stays,
    ):
        desc = CacheDesc(2, [4, NBYTES], duo.SMALL.data_type)
        cache = await prompt.kv_cache_manager.allocate_cache(desc, duo.keys(desc))
        duo.fill(cache)
        address = list(prompt.listen_address or ())
        await stays.ask("link", "linked", cluster=duo.PROMPT, address=address)
        await pulls(stays, 0)
        for number, how in enumerate(("ends", "killed")):
            async with child("DECODER", 6 + number, transport="shm") as goes:
                await goes.ask("link", "linked", cluster=duo.PROMPT, address=address)
                await pulls(goes, 1)
                if how == "killed":
                    goes.kill()
            await pulls(stays, 2)
            assert all(bool((array[3] == duo.pattern(t, 3)).all()) for t, array in enumerate(duo.arrays(cache)))
        await prompt.kv_cache_manager.deallocate_cache(cache)
    assert capfd.readouterr() == ("", "")


async def test_3_12_memory_of_a_process_that_was_killed_is_gone_when_the_last_reader_lets_go() -> None:
    async with duo.node(LLMRole.DECODER, duo.DECODER, transport="shm") as node:
        here = Here(node)
        async with child("PROMPT", duo.PROMPT, listen=True, transport="shm") as prefill:
            await prefill.ask("publish", "published", nbytes=NBYTES, first=0)
            await here.link(prefill)
            before = mappings() - 1  # but for the peer's own page
            await here.check_right(NBYTES)
            await eventually(lambda: mappings() > before + 1)
            prefill.kill()
            info = duo.cluster(duo.PROMPT, prefill.address)
        assert (await node.unlink_clusters([info], 5000, True))[1] == [OK]
        await eventually(lambda: mappings() == before)
    assert await asyncio.to_thread(lambda: list(Path("/dev/shm").glob("kvpull*"))) == []


async def pulls(peer: Child, key: int) -> None:
    peer.tell("pull", cluster=duo.PROMPT, key=key, nbytes=NBYTES, timeout=duo.TIMEOUT_MS)
    await peer.hear("pulling")
    assert (await peer.hear("pulled"))["right"]
