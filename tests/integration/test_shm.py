"""Whether two processes share memory: other users and namespaces, sides that differ, scarce descriptors and memory."""

from __future__ import annotations

import contextlib
import os
import subprocess
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from kvpull_async import LLMException, LLMStatusCode
from tests import duo
from tests.integration.own_loop import outcome
from tests.integration.processes import child, descriptors, few_descriptors
from tests.integration.reader import KINDS, comes_to, fields, options_for, reader, refused, source, source_kind
from tests.loop_nodes import event_log

NOBODY = 65534
SMALL, LARGE = 100_000, 3 * 1024 * 1024
LINK_FAILED = LLMStatusCode.LLM_LINK_FAILED
each_kind = pytest.mark.parametrize("kind", KINDS)
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user, or make a network")


# --- what is chosen, and why ---


async def test_between_processes_of_one_host_and_user_shared_memory_is_chosen_and_said() -> None:
    with event_log() as log:
        async with source(transport="auto") as there, reader(transport="auto") as here:
            await there.ask("publish", "published", key=0, nbytes=LARGE)
            await here.link(there)
            await here.check_right(0, nbytes=LARGE)
            assert any("path=shm" in line for line in (await there.ask("heard", "heard"))["events"])
        (up,) = log.named("link.up")
        assert (up["path"], up["why"]) == ("shm", "same host and user")


@as_root
async def test_a_peer_of_another_user_is_reached_over_tcp_and_the_log_says_why() -> None:
    with event_log() as log:
        async with source(transport="auto", user=NOBODY) as there, reader(transport="auto") as here:
            await there.ask("publish", "published", key=0, nbytes=LARGE)
            await here.link(there)
            await here.check_right(0, nbytes=LARGE)
        (up,) = log.named("link.up")
        assert up["path"] == "tcp"
        assert f"user {NOBODY}" in up["why"]
        assert "user 0" in up["why"]


@as_root
async def test_p10_shared_memory_that_is_insisted_on_is_refused_to_another_user_with_the_reason() -> None:
    async with source(transport="shm", user=NOBODY) as there, reader(transport="shm") as here:
        with pytest.raises(LLMException, match=f"user {NOBODY}") as raised:
            await here.link(there)
        assert raised.value.status_code is LINK_FAILED


@contextlib.contextmanager
def other_network() -> Iterator[tuple[str, str]]:
    """The name of another network namespace, and the address at which it is reached."""
    name, number = f"kvpull-{uuid.uuid4().hex[:8]}", os.getpid() % 200 + 20
    ours, theirs = f"kvp{uuid.uuid4().hex[:6]}a", f"kvp{uuid.uuid4().hex[:6]}b"
    commands = (
        f"ip netns add {name}",
        f"ip link add {ours} type veth peer name {theirs} netns {name}",
        f"ip addr add 10.213.{number}.1/24 dev {ours}",
        f"ip link set {ours} up",
        f"ip -n {name} addr add 10.213.{number}.2/24 dev {theirs}",
        f"ip -n {name} link set {theirs} up",
        f"ip -n {name} link set lo up",
    )
    try:
        for command in commands:
            made = subprocess.run(command.split(), capture_output=True, text=True, timeout=20, check=False)
            if made.returncode:
                pytest.skip(f"no other network namespace to be had here: {command}: {made.stderr.strip()}")
        yield name, f"10.213.{number}.2"
    finally:
        for command in (f"ip link del {ours}", f"ip netns del {name}"):
            subprocess.run(command.split(), capture_output=True, timeout=20, check=False)


@as_root
async def test_a_peer_in_another_network_namespace_is_reached_over_tcp_and_the_log_says_why() -> None:
    """It is on the same host and of the same user, but the names of its sockets are not seen from here."""
    with other_network() as (name, address), event_log() as log:
        options = {"link_secret": "between the two of us", "transport": "auto"}
        async with (
            source(
                before=["ip", "netns", "exec", name], listen=False, listen_ip_info=f"{address}:0", **options
            ) as there,
            reader(**options) as here,
        ):
            await there.ask("publish", "published", key=0, nbytes=LARGE)
            await here.link(there)
            await here.check_right(0, nbytes=LARGE)
        (up,) = log.named("link.up")
        assert up["path"] == "tcp"
        assert "network namespace" in up["why"]


@as_root
@pytest.mark.parametrize("inside", ["PROMPT", "DECODER"])
async def test_a_peer_in_another_process_namespace_shares_memory_files_and_streams_what_it_cannot_read(
    inside: str,
) -> None:
    """Where the source's process is not seen, only what is in no memory file has to be sent."""
    wraps: dict[str, list[str]] = {"PROMPT": [], "DECODER": [], inside: elsewhere()}
    options: dict[str, Any] = {"program": "source", "transport": "shm"}
    async with (
        source(before=wraps["PROMPT"], transport="shm") as there,
        child("DECODER", duo.DECODER, before=wraps["DECODER"], **options) as decode,
    ):
        for key, kind in ((0, "allocated"), (1, "registered")):
            await there.ask("publish", "published", key=key, nbytes=LARGE, kind=kind)
            for _ in range(2):
                said = await decode.ask(
                    "fetch", "fetched", cluster=duo.PROMPT, address=list(there.address), key=key, nbytes=LARGE
                )
                assert said["right"] == [True, True]
        heard = (await decode.ask("heard", "heard"))["events"]
        assert any("path=shm" in line for line in heard)


def elsewhere() -> list[str]:
    """What starts a command in a process namespace of its own."""
    command = ["unshare", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*command, "true"], capture_output=True, timeout=20, check=False).returncode:
        pytest.skip("no other process namespace to be had here")
    return command


@pytest.mark.parametrize(("theirs", "ours"), [("shm", "tcp"), ("tcp", "shm")])
async def test_p10_two_sides_that_insist_on_different_paths_are_told_so(theirs: str, ours: str) -> None:
    async with source(transport=theirs) as there, reader(transport=ours) as here:
        with pytest.raises(LLMException, match="no data path in common") as raised:
            await here.link(there)
        assert raised.value.status_code is LINK_FAILED
        assert theirs in str(raised.value)
        assert ours in str(raised.value)


# --- scarcity ---


@each_kind
async def test_p10_a_puller_out_of_descriptors_is_told_so_and_recovers(kind: str) -> None:
    options = options_for(kind)
    async with source(**options) as there, reader(**options) as here:
        await here.link(there)
        cache = await here.cache(LARGE)
        await there.ask("publish", "published", key=0, nbytes=LARGE, kind=source_kind(kind))
        with few_descriptors(0):
            for _ in range(3):
                error = await outcome(here.pull(cache, 0, timeout=5000))
                if kind == "read":  # which needs none
                    assert error is None
                else:
                    assert refused(error, LINK_FAILED).retry_safe
        await here.check_right(0, nbytes=LARGE)
        before = descriptors()
        for _ in range(10):
            await here.check_right(0, nbytes=LARGE)
        assert descriptors() <= before


@each_kind
async def test_p10_a_source_out_of_descriptors_says_so_and_recovers(kind: str) -> None:
    """New caches are refused, or shared in another way, and what was there is still to be had."""
    options = options_for(kind)
    async with source(**options) as there, reader(**options) as here:
        await there.ask("publish", "published", key=0, nbytes=LARGE, kind=source_kind(kind))
        await here.link(there)
        await here.check_right(0, nbytes=LARGE)
        await there.ask("limit", "limited", spare=0)
        spent = (await there.ask("spent", "spent"))["cpu"]
        for _ in range(5):
            there.tell("publish", key=1, nbytes=LARGE)
            answer = await there.hear("failed", "published")
            assert answer["event"] == "failed", "the test is wrong: it had descriptors left"
            assert "OUT_OF_MEMORY" in answer["status"]
        await here.check_right(0, nbytes=LARGE)
        async with reader(**options) as other:
            with pytest.raises(LLMException):
                await other.node.link_clusters([duo.cluster(duo.PROMPT, there.address)], 800, raise_on_error=True)
        assert (await there.ask("spent", "spent"))["cpu"] - spent < 1.0, "it ran in circles"
        await there.ask("limit", "limited", spare=None)
        await there.ask("publish", "published", key=1, nbytes=LARGE, kind=source_kind(kind))
        await here.check_right(1, nbytes=LARGE)


async def test_a_source_without_a_descriptor_for_the_side_channel_waits_quietly_for_one() -> None:
    """The peer's first connection takes the last one; who comes to the side channel then stays in the backlog."""
    async with source(transport="shm") as there, reader(transport="shm") as here:
        await there.ask("publish", "published", key=0, nbytes=LARGE)
        await here.link(there)  # so that the socket at which the source waits is there
        linked = (await fields(there))["descriptors"]
        await here.unlink(there)
        await comes_to(there, lambda state: state["descriptors"] <= linked - 3)  # two connections, the side channel
        await there.ask("limit", "limited", spare=1)
        spent = (await there.ask("spent", "spent"))["cpu"]
        with pytest.raises(LLMException) as raised:
            await here.link(there)
        assert raised.value.status_code is LINK_FAILED
        assert (await there.ask("spent", "spent"))["cpu"] - spent < 0.5, "it ran in circles"
        await there.ask("limit", "limited", spare=None)
        await here.link(there)
        await here.check_right(0, nbytes=LARGE)


async def test_p10_more_memory_than_there_is_is_refused_and_nobody_dies() -> None:
    async with source(transport="shm") as there, reader(transport="shm") as here:
        await here.link(there)
        before = await fields(there)
        for nbytes in (2**40, 2**45, 2**61):
            answer = await there.ask("publish", "failed", key=7, nbytes=nbytes)
            assert "OUT_OF_MEMORY" in answer["status"] or "PARAM_INVALID" in answer["status"], answer
        with pytest.raises(LLMException, match="bytes"):
            await here.cache(2**40)
        after = await fields(there)
        assert (after["used"], after["mappings"]) == (before["used"], before["mappings"])
        await there.ask("publish", "published", key=0, nbytes=LARGE)
        await here.check_right(0, nbytes=LARGE)


@pytest.mark.parametrize("process_reads", ["auto", "off"])
async def test_a_source_with_few_descriptors_keeps_half_of_them_and_serves_its_other_caches_all_the_same(
    process_reads: str,
) -> None:
    """Each memory file that can be passed on costs one; caches beyond that are read through the kernel, or streamed."""
    limited = ["sh", "-c", 'ulimit -n 96; exec "$@"', "sh"]
    options = {"transport": "shm", "allow_process_vm_read": process_reads}
    async with source(before=limited, **options) as there, reader(**options) as here:
        await here.link(there)
        for key in range(80):
            await there.ask("publish", "published", key=key, nbytes=SMALL)
        for key in (*range(0, 80, 3), 79):
            await here.check_right(key, nbytes=SMALL)
        for key in range(80):
            await there.ask("spoil", "spoiled", key=key)
        await there.ask("publish", "published", key=100, nbytes=SMALL)
        await here.check_right(100, nbytes=SMALL)
        assert (await fields(there))["descriptors"] < 30
        assert here.node.counters["links_up"] == 1
