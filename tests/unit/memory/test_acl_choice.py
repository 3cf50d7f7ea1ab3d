"""Which library of AscendCL is chosen, and what is said if none can be."""

from __future__ import annotations

import ctypes
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvpull_async.memory._acl import OPTIONAL, REQUIRED, Acl, AclMissing, load
from tests.acl_libraries import Library, at, ran


@pytest.fixture
def nothing_by_name() -> None:
    """For tests of failure: on a machine with devices the dynamic loader would still find a library."""
    try:
        acl = load({})
    except AclMissing:
        return
    pytest.skip(f"here the dynamic loader finds {acl.path}")


# --- which library ---


def test_loading_initialises_nothing(library: Library) -> None:
    code = "int calls = 0;\n" + "".join(
        f"int {name}(void) {{ ++calls; return 0; }}\n" for name in (*REQUIRED, *OPTIONAL)
    )
    acl = load(at(library("untouched", functions=(), code=code)))
    calls = ctypes.c_int.in_dll(ctypes.CDLL(acl.path), "calls")
    assert calls.value == 0
    acl.aclrtFree(1)
    assert calls.value == 1, "the counter counts nothing"


def test_a_second_load_gives_the_same_object(library: Library, tmp_path: Path) -> None:
    home = library("once")
    (tmp_path / "link").symlink_to(home)
    assert load(at(home)) is load(at(home)) is load(at(tmp_path / "link"))
    assert load(at(library("another"))) is not load(at(home))


def test_threads_that_load_at_once_get_the_same_object(library: Library) -> None:
    environ, barrier = at(library("many")), threading.Barrier(8, timeout=60)

    def loaded(_: int) -> Acl:
        barrier.wait()
        return load(environ)

    with ThreadPoolExecutor(8) as threads:
        assert len({id(acl) for acl in threads.map(loaded, range(8))}) == 1


def test_functions_may_come_from_the_second_library_of_the_folder(library: Library) -> None:
    moved = {"aclrtMalloc", "aclrtFree"}
    home = library("split", functions=REQUIRED.keys() - moved)
    library("split", name="libacl_rt.so", functions=(*moved, "aclrtStreamAbort"))
    acl = load(at(home))
    assert acl.path == str(home / "lib64" / "libascendcl.so")
    assert acl.has("aclrtStreamAbort")
    assert acl.aclrtFree(1) == 0


def test_the_first_library_is_asked_first(library: Library) -> None:
    home = library("order", functions=REQUIRED.keys() - {"aclrtFree"}, code="int aclrtFree(void *a) { return 1; }")
    library("order", name="libacl_rt.so", code="int aclrtStreamAbort(void *stream) { return 2; }")
    acl = load(at(home))
    assert acl.aclrtFree(1) == 1
    assert acl.aclrtStreamAbort is not None
    assert acl.aclrtStreamAbort(1) == 2


def test_the_second_library_alone_is_enough(library: Library) -> None:
    home = library("alone", name="libacl_rt.so")
    assert load(at(home)).path == str(home / "lib64" / "libacl_rt.so")


def test_the_home_path_comes_before_the_toolkit_and_the_loader(library: Library) -> None:
    home, toolkit, loaders = library("home"), library("toolkit"), library("loaders")
    program = """
        import os
        from kvpull_async.memory._acl import load
        for names in (("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"), ("ASCEND_TOOLKIT_HOME",), ()):
            print(load({name: os.environ[name] for name in names}).path)
    """
    environ = {"ASCEND_HOME_PATH": str(home), "ASCEND_TOOLKIT_HOME": str(toolkit)}
    printed = ran(program, LD_LIBRARY_PATH=str(loaders / "lib64"), **environ).split()
    assert printed == [str(place / "lib64" / "libascendcl.so") for place in (home, toolkit, loaders)]


def test_one_that_is_loaded_already_is_taken_whatever_the_environment_says(library: Library) -> None:
    """As torch_npu may have done: two runtimes in one process would not know of each other."""
    mine, other = library("mine", soname="libascendcl.so"), library("other")
    program = f"""
        import ctypes, os
        ctypes.CDLL({str(mine / "lib64" / "libascendcl.so")!r})
        from kvpull_async.memory import _acl
        print(_acl.load(os.environ).path)
        """
    assert ran(program, **at(other)) == str(mine / "lib64" / "libascendcl.so")


def test_a_home_without_a_usable_library_leaves_the_choice_to_the_next(library: Library, tmp_path: Path) -> None:
    toolkit = library("fallback")
    environ = {"ASCEND_HOME_PATH": str(tmp_path / "nowhere"), "ASCEND_TOOLKIT_HOME": str(toolkit)}
    assert load(environ).path.startswith(str(toolkit))


def test_the_loaders_library_and_the_same_file_by_path_are_one(library: Library) -> None:
    home = library("same")
    program = """
        import os
        from kvpull_async.memory._acl import load
        print(load({}) is load({"ASCEND_HOME_PATH": os.environ["ASCEND_HOME_PATH"]}))
    """
    assert ran(program, LD_LIBRARY_PATH=str(home / "lib64"), ASCEND_HOME_PATH=str(home)) == "True"


# --- none ---


@pytest.mark.usefixtures("nothing_by_name")
def test_the_error_tells_everything_that_was_tried(tmp_path: Path) -> None:
    with pytest.raises(AclMissing) as caught:
        load({"ASCEND_TOOLKIT_HOME": str(tmp_path)})
    text = str(caught.value)
    assert "\n" not in text
    for piece in (
        "$ASCEND_HOME_PATH is not set; ",
        f"{tmp_path}/lib64/libascendcl.so: cannot open shared object file",
        f"{tmp_path}/lib64/libacl_rt.so: cannot open shared object file",
        "; libascendcl.so: cannot open shared object file",
        "; libacl_rt.so: cannot open shared object file",
    ):
        assert piece in text
    assert caught.value.attempts == tuple(text.partition("tried: ")[2].split("; "))
    assert str(pickle.loads(pickle.dumps(caught.value))) == text


@pytest.mark.usefixtures("nothing_by_name")
def test_a_home_named_twice_is_tried_once_and_an_empty_one_is_none(tmp_path: Path) -> None:
    with pytest.raises(AclMissing) as twice:
        load({"ASCEND_HOME_PATH": str(tmp_path), "ASCEND_TOOLKIT_HOME": str(tmp_path)})
    assert len(twice.value.attempts) == 4
    with pytest.raises(AclMissing, match=r"\$ASCEND_HOME_PATH is not set; \$ASCEND_TOOLKIT_HOME is not set"):
        load({"ASCEND_HOME_PATH": ""})


@pytest.mark.usefixtures("nothing_by_name")
def test_a_library_that_lacks_what_is_required_is_no_library(library: Library) -> None:
    home = library("poor", functions=REQUIRED.keys() - {"aclrtMemcpy", "aclInit"})
    with pytest.raises(AclMissing) as caught:
        load(at(home))
    assert f"{home}/lib64/libascendcl.so: lacks aclInit, aclrtMemcpy" in caught.value.attempts


@pytest.mark.usefixtures("nothing_by_name")
def test_a_file_that_is_no_library_is_told_with_the_loaders_reason(library: Library) -> None:
    home = library("broken")
    (home / "lib64" / "libascendcl.so").write_bytes(b"not a library")
    with pytest.raises(AclMissing, match=r"broken/lib64/libascendcl\.so: (file too short|invalid ELF header)"):
        load(at(home))


@pytest.mark.usefixtures("nothing_by_name")
@pytest.mark.parametrize("home", ["devlib", "stub", "x/stub/y"])
def test_a_stub_library_is_never_used(library: Library, home: str) -> None:
    place = library(home)
    with pytest.raises(AclMissing) as caught:
        load(at(place))
    assert f"{place}/lib64/libascendcl.so: skipped: a stub library" in caught.value.attempts


@pytest.mark.usefixtures("nothing_by_name")
def test_a_link_to_a_stub_library_is_never_used(library: Library, tmp_path: Path) -> None:
    stub = library("devlib")
    home = tmp_path / "linked"
    home.mkdir()
    (home / "lib64").symlink_to(stub / "lib64")
    with pytest.raises(AclMissing, match=r"linked/lib64/libascendcl\.so: skipped: a stub library"):
        load(at(home))


def test_a_stub_that_the_loader_finds_is_put_away_again(library: Library) -> None:
    stub = library("devlib")
    program = """
        from kvpull_async.memory._acl import AclMissing, load
        try:
            load({})
        except AclMissing as error:
            print(error)
        with open("/proc/self/maps") as maps:
            print("devlib" in maps.read())
    """
    text, mapped = ran(program, LD_LIBRARY_PATH=str(stub / "lib64")).splitlines()
    assert f"{stub}/lib64/libascendcl.so: skipped: a stub library" in text
    assert mapped == "False"


def test_the_folder_that_a_program_runs_in_does_not_make_the_loaders_library_a_stub(library: Library) -> None:
    home = library("real")
    inside = library("stub") / "lib64"
    program = f"""
        import os
        from kvpull_async.memory._acl import load
        os.chdir({str(inside)!r})
        print(load({{}}).path)
    """
    assert ran(program, LD_LIBRARY_PATH=str(home / "lib64")) == str(home / "lib64" / "libascendcl.so")
