"""The binding of AscendCL: what a library has and lacks, and that its calls carry their arguments."""

from __future__ import annotations

import ctypes

from kvpull_async.memory import _acl
from kvpull_async.memory._acl import OPTIONAL, REQUIRED, Acl, load
from tests.acl_libraries import Library, at, ran

HIGH = 0xFEDC_BA98_7654_3210  # no half of it can be mistaken for the whole


# --- what a library has ---


def test_a_library_has_every_function_under_its_c_name(library: Library) -> None:
    acl = load(at(library("whole", functions=(*REQUIRED, *OPTIONAL))))
    assert acl.missing == ()
    assert all(acl.has(name) for name in (*REQUIRED, *OPTIONAL))
    assert acl.aclrtFree(HIGH) == 0


def test_optional_functions_may_be_missing_and_are_named(library: Library) -> None:
    acl = load(at(library("old", functions=(*REQUIRED, "aclrtStreamQuery"))))
    assert acl.missing == tuple(sorted(set(OPTIONAL) - {"aclrtStreamQuery"}))
    assert acl.has("aclrtStreamQuery")
    assert not acl.has("aclrtStreamAbort")
    assert acl.aclrtStreamAbort is None
    assert not acl.has("aclFinalize"), "nobody may end the runtime of the whole process"


def test_the_class_annotates_exactly_the_functions_of_the_tables() -> None:
    assert set(Acl.__annotations__) == {*REQUIRED, *OPTIONAL}
    optional = {name for name, kind in Acl.__annotations__.items() if kind.endswith("| None")}
    assert optional == set(OPTIONAL)


def test_every_function_has_its_types(library: Library) -> None:
    acl = load(at(library("typed", functions=(*REQUIRED, *OPTIONAL))))
    for name, (restype, argtypes) in (REQUIRED | OPTIONAL).items():
        function = getattr(acl, name)
        assert function.argtypes == argtypes, name
        assert function.restype is restype, name


def test_the_types_are_not_forced_on_others_in_the_process(library: Library) -> None:
    acl = load(at(library("shared")))
    others = ctypes.CDLL(acl.path)
    others.aclrtFree.argtypes = [ctypes.c_char_p]
    assert acl.aclrtFree(HIGH) == 0


# --- what a call carries ---


def test_an_address_of_64_bits_and_a_size_survive_both_ways(library: Library) -> None:
    code = """
    int aclrtMalloc(void **address, size_t size, int policy) { *address = (void *)size; return 40 + policy; }
    int aclrtFree(void *address) { return address == (void *)0xFEDCBA9876543210 ? 0 : 107000; }
    """
    rest = REQUIRED.keys() - {"aclrtMalloc", "aclrtFree"}
    acl = load(at(library("echo", functions=rest, code=code)))
    address = ctypes.c_void_p()
    assert acl.aclrtMalloc(ctypes.byref(address), HIGH, 2) == 42
    assert address.value == HIGH
    assert acl.aclrtFree(address.value) == 0
    assert acl.aclrtFree(HIGH & 0xFFFF_FFFF) == 107000


def test_a_copy_has_its_arguments_in_order(library: Library) -> None:
    code = """
    int aclrtMemcpyAsync(void *dst, size_t room, const void *src, size_t count, int kind, void *stream) {
        return dst == (void *)0xFEDCBA9876543210 && room == 0x100000002 && src == (void *)0xFEDCBA9876543211 &&
               count == 0x100000001 && stream == (void *)0xFEDCBA9876543212 ? kind : -1;
    }
    """
    acl = load(at(library("copy", functions=REQUIRED.keys() - {"aclrtMemcpyAsync"}, code=code)))
    kind = _acl.MemcpyKind.DEVICE_TO_HOST
    assert acl.aclrtMemcpyAsync(HIGH, 0x1_0000_0002, HIGH + 1, 0x1_0000_0001, kind, HIGH + 2) == 2


def test_a_batch_has_its_arguments_in_order(library: Library) -> None:
    code = """
    int aclrtMemcpyBatchAsync(void **dsts, size_t *rooms, void **srcs, size_t *sizes, size_t count, BatchAttr *attrs,
                              size_t *indexes, size_t attr_count, size_t *failed, void *stream) {
        *failed = (size_t)-1;
        return dsts[1] == (void *)0xFEDCBA9876543210 && rooms[1] == 4 && srcs[1] == (void *)0xFEDCBA9876543211 &&
               sizes[1] == 3 && count == 2 && attrs[0].dst.id == 7 && attrs[0].dst.type == 1 &&
               attrs[0].src.id == 0 && attrs[0].src.type == 0 && indexes[0] == 0 && attr_count == 1 &&
               stream == (void *)0xFEDCBA9876543212 ? 0 : -1;
    }
    """
    acl = load(at(library("batch", code=code)))
    addresses, sizes = ctypes.c_void_p * 2, ctypes.c_size_t * 2
    attrs = (_acl.MemcpyBatchAttr * 1)()
    attrs[0].dst = _acl.MemLocation(7, _acl.LocationType.DEVICE)
    failed, indexes = ctypes.c_size_t(), (ctypes.c_size_t * 1)(0)
    destinations, rooms = addresses(1, HIGH), sizes(1, 4)
    sources, counts = addresses(1, HIGH + 1), sizes(1, 3)
    issue = acl.aclrtMemcpyBatchAsync
    assert issue is not None
    arguments = (destinations, rooms, sources, counts, 2, attrs, indexes, 1, ctypes.byref(failed), HIGH + 2)
    assert issue(*arguments) == 0
    assert failed.value == 2**64 - 1


def test_structures_lie_as_in_c(library: Library) -> None:
    code = """
    const size_t layout[] = {
        sizeof(Location), offsetof(Location, type), sizeof(BatchAttr), offsetof(BatchAttr, src),
        sizeof(PtrAttributes), offsetof(PtrAttributes, page_size),
    };
    """
    acl = load(at(library("layout", code=code)))
    layout = list((ctypes.c_size_t * 6).in_dll(ctypes.CDLL(acl.path), "layout"))
    location, batch, pointer = _acl.MemLocation, _acl.MemcpyBatchAttr, _acl.PtrAttributes
    ours = [ctypes.sizeof(location), location.type.offset, ctypes.sizeof(batch), batch.src.offset]
    assert layout == [*ours, ctypes.sizeof(pointer), pointer.page_size.offset] == [8, 4, 32, 8, 28, 8]


def test_text_is_bytes_or_none(library: Library) -> None:
    code = """
    const char *aclGetRecentErrMsg(void) { return NULL; }
    const char *aclrtGetSocName(void) { return "Ascend910B4"; }
    """
    acl = load(at(library("text", code=code)))
    assert acl.aclGetRecentErrMsg is not None
    assert acl.aclrtGetSocName is not None
    assert acl.aclGetRecentErrMsg() is None
    assert acl.aclrtGetSocName() == b"Ascend910B4"


# --- programs without a device ---


def test_importing_the_packages_neither_loads_the_library_nor_looks_for_it(library: Library) -> None:
    home = library("tempting")
    program = """
        import os
        opened = []
        def hear(event, arguments):
            if event == "ctypes.dlopen" and any(name in str(arguments[0]) for name in ("ascend", "acl")):
                opened.append(arguments[0])
        sys.addaudithook(hear)
        import kvpull_async, kvpull_sync
        def tell():
            with open("/proc/self/maps") as maps:
                print(bool(opened), "kvpull_async.memory._acl" in sys.modules, "libascendcl" in maps.read())
        tell()
        from kvpull_async.memory._acl import load
        load(os.environ)
        tell()
    """
    before, after = ran(program, ASCEND_HOME_PATH=str(home), LD_LIBRARY_PATH=str(home / "lib64")).splitlines()
    assert before == "False False False"
    assert after == "True True True", "this test would not notice"
