"""What both faces' `LLMDataDist` decide before and after crossing: life cycle, arguments, modes, overall codes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from kvpull_async import LLMClusterInfo, LLMException, LLMRole, LLMStatusCode
from kvpull_async.crossing import blocked
from kvpull_async.datadist import DataDist
from kvpull_async.engine import close_bounded, end
from tests.duo import OK, cluster, options
from tests.loop_nodes import event_log

PARAM_INVALID = LLMStatusCode.LLM_PARAM_INVALID
NOWHERE = ("127.0.0.1", 9)  # the discard port: nobody listens there


def started(role: LLMRole = LLMRole.DECODER, **properties: Any) -> DataDist:
    made = DataDist(role, 7, dropped=None)
    opening = made.start(options(**properties))
    assert opening is not None
    blocked(made.engine, opening)
    return made


@pytest.fixture(params=[False, True], ids=["older", "newer"])
def datadist(request: pytest.FixtureRequest) -> Iterator[DataDist]:
    made = started(enable_cache_manager=request.param)
    yield made
    close_bounded(made.engine)


def raised(call: Any, *args: Any) -> Any:
    with pytest.raises(LLMException) as caught:
        call(*args)
    return caught.value.status_code


# -- life --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", [1, "DECODER", None])
def test_the_role_is_an_llm_role(role: object) -> None:
    with pytest.raises(TypeError, match="role"):
        DataDist(role, 1, dropped=None)


@pytest.mark.parametrize(
    ("cluster_id", "error"), [(-1, ValueError), (2**64, ValueError), (True, TypeError), (None, TypeError)]
)
def test_the_cluster_id_is_a_uint64(cluster_id: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="cluster_id"):
        DataDist(LLMRole.MIX, cluster_id, dropped=None)
    assert DataDist(LLMRole.MIX, 2**64 - 1, dropped=None).cluster_id == 2**64 - 1


def test_use_before_init_and_after_finalize_is_a_runtime_error() -> None:
    made = DataDist(LLMRole.DECODER, 1, dropped=None)
    for call in (
        lambda: made.engine,
        lambda: made.newer,
        lambda: made.manager("kv", None),
        lambda: made.link_clusters([], 1),
        lambda: made.unlink_clusters([], 1, False),
        lambda: made.check_link_status(1),
        lambda: made.switch_role(LLMRole.PROMPT, None),
        lambda: made.link("comm", {}, ""),
        lambda: made.unlink(1),
        lambda: made.query_register_mem_status(1),
    ):
        with pytest.raises(RuntimeError, match="init"):
            call()
    assert made.drop() is None


def test_starting_twice_starts_once() -> None:
    made = started()
    engine = made.engine
    assert made.start(options()) is None
    assert made.engine is engine
    assert made.drop() is engine
    end(engine)


@pytest.mark.parametrize("again", [{"llm.listenIpInfo": "x"}, None])
def test_a_second_start_with_other_options_does_nothing_and_says_so(again: Any) -> None:
    made, first = started(link_secret="hush"), options(link_secret="hush")
    with event_log() as log:
        assert made.start(first) is None
        assert made.start({**first, **again, "kvpull.LinkSecret": "hush hush"} if again else again) is None
        engine = made.drop()
        assert engine is not None
        close_bounded(engine)  # writes what is queued
    told = log.named("config.init_again")
    other = "kvpull.LinkSecret llm.listenIpInfo" if again else " ".join(sorted(first))
    assert [event["options"] for event in told] == [other]
    assert "hush" not in str(told)


def test_names_that_nobody_knows_are_told_of_once() -> None:
    given = {**options(), "llm.SyncKvCacheWaitTimes": "5", "ge.whatever": "1", "llm.RdmaServiceLevel": "4"}
    with event_log() as log, pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVPULL_QUEUE_LIMITS", "hush")
        made = DataDist(LLMRole.DECODER, 7, dropped=None)
        opening = made.start(given)
        assert opening is not None
        blocked(made.engine, opening)
        close_bounded(made.engine)
    told = [(event["option"], event["nearest"]) for event in log.named("config.unknown_option")]
    assert told == [("llm.SyncKvCacheWaitTimes", "llm.SyncKvCacheWaitTime"), ("ge.whatever", None)]
    assert [event["option"] for event in log.named("config.ignored_option")] == ["llm.RdmaServiceLevel"]
    variables = {event["variable"]: event["nearest"] for event in log.named("config.unknown_variable")}
    assert variables["KVPULL_QUEUE_LIMITS"] == "KVPULL_QUEUE_LIMIT"
    assert "hush" not in str(log.named("config.unknown_variable"))


@pytest.mark.parametrize(("secret", "told"), [("hush", 1), ("hush, and on it goes", 0)])
def test_a_short_secret_is_told_of_once_and_never_shown(secret: str, told: int) -> None:
    with event_log() as log:
        made = DataDist(LLMRole.DECODER, 7, dropped=None)
        opening = made.start(options(link_secret=secret))
        assert opening is not None
        blocked(made.engine, opening)
        close_bounded(made.engine)
    assert len(log.named("config.weak_secret")) == told
    assert "hush" not in str(log.named("config.weak_secret"))


def test_of_many_threads_that_begin_or_end_it_one_does() -> None:
    made, engines, barrier = DataDist(LLMRole.DECODER, 1, dropped=None), [], threading.Barrier(8)

    def begin() -> None:
        barrier.wait(20)
        if made.start(options()) is not None:
            engines.append(made.engine)

    def finish() -> None:
        barrier.wait(20)
        engine = made.drop()
        if engine is not None:
            end(engine)
            engines.append(None)

    for work, left in ((begin, 1), (finish, 2)):
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert len(engines) == left


@pytest.mark.parametrize("given", [None, [("llm.Role", "Mix")], "options"])
def test_options_are_a_dict(given: object) -> None:
    with pytest.raises(TypeError, match="options"):
        DataDist(LLMRole.DECODER, 1, dropped=None).start(given)


def test_wrong_options_leave_it_ready_for_another_start() -> None:
    made = DataDist(LLMRole.DECODER, 1, dropped=None)
    assert raised(made.start, {"nonsense": "1"}) == PARAM_INVALID
    opening = made.start(options())
    assert opening is not None
    end(made.engine)


def test_the_role_taken_by_switching_stays_for_the_next_start() -> None:
    made = started(LLMRole.DECODER, enable_cache_manager=True)
    blocked(made.engine, made.switch_role(LLMRole.MIX, None))
    engine = made.drop()
    assert engine is not None
    close_bounded(engine)
    assert made.role is LLMRole.MIX


# -- links -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("clusters", "timeout", "error"),
    [
        (None, 1, TypeError),
        ("clusters", 1, TypeError),
        ([1], 1, TypeError),
        ([None], 1, TypeError),
        ([], None, TypeError),
        ([], 1.5, TypeError),
        ([], True, TypeError),
        ([], 2**31, ValueError),
        ([], 0, LLMException),
        ([], -1, LLMException),
        ([LLMClusterInfo()], 1, TypeError),  # without a cluster id
    ],
)
def test_wrong_arguments_raise(datadist: DataDist, clusters: object, timeout: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        datadist.link_clusters(clusters, timeout)
    with pytest.raises(error):
        datadist.unlink_clusters(clusters, timeout, False)


@pytest.mark.parametrize("force", [None, 1, "yes"])
def test_force_is_a_bool(datadist: DataDist, force: object) -> None:
    with pytest.raises(TypeError, match="force"):
        datadist.unlink_clusters([], 1, force)


def test_no_cluster_is_no_answer(datadist: DataDist) -> None:
    for operation in (datadist.link_clusters([], 1), datadist.unlink_clusters((), 1, True, raises=False)):
        assert blocked(datadist.engine, operation) == (PARAM_INVALID, [])


@pytest.mark.parametrize("addresses", [[], [NOWHERE, NOWHERE]])
def test_a_cluster_needs_exactly_one_address(datadist: DataDist, addresses: list[tuple[str, int]]) -> None:
    info = LLMClusterInfo()
    info.remote_cluster_id = 1
    for address in addresses:
        info.append_remote_ip_info(*address)
    overall, codes = blocked(datadist.engine, datadist.link_clusters([info], 1000))
    assert (overall, codes) == (PARAM_INVALID, [PARAM_INVALID])


def test_a_refused_connection_is_a_code(datadist: DataDist) -> None:
    failed = LLMStatusCode.LLM_LINK_FAILED
    result = blocked(datadist.engine, datadist.link_clusters([cluster(1, NOWHERE), cluster(2, NOWHERE)], 5000))
    assert result == (failed, [failed, failed])


def test_only_the_older_mode_limits_the_clusters_of_one_call() -> None:
    older, newer = started(), started(enable_cache_manager=True)
    clusters = [cluster(number, NOWHERE) for number in range(1, 18)]
    try:
        exceeded = LLMStatusCode.LLM_CLUSTER_NUM_EXCEED_LIMIT
        assert blocked(older.engine, older.link_clusters(clusters, 5000)) == (exceeded, [])
        assert len(blocked(older.engine, older.link_clusters(clusters[:16], 5000))[1]) == 16
        assert len(blocked(newer.engine, newer.link_clusters(clusters, 5000))[1]) == 17
    finally:
        close_bounded(older.engine)
        close_bounded(newer.engine)


def test_only_the_older_mode_lets_decoders_alone_link() -> None:
    for newer, expected in ((False, (PARAM_INVALID, [])), (True, (LLMStatusCode.LLM_LINK_FAILED,) * 2)):
        made = started(LLMRole.PROMPT, enable_cache_manager=newer)
        overall, codes = blocked(made.engine, made.link_clusters([cluster(1, NOWHERE)], 5000))
        close_bounded(made.engine)
        assert (overall, codes[0] if codes else codes) == expected


@pytest.mark.parametrize("force", [False, True])
def test_unlinking_what_is_not_linked_is_a_success_overall(datadist: DataDist, *, force: bool) -> None:
    each = OK if datadist.newer else LLMStatusCode.LLM_NOT_YET_LINK
    assert blocked(datadist.engine, datadist.unlink_clusters([cluster(1, NOWHERE)], 1000, force)) == (
        OK,
        [each],
    )


# -- modes -------------------------------------------------------------------------------------------------------------


def test_each_mode_refuses_the_calls_of_the_other(datadist: DataDist) -> None:
    if datadist.newer:
        assert raised(datadist.check_link_status, 1) == PARAM_INVALID
        for unknown in (datadist.unlink(1), datadist.query_register_mem_status(1)):
            assert raised(blocked, datadist.engine, unknown) == LLMStatusCode.LLM_NOT_YET_LINK
    else:
        assert raised(datadist.link, "comm", {}, "") == PARAM_INVALID
        assert raised(datadist.unlink, 1) == PARAM_INVALID
        assert raised(datadist.query_register_mem_status, 1) == PARAM_INVALID
        assert raised(blocked, datadist.engine, datadist.check_link_status(1)) == LLMStatusCode.LLM_NOT_YET_LINK


def test_the_hixl_backend_has_no_links_by_rank_table() -> None:
    made = DataDist(LLMRole.MIX, 1, dropped=None)
    given = {"llm.LocalCommRes": "", "llm.TransferBackend": "hixl", "llm.listenIpInfo": "127.0.0.1:0"}
    opening = made.start(given)
    assert opening is not None
    blocked(made.engine, opening)
    try:
        for call in (partial(made.link, "comm", {}), made.unlink, made.query_register_mem_status):
            assert raised(call, 1) == LLMStatusCode.LLM_FEATURE_NOT_ENABLED
    finally:
        close_bounded(made.engine)


def test_a_comm_id_is_an_unsigned_number(datadist: DataDist) -> None:
    if datadist.newer:
        for call in (datadist.unlink, datadist.query_register_mem_status):
            for wrong, error in ((None, TypeError), ("1", TypeError), (-1, ValueError)):
                with pytest.raises(error, match="comm_id"):
                    call(wrong)


@pytest.mark.parametrize("role", [None, 2, "PROMPT"])
def test_the_new_role_is_an_llm_role(datadist: DataDist, role: object) -> None:
    with pytest.raises(TypeError, match="role"):
        datadist.switch_role(role, None)
    with pytest.raises(TypeError, match="switch_options"):
        datadist.switch_role(LLMRole.PROMPT, ["llm.listenIpInfo"])
    with pytest.raises(TypeError, match="listenIpInfo"):
        datadist.switch_role(LLMRole.PROMPT, {"llm.listenIpInfo": None})


def test_switching_refuses_options_or_tells_of_them_as_init_does() -> None:
    made, address = started(enable_cache_manager=True), "127.0.0.1:0"
    with event_log() as log:
        assert raised(made.switch_role, LLMRole.MIX, {"listen_ip_info": address}) == PARAM_INVALID
        misspelt = {"llm.ListenIpInfo": address, "llm.SyncKvCacheWaitTime": "5"}
        blocked(made.engine, made.switch_role(LLMRole.MIX, misspelt))
        assert made.engine.listen_address is None
        close_bounded(made.engine)
    told = [(event["option"], event["nearest"]) for event in log.named("config.unknown_option")]
    assert told == [("llm.ListenIpInfo", "llm.listenIpInfo")]


def test_the_older_mode_needs_leave_another_role_and_an_address_for_prompts() -> None:
    address = {"llm.listenIpInfo": "127.0.0.1:0"}
    made, allowed = started(), started(enable_switch_role=True)
    try:
        assert raised(made.switch_role, LLMRole.DECODER, None) == PARAM_INVALID
        assert raised(made.switch_role, LLMRole.PROMPT, None) == PARAM_INVALID
        assert raised(made.switch_role, LLMRole.PROMPT, address) == LLMStatusCode.LLM_FEATURE_NOT_ENABLED
        blocked(allowed.engine, allowed.switch_role(LLMRole.PROMPT, address))
        assert allowed.engine.node.role is LLMRole.PROMPT
        assert allowed.engine.listen_address is not None
        blocked(allowed.engine, allowed.switch_role(LLMRole.DECODER, None))
        assert allowed.engine.listen_address is None
    finally:
        close_bounded(made.engine)
        close_bounded(allowed.engine)


def test_a_role_whose_address_is_taken_is_not_taken() -> None:
    made, other = started(enable_cache_manager=True), started(listen=True)
    try:
        taken = other.engine.listen_address
        assert taken is not None
        operation = made.switch_role(LLMRole.PROMPT, {"llm.listenIpInfo": "{}:{}".format(*taken)})
        assert raised(blocked, made.engine, operation) == LLMStatusCode.LLM_FAILED
        assert made.engine.node.role is LLMRole.DECODER
    finally:
        close_bounded(made.engine)
        close_bounded(other.engine)


def test_the_newer_mode_switches_only_without_links() -> None:
    source, made = started(LLMRole.PROMPT, listen=True), started(enable_cache_manager=True)
    try:
        info = cluster(7, source.engine.listen_address)
        assert blocked(made.engine, made.link_clusters([info], 10_000)) == (OK, [OK])
        operation = made.switch_role(LLMRole.PROMPT, None)
        assert raised(blocked, made.engine, operation) == LLMStatusCode.LLM_EXIST_LINK
        assert blocked(made.engine, made.unlink_clusters([info], 10_000, False)) == (OK, [OK])
        blocked(made.engine, made.switch_role(LLMRole.PROMPT, None))
    finally:
        close_bounded(made.engine)
        close_bounded(source.engine)
