"""What nearly all existing programs do, between real processes: register plain memory by address, link, pull blocks
with positional arguments, finalize or not even that; their options; and how they name themselves and their caches.
"""

from __future__ import annotations

import pytest

from tests import ranks
from tests.integration.callers import (
    DECODE,
    FILL,
    FORCED,
    HELD,
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
    prefill,
    program,
    pulled,
)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("mode", "style", "memory"),
    [
        ("remote-access", "link_clusters", "numpy"),
        ("cache-manager", "link_clusters", "numpy"),
        ("remote-access", "link", "numpy"),
        ("remote-access", "link_clusters", "torch"),
        ("cache-manager", "link", "torch"),
    ],
)
def test_the_main_path(mode: str, style: str, memory: str) -> None:
    with both(mode, style, memory) as (source, puller, *_):
        puller.run(PULL, peer=PREFILL, src=[3, 4, 5, 0], dst=[7, 8, 9, 1])
        assert puller.run(HELD) == pulled({7: 3, 8: 4, 9: 5, 1: 0})
        source.run(FILL, add=2)
        puller.run(PULL, peer=PREFILL, src=[15], dst=[15])
        assert puller.run(HELD) == [
            [64 * t + 17 if b == 15 else was for b, was in enumerate(held)]
            for t, held in enumerate(pulled({7: 3, 8: 4, 9: 5, 1: 0}))
        ]
        for each in (puller, source):
            each.run("cache_manager.unregister_cache(cache.cache_id)\ndatadist.finalize()")
            assert each.end() == (0, "")


# -- options -----------------------------------------------------------------------------------------------------------

PUSH = "cache_manager.push_blocks(BlocksCacheKey({peer}, 0), cache, {src}, {dst})"


def test_local_comm_res_alone_switches_on_the_cache_manager_and_remote_access() -> None:
    """A push needs both; without remote access it is refused."""
    with both("remote-access") as (source, puller, *_):
        assert puller.run('answer = [options["llm.LocalCommRes"], [name for name in options if "Enable" in name]]') == [
            "",
            [],
        ]
        source.run(PUSH, peer=DECODE, src=[2], dst=[5])
        assert puller.run(HELD) == pulled({5: 2})
    with both("cache-manager") as (source, *_):
        assert source.ask(PUSH, peer=DECODE, src=[2], dst=[5])["raised"] == "LLMException"


def test_the_hixl_backend_needs_an_address_to_listen_on() -> None:
    mode = 'local_comm_res = ""\nconfig.transfer_backend = "hixl"'
    with program() as source, program() as puller:
        port = prefill(source, mode)
        puller.run(MEMORY["numpy"])
        refused = puller.ask(START, mode=mode, listen="", role="DECODER", cluster=DECODE)
        assert refused["raised"] == "LLMException"
        puller.run('options["llm.listenIpInfo"] = "127.0.0.1:0"\ndatadist.init(options)')
        puller.run("cache_manager = datadist.cache_manager")
        puller.run(REGISTER, fill=255, cluster=DECODE)
        link(puller, port)
        puller.run(PULL, peer=PREFILL, src=[1], dst=[2])
        assert puller.run(HELD) == pulled({2: 1})


OPTIONS = """
config = LLMConfig()
config.device_id = {device}
config.sync_kv_timeout = "20000"
config.ge_options["ge.exec.rankTableFile"] = "/nowhere"
extra = {{"ge.socVersion": "any"}}
config.ge_options = {{**config.ge_options, **extra}}
config.ge_options["ge.flowGraphMemMaxSize"] = str(9 * 2**30)
options = config.generate_options()
options["llm.EnableCacheManager"] = "1"
if {listen!r}:
    options["llm.listenIpInfo"] = {listen!r}
answer = [type(options) is dict, {{type(text) for text in options.values()}} == {{str}}, options]
datadist = LLMDataDist(LLMRole.{role}, {cluster})
datadist.init(options)
cache_manager = datadist.cache_manager
"""


def test_options_are_a_dict_of_strings_that_callers_edit() -> None:
    """Device ids are labels: both processes have the same one."""
    device = 7
    with program() as source, program() as puller:
        for each, role, cluster, listen in (
            (source, "PROMPT", PREFILL, "127.0.0.1:0"),
            (puller, "DECODER", DECODE, ""),
        ):
            each.run(MEMORY["numpy"])
            is_dict, of_strings, options = each.run(OPTIONS, device=device, role=role, cluster=cluster, listen=listen)
            assert (is_dict, of_strings) == (True, True)
            assert options["ge.exec.deviceId"] == str(device)
            assert options["ge.exec.rankTableFile"] == "/nowhere"
            assert (options["ge.socVersion"], options["ge.flowGraphMemMaxSize"]) == ("any", "9663676416")
            each.run(REGISTER, fill=255, cluster=cluster)
        source.run(FILL, add=1)
        link(puller, source.run("answer = datadist.listen_address")[1])
        puller.run(PULL, peer=PREFILL, src=[9], dst=[3])
        assert puller.run(HELD) == pulled({3: 9})


AGAIN = "datadist.finalize()\ndatadist.init(options)\ncache_manager = datadist.cache_manager"


def test_finalize_and_init_again_with_the_same_options_and_port() -> None:
    with both("cache-manager") as (source, puller, port, _):
        source.run(f'options["llm.listenIpInfo"] = "127.0.0.1:{port}"')
        for add in (9, 20):
            source.run(AGAIN)
            assert source.run(REGISTER, fill=0, cluster=PREFILL) == 1
            source.run(FILL, add=add)
            assert puller.run(UNLINK, peer=PREFILL) == FORCED
            link(puller, port)
            puller.run(PULL, peer=PREFILL, src=[6], dst=[0])
            assert puller.run(HELD) == pulled({0: 6}, add=add)


def test_finalize_and_init_again_and_join_the_same_group() -> None:
    with both("cache-manager", "link") as (source, puller, _, name):
        for each, fill in ((source, 7), (puller, 255)):
            each.run(AGAIN)
            assert each.run(REGISTER, fill=fill, cluster=PREFILL if each is source else DECODE) == 1
        join(puller, source, name)
        puller.run(PULL, peer=PREFILL, src=[6], dst=[0])
        assert puller.run(HELD) == [[7] + [255] * 15] * 4


def test_use_before_init_and_after_finalize_is_a_runtime_error_of_its_own() -> None:
    uses = ["cache_manager", "kv_cache_manager", "link_clusters([])", "link('a', {}, '')", "unlink(1)"]
    with both("cache-manager") as (source, *_):
        source.run("another = LLMDataDist(LLMRole.PROMPT, 5)\ndatadist.finalize()")
        for name in ("another", "datadist"):
            assert {source.ask(f"{name}.{use}")["raised"] for use in uses} == {"RuntimeError"}
            assert source.run(f"answer = {name}.cluster_id") == (5 if name == "another" else PREFILL)


@by_link_style
def test_a_program_that_never_finalizes_ends_and_leaves_the_other_side_working(style: str) -> None:
    with both("remote-access", style) as (source, puller, port, _):
        puller.run(PULL, peer=PREFILL, src=[1], dst=[1])
        assert puller.end() == (0, "")
        with program() as other:
            decode(other, "remote-access")
            if style == "link":
                join(other, source, ranks.comm_name())
            else:
                link(other, port)
            other.run(PULL, peer=PREFILL, src=[2], dst=[2])
            assert other.run(HELD) == pulled({2: 2})
        assert source.end() == (0, "")


@by_link_style
def test_finalize_while_the_peer_is_gone(style: str) -> None:
    with both("cache-manager", style) as (source, puller, *_):
        source.kill()
        puller.run("datadist.finalize()\ndatadist.finalize()")
        assert puller.end() == (0, "")


# -- identity ----------------------------------------------------------------------------------------------------------


def test_both_ends_have_the_same_id() -> None:
    """Which may use any of its 64 bits."""
    with program() as source, program() as puller:
        for cluster in (0, 0x8000_0000_0000_0000, 2**64 - 2):
            for each, listen, role, fill in ((source, "127.0.0.1:0", "PROMPT", 3), (puller, "", "DECODER", 255)):
                each.run(MEMORY["numpy"])
                each.run(START, mode='local_comm_res = ""', listen=listen, role=role, cluster=cluster)
                each.run(REGISTER, fill=fill, cluster=cluster)
            port = source.run("answer = datadist.listen_address")[1]
            assert puller.run(LINK, peer=cluster, port=port) == LINKED
            puller.run(PULL, peer=cluster, src=[4], dst=[8])
            source.run(PUSH, peer=cluster, src=[4], dst=[9])
            assert puller.run(HELD) == [[3 if b in (8, 9) else 255 for b in range(16)]] * 4
            for each in (source, puller):
                each.run("datadist.finalize()")


@by_link_style
def test_two_processes_of_one_cluster_id_pull_from_one_source(style: str) -> None:
    """With `link`, the name of the comm tells them apart."""
    with both("cache-manager", style) as (source, first, port, _), program() as second:
        decode(second, "cache-manager")
        if style == "link":
            join(second, source, ranks.comm_name("another"))
        else:
            link(second, port)
        for block in range(3):
            first.run(PULL, peer=PREFILL, src=[block], dst=[block])
            second.run(PULL, peer=PREFILL, src=[block], dst=[15 - block])
        assert first.run(HELD) == pulled({0: 0, 1: 1, 2: 2})
        assert second.run(HELD) == pulled({15: 0, 14: 1, 13: 2})


def test_two_sources_of_one_cluster_id_are_two_programs() -> None:
    """A decode process that knows both by address links to one after the other."""
    with both("cache-manager") as (_, puller, port, _), program() as other:
        elsewhere = prefill(other, "cache-manager", add=30)
        puller.run(PULL, peer=PREFILL, src=[1], dst=[1])
        assert puller.run(UNLINK, peer=PREFILL) == FORCED
        link(puller, elsewhere)
        puller.run(PULL, peer=PREFILL, src=[2], dst=[2])
        assert puller.run(UNLINK, peer=PREFILL) == FORCED
        link(puller, port)
        puller.run(PULL, peer=PREFILL, src=[3], dst=[3])
        assert puller.run(HELD) == [
            [64 * t + {1: 2, 2: 32, 3: 4}[b] if b in (1, 2, 3) else 255 for b in range(16)] for t in range(4)
        ]


IDS = """
allocated = cache_manager.allocate_cache(CacheDesc(1, [2, 64], DataType.DT_INT8), [CacheKey({cluster}, req_id=9)])
paged = cache_manager.allocate_blocks_cache(CacheDesc(1, [2, 64], DataType.DT_INT8), BlocksCacheKey({cluster}, 3))
plain = cache_manager.register_cache(CacheDesc(1, [2, 64], DataType.DT_INT8), [address(tensors[0])])
answer = [allocated.cache_id, paged.cache_id, plain.cache_id]
"""


def test_cache_ids_count_up_from_one() -> None:
    """Whatever makes the cache; programs name a peer's caches by such literals."""
    with both("remote-access") as (source, puller, *_):
        assert source.run(IDS, cluster=PREFILL) == [2, 3, 4]
        assert puller.run(IDS, cluster=DECODE) == [2, 3, 4]
        puller.run(f"cache_manager.pull_cache(CacheKeyByIdAndIndex({PREFILL}, 4, 1), plain, 0)")
        assert puller.run("answer = tensors[0][:128].tolist()") == [1] * 64 + [255] * 64


def test_a_blocks_key_registered_again_names_the_new_cache() -> None:
    with both("cache-manager") as (source, puller, *_):
        assert source.run(REGISTER, fill=77, cluster=PREFILL) == 2
        puller.run(PULL, peer=PREFILL, src=[0], dst=[0])
        assert puller.run(HELD) == [[77] + [255] * 15] * 4


def test_keys_name_their_cluster_in_either_way() -> None:
    named = [f"prompt_cluster_id={PREFILL}, model_id=0", f"cluster_id={PREFILL}, model_id=0", f"cluster_id={PREFILL}"]
    keys = [*named, f"{PREFILL}, 0", f"{PREFILL}"]
    with both("cache-manager") as (source, puller, *_):
        for block, key in enumerate(keys):
            puller.run(f"cache_manager.pull_blocks(BlocksCacheKey({key}), cache, [{block}], [{block}])")
        assert puller.run(HELD) == pulled({block: block for block in range(len(keys))})
        for number, name in enumerate(("prompt_cluster_id", "cluster_id")):
            source.run(f"""
kept = cache_manager.allocate_cache(
    CacheDesc(1, [1, 64], DataType.DT_INT8), [CacheKey({name}={PREFILL}, req_id={number}, model_id=1)]
)
""")
            puller.run(f"""
held = cache_manager.allocate_cache(CacheDesc(1, [1, 64], DataType.DT_INT8))
cache_manager.pull_cache(CacheKey({name}={PREFILL}, req_id={number}, model_id=1), held, 0)
""")
        assert puller.ask(PULL, peer=DECODE, src=[0], dst=[0])["raised"] == "LLMException"
