"""Links by rank table between real processes, as existing programs make them: both call `link` in any order, poll the
status, pull in both directions, unlink, or die.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.integration.callers import Program, program
from tests.ranks import comm_name, device, table, together

PATIENCE_S = 30.0

START = """
import time
config = LLMConfig()
config.local_comm_res = ""
config.sync_kv_timeout = 20000
options = config.generate_options()
options.update({options!r})
datadist = LLMDataDist(LLMRole.MIX, {cluster})
datadist.init(options)
cache_manager = datadist.cache_manager
tensors = [np.full(4 * 256, {cluster} % 251, np.uint8) for _ in range(2)]
cache = cache_manager.register_blocks_cache(
    CacheDesc(2, [4, 256], DataType.DT_UINT8), [t.ctypes.data for t in tensors], BlocksCacheKey({cluster}, 0)
)
"""
LINK = "answer = datadist.link({name!r}, {ranks!r}, {table!r})"
STATUS = "answer = datadist.query_register_mem_status({comm}).name"
# Polled in the program: a status that is asked for from outside comes late.
UNTIL = """
bound = time.monotonic() + {patience}
while (answer := datadist.query_register_mem_status({comm}).name) != {status!r} and time.monotonic() < bound:
    time.sleep(0.002)
"""
UNLINK = "datadist.unlink({comm})"
PULL = """
tensors[0][:] = tensors[1][:] = 255
try:
    cache_manager.pull_blocks(BlocksCacheKey({peer}, 0), cache, [1, 2], [3, 0])
    answer = [set(t.reshape(4, 256)[b]) == {{[{peer} % 251, 255][b in (1, 2)]}} for t in tensors for b in range(4)]
finally:
    tensors[0][:] = tensors[1][:] = datadist.cluster_id % 251
"""
FINALIZE = "datadist.finalize()"
AGAIN = "datadist.init(options)"

Ranks = dict[int, int]
BOTH: Ranks = {1: 0, 2: 1}


@contextmanager
def nodes(*clusters: int, **options: str) -> Iterator[list[Program]]:
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(program()) for _ in clusters]
        for one, cluster in zip(made, clusters, strict=True):
            start(one, cluster, **options)
        yield made


def start(node: Program, cluster: int, **options: str) -> None:
    node.run(START, cluster=cluster, options={f"kvpull.{name}": text for name, text in options.items()})


def link(node: Program, name: str, ranks: Ranks | None = None, text: str = "") -> int:
    comm = node.run(LINK, name=name, ranks=BOTH if ranks is None else ranks, table=text or together())
    assert isinstance(comm, int)
    return comm


def becomes(node: Program, comm: int, status: str = "OK", patience: float = PATIENCE_S) -> None:
    assert node.run(UNTIL, comm=comm, status=status, patience=patience) == status


def pulls(node: Program, *peers: int) -> None:
    for peer in peers:
        assert all(node.run(PULL, peer=peer)), peer


def linked(both: list[Program], name: str, text: str = "") -> tuple[int, int]:
    one, other = both
    comms = link(one, name, text=text), link(other, name, text=text)
    becomes(one, comms[0])
    becomes(other, comms[1])
    return comms


def status_of(node: Program, source: str, **values: Any) -> str | None:
    said = node.ask(source, **values)
    assert said.get("raised") == "LLMException", said
    status: str | None = said["status"]
    return status


# -- meeting -----------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("first", [1, 2])
def test_both_link_in_any_order_and_pull_from_each_other(first: int) -> None:
    with nodes(1, 2) as (one, two):
        name, early, late = comm_name(), *((one, two) if first == 1 else (two, one))
        assert link(early, name) == 1
        assert early.run(STATUS, comm=1) == "PREPARING"
        time.sleep(0.3)
        assert early.run(STATUS, comm=1) == "PREPARING"
        assert link(late, name) == 1
        becomes(late, 1)
        becomes(early, 1)
        pulls(one, 2)
        pulls(two, 1)


@pytest.mark.parametrize(
    "text",
    [
        table([device(0, "127.0.0.2"), device(1, "127.0.0.2")]),
        table([device(0, "127.0.0.2")], [device(1, "127.0.0.3")]),
        table([device(0, "127.0.0.2")], [device(1, "127.0.0.3")], version="1.2"),
        table([device(0, None)], [device(1, None)], version="1.2", names=["127.0.0.5", "127.0.0.6"]),
        table([device(0, "10.1.1.1"), device(1, "10.1.1.2")], version="1.2", names=["any string"]),
    ],
    ids=["one server", "two servers", "super pods", "server ids", "unreachable devices"],
)
def test_tables_of_every_kind(text: str) -> None:
    with nodes(1, 2) as (one, two):
        linked([one, two], comm_name(), text)
        pulls(one, 2)
        pulls(two, 1)


def test_addresses_that_an_option_gives() -> None:
    text = table([device(0, "10.1.1.1")], [device(1, "10.1.1.2")])
    with nodes(1, 2, RankHosts="10.1.1.1=127.0.0.9, 10.1.1.2=127.0.0.9") as (one, two):
        linked([one, two], comm_name(), text)
        pulls(two, 1)


def test_four_members_are_linked_pair_by_pair() -> None:
    ranks = {11: 0, 12: 1, 13: 2, 2**64 - 1: 3}
    with nodes(*ranks) as members:
        name = comm_name()
        for node in reversed(members):
            assert link(node, name, ranks, together(*range(4))) == 1
        for node in members:
            becomes(node, 1)
        for cluster, node in zip(ranks, members, strict=True):
            pulls(node, *(other for other in ranks if other != cluster))


def test_several_comms_at_once_and_a_pair_that_two_of_them_have() -> None:
    with nodes(1, 2, 3) as (one, two, three):
        pair, all_three = comm_name("pair"), comm_name("all")
        text = together(0, 1, 2)
        assert link(two, all_three, {1: 0, 2: 1, 3: 2}, text) == 1
        assert link(two, pair, BOTH, text) == 2
        assert [link(one, pair, BOTH, text), link(one, all_three, {1: 0, 2: 1, 3: 2}, text)] == [1, 2]
        assert link(three, all_three, {1: 0, 2: 1, 3: 2}, text) == 1
        for node, comms in ((one, (1, 2)), (two, (1, 2)), (three, (1,))):
            for comm in comms:
                becomes(node, comm)
        assert one.run("answer = datadist.counters['links_up']") == 2
        two.run(UNLINK, comm=2)
        pulls(two, 1, 3)
        assert [one.run(STATUS, comm=2), two.run(STATUS, comm=1)] == ["OK", "OK"]
        two.run(UNLINK, comm=1)
        becomes(one, 2, "FAILED")
        assert status_of(two, PULL, peer=1) == "LLM_NOT_YET_LINK"
        pulls(three, 1)


def test_the_same_ids_and_the_same_name_twice_on_one_host() -> None:
    """The tables differ, as those of different devices do: nobody meets the wrong one."""
    with nodes(1, 1, 2, 2) as (one, other_one, two, other_two):
        for node, fill in ((one, 1), (other_one, 101)):
            node.run(f"tensors[0][:] = tensors[1][:] = {fill}")
        name = comm_name()
        texts = [table([device(0, ip), device(1, ip)]) for ip in ("10.1.1.1", "10.1.1.2")]
        for node, text in ((two, texts[0]), (other_one, texts[1]), (other_two, texts[1]), (one, texts[0])):
            assert link(node, name, text=text) == 1
        for node in (one, other_one, two, other_two):
            becomes(node, 1)
        seen = "cache_manager.pull_blocks(BlocksCacheKey(1, 0), cache, [0], [0]); answer = int(tensors[0][0])"
        assert [two.run(seen), other_two.run(seen)] == [1, 101]


def test_a_link_of_link_clusters_is_shared_and_stays() -> None:
    with nodes(1, 2) as (one, two):
        two.run(FINALIZE)
        two.run("options['llm.listenIpInfo'] = '127.0.0.1:0'\n" + AGAIN + "\ncache_manager = datadist.cache_manager")
        two.run(
            "cache = cache_manager.register_blocks_cache(CacheDesc(2, [4, 256], DataType.DT_UINT8),"
            "[t.ctypes.data for t in tensors], BlocksCacheKey(2, 0))"
        )
        host, port = two.run("answer = datadist.listen_address")
        ordinary = f"info = LLMClusterInfo(); info.remote_cluster_id = 2; info.append_remote_ip_info({host!r}, {port})"
        one.run(
            ordinary + "; info.append_local_ip_info('127.0.0.1', 0); answer = datadist.link_clusters([info])[0].name"
        )
        name = comm_name()
        comms = linked([one, two], name)
        assert one.run("answer = datadist.counters['links_up']") == 1
        one.run(UNLINK, comm=comms[0])
        two.run(UNLINK, comm=comms[1])
        pulls(one, 2)
        pulls(two, 1)


# -- ending ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", [0, 1])
def test_unlinking_ends_the_peers_comm_and_both_may_link_again_at_once(who: int) -> None:
    with nodes(1, 2) as both:
        name = comm_name()
        for turn in (1, 2, 3):
            assert linked(both, name) == (turn, turn)
            pulls(both[0], 2)
            both[who].run(UNLINK, comm=turn)
            assert status_of(both[who], STATUS, comm=turn) == "LLM_NOT_YET_LINK"
            assert status_of(both[who], UNLINK, comm=turn) == "LLM_NOT_YET_LINK"
            assert status_of(both[who], PULL, peer=2 - who) == "LLM_NOT_YET_LINK"
            if turn == 2:  # one side is ahead of the other
                assert link(both[who], name) == 3
                becomes(both[1 - who], 2, "FAILED")
                time.sleep(0.3)
                assert both[who].run(STATUS, comm=3) == "PREPARING"
                both[1 - who].run(UNLINK, comm=2)
                assert link(both[1 - who], name) == 3
                becomes(both[0], 3)
                becomes(both[1], 3)
                break
            becomes(both[1 - who], turn, "FAILED")
            both[1 - who].run(UNLINK, comm=turn)


@pytest.mark.parametrize("who", [0, 1])
def test_a_peer_that_was_killed_and_started_again(who: int) -> None:
    with nodes(1, 2) as both, program() as another:
        name = comm_name()
        linked(both, name)
        pulls(both[1 - who], who + 1)
        both[who].kill()
        becomes(both[1 - who], 1, "PREPARING")
        start(another, who + 1)
        assert link(another, name) == 1
        becomes(another, 1)
        becomes(both[1 - who], 1)
        pulls(both[1 - who], who + 1)
        pulls(another, 2 - who)


@pytest.mark.parametrize("alone", [0, 1])
def test_a_peer_that_never_comes_is_a_failure_after_the_timeout(alone: int) -> None:
    with nodes(1, 2, RankLinkTimeout="300") as both:
        assert link(both[alone], comm_name()) == 1
        assert both[alone].run(STATUS, comm=1) == "PREPARING"
        becomes(both[alone], 1, "FAILED")
        both[alone].run(UNLINK, comm=1)
        assert linked(both, comm_name())[1 - alone] == 1


def test_a_failed_comm_gives_way_to_one_of_the_same_group() -> None:
    with nodes(1, 2, RankLinkTimeout="300") as (one, two):
        name = comm_name()
        assert link(one, name) == 1
        assert status_of(one, LINK, name=name, ranks=BOTH, table=together()) == "LLM_ALREADY_LINK"
        becomes(one, 1, "FAILED")
        assert [link(one, name), link(two, name)] == [2, 1]
        becomes(one, 2)
        becomes(two, 1)
        assert one.run(STATUS, comm=1) == "FAILED"
        one.run(UNLINK, comm=1)
        pulls(two, 1)


def test_finalize_right_after_link_and_the_same_again() -> None:
    with nodes(1, 2) as (one, two):
        name = comm_name()
        for _ in range(3):
            assert link(one, name) == 1
            one.run(FINALIZE)
            one.run(AGAIN)
        assert status_of(one, STATUS, comm=1) == "LLM_NOT_YET_LINK"
        linked([one, two], name)


def test_finalize_and_init_again_after_being_linked() -> None:
    for who in (0, 1):
        with nodes(1, 2) as both:
            name = comm_name()
            linked(both, name)
            both[who].run(FINALIZE)
            both[who].run(AGAIN)
            assert link(both[who], name) == 1
            becomes(both[who], 1)
            becomes(both[1 - who], 1)


# -- what goes with it -------------------------------------------------------------------------------------------------


def test_what_is_registered_afterwards_is_not_remote_accessible() -> None:
    made = "cache_manager.register_cache(CacheDesc(2, [4, 256], DataType.DT_UINT8), addresses, [], {})"
    with nodes(1, 2) as (one, two):
        for node in (one, two):
            node.run("addresses = [t.ctypes.data for t in tensors]")
        one.run(made.format("True"))
        linked([one, two], comm_name())
        assert status_of(one, made.format("True")) == "LLM_PARAM_INVALID"
        assert one.run("answer = " + made.format("False") + ".cache_id") == 3
        assert one.run("answer = " + made.format("None") + ".cache_id") == 4
        pull = "cache_manager.pull_cache(CacheKeyByIdAndIndex(1, {}, 0), other)"
        two.run("other = " + made.format("None"))
        assert status_of(two, pull.format(4)) == "LLM_PARAM_INVALID"


def test_a_table_without_an_address_for_this_node_says_what_can_be_done() -> None:
    with nodes(1) as (one,):
        for text in (
            table([device(0, "10.1.1.1")], [device(1, "10.1.1.2")]),
            table([device(0, None)], [device(1, None)]),
        ):
            said = one.ask(LINK, name=comm_name(), ranks=BOTH, table=text)
            assert said["status"] == "LLM_PARAM_INVALID"
            assert "KVPULL_RANK_HOSTS" in said["text"]


FORK = """
import os, socket, warnings
warnings.simplefilter("ignore")
child = os.fork()
if not child:
    time.sleep(60)
    os._exit(0)
datadist.unlink(1)
answer = []
for port in range(21000, 21000 + 4104):
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.88", port)) == 0:
            answer.append(port)
os.kill(child, 9)
os.waitpid(child, 0)
"""


def test_a_forked_child_does_not_listen() -> None:
    with nodes(1) as (one,):
        link(one, comm_name(), text=table([device(0, "127.0.0.88")], [device(1, "127.0.0.89")]))
        assert one.run(FORK) == []


THREADS = """
import threading
comms = {{}}
def begin(name):
    comms[name] = datadist.link(name, {{1: 0, 2: 1}}, {table!r})
threads = [threading.Thread(target=begin, args=(name,)) for name in {names!r}]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
answer = sorted(comms.values())
"""


def test_links_from_many_threads() -> None:
    names = [comm_name() for _ in range(16)]
    with nodes(1, 2) as both:
        for node in both:
            assert node.run(THREADS, names=names, table=together()) == list(range(1, 17))
        for node in both:
            for comm in range(1, 17):
                becomes(node, comm)
        pulls(both[0], 2)


def test_programs_that_end_without_a_word() -> None:
    with nodes(1, 2) as (one, two):
        linked([one, two], comm_name())
        link(one, comm_name("never"))
        link(two, comm_name("either"))
        for node in (one, two):
            code, stderr = node.end()
            assert (code, stderr) == (0, "")
