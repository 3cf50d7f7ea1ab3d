"""Status codes and exceptions as callers see them."""

from __future__ import annotations

import pickle

import pytest

from kvpull_async.status import LLMException, LLMStatusCode, LLMTimeoutError, Status, fresh, status_of, worth_repeating

FIELDS = {"peer": 7, "operation": "pull_cache", "elapsed_ms": 1.5, "retry_safe": True, "destination_unsafe": True}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LLM_SUCCESS", 0),
        ("LLM_FAILED", 4294967295),
        ("LLM_WAIT_PROCESS_TIMEOUT", 1343270913),
        ("LLM_KV_CACHE_NOT_EXIST", 1343270914),
        ("LLM_PARAM_INVALID", 1343270917),
        ("LLM_BLOCKS_OUT_OF_MEMORY", 1343270931),
        ("LLM_EXIST_LINK", 1343270936),
        ("LLM_OUT_OF_MEMORY", 1343270940),
        ("LLM_DEVICE_MEM_ERROR", 507053),
        ("LLM_SUSPECT_REMOTE_ERROR", 507057),
        ("LLM_UNKNOWN_ERROR", -1),
    ],
)
def test_codes_are_integers_with_the_originals_values(name: str, value: int) -> None:
    assert LLMStatusCode[name] == value


def test_there_are_29_codes() -> None:
    assert len(LLMStatusCode) == 29


def test_text_is_the_name_and_a_format_spec_the_number() -> None:
    code = LLMStatusCode.LLM_TIMEOUT
    assert str(code) == f"{code}" == "LLMStatusCode.LLM_TIMEOUT"
    assert f"{code:#x}" == "0x5010b01a"


@pytest.mark.parametrize("internal", [-1, 1343270932, 1343270935, 12345])
def test_a_number_without_a_member_is_failed(internal: int) -> None:
    assert status_of(internal) is LLMStatusCode.LLM_FAILED


def test_every_other_number_maps_to_its_member() -> None:
    assert all(status_of(int(code)) is code for code in LLMStatusCode if code != -1)


@pytest.mark.parametrize("code", [LLMStatusCode.LLM_TIMEOUT, 99, None, "odd"])
def test_an_exception_keeps_any_status(code: object) -> None:
    assert LLMException("no", status_code=code).status_code == code


def test_the_default_status_is_the_originals_success() -> None:
    error = LLMException("no")
    assert isinstance(error, RuntimeError)
    assert error.status_code is LLMStatusCode.LLM_SUCCESS
    assert (error.peer, error.operation, error.elapsed_ms) == (None, None, None)
    assert not error.retry_safe
    assert not error.destination_unsafe


def test_only_the_status_is_read_only() -> None:
    error = LLMException("no")
    error.destination_unsafe = True
    assert error.destination_unsafe
    with pytest.raises(AttributeError):
        error.status_code = 0  # type: ignore[misc]


def test_a_timeout_is_caught_as_both() -> None:
    assert LLMTimeoutError("late").status_code is LLMStatusCode.LLM_TIMEOUT
    with pytest.raises(TimeoutError):
        raise LLMTimeoutError("late", status_code=LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT)
    with pytest.raises(LLMException):
        raise LLMTimeoutError("late")


@pytest.mark.parametrize("kind", [LLMException, LLMTimeoutError])
@pytest.mark.parametrize("args", [(), ("late",), (1, "late"), (1, "late", "file")])
def test_text_arguments_and_fields_survive_pickling(kind: type[LLMException], args: tuple[object, ...]) -> None:
    error = kind(*args, status_code=5, **FIELDS)  # type: ignore[arg-type]
    twin = pickle.loads(pickle.dumps(error))
    assert type(twin) is kind
    assert (twin.args, str(twin)) == (args, str(RuntimeError(*args)))
    assert (twin.status_code, vars(twin)) == (5, vars(error))


@pytest.mark.parametrize("kind", [LLMException, LLMTimeoutError])
def test_fresh_gives_each_waiter_its_own_exception(kind: type[LLMException]) -> None:
    error = kind("cut", status_code=LLMStatusCode.LLM_LINK_FAILED, **FIELDS)  # type: ignore[arg-type]
    error.__cause__ = cause = OSError("gone")
    vars(error)["__notes__"] = ["first"]
    twin = fresh(error)
    vars(twin)["__notes__"].append("second")
    twin.peer = 8
    assert twin is not error
    assert (type(twin), twin.args, twin.status_code, twin.operation) == (
        kind,
        ("cut",),
        error.status_code,
        "pull_cache",
    )
    assert twin.__cause__ is cause
    assert (error.peer, vars(error)["__notes__"]) == (7, ["first"])


def test_fresh_keeps_an_uncaused_error_uncaused() -> None:
    assert not fresh(LLMException("no")).__suppress_context__


def test_what_a_peer_can_never_do_is_not_worth_repeating() -> None:
    hopeless = [code for code in LLMStatusCode if not worth_repeating(code)]
    assert hopeless == [LLMStatusCode.LLM_PARAM_INVALID, LLMStatusCode.LLM_FEATURE_NOT_ENABLED]


def test_status_object() -> None:
    assert Status(LLMStatusCode.LLM_SUCCESS).is_ok()
    failed = Status(LLMStatusCode.LLM_FAILED)
    assert not failed.is_ok()
    assert failed.status_code is LLMStatusCode.LLM_FAILED
    assert repr(failed) == "Status(LLMStatusCode.LLM_FAILED)"
