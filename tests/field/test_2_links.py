"""Field reports of theme 2: links that are set up, torn down and made again."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvpull_async import CacheDesc, CacheKey, LLMClusterInfo, LLMException, LLMRole, LLMStatusCode
from kvpull_async.protocol import frames
from tests import duo
from tests.certificates import Authority, cluster
from tests.conformance.api import Api
from tests.integration.own_loop import outcome, within
from tests.integration.processes import child, sockets
from tests.integration.rig import (
    FAILED,
    MISSING,
    OK,
    SOON,
    Here,
    each_face,
    each_process_path,
    link_failed,
    links_of,
    nodes,
)
from tests.loop_nodes import event_log, eventually

LIMIT = 16
"""Clusters of one `link_clusters` call in the older mode."""
LINKED = {OK, LLMStatusCode.LLM_ALREADY_LINK, LLMStatusCode.LLM_REPEAT_REQUEST}
"""What is said of a cluster that several calls link at once."""


# --- 2.1 ---


async def _says(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, words: bytes) -> None:
    writer.write(words)
    with contextlib.suppress(ConnectionError):
        await reader.read(100)
        await reader.read()
    writer.close()


@contextlib.asynccontextmanager
async def speaking(words: bytes) -> AsyncIterator[Any]:
    server = await asyncio.start_server(lambda reader, writer: _says(reader, writer, words), "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()
    finally:
        server.close()


def unused() -> tuple[str, int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address: tuple[str, int] = server.getsockname()
        return address


def no_address(cluster_id: int) -> LLMClusterInfo:
    info = LLMClusterInfo()
    info.remote_cluster_id = cluster_id
    return info


async def reason(node: Any, info: Any) -> LLMException:
    """Why it could not be linked: told by the exception, and by the log where a code is returned."""
    began = time.monotonic()
    with event_log() as log:
        with pytest.raises(LLMException) as caught:
            await node.link_clusters([info], 2000, raise_on_error=True)
        overall, codes = await node.link_clusters([info], 2000)
        assert codes == [overall] == [caught.value.status_code]
        assert time.monotonic() - began < SOON
        failed = {"name": "link.failed", "cluster_id": info.remote_cluster_id}
        await eventually(lambda: any(event["reason"] in str(caught.value) for event in log.named(**failed)))
    assert caught.value.peer == info.remote_cluster_id
    assert links_of(node) == []
    return caught.value


async def test_2_1_each_mistake_in_a_link_has_its_own_message_that_names_the_field_and_the_peer() -> None:
    newer = frames.encode(frames.Challenge(99, b"i" * 16, b"n" * 32, False))
    async with (
        duo.node(LLMRole.PROMPT, duo.PROMPT, listen=True) as prompt,
        duo.node(LLMRole.PROMPT, 3, listen=True, link_secret="a secret of theirs") as secretive,
        duo.node(LLMRole.DECODER, duo.DECODER) as decoder,
        speaking(b"HTTP/1.1 400 Bad Request\r\n\r\n") as web,
        speaking(newer) as version,
    ):
        closed, (_, right_port) = unused(), prompt.listen_address or ("", 0)
        wrong: dict[str, tuple[Any, tuple[str, ...]]] = {
            "port": (duo.cluster(duo.PROMPT, closed), (f"127.0.0.1:{closed[1]}", "Connection refused")),
            "ip": (
                duo.cluster(duo.PROMPT, ("127.0.0.99", right_port)),
                (f"127.0.0.99:{right_port}", "Connection refused"),
            ),
            "program": (duo.cluster(duo.PROMPT, web), (f"{web[0]}:{web[1]}",)),
            "version": (duo.cluster(duo.PROMPT, version), ("99", str(frames.VERSION), "release")),
            "cluster id": (duo.cluster(5, prompt.listen_address), ("this is cluster 1, not 5",)),
            "secret": (duo.cluster(3, secretive.listen_address), ("link secret",)),
            "no address": (no_address(8), ("exactly one remote ip",)),
        }
        told = {}
        for field, (info, words) in wrong.items():
            told[field] = str(await reason(decoder, info))
            assert all(word in told[field] for word in words), (field, told[field])
            assert f"cluster {info.remote_cluster_id}{' at ' * bool(info.remote_ip_info_list)}" in told[field]
        plain = [text.replace(str(closed[1]), "").replace(str(right_port), "") for text in told.values()]
        assert len(set(plain)) == len(wrong)
        await decoder.link_clusters([duo.cluster(duo.PROMPT, prompt.listen_address)], raise_on_error=True)


# --- 2.3 ---


@each_face
def test_2_3_more_clusters_than_one_call_may_link_are_refused_at_once(api: Api) -> None:
    async def body() -> None:
        async with nodes(api, linked=False) as two:
            address = two.prompt.listen_address
            infos = [duo.cluster(duo.PROMPT, address), *(duo.cluster(100 + i, address) for i in range(31))]
            began = time.monotonic()
            overall, codes = await api.do(two.decoder.link_clusters, infos, 20_000)
            assert (overall, codes) == (LLMStatusCode.LLM_CLUSTER_NUM_EXCEED_LIMIT, [])
            assert time.monotonic() - began < SOON
            assert links_of(two.decoder) == [], "not even the first ones"
            overall, codes = await api.do(two.decoder.link_clusters, infos[:LIMIT], 20_000)
            assert codes == [OK, *[FAILED] * (LIMIT - 1)]

    api.run(body())


async def test_2_3_many_calls_at_once_give_each_cluster_its_own_code_in_the_order_it_was_asked_for() -> None:
    rng = random.Random("2.3")
    async with contextlib.AsyncExitStack() as stack:
        prompts = [await stack.enter_async_context(duo.node(LLMRole.PROMPT, 1 + i, listen=True)) for i in range(LIMIT)]
        decoder = await stack.enter_async_context(duo.node(LLMRole.DECODER, 99))
        refusing, calls, expected = unused(), [], []
        for number in range(32):
            good = prompts[number % LIMIT]
            infos = [(duo.cluster(good.cluster_id, good.listen_address), LINKED)]
            infos += [(duo.cluster(1000 + 10 * number + i, refusing), {FAILED}) for i in range(3)]
            rng.shuffle(infos)
            expected.append([codes for _, codes in infos])
            calls.append(decoder.link_clusters([info for info, _ in infos], 20_000))
        for (_, codes), allowed in zip(await within(asyncio.gather(*calls)), expected, strict=True):
            assert len(codes) == len(allowed)
            assert all(code in one for code, one in zip(codes, allowed, strict=True)), (codes, allowed)
        assert sorted(link.cluster_id for link in links_of(decoder)) == [prompt.cluster_id for prompt in prompts]


# --- 2.5 ---


def bad_options(port: int) -> dict[str, tuple[dict[str, str], type[BaseException], str]]:
    good = duo.options()
    far = {**good, "llm.listenIpInfo": "192.0.2.77:0"}
    taken = {**good, "llm.listenIpInfo": f"127.0.0.1:{port}"}
    return {
        "listen port taken": (taken, LLMException, f"127.0.0.1:{port}"),
        "no such address": ({**far, "kvpull.AllowInsecureNetwork": "1"}, LLMException, "192.0.2.77:0"),
        "open to the network": (far, LLMException, "kvpull.LinkSecret"),
        "malformed address": ({**good, "llm.listenIpInfo": "here"}, Exception, "listenIpInfo"),
        "timeout of no number": ({**good, "llm.SyncKvCacheWaitTime": "soon"}, Exception, "SyncKvCacheWaitTime"),
        "misspelt option of ours": ({**good, "kvpull.queue_limits": "3"}, Exception, "queue_limit"),
        "own option out of range": ({**good, "kvpull.queue_limit": "-3"}, Exception, "queue_limit"),
        "no such backend": ({**good, "llm.TransferBackend": "carrier pigeon"}, Exception, "ransfer"),
    }


@each_face
@pytest.mark.parametrize("kind", bad_options(1))
def test_2_5_an_init_that_cannot_be_names_the_option_and_may_be_repeated(api: Api, kind: str) -> None:
    async def body() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            options, error, words = bad_options(server.getsockname()[1])[kind]
            node = api.package.LLMDataDist(LLMRole.DECODER, duo.DECODER)
            threads = threading.active_count()
            for _ in range(2):
                with pytest.raises(error) as caught:
                    await api.do(node.init, options)
                assert words in str(caught.value), caught.value
                if isinstance(caught.value, LLMException):
                    assert caught.value.status_code is not OK
                await api.until(lambda: threading.active_count() == threads)
            await api.do(node.init, duo.options(listen=True))
            cache = await api.do(node.kv_cache_manager.allocate_cache, duo.SMALL)
            await api.do(node.kv_cache_manager.deallocate_cache, cache)
            await api.do(node.finalize)

    api.run(body())


# --- 2.6 ---


@each_face
@pytest.mark.parametrize("who", ["dialling", "accepting"])
def test_2_6_tls_on_one_side_only_is_said_in_so_many_words_long_before_the_timeout(
    api: Api, who: str, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)

    async def body() -> None:
        prompt = api.package.LLMDataDist(LLMRole.PROMPT, duo.PROMPT)
        decoder = api.package.LLMDataDist(LLMRole.DECODER, duo.DECODER)
        certificates = [
            authority.issue(f"node{node.cluster_id}", *cluster(node.cluster_id)) for node in (prompt, decoder)
        ]
        try:
            with event_log() as log:
                await api.do(prompt.init, duo.options(listen=True, **(certificates[0] if who == "accepting" else {})))
                await api.do(decoder.init, duo.options(**(certificates[1] if who == "dialling" else {})))
                began = time.monotonic()
                info = duo.cluster(duo.PROMPT, prompt.listen_address)
                assert await api.do(decoder.link_clusters, [info], 30_000) == (FAILED, [FAILED])
                assert time.monotonic() - began < SOON
                await api.until(lambda: bool(log.named("link.failed", text="TLS") and log.named("link.rejected")))
                (failed,) = log.named("link.failed")
                assert "the accepting side" in failed["reason"]
                assert "the dialling side" in failed["reason"]
                assert "TLS" in log.named("link.rejected")[0]["reason"]
            await api.do(decoder.finalize)
            await api.do(decoder.init, duo.options(**(certificates[1] if who == "accepting" else {})))
            assert await api.do(decoder.link_clusters, [info], 30_000) == (OK, [OK])
        finally:
            for node in (decoder, prompt):
                await api.do(node.finalize)

    api.run(body())


# --- 2.7 ---


@each_process_path
@pytest.mark.parametrize("busy", [True, False], ids=["pulls under way", "idle"])
async def test_2_7_a_prefill_process_that_is_restarted_on_its_port_is_met_again_as_another_one(
    path: str, busy: bool
) -> None:
    nbytes = 3 * 1024 * 1024
    with event_log() as log:
        async with duo.node(LLMRole.DECODER, duo.DECODER, transport=path) as node:
            here = Here(node)
            async with child("PROMPT", duo.PROMPT, listen=True, transport=path) as prefill:
                await prefill.ask("publish", "published", nbytes=nbytes, first=0)
                await here.link(prefill)
                cache, pulls = await here.cache(nbytes), []
                if busy:
                    prefill.stop()
                    pulls = [here.pull(cache, i) for i in range(4)]
                    await asyncio.sleep(0.05)
                prefill.kill()
            began = time.monotonic()
            listen = f"{prefill.address[0]}:{prefill.address[1]}"
            async with child("PROMPT", duo.PROMPT, listen_ip_info=listen, transport=path) as again:
                for pull in pulls:  # at once, though each had 30 s
                    link_failed(await outcome(pull))
                assert time.monotonic() - began < SOON
                await again.ask("publish", "published", nbytes=nbytes, first=100)
                await here.check_right(nbytes, 101)
                old = await outcome(here.pull(cache, 0))
                assert isinstance(old, LLMException)
                assert old.status_code is MISSING, "what the old process held is gone"
        assert len(log.named("link.incarnation_changed", cluster_id=duo.PROMPT)) == 1


# --- 2.13 ---


@each_face
@pytest.mark.parametrize("rides", [True, False], ids=["on the answer", "on a connection of its own"])
def test_2_13_thousands_of_pulls_at_once_use_the_same_few_sockets(api: Api, rides: bool) -> None:
    at_once, each = 10, 200

    async def body() -> None:
        async with nodes(api, **({} if rides else {"inline_limit": 0})) as two:
            await two.publish()
            await two.check_right()
            before, most = sockets(), []

            async def some(entry: int) -> None:
                cache = await two.destination()
                for number in range(each):
                    await two.pull(cache, number % 4)
                    if number % 50 == entry:
                        most.append(sockets())

            def one(entry: int) -> Any:
                return api.start(lambda: some(entry))

            for running in [one(entry) for entry in range(at_once)]:
                assert await running.outcome() is None
            assert two.decoder.counters["pulls_finished"] >= at_once * each
            loops = 3 * at_once if api.name == "awaited" else 0  # of the callers: two sockets and a selector each
            assert max(most) <= before + loops
            await api.until(lambda: sockets() <= before)

    api.run(body())


async def test_2_13_what_belonged_to_a_peer_that_was_restarted_is_closed() -> None:
    async with duo.node(LLMRole.DECODER, duo.DECODER) as node:
        here, address, counts = Here(node), None, []
        for number in range(4):
            where: dict[str, Any] = {"listen": True} if address is None else {"listen_ip_info": address}
            async with duo.node(LLMRole.PROMPT, duo.PROMPT, **where) as prompt:
                host, port = prompt.listen_address or ("", 0)
                address = f"{host}:{port}"
                if not number:
                    await node.link_clusters([duo.cluster(duo.PROMPT, (host, port))], raise_on_error=True)
                cache = await prompt.kv_cache_manager.allocate_cache(
                    CacheDesc(2, [4, 70_000], duo.SMALL.data_type), [CacheKey(duo.PROMPT, i) for i in range(4)]
                )
                duo.fill(cache)
                await eventually(lambda: [link.state.value for link in links_of(node)] == ["ready"])
                await here.check_right(70_000)
                counts.append(sockets())
                await prompt.kv_cache_manager.deallocate_cache(cache)
        assert counts == counts[:1] * 4


# --- 2.14 ---


async def test_2_14_many_nodes_of_one_host_with_the_same_settings_all_begin() -> None:
    async with contextlib.AsyncExitStack() as stack:
        plain = [await stack.enter_async_context(duo.node(LLMRole.DECODER, i)) for i in range(8)]
        listening = [await stack.enter_async_context(duo.node(LLMRole.PROMPT, 10 + i, listen=True)) for i in range(8)]
        assert [node.listen_address for node in plain] == [None] * 8
        assert len({node.listen_address for node in listening}) == 8
        infos = [duo.cluster(node.cluster_id, node.listen_address) for node in listening]
        assert (await plain[0].link_clusters(infos, duo.TIMEOUT_MS))[1] == [OK] * 8


@each_face
def test_2_14_a_port_that_another_node_has_fails_init_with_its_number_and_leaves_no_thread(api: Api) -> None:
    async def body() -> None:
        async with nodes(api, linked=False) as two:
            _, port = two.prompt.listen_address
            threads = threading.active_count()
            others = [api.package.LLMDataDist(LLMRole.PROMPT, 50 + i) for i in range(3)]
            for other in others:
                with pytest.raises(LLMException, match=f":{port}") as caught:
                    await api.do(other.init, duo.options(listen_ip_info=f"127.0.0.1:{port}"))
                assert caught.value.status_code is LLMStatusCode.LLM_FAILED
            await api.until(lambda: threading.active_count() == threads)
            await api.do(two.decoder.link_clusters, [duo.cluster(duo.PROMPT, two.prompt.listen_address)])
            await two.publish()
            await two.check_right()

    api.run(body())


async def test_2_14_a_port_that_another_process_has_fails_init_with_its_number() -> None:
    async with child("PROMPT", duo.PROMPT, listen=True) as prefill:
        with pytest.raises(LLMException, match=f":{prefill.address[1]}"):
            async with duo.node(LLMRole.PROMPT, 3, listen_ip_info=f"127.0.0.1:{prefill.address[1]}"):
                pass
