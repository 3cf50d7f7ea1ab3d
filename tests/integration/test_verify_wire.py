"""Verified pulls and pushes between two processes, whose bytes change on the wire, and peers that lack a package."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from kvpull_async import CacheKey, CacheKeyByIdAndIndex, LLMException, LLMRole, LLMStatusCode
from kvpull_async.testing.proxy import Fault, FaultKind, Way
from tests import duo
from tests.integration.own_loop import outcome
from tests.integration.processes import ROOT, child
from tests.integration.proxied import KEYS, SIZES, Proxied, Pushed, proxied, puller, pushed, source
from tests.integration.verifying import SUMS, check_mismatch

ACCESS: dict[str, Any] = {
    "transport": "tcp",
    "enable_cache_manager": True,
    "enable_remote_cache_accessible": True,
    "listen": True,
}
sums = pytest.mark.parametrize("name", SUMS)


def pull(scene: Proxied, cache: Any, size: str, **options: Any) -> asyncio.Task[Any]:
    manager = scene.node.kv_cache_manager
    return asyncio.ensure_future(
        manager.pull_cache(CacheKey(duo.PROMPT, KEYS[size]), cache, 0, src_cache_offset=0, **options)
    )


@sums
@pytest.mark.parametrize("at", [24, 1_000_000, 2 * SIZES["streamed"] + 23])
async def test_p2_p4_a_byte_of_the_payload_that_changes_on_the_wire_fails_the_pull(name: str, at: int) -> None:
    """The first and the last byte behind the 24 of a payload's head, and one between."""
    async with proxied() as scene:
        cache = await scene.cache(SIZES["streamed"])
        scene.proxy.inflict(Fault(FaultKind.CORRUPT, Way.BACK, at, 0x40), kind="payload")
        check_mismatch(await outcome(pull(scene, cache, "streamed", verify=name)), name, scene.node)
        assert not duo.holds(cache, entry=0, source=0)
        assert await outcome(pull(scene, cache, "streamed", verify=name)) is None
        assert duo.holds(cache, entry=0, source=0)
        assert scene.node.counters["links_up"] == 1


async def test_without_a_sum_such_a_byte_goes_unnoticed() -> None:
    """What it is for: if this fails, the tests above may prove nothing."""
    async with proxied() as scene:
        cache = await scene.cache(SIZES["streamed"])
        scene.proxy.inflict(Fault(FaultKind.CORRUPT, Way.BACK, 1_000_000, 0x40), kind="payload")
        assert await outcome(pull(scene, cache, "streamed")) is None
        assert not duo.holds(cache, entry=0, source=0)


@sums
async def test_p2_p4_a_byte_that_changes_inside_an_answer_fails_the_pull(name: str) -> None:
    """It is somewhere in the bytes that ride on the grant, which has 2 KiB of them and less than 200 bytes besides."""
    async with proxied(heartbeat_interval=20_000, heartbeat_timeout=60_000) as scene:
        cache = await scene.cache(SIZES["inline"])
        scene.proxy.inflict(Fault(FaultKind.CORRUPT, Way.BACK, 1000, 0x01), kind="control")
        check_mismatch(await outcome(pull(scene, cache, "inline", verify=name)), name, scene.node)
        assert await outcome(pull(scene, cache, "inline", verify=name)) is None
        assert duo.holds(cache, entry=0, source=0)


@sums
@pytest.mark.parametrize("nbytes", [2048, 700_000], ids=["inline", "streamed"])
async def test_p2_p4_a_byte_of_a_push_that_changes_on_the_wire_fails_it(name: str, nbytes: int) -> None:
    async with pushed(nbytes) as scene:
        assert await push(scene, name) is None
        assert (await scene.see())["right"]
        kind = "control" if nbytes == 2048 else "payload"
        scene.proxy.inflict(Fault(FaultKind.CORRUPT, Way.THERE, 1500, 0x80), kind=kind)
        check_mismatch(await push(scene, name), name, scene.node)
        assert not (await scene.see())["right"]
        assert await push(scene, name) is None
        assert (await scene.see())["right"]


async def push(scene: Pushed, name: str) -> BaseException | None:
    key, manager = CacheKeyByIdAndIndex(duo.PROMPT, scene._to, 0), scene.node.cache_manager
    return await outcome(asyncio.ensure_future(manager.push_cache(key, scene._source, 1, verify=name)))


# --- a peer without the package ---


def without_xxhash(folder: Path) -> dict[str, str]:
    """The environment of a process in which it cannot be imported."""
    (folder / "xxhash.py").write_text("raise ImportError('there is none here')\n", encoding="utf-8")
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT), *(entry for entry in sys.path if entry)])}


def lacking(error: BaseException | None, side: str) -> None:
    assert isinstance(error, LLMException), repr(error)
    assert error.status_code is LLMStatusCode.LLM_FEATURE_NOT_ENABLED
    assert f"xxhash on the {side}" in str(error)
    assert not error.retry_safe  # it would be refused again


@pytest.mark.parametrize("size", SIZES)
async def test_p10_a_source_without_the_package_says_so(tmp_path: Path, size: str) -> None:
    async with source(environment=without_xxhash(tmp_path)) as there, puller(there) as scene:
        assert await scene.link()
        cache = await scene.cache(SIZES[size])
        lacking(await outcome(pull(scene, cache, size, verify="xxh3")), "source")
        assert await outcome(pull(scene, cache, size, verify="crc32")) is None
        assert duo.holds(cache, entry=0, source=0)


@pytest.mark.parametrize("nbytes", [2048, 700_000], ids=["inline", "streamed"])
async def test_p10_a_receiver_without_the_package_says_so(tmp_path: Path, nbytes: int) -> None:
    async with (
        child("MIX", duo.PROMPT, program="pushing", environment=without_xxhash(tmp_path), **ACCESS) as there,
        duo.node(LLMRole.MIX, duo.DECODER, **ACCESS) as node,
    ):
        scene = Pushed(node, there, there)  # type: ignore[arg-type]  # with no proxy between: both have an address
        await scene.open(nbytes)
        await scene.set_canary()
        lacking(await push(scene, "xxh3"), "receiver")
        assert (await scene.see())["untouched"]
        assert await push(scene, "crc32") is None
        assert (await scene.see())["right"]
