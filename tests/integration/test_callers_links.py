"""How existing programs link and unlink, between real processes: `link` with rank tables, polled; `link_clusters` from
one side or from both; by force from a peer that is gone, and again when it is back.
"""

from __future__ import annotations

import time

import pytest

from tests import ranks
from tests.integration.callers import (
    DECODE,
    FILL,
    FORCED,
    HELD,
    JOIN,
    JOINED,
    LINK,
    LINKED,
    MEMORY,
    PREFILL,
    PULL,
    REGISTER,
    START,
    UNLINK,
    both,
    by_link_style,
    decode,
    join,
    link,
    pair,
    prefill,
    program,
    pulled,
)

# -- link --------------------------------------------------------------------------------------------------------------

# As plugins do it: each side from the thread that happened to hear of the other one.
JOIN_IN_THREADS = """
import threading, time

def make(name, table, ids, statuses):
    comm_id = datadist.link(name, {{{prefill}: 0, {decode}: 1}}, table)
    ids.append(comm_id)
    give_up = time.monotonic() + 30
    while time.monotonic() < give_up:
        status = datadist.query_register_mem_status(comm_id=comm_id)
        if status == RegisterMemStatus.OK:
            break
        if status == RegisterMemStatus.FAILED:
            raise RuntimeError("link failed")
        time.sleep(0.02)
    statuses.append(status.name)

ids, statuses = [], []
threads = [threading.Thread(target=make, args=(name, {table!r}, ids, statuses)) for name in {names!r}]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(40)
answer = [sorted(ids), statuses]
"""


def test_several_links_at_once_from_any_thread() -> None:
    names = [ranks.comm_name() for _ in range(4)]
    with program() as source, program() as puller:
        prefill(source, "remote-access", port=None)
        decode(puller, "remote-access")
        for each, ordered in ((source, names), (puller, names[::-1])):
            each.begin(JOIN_IN_THREADS, names=ordered, table=ranks.together(), prefill=PREFILL, decode=DECODE)
        assert [each.finish() for each in (source, puller)] == [[[1, 2, 3, 4], ["OK"] * 4]] * 2
        puller.run(PULL, peer=PREFILL, src=[3], dst=[4])
        source.run(PULL, peer=DECODE, src=[0], dst=[0])
        assert puller.run(HELD) == pulled({4: 3})
        puller.run("for comm_id in ids[:3]:\n    datadist.unlink(comm_id)")
        puller.run(PULL, peer=PREFILL, src=[5], dst=[5])
        assert puller.run(HELD) == pulled({4: 3, 5: 5})
        puller.run("datadist.unlink(ids[3])")
        assert puller.ask(PULL, peer=PREFILL, src=[0], dst=[0])["status"] == "LLM_NOT_YET_LINK"
        assert puller.ask("datadist.query_register_mem_status(ids[3])")["status"] == "LLM_NOT_YET_LINK"


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_link_returns_at_once_whoever_comes_first(first: str) -> None:
    """The other one comes when the first has polled for a while, and then it takes but a moment."""
    name = ranks.comm_name()
    with program() as source, program() as puller:
        prefill(source, "cache-manager", port=None)
        decode(puller, "cache-manager")
        early, late = (source, puller) if first == "prefill" else (puller, source)
        values = {"name": name, "prefill": PREFILL, "decode": DECODE, "table": ranks.together()}
        assert early.run(JOIN, **values) == 1
        status = "answer = datadist.query_register_mem_status(1).name"
        for _ in range(3):
            assert early.run(status) == "PREPARING"
            time.sleep(0.1)
        assert late.run(JOIN, **values) == 1
        assert [each.run(JOINED) for each in (early, late)] == ["OK", "OK"]
        puller.run(PULL, peer=PREFILL, src=[3], dst=[4])
        assert puller.run(HELD) == pulled({4: 3})


QUICKLY = """
import time
began = time.monotonic()
comm_id = datadist.link({name!r}, {{{prefill}: 0, {decode}: 1}}, {table!r})
called = time.monotonic()
while datadist.query_register_mem_status(comm_id) != RegisterMemStatus.OK:
    assert time.monotonic() < began + 30
    time.sleep(0.001)
answer = [called - began, time.monotonic() - called]
"""


def test_a_link_to_a_peer_that_is_there_is_up_within_a_tenth_of_a_second() -> None:
    """At least once in a few times: the machine may have other things to do."""
    with program() as source, program() as puller:
        prefill(source, "cache-manager", port=None)
        decode(puller, "cache-manager")
        times = []
        for _ in range(5):
            values = {"name": ranks.comm_name(), "prefill": PREFILL, "decode": DECODE, "table": ranks.together()}
            source.run(JOIN, **values)
            times.append(puller.run(QUICKLY, **values))
            for each in (source, puller):
                each.run("datadist.unlink(comm_id)")
        assert min(called for called, _ in times) < 0.1, times
        assert min(waited for _, waited in times) < 0.1, times


# Servers are called by their address; a device's address leads nowhere here, unless it is one of the loopback.
DEVICES = {rank: ranks.device(rank, f"10.20.30.{rank}", super_device_id=str(rank)) for rank in (0, 1)}
LOCAL = {rank: ranks.device(rank, f"127.0.0.{rank + 2}") for rank in (0, 1)}
TABLES = {
    "1.0, one server": ranks.table([DEVICES[0], DEVICES[1]], names=["10.0.0.1"]),
    "1.2, one server": ranks.table([DEVICES[0], DEVICES[1]], names=["10.0.0.1"], version="1.2"),
    "1.2, no super pods": ranks.table([LOCAL[0], LOCAL[1]], version="1.2", super_pod_list=[]),
    "1.0, two servers": ranks.table([LOCAL[0]], [LOCAL[1]]),
    "1.2, two servers": ranks.table([LOCAL[0]], [LOCAL[1]], version="1.2", names=["127.0.0.2", "127.0.0.3"]),
    "1.2, two super pods": ranks.table(
        [DEVICES[0]], [DEVICES[1]], version="1.2", names=["127.0.0.7", "127.0.0.8"],
        super_pod_list=[{"super_pod_id": str(n), "server_list": [{"server_id": f"127.0.0.{n + 7}"}]} for n in (0, 1)],
    ),
    "host addresses": ranks.table(
        [ranks.device(0, "10.20.30.1", host_ip="127.0.0.4")], [ranks.device(1, "10.20.30.2", host_ip="127.0.0.5")]
    ),
}  # fmt: skip


def test_rank_tables_of_every_kind() -> None:
    with program() as source, program() as puller:
        prefill(source, "remote-access", port=None)
        decode(puller, "remote-access")
        for block, (kind, table) in enumerate(TABLES.items()):
            join(source, puller, ranks.comm_name(), table)
            puller.run(PULL, peer=PREFILL, src=[block], dst=[block])
            assert puller.run(HELD) == pulled({number: number for number in range(block + 1)}), kind
            for each in (source, puller):
                each.run("datadist.unlink(comm_id)")


def test_two_pairs_of_programs_with_the_same_names_and_ids_do_not_mix() -> None:
    """Such as one sample that is run twice at a time."""
    name = ranks.comm_name()
    with pair("remote-access", "link") as (source, puller, *_), pair("remote-access", "link") as (other, another, *_):
        other.run(FILL, add=30)
        join(source, puller, name)
        join(other, another, name)
        for each in (puller, another):
            each.run(PULL, peer=PREFILL, src=[1], dst=[2])
        assert puller.run(HELD) == pulled({2: 1})
        assert another.run(HELD) == pulled({2: 1}, add=30)


# -- link_clusters -----------------------------------------------------------------------------------------------------


@by_link_style
def test_after_linking_both_pull_and_push(style: str) -> None:
    with both("remote-access", style) as (source, puller, *_):
        puller.run(FILL, add=100)
        source.run(PULL, peer=DECODE, src=[2, 3], dst=[0, 1])
        puller.run(PULL, peer=PREFILL, src=[5], dst=[5])
        for each, peer, src, dst in ((source, DECODE, 6, 7), (puller, PREFILL, 8, 9)):
            each.run(f"cache_manager.push_blocks(BlocksCacheKey({peer}, 0), cache, [{src}], [{dst}])")
        theirs, ours = source.run(HELD), puller.run(HELD)
        for t in range(4):
            filled = [64 * t + b + 1 for b in range(16)]
            computed = [(64 * t + b + 100) % 256 for b in range(16)]
            assert theirs[t] == [computed[2], computed[3], *filled[2:9], computed[8], *filled[10:]]
            assert ours[t] == [*computed[:5], filled[5], computed[6], filled[6], *computed[8:]]


BOTH_WAYS = """
cluster = LLMClusterInfo()
cluster.remote_cluster_id = {peer}
cluster.append_local_ip_info("127.0.0.1", 0)
cluster.append_remote_ip_info("127.0.0.1", {port})
answer = datadist.link_clusters([cluster], 20000)[0].name
"""


@pytest.mark.parametrize("backend", ["", "hixl"])
@pytest.mark.parametrize("together", [True, False])
def test_two_sides_link_to_each_other(backend: str, together: bool) -> None:
    """At the same time or one after the other. With hixl both are told of success: there each side links for itself.
    Otherwise whoever comes second may hear that it is linked already.
    """
    with program() as source, program() as puller:
        ports = []
        for each, role, cluster, fill in ((source, "PROMPT", PREFILL, 5), (puller, "DECODER", DECODE, 9)):
            each.run(MEMORY["numpy"])
            mode = 'local_comm_res = ""' + ('\nconfig.transfer_backend = "hixl"' if backend else "")
            ports.append(each.run(START, mode=mode, listen="127.0.0.1:0", role=role, cluster=cluster)[1])
            each.run(REGISTER, fill=fill, cluster=cluster)
        source.begin(BOTH_WAYS, peer=DECODE, port=ports[1])
        codes = [] if together else [source.finish()]
        puller.begin(BOTH_WAYS, peer=PREFILL, port=ports[0])
        codes += [each.finish() for each in ((source, puller) if together else (puller,))]
        assert "LLM_SUCCESS" in codes
        assert set(codes) <= ({"LLM_SUCCESS"} if backend else {"LLM_SUCCESS", "LLM_ALREADY_LINK"}), codes
        source.run(PULL, peer=DECODE, src=[0], dst=[1])
        puller.run(PULL, peer=PREFILL, src=[0], dst=[1])
        assert source.run(HELD) == [[5, 9, *[5] * 14]] * 4
        assert puller.run(HELD) == [[9, 5, *[9] * 14]] * 4


def test_a_local_address_has_port_0_or_is_missing() -> None:
    given = 'append_local_ip_info("127.0.0.1", 0)'
    with program() as source, program() as puller:
        port = prefill(source, "remote-access")
        decode(puller, "remote-access")
        for block, local in enumerate((given, "remote_role_type = LLMRole.PROMPT")):
            assert puller.run(LINK.replace(given, local), peer=PREFILL, port=port) == LINKED
            puller.run(PULL, peer=PREFILL, src=[block], dst=[block])
            assert puller.run(UNLINK, peer=PREFILL) == FORCED
        assert puller.run(HELD) == pulled({0: 0, 1: 1})


UNTIL_LINKED = """
import time
clusters = []
for peer, port in {peers!r}:
    cluster = llm_datadist.LLMClusterInfo()
    cluster.remote_cluster_id = peer
    cluster.append_local_ip_info("127.0.0.1", 0)
    cluster.append_remote_ip_info("127.0.0.1", port)
    clusters.append(cluster)
give_up = time.monotonic() + 30
rounds = 0
while clusters and time.monotonic() < give_up:
    overall, codes = datadist.link_clusters(clusters, timeout=3000)
    rounds += 1
    for index in range(len(codes) - 1, -1, -1):
        if codes[index] == llm_datadist.LLMStatusCode.LLM_SUCCESS:
            clusters.pop(index)
    if overall != LLMStatusCode.LLM_SUCCESS:
        time.sleep(0.1)
answer = [overall.name, len(clusters), rounds > 1]
"""


def test_a_program_calls_link_clusters_until_every_peer_is_there() -> None:
    """One of two sources comes later."""
    with program() as source, program() as puller, program() as late:
        port = prefill(source, "remote-access")
        late.run(MEMORY["numpy"])
        address = late.run(START, mode='local_comm_res = ""', listen="127.0.0.1:0", role="PROMPT", cluster=33)
        late.run("datadist.finalize()")
        decode(puller, "remote-access")
        puller.run("import llm_datadist")
        puller.begin(UNTIL_LINKED, peers=[(PREFILL, port), (33, address[1])])
        time.sleep(1.0)
        late.run(f'options["llm.listenIpInfo"] = "127.0.0.1:{address[1]}"')
        late.run("datadist.init(options)\ncache_manager = datadist.cache_manager")
        late.run(REGISTER, fill=44, cluster=33)
        assert puller.finish() == ["LLM_SUCCESS", 0, True]
        puller.run(PULL, peer=33, src=[0], dst=[0])
        puller.run(PULL, peer=PREFILL, src=[1], dst=[1])
        assert [tensor[:3] for tensor in puller.run(HELD)] == [[44, 64 * t + 2, 255] for t in range(4)]


UNLINK_AND_LINK = """
cluster = LLMClusterInfo()
cluster.remote_cluster_id = {peer}
cluster.append_local_ip_info("127.0.0.1", 26000)
cluster.append_remote_ip_info("127.0.0.1", {port})
answer = []
for _ in range(2):
    answer.append(datadist.unlink_clusters([cluster], 5000)[0].name)
    try:
        cache_manager.pull_blocks(BlocksCacheKey({peer}, 0), cache, [0], [0])
    except LLMException as error:
        answer.append(error.status_code.name)
    answer.append(datadist.link_clusters([cluster], 5000)[0].name)
"""


def test_a_program_closes_a_link_and_makes_it_anew_from_the_same_description() -> None:
    """Without force the peer is told. The local address is a label."""
    with both("remote-access") as (source, puller, port, _):
        said = puller.run(UNLINK_AND_LINK, peer=PREFILL, port=port)
        assert said == ["LLM_SUCCESS", "LLM_NOT_YET_LINK", "LLM_SUCCESS"] * 2
        puller.run(PULL, peer=PREFILL, src=[1], dst=[1])
        assert puller.run(HELD) == pulled({1: 1})
        info = f"cluster = LLMClusterInfo()\ncluster.remote_cluster_id = {PREFILL}"
        info += f"\ncluster.append_remote_ip_info('127.0.0.1', {port})"
        assert puller.run(f"{info}\nanswer = datadist.unlink_clusters([cluster], 5000)[0].name") == "LLM_SUCCESS"
        assert source.ask(PULL, peer=DECODE, src=[0], dst=[0])["status"] == "LLM_NOT_YET_LINK"


# -- peers that are gone -----------------------------------------------------------------------------------------------


def test_a_dead_peer_is_unlinked_by_force_and_linked_again_when_it_is_back() -> None:
    with both("remote-access") as (source, puller, port, _):
        puller.run(PULL, peer=PREFILL, src=[0], dst=[0])
        source.kill()
        failed = puller.ask(PULL, peer=PREFILL, src=[1], dst=[1])
        assert failed["raised"] == "LLMException", failed
        assert puller.run(HELD) == pulled({0: 0})
        assert puller.run(UNLINK, peer=PREFILL) == FORCED
        assert puller.run(UNLINK, peer=PREFILL) == FORCED
        assert puller.run(UNLINK, peer=12345) == FORCED
        with program() as reborn:
            prefill(reborn, "remote-access", port=port, add=50)
            link(puller, port)
            puller.run(PULL, peer=PREFILL, src=[1], dst=[1])
            assert [tensor[1] for tensor in puller.run(HELD)] == [64 * t + 51 for t in range(4)]
        puller.run("datadist.finalize()")
        assert puller.end() == (0, "")


@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_a_dead_member_is_unlinked_and_linked_again_when_it_is_back(victim: str) -> None:
    with both("remote-access", "link") as (source, puller, _, name):
        puller.run(PULL, peer=PREFILL, src=[0], dst=[0])
        dead, left, peer = (source, puller, PREFILL) if victim == "prefill" else (puller, source, DECODE)
        dead.kill()
        assert left.ask(PULL, peer=peer, src=[1], dst=[1])["raised"] == "LLMException"
        left.run("datadist.unlink(comm_id)")
        with program() as reborn:
            if victim == "prefill":
                prefill(reborn, "remote-access", port=None, add=50)
            else:
                decode(reborn, "remote-access")
            join(left, reborn, name)
            one = left if victim == "prefill" else reborn
            one.run(PULL, peer=PREFILL, src=[1], dst=[1])
            assert [t[1] for t in one.run(HELD)] == [64 * t + (51 if victim == "prefill" else 2) for t in range(4)]


def test_a_listener_forgets_a_peer_by_id_alone() -> None:
    """It never linked to anybody itself. The peer links again, or another one of that id."""
    with both("remote-access") as (source, puller, port, _):
        puller.run(PULL, peer=PREFILL, src=[0], dst=[0])
        assert source.run(UNLINK, peer=DECODE) == FORCED
        assert source.run(UNLINK, peer=DECODE) == FORCED
        assert source.ask(PULL, peer=DECODE, src=[0], dst=[0])["status"] == "LLM_NOT_YET_LINK"
        assert puller.ask(PULL, peer=PREFILL, src=[1], dst=[1])["raised"] == "LLMException"
        assert puller.run(UNLINK, peer=PREFILL) == FORCED
        link(puller, port)
        puller.run(PULL, peer=PREFILL, src=[1], dst=[1])
        assert puller.run(HELD) == pulled({0: 0, 1: 1})
        puller.kill()
        assert source.run(UNLINK, peer=DECODE) == FORCED
        with program() as reborn:
            decode(reborn, "remote-access")
            link(reborn, port)
            reborn.run(PULL, peer=PREFILL, src=[2], dst=[2])
            assert reborn.run(HELD) == pulled({2: 2})
