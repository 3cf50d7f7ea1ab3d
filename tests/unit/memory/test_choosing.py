"""Which memory an engine gets: what each `device_backend` takes or refuses, and that no loop is held meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kvpull_async.memory import choosing
from kvpull_async.memory._acl import AclMissing, load
from kvpull_async.memory.choosing import ACL, HOST, Chosen, Unopened, choose
from kvpull_async.memory.host import HostMemory
from kvpull_async.observe import Log
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.values import Placement
from tests.acl_libraries import Library, at, ran
from tests.loop_nodes import event_log
from tests.unit.memory.choices import BUDGETS, SICK, Device, device, sick_library, without

NOT_ENABLED = LLMStatusCode.LLM_FEATURE_NOT_ENABLED


def chosen(backend: str, environ: Mapping[str, str], device_ids: tuple[int, ...] = (0,)) -> Chosen:
    return choose(backend, budgets=BUDGETS, device_ids=device_ids, environ=environ)


def refused(environ: Mapping[str, str], device_ids: tuple[int, ...] = (0,)) -> LLMException:
    with pytest.raises(LLMException) as caught:
        chosen(ACL, environ, device_ids)
    return caught.value


@pytest.fixture
def nothing() -> dict[str, str]:
    """An environment in which there is no CANN."""
    try:
        acl = load({})
    except AclMissing:
        return {}
    pytest.skip(f"here the dynamic loader finds {acl.path}")


@pytest.fixture
def sick(library: Library) -> dict[str, str]:
    return sick_library(library)


# -- host --------------------------------------------------------------------------------------------------------------


def test_host_memory_serves_both_placements_within_their_budgets() -> None:
    made = chosen(HOST, {})
    assert (made.backend, made.reason, made.device, made.lost) == (HOST, "device_backend is host", {}, False)
    assert isinstance(made.memory, HostMemory)
    assert made.publications is made.memory.publications
    for placement, limit in BUDGETS.items():
        with pytest.raises(LLMException, match=f"of {limit} are free"):
            made.memory.allocate(tensors=1, tensor_nbytes=16384, placement=placement)
    made.memory.close()


def test_whoever_wants_host_memory_loads_nothing_of_ascend() -> None:
    program = """
        from kvpull_async.memory.choosing import choose
        from kvpull_sync import LLMConfig, LLMDataDist, LLMRole
        choose("host", budgets={}, device_ids=(0,), environ={"ASCEND_HOME_PATH": "/nowhere"})
        node, config = LLMDataDist(LLMRole.MIX, 1), LLMConfig()
        config.device_backend = "host"
        node.init(config.generate_options())
        node.finalize()
        print([name for name in sys.modules if name.endswith(("._acl", ".ascend")) or ".npu" in name])
    """
    assert ran(program) == "[]"


# -- no CANN -----------------------------------------------------------------------------------------------------------


def test_who_insists_hears_all_that_was_tried(nothing: dict[str, str], tmp_path: Path) -> None:
    error = refused({**nothing, "ASCEND_HOME_PATH": str(tmp_path)})
    assert error.status_code is NOT_ENABLED
    told = str(error)
    assert told.startswith("device_backend acl: ")
    for tried in (f"{tmp_path}/lib64/libascendcl.so", "ASCEND_TOOLKIT_HOME", "libacl_rt.so"):
        assert tried in told
    assert isinstance(error.__cause__, AclMissing)


def test_auto_takes_host_memory_where_there_is_no_sign_of_an_npu(
    nothing: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choosing, "_SIGNS", ((str(tmp_path), "davinci*"), (str(tmp_path / "none"), "Ascend")))
    made = chosen("auto", nothing)
    assert (made.backend, made.reason, made.lost) == (HOST, "no Ascend runtime library was found", False)
    made.memory.close()


def test_an_npu_without_cann_is_told_with_what_is_most_likely_missing(
    nothing: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choosing, "_SIGNS", ((str(tmp_path / "none"), "Ascend"), (str(tmp_path), "davinci*")))
    (tmp_path / "davinci0").touch()
    made = chosen("auto", nothing)
    assert (made.backend, made.lost) == (HOST, True)
    assert "set_env.sh" in made.reason
    made.memory.close()
    assert "has set_env.sh of CANN been run before Python started?" in str(refused(nothing))


def test_auto_says_what_it_tried_where_cann_should_be(nothing: dict[str, str], tmp_path: Path) -> None:
    made = chosen("auto", {**nothing, "ASCEND_HOME_PATH": str(tmp_path)})
    assert (made.backend, made.lost) == (HOST, True)
    assert f"{tmp_path}/lib64/libascendcl.so" in made.reason
    made.memory.close()


def test_auto_says_that_a_library_cannot_be_used(
    nothing: dict[str, str], library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by the dynamic loader, without any variable that names CANN."""
    home = library("old", functions=without("aclrtMalloc"))
    monkeypatch.setattr("kvpull_async.memory._acl._NAMES", (f"{home}/lib64/libascendcl.so",))
    made = chosen("auto", nothing)
    assert (made.backend, made.lost) == (HOST, True)
    assert "aclrtMalloc" in made.reason
    made.memory.close()


# -- a device that cannot be had ---------------------------------------------------------------------------------------


def test_who_insists_gets_the_devices_own_error(sick: dict[str, str]) -> None:
    error = refused(sick)
    assert error.status_code is LLMStatusCode.LLM_FAILED
    assert str(SICK) in str(error)


def test_auto_says_why_the_device_does_not_serve(sick: dict[str, str]) -> None:
    made = chosen("auto", sick)
    assert (made.backend, made.lost) == (HOST, True)
    assert str(SICK) in made.reason
    made.memory.close()


def test_a_library_without_a_device_is_not_enough(library: Library) -> None:
    environ = at(library("empty"))  # it answers 0 to everything, and leaves the count at 0
    made = chosen("auto", environ)
    assert (made.backend, made.lost) == (HOST, True)
    assert "device 0" in made.reason
    assert "device 0" in str(refused(environ))
    made.memory.close()


def test_a_node_has_one_device(library: Library) -> None:
    environ = at(library("several"))
    error = refused(environ, (0, 1))
    assert error.status_code is NOT_ENABLED
    assert "device_id names 2" in str(error)
    made = chosen("auto", environ, (0, 1))
    assert (made.backend, made.lost) == (HOST, True)
    assert "device_id names 2" in made.reason
    made.memory.close()


def test_no_thread_is_a_failure_and_not_a_crash(sick: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("kvpull_async.memory.ascend.open_memory", none)
    error = refused(sick)
    assert error.status_code is LLMStatusCode.LLM_FAILED
    assert "new thread" in str(error)
    assert isinstance(error.__cause__, RuntimeError)
    made = chosen("auto", sick)
    assert made.lost
    made.memory.close()


def test_memory_that_cannot_even_be_described_is_closed(sick: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Device(describes=False)
    monkeypatch.setattr("kvpull_async.memory.ascend.open_memory", memory.opened)
    assert "cannot say" in str(refused(sick))
    assert memory.closed == 1


# -- a device ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["auto", ACL])
def test_a_device_that_can_be_opened_serves(
    backend: str, sick: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = device(monkeypatch)
    made = chosen(backend, sick)
    assert made.memory is memory
    assert made.publications is memory.publications
    assert (made.backend, made.lost, made.device["soc"]) == (ACL, False, "Ascend910B4")
    memory.close()


# -- before and after --------------------------------------------------------------------------------------------------


def test_before_init_has_ended_there_is_no_memory() -> None:
    memory, whole = Unopened(), np.array([[0, 0, 1]], np.int64)
    uses: list[Callable[[], object]] = [
        partial(memory.allocate, tensors=1, tensor_nbytes=1, placement=Placement.HOST),
        partial(memory.adopt, [1], tensor_nbytes=1, placement=Placement.HOST),
        partial(memory.views, []),
        partial(memory.landing, [], whole),
        partial(memory.lending, [], whole),
    ]
    for use in uses:
        with pytest.raises(LLMException, match="init"):
            use()
    memory.close()


def test_the_log_says_what_was_chosen_and_why(sick: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    with event_log() as log:
        for made in (chosen(HOST, {}), chosen("auto", sick)):
            made.attend(Log())
            made.memory.close()
        device(monkeypatch)
        made = chosen("auto", sick)
        made.attend(Log())
        made.memory.close()
    host, lost, npu = log.named("memory.chosen")
    assert log.warnings == [lost]
    assert (host["backend"], host["reason"]) == (HOST, "device_backend is host")
    assert lost["backend"] == HOST
    assert str(SICK) in lost["reason"]
    assert "device_id" not in host
    named = ("backend", "device_id", "library", "soc", "version", "missing")
    assert [npu[name] for name in named] == [ACL, 0, "/x.so", "Ascend910B4", "1.17.0", "a, b"]


def test_the_log_says_once_that_threads_hang_with_a_device(
    sick: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = device(monkeypatch)
    hears: list[Callable[[bool], object]] = []
    monkeypatch.setattr(memory, "watch", lambda **hooks: hears.append(hooks["held"]))
    made = chosen("auto", sick)
    with event_log() as log:
        made.attend(Log())
        (held,) = hears
        for begins in (True, True, False, False, True, False):
            held(begins)
    assert [(event["event"], event["device_id"]) for event in log.warnings] == [("memory.hangs", 0)] * 2
    made.memory.close()
