"""Plugins of serving engines, whole: tensors of torch, links made when a request needs one, workers that die and come
back. What they do with the API stands in `peers`; the tests start them, give them requests and look at every byte.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.integration.callers import Program, program
from tests.torch_cpu import torch_cpu

torch_cpu()

# Every value tells its tensor, its block and who filled it; in bfloat16 small integers are exact.
KV = """
import torch

def filled(tensors, blocks, row, dtype, first):
    made = []
    for t in range(tensors):
        values = (torch.arange(blocks).view(-1, 1) + first + 3 * t).expand(blocks, row) % 120
        made.append(values.to(dtype).contiguous())
    return made

def wrong(tensors, moves, theirs, ours):
    '''The tensors in which not exactly these blocks have come over.'''
    said = []
    for number, (tensor, source, before) in enumerate(zip(tensors, theirs, ours)):
        expected = before.clone()
        for src, dst in moves:
            expected[dst] = source[src]
        if not torch.equal(tensor, expected):
            said.append(number)
    return said
"""

# -- by rank table -----------------------------------------------------------------------------------------------------

WORKER = """
from tests.integration.peers.comm_connector import Worker
kinds = {{"equal": (24, 24), "latent": (64, 8)}}[{kind!r}]
keys, values = (filled(61, 8, row, torch.{dtype}, {first} + 50 * k) for k, row in enumerate(kinds))
layers = {{f"model.layers.{{n}}.attn": pair for n, pair in enumerate(zip(keys, values))}}
worker = Worker({role!r}, {place!r})
answer = worker.register(layers)
"""
LOAD = """
future = worker.load({request!r}, {port}, {remote!r}, {local!r})
future.result(60)
answer = sorted(worker.finished)
"""
JUDGE = """
answer = []
for kind, (held, row) in enumerate(zip((keys, values), kinds)):
    theirs, ours = (filled(61, 8, row, torch.{dtype}, first + 50 * kind) for first in ({theirs}, {ours}))
    answer.append(wrong(held, {moves!r}, theirs, ours))
"""


def place(cluster: int, device: int, *, server: str, ip: str, **more: str) -> dict[str, Any]:
    return {"cluster_id": cluster, "device_id": str(device), "device_ip": ip, "server_id": server, **more}


POD = {"super_pod_id": "0"}
PLACES = {
    "one server": (
        place(1, 0, server="10.0.0.1", ip="10.1.1.1"),
        place(2, 1, server="10.0.0.1", ip="10.1.1.2"),
    ),
    "two servers of a super pod": (
        place(2**63 + 1, 0, server="127.0.0.21", ip="10.1.2.1", super_device_id="0", **POD),
        place(2**63 + 2, 0, server="127.0.0.22", ip="10.1.2.2", super_device_id="8", **POD),
    ),
}


def start(made: Program, role: str, where: dict[str, Any], *, kind: str, first: int, dtype: str) -> int:
    made.run(KV)
    port = made.run(WORKER, role=role, place=where, kind=kind, first=first, dtype=dtype)
    return int(port)


@pytest.mark.parametrize(
    ("places", "kind", "dtype"),
    [("one server", "equal", "bfloat16"), ("two servers of a super pod", "latent", "float16")],
)
def test_a_plugin_that_links_by_rank_table(places: str, kind: str, dtype: str) -> None:
    """Of 61 layers. Requests one after another; the prefill worker is killed and comes back; nobody ever finalizes."""
    theirs, ours = PLACES[places]
    given = {"kind": kind, "dtype": dtype}
    with program() as decode:
        with program() as prefill:
            port = start(prefill, "producer", theirs, first=1, **given)
            start(decode, "consumer", ours, first=30, **given)
            moves = [(0, 7), (1, 6), (5, 2)]
            assert decode.run(LOAD, request="a", port=port, remote=[0, 1], local=[7, 6]) == ["a"]
            assert decode.run(LOAD, request="b", port=port, remote=[3, 4, 5], local=[2]) == ["a", "b"]
            assert decode.run(JUDGE, moves=moves, theirs=1, ours=30, dtype=dtype) == [[], []]
            assert prefill.run("answer = sorted(worker.finished)") == ["a", "b"]
            prefill.kill()
        assert decode.run(f"worker.remove_remote({theirs['cluster_id']})\nanswer = worker.complaints") == []
        with program() as reborn:
            port = start(reborn, "producer", theirs, first=1, **given)
            assert decode.run(LOAD, request="c", port=port, remote=[2, 3], local=[0, 1]) == ["a", "b", "c"]
            assert decode.run(JUDGE, moves=[*moves, (2, 0), (3, 1)], theirs=1, ours=30, dtype=dtype) == [[], []]
            assert reborn.end() == (0, "")
        assert decode.end() == (0, "")


def test_workers_that_come_back_are_met_again_though_nobody_unlinked() -> None:
    """The side that stays thinks that it is linked, and does not call `link` again."""
    theirs, ours = PLACES["one server"]
    given = {"kind": "equal", "dtype": "float16"}
    moves = [(0, 7), (1, 6)]
    with program() as decode, program() as prefill:
        port = start(prefill, "producer", theirs, first=1, **given)
        start(decode, "consumer", ours, first=30, **given)
        assert decode.run(LOAD, request="a", port=port, remote=[0, 1], local=[7, 6]) == ["a"]
        decode.kill()
        with program() as again:
            start(again, "consumer", ours, first=30, **given)
            assert again.run(LOAD, request="b", port=port, remote=[0, 1], local=[7, 6]) == ["b"]
            prefill.kill()
            with program() as reborn:
                port = start(reborn, "producer", theirs, first=9, **given)
                for _ in range(20):  # what is asked for while the link comes back may fail
                    said = again.ask(LOAD, request="c", port=port, remote=[0, 1], local=[7, 6])
                    if "raised" not in said:
                        break
                    time.sleep(0.3)
                assert said.get("answer") == ["b", "c"], said
                assert again.run(JUDGE, moves=moves, theirs=9, ours=30, dtype="float16") == [[], []]


# -- by link_clusters --------------------------------------------------------------------------------------------------

ENGINE = """
from tests.integration.peers.cluster_connector import Client, Engine
held = [filled(4, 8, 16, torch.bfloat16, {first}), filled(2, 8, 40, torch.int8, {first})]
end = {make}
end.register(held)
answer = [end.cluster_id, (end.engine.listen_address or [0, 0])[1]]
"""
PULLS = """
from concurrent.futures import ThreadPoolExecutor
pulls = [({peer}, {port}, [src], [dst]) for src, dst in {moves!r}]
with ThreadPoolExecutor(4) as pool:
    answer = list(pool.map(lambda pull: end.{how}(*pull), pulls))
"""
COMPARE = """
answer = [
    wrong(held[0], {moves!r}, filled(4, 8, 16, torch.bfloat16, {theirs}), filled(4, 8, 16, torch.bfloat16, {ours})),
    wrong(held[1], {moves!r}, filled(2, 8, 40, torch.int8, {theirs}), filled(2, 8, 40, torch.int8, {ours})),
]
"""


def test_a_plugin_that_links_when_it_has_to() -> None:
    """Pulls from threads and from loops. The server forgets the client by id, sleeps and wakes up with other data, is
    killed and comes back; the client notices by its pulls and goes on.
    """
    with program() as client:
        with program() as server:
            server.run(KV)
            cluster, port = server.run(ENGINE, make="Engine(0)", first=1)
            server.run(f'end.options["llm.listenIpInfo"] = "127.0.0.1:{port}"')
            client.run(KV)
            own, _ = client.run(ENGINE, make="Client()", first=60)
            moves = [(0, 3), (1, 4), (2, 5), (7, 7)]
            for how in ("pull", "pull_from_a_loop"):
                assert client.run(PULLS, peer=cluster, port=port, moves=moves, how=how) == [True] * 4
            assert client.run(COMPARE, moves=moves, theirs=1, ours=60) == [[], []]
            assert client.run("answer = sorted(set(end.attempts))") == ["ok"]
            server.run(f"end.forget([{own}])\nend.forget([{own}, 4711])")
            moves.append((6, 0))
            assert client.run(PULLS, peer=cluster, port=port, moves=moves[-1:], how="pull") == [True]
            server.run("end.sleep()\nend.wake_up()\nend.register(held)")
            moves.append((5, 1))
            assert client.run(PULLS, peer=cluster, port=port, moves=moves[-1:], how="pull") == [True]
            assert client.run(COMPARE, moves=moves, theirs=1, ours=60) == [[], []]
            server.kill()
        client.begin(PULLS, peer=cluster, port=port, moves=[(4, 2)], how="pull_from_a_loop")
        with program() as reborn:
            reborn.run(KV)
            reborn.run(ENGINE, make=f"Engine({port}, {cluster})", first=1)
            assert client.finish() == [True]
            assert client.run(COMPARE, moves=[*moves, (4, 2)], theirs=1, ours=60) == [[], []]
            client.run("end.sleep()")
        assert client.end() == (0, "")


# -- the older manager -------------------------------------------------------------------------------------------------

CONNECTOR = """
from tests.integration.peers.request_connector import Connector, LAYERS, SHAPE

def layers(first):
    return [torch.arange(64, dtype=torch.float16).view(SHAPE[1:]) + first + 100 * n for n in range(LAYERS)]

connector = Connector({role!r}, {cluster}, {listen!r})
answer = connector.engine.listen_address
"""


def test_a_plugin_with_a_cache_for_each_request() -> None:
    """From two prefill processes. What was saved under a request is there once, though its cache was let go of."""
    with program() as one, program() as two, program() as decode:
        peers = []
        for number, source in enumerate((one, two)):
            source.run(KV)
            address = source.run(CONNECTOR, role="PROMPT", cluster=number, listen="127.0.0.1:0")
            peers.append((number, address[1]))
        decode.run(KV)
        decode.run(CONNECTOR, role="DECODER", cluster=2, listen="")
        assert decode.run(f"answer = connector.link({peers!r})") == ["LLM_SUCCESS"] * 2
        for round_ in range(3):
            for number, source in enumerate((one, two)):
                source.run(f"connector.save('request-{round_}', layers({10 * round_ + number}))")
            for number in (1, 0):
                assert (
                    decode.run(f"""
loaded = connector.load('request-{round_}', {number})
answer = [torch.equal(*pair) for pair in zip(loaded, layers({10 * round_ + number}))]
""")
                    == [True] * 3
                )
        again = decode.ask("connector.load('request-2', 0)")
        assert again["status"] == "LLM_KV_CACHE_NOT_EXIST"
        for each in (decode, two, one):
            assert each.end() == (0, "")
