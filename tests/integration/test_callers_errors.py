"""What existing programs expect of errors, between real processes: their classes and codes, what is worth another try,
and how soon a peer that is gone is noticed.
"""

from __future__ import annotations

from tests.integration.callers import (
    DECODE,
    HELD,
    PREFILL,
    PULL,
    REGISTER,
    both,
    by_link_style,
    connect,
    pair,
    program,
    pulled,
)

# As connectors sort what a pull raised.
SORTED = """
RETRYABLE = [
    LLMStatusCode.LLM_REPEAT_REQUEST, LLMStatusCode.LLM_CLUSTER_NUM_EXCEED_LIMIT, LLMStatusCode.LLM_PROCESSING_LINK,
    LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY, LLMStatusCode.LLM_TIMEOUT, LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT,
    LLMStatusCode.LLM_LINK_BUSY,
]

def sort(call, *arguments):
    try:
        call(*arguments)
    except LLMException as error:
        return "again" if getattr(error, "status_code", None) in RETRYABLE else "failed"
    except (TypeError, ValueError):
        return "input"
    return "done"
"""


@by_link_style
def test_errors_by_class_and_status(style: str) -> None:
    with both("cache-manager", style) as (_, puller, *_):
        for src, dst, status in (([16], [0], "LLM_PARAM_INVALID"), ([0], [16], "LLM_PARAM_INVALID")):
            assert puller.ask(PULL, peer=PREFILL, src=src, dst=dst)["status"] == status
        assert puller.ask(PULL, peer=77, src=[0], dst=[0])["status"] == "LLM_NOT_YET_LINK"
        assert puller.ask(PULL, peer=PREFILL, src="3", dst=[0])["raised"] == "TypeError"
        missing = f"cache_manager.pull_blocks(BlocksCacheKey({PREFILL}, 3), cache, [0], [0])"
        assert puller.ask(missing)["status"] == "LLM_KV_CACHE_NOT_EXIST"
        assert puller.run(HELD) == pulled({})
        puller.run(SORTED)
        for arguments, sort in (
            (f"BlocksCacheKey({PREFILL}, 0), cache, ['1'], [1]", "input"),
            ("CacheDesc, cache, [1], [1]", "input"),
            (f"BlocksCacheKey({PREFILL}, 0), cache, [99], [1]", "failed"),
            (f"BlocksCacheKey({PREFILL}, 0), cache, [], []", "failed"),
            (f"BlocksCacheKey({PREFILL}, 0), cache, [0], [0]", "done"),
        ):
            assert puller.run(f"answer = sort(cache_manager.pull_blocks, {arguments})") == sort, arguments
        assert puller.run("answer = sort(LLMClusterInfo().append_remote_ip_info, '127.0.0.1', 70000)") == "input"
        assert puller.run(HELD) == pulled({0: 0})


SHORTLY = """
datadist.finalize()
options["llm.SyncKvCacheWaitTime"] = "400"
datadist.init(options)
cache_manager = datadist.cache_manager
"""
AGAIN = """
for attempt in range(20):
    answer = sort(cache_manager.pull_blocks, BlocksCacheKey({peer}, 0), cache, [1], [1])
    if answer != "again":
        break
"""


@by_link_style
def test_a_source_that_hangs_is_worth_another_try(style: str) -> None:
    """The pull ends in its time with a code that callers repeat on, and repeating is all that it takes."""
    with pair("cache-manager", style) as (source, puller, port, _):
        puller.run(SHORTLY)
        puller.run(REGISTER, fill=255, cluster=DECODE)
        connect(style, source, puller, port)
        puller.run(SORTED)
        source.stop()
        try:
            outcome = puller.run(
                f"answer = sort(cache_manager.pull_blocks, BlocksCacheKey({PREFILL}, 0), cache, [0], [0])"
            )
        finally:
            source.go_on()
        assert outcome == "again"
        assert puller.run(AGAIN, peer=PREFILL) == "done"
        assert puller.run(HELD) == pulled({1: 1})


SOON = """
import time
began = time.monotonic()
try:
    cache_manager.pull_blocks(BlocksCacheKey({peer}, 0), cache, [1], [1])
except LLMException as error:
    answer = [error.status_code in RETRYABLE, time.monotonic() - began]
"""


@by_link_style
def test_a_dead_peer_is_noticed_long_before_the_pull_would_time_out(style: str) -> None:
    with both("remote-access", style) as (source, puller, *_):
        puller.run(SORTED)
        source.kill()
        _, elapsed = puller.run(SOON, peer=PREFILL)
        assert elapsed < 10  # of 20 s
        assert puller.run(HELD) == pulled({})


@by_link_style
def test_many_threads_share_a_link_and_none_is_told_that_it_is_busy(style: str) -> None:
    with both("remote-access", style) as (_, puller, *_):
        puller.run(SORTED)
        assert puller.run(f"""
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(16) as pool:
    calls = [
        pool.submit(sort, cache_manager.pull_blocks, BlocksCacheKey({PREFILL}, 0), cache, [block], [15 - block])
        for _ in range(10) for block in range(16)
    ]
    answer = sorted({{call.result() for call in calls}})
""") == ["done"]
        assert puller.run(HELD) == pulled({15 - block: block for block in range(16)})


# -- codes and exceptions ----------------------------------------------------------------------------------------------

CODES = """
from enum import IntEnum
import pickle
comm_id = 5
answer = [
    issubclass(LLMStatusCode, IntEnum),
    [int(LLMStatusCode.LLM_SUCCESS), int(LLMStatusCode.LLM_PARAM_INVALID), int(LLMStatusCode.LLM_TIMEOUT)],
    comm_id == LLMStatusCode.LLM_PARAM_INVALID, LLMStatusCode.LLM_SUCCESS == 0,
    min(int(code) for code in LLMStatusCode if int(code) > 0) > 2**16,
    str(LLMStatusCode.LLM_LINK_BUSY),
]
"""
MADE = """
answer = []
for code in (LLMStatusCode.LLM_TIMEOUT, 7, None, "odd", -1):
    error = LLMException("[pull_blocks] failed, {}", status_code=code)
    answer.append([error.status_code == code, str(error), isinstance(error, RuntimeError)])
answer.append([LLMException("plain").status_code == LLMStatusCode.LLM_SUCCESS, "", True])
answer.append([not issubclass(LLMException, (TypeError, ValueError)), "", True])
"""


def test_codes_are_large_integers_and_exceptions_can_be_made() -> None:
    """An id that `link` returned is compared with codes, and is none of them."""
    with program() as one:
        assert one.run(CODES) == [
            True,
            [0, 1343270917, 1343270938],
            False,
            True,
            True,
            "LLMStatusCode.LLM_LINK_BUSY",
        ]
        text = "[pull_blocks] failed, {}"
        assert one.run(MADE) == [*[[True, text, True]] * 5, [True, "", True], [True, "", True]]


# -- codes that callers repeat on --------------------------------------------------------------------------------------

OLDER = """
config = LLMConfig()
config.device_id = 0
config.sync_kv_timeout = 300
config.mem_pool_cfg = '{{"memory_size": 1048576, "page_shift": 12}}'
if {listen!r}:
    config.listen_ip_info = {listen!r}
datadist = LLMDataDist(LLMRole.{role}, {cluster})
datadist.init(config.generate_options())
manager = datadist.kv_cache_manager
answer = datadist.listen_address
"""
CLUSTERS = """
clusters = []
for number in range({count}):
    cluster = LLMClusterInfo()
    cluster.remote_cluster_id = {first} + number * {step}
    cluster.append_local_ip_info("127.0.0.1", 0)
    cluster.append_remote_ip_info("127.0.0.1", {port})
    clusters.append(cluster)
ret, rets = datadist.link_clusters(clusters, 20000)
answer = [ret.name, sorted(code.name for code in rets)]
"""


def test_the_older_manager_says_what_callers_repeat_on() -> None:
    with program() as source, program() as puller:
        port = source.run(OLDER, role="PROMPT", cluster=PREFILL, listen="127.0.0.1:0")[1]
        puller.run(OLDER, role="DECODER", cluster=DECODE, listen="")
        many = puller.run(CLUSTERS, count=17, first=100, step=1, port=port)
        assert many[0] == "LLM_CLUSTER_NUM_EXCEED_LIMIT"
        twice = puller.run(CLUSTERS, count=2, first=PREFILL, step=0, port=port)
        assert twice[1] == ["LLM_REPEAT_REQUEST", "LLM_SUCCESS"]
        puller.run("held = manager.allocate_cache(CacheDesc(1, [1, 1024], DataType.DT_UINT8))")
        large = "large = manager.allocate_cache(CacheDesc(1, [1, 1 << 20], DataType.DT_UINT8))"
        assert puller.ask(large)["status"] == "LLM_DEVICE_OUT_OF_MEMORY"
        puller.run("manager.deallocate_cache(held)")
        puller.run(large)
        source.run(f"""
kept = manager.allocate_cache(CacheDesc(1, [1, 1 << 20], DataType.DT_UINT8), [CacheKey({PREFILL}, 1)])
""")
        source.stop()
        try:
            late = puller.ask(f"manager.pull_cache(CacheKey({PREFILL}, 1), large)")
        finally:
            source.go_on()
        assert late["status"] == "LLM_WAIT_PROCESS_TIMEOUT", late
        puller.run(SORTED)
        assert (
            puller.run(f"""
for attempt in range(20):
    answer = sort(manager.pull_cache, CacheKey({PREFILL}, 1), large)
    if answer != "again":
        break
""")
            == "done"
        )


def test_a_link_may_be_asked_to_say_that_it_is_busy() -> None:
    mode = 'enable_cache_manager = True\nconfig.link_busy_policy = "raise"'
    with both(mode) as (_, puller, *_):
        puller.run(SORTED)
        assert puller.run(f"""
from concurrent.futures import ThreadPoolExecutor
import time

def until_done(block):
    outcomes = ["again"]
    while outcomes[-1] == "again" and len(outcomes) < 10000:
        outcomes.append(sort(cache_manager.pull_blocks, BlocksCacheKey({PREFILL}, 0), cache, [block], [block]))
        time.sleep(0.001)
    return outcomes[1:]

with ThreadPoolExecutor(8) as pool:
    rounds = list(pool.map(until_done, list(range(16)) * 10))
answer = [sorted({{outcomes[-1] for outcomes in rounds}}), any(len(outcomes) > 1 for outcomes in rounds)]
""") == [["done"], True]
        assert puller.run(HELD) == pulled({block: block for block in range(16)})
