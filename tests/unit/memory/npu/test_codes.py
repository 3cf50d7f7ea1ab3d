"""What a code of the runtime becomes: its text, its status, and what it says of the work and the device."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest

from kvpull_async.memory._acl import load
from kvpull_async.memory.npu.codes import (
    CODES,
    STILL_RUNNING,
    AclError,
    AclTimeoutError,
    check,
    failure,
    meaning,
    suspect,
)
from kvpull_async.status import LLMException, LLMStatusCode, LLMTimeoutError, fresh
from tests.acl_libraries import Library, at

# The runtime's memory of one thread's errors: told once, then forgotten.
MESSAGE = """
#include <string.h>
static _Thread_local const char *recent;
static _Thread_local char buffer[4096];
const char *aclGetRecentErrMsg(void) { const char *said = recent; recent = NULL; return said; }
int aclrtStreamAbort(void *stream) { recent = "newest\\n\\tand older"; return 207001; }
int aclrtGetMemInfo(int kind, size_t *free, size_t *total) {
    memset(buffer, 'x', 4000); buffer[4000] = 0; recent = buffer; return 507000;
}
int aclrtStreamQuery(void *stream, int *status) { recent = "\\xe5\\x86\\x85 \\xff"; return 107003; }
"""


# --- statuses ---


@pytest.mark.parametrize(
    ("status", "codes"),
    [
        (LLMStatusCode.LLM_PARAM_INVALID, [100000, 107000, 107001, 107008, 107016, 200003]),
        (LLMStatusCode.LLM_OUT_OF_MEMORY, [200000, 207001, 207018]),
        (LLMStatusCode.LLM_TIMEOUT, [107019, 107020, 207020, 507046, 507047]),
        (LLMStatusCode.LLM_FEATURE_NOT_ENABLED, [100039, 200001, 200006, 207000]),
        (LLMStatusCode.LLM_DEVICE_MEM_ERROR, [507053, 507054, 507055]),
        (LLMStatusCode.LLM_SUSPECT_REMOTE_ERROR, [507056, 507057]),
        # Ours, or nobody's: the caller can do nothing about it.
        (LLMStatusCode.LLM_FAILED, [107002, 107003, 107017, 107022, 107023, 207004, 207007, 207008, 500000, 507000]),
    ],
    ids=lambda value: value.name if isinstance(value, LLMStatusCode) else "",
)
def test_a_code_has_the_status_that_a_caller_can_act_on(status: LLMStatusCode, codes: list[int]) -> None:
    assert {code: meaning(code).status for code in codes} == dict.fromkeys(codes, status)


@pytest.mark.parametrize("code", [107999, 207999, 307999, 507999, 1, -1, 999999, 2**31 - 1, -(2**31)])
def test_an_unknown_code_fails_and_says_so(code: int) -> None:
    assert meaning(code).status is LLMStatusCode.LLM_FAILED
    assert f"answered {code} (unknown" in str(failure("aclrtMemcpy", code))


def test_unknown_codes_of_different_classes_read_differently() -> None:
    assert len({meaning(code).name for code in (107999, 207999, 307999, 507999, 7)}) == 5


# --- the work and the device ---


@pytest.mark.parametrize("code", [507000, 507010, 507053, 507899, 507901, 500003, 507999, 207004])
def test_the_device_may_be_lost_after_errors_of_the_hardware(code: int) -> None:
    assert suspect(code)


@pytest.mark.parametrize("code", [100000, 107002, 107020, 107023, 107999, 207000, 207001, 207999, 507046, 507047, 0])
def test_the_device_is_not_to_blame_for_calls_resources_and_timeouts(code: int) -> None:
    assert not suspect(code)


def test_after_every_timeout_the_work_may_still_be_running() -> None:
    timeouts = {code for code, (_, status) in CODES.items() if status is LLMStatusCode.LLM_TIMEOUT}
    assert timeouts <= STILL_RUNNING
    assert STILL_RUNNING.isdisjoint({107022, 107023}), "what was aborted does not run"
    assert STILL_RUNNING.isdisjoint(code for code in CODES if code < 107000), "such calls start nothing"


# --- exceptions ---


def test_the_text_has_function_code_name_and_the_runtimes_message() -> None:
    error = failure("aclrtMalloc", 207001, "newest\nolder")
    assert str(error) == "aclrtMalloc answered 207001 (MEMORY_ALLOCATION): newest older"
    assert (error.function, error.code) == ("aclrtMalloc", 207001)
    assert str(failure("aclrtMalloc", 207001)) == "aclrtMalloc answered 207001 (MEMORY_ALLOCATION)"


@pytest.mark.parametrize(("code", "safe"), [(207001, True), (507046, True), (107000, False), (507053, False)])
def test_repeating_is_safe_where_memory_or_time_was_short(code: int, safe: bool) -> None:
    assert failure("aclrtMemcpy", code).retry_safe is safe


def test_a_timeout_is_a_timeout_error_and_nothing_else_is() -> None:
    late, other = failure("aclrtSynchronizeStreamWithTimeout", 507046), failure("aclrtMemcpy", 507053)
    assert isinstance(late, AclError)
    assert isinstance(late, LLMTimeoutError)
    assert isinstance(late, TimeoutError)
    assert isinstance(other, LLMException)
    assert not isinstance(other, TimeoutError)


def test_other_fields_of_an_exception_may_be_given() -> None:
    error = AclError("text", function="aclrtMemcpy", code=207001, peer=3, retry_safe=False, destination_unsafe=True)
    assert (error.peer, error.retry_safe, error.destination_unsafe) == (3, False, True)
    assert error.status_code is LLMStatusCode.LLM_OUT_OF_MEMORY


@pytest.mark.parametrize("twin", [copy.copy, fresh, lambda error: pickle.loads(pickle.dumps(error))])
@pytest.mark.parametrize(("code", "kind"), [(507053, AclError), (507046, AclTimeoutError)])
def test_a_copy_is_equal_in_all(twin: Callable[[AclError], AclError], code: int, kind: type[AclError]) -> None:
    error = failure("aclrtMemcpy", code, "said")
    error.peer, error.destination_unsafe = 7, True
    copied = twin(error)
    assert copied is not error
    assert type(copied) is kind
    assert str(copied) == str(error)
    assert vars(copied) == vars(error)
    assert copied.status_code is meaning(code).status


# --- checking ---


def test_zero_is_no_failure(library: Library) -> None:
    check(load(at(library("fine"))), "aclrtMemcpy", 0)


def test_a_failure_without_the_runtimes_message_is_told_all_the_same(library: Library) -> None:
    acl = load(at(library("silent")))
    with pytest.raises(AclError, match=r"^aclrtMemcpy answered 107002 \(CONTEXT_NULL\)$"):
        check(acl, "aclrtMemcpy", 107002)


def test_the_message_is_the_calls_own_and_only_once(library: Library) -> None:
    acl = load(at(library("telling", code=MESSAGE)))
    assert acl.aclrtStreamAbort is not None
    with pytest.raises(AclError, match=r"\(MEMORY_ALLOCATION\): newest and older$"):
        check(acl, "aclrtStreamAbort", acl.aclrtStreamAbort(None))
    with pytest.raises(AclError, match=r"^aclrtFree answered 107000 \(PARAM_INVALID\)$"):
        check(acl, "aclrtFree", 107000)


def test_a_success_leaves_the_message_alone(library: Library) -> None:
    acl = load(at(library("kept", code=MESSAGE)))
    assert acl.aclrtStreamAbort is not None
    assert acl.aclGetRecentErrMsg is not None
    acl.aclrtStreamAbort(None)
    check(acl, "aclrtFree", 0)
    assert acl.aclGetRecentErrMsg() == b"newest\n\tand older"


def test_a_long_message_is_cut(library: Library) -> None:
    acl = load(at(library("long", code=MESSAGE)))
    assert acl.aclrtGetMemInfo is not None
    with pytest.raises(AclError) as caught:
        check(acl, "aclrtGetMemInfo", acl.aclrtGetMemInfo(1, None, None))
    assert str(caught.value) == f"aclrtGetMemInfo answered 507000 (INTERNAL_ERROR): {'x' * 500}"


def test_a_message_of_any_bytes_is_shown(library: Library) -> None:
    acl = load(at(library("bytes", code=MESSAGE)))
    assert acl.aclrtStreamQuery is not None
    with pytest.raises(AclError, match=r"内 \ufffd$"):
        check(acl, "aclrtStreamQuery", acl.aclrtStreamQuery(None, None))
