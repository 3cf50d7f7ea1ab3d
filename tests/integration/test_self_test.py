"""`python -m kvpull_async.self_test` on the emulator: all is well where it is, and each fault is named where it is not.

A faulty library is the emulator with one function put before its own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvpull_async.self_test.report import SECTIONS
from tests.emulation import build, needs_gcc

SECONDS = 240

pytestmark = [
    needs_gcc,
    pytest.mark.timeout(SECONDS + 30),
]

Faulty = Callable[[str], Path]
MEMCPY = "int aclrtMemcpy(void *dst, size_t room, const void *src, size_t count, int kind)"
FAULTY = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>
#define NEXT(name) ((int (*)())dlsym(RTLD_NEXT, name))
"""


@pytest.fixture
def faulty(tmp_path: Path) -> Faulty:
    """Makes a home whose library has this code, and for all else what the emulator has."""

    def make(code: str) -> Path:
        folder = tmp_path / "lib64"
        folder.mkdir()
        real = build() / "lib64" / "libascendcl.so"
        command = ["gcc", "-shared", "-fPIC", "-w", "-Wl,--no-as-needed", "-x", "c", "-", "-x", "none", str(real), "-o"]
        subprocess.run(
            [*command, str(folder / "libascendcl.so")], input=FAULTY + code, text=True, check=True, timeout=60
        )
        return tmp_path

    return make


# As much of torch as the self-test asks for, on the emulator: tensors in device memory, made and looked at by torch's
# own thread, which has set the device. Nobody may finalise AscendCL, or reset the device, beside it.
TORCH = """
import ctypes, os
import numpy as np

acl = ctypes.CDLL(os.environ["ASCEND_HOME_PATH"] + "/lib64/libascendcl.so")
uint8 = "uint8"


def done(code):
    if code:
        raise RuntimeError(f"torch: {code}")


def zeros(nbytes, dtype, device):
    made = Tensor(nbytes)
    done(acl.aclrtMemset(made.place, ctypes.c_size_t(nbytes), 0, ctypes.c_size_t(nbytes)))
    return made


class Tensor:
    def __init__(self, nbytes):
        self.nbytes, self.place = ctypes.c_size_t(nbytes), ctypes.c_void_p()
        done(acl.aclrtMalloc(ctypes.byref(self.place), self.nbytes, 0))

    def data_ptr(self):
        return self.place.value

    def clone(self):
        made, stream, within = Tensor(self.nbytes.value), ctypes.c_void_p(), 3
        done(acl.aclrtCreateStream(ctypes.byref(stream)))
        done(acl.aclrtMemcpyAsync(made.place, self.nbytes, self.place, self.nbytes, within, stream))
        done(acl.aclrtSynchronizeStream(stream))
        done(acl.aclrtDestroyStream(stream))
        return made

    def cpu(self):
        found, down = np.zeros(self.nbytes.value, np.uint8), 2
        done(acl.aclrtMemcpy(ctypes.c_void_p(found.ctypes.data), self.nbytes, self.place, self.nbytes, down))
        return Copied(found)


class Copied:
    def __init__(self, array):
        self.array = array

    def numpy(self):
        return self.array


class npu:
    begun = False

    @classmethod
    def init(cls):
        if not cls.begun:
            done(acl.aclInit(None))  # 100002 if anybody was earlier
            acl.acl_emulator_claim()
        cls.begun = True

    @classmethod
    def set_device(cls, number):
        cls.init()
        done(acl.aclrtSetDevice(number))

    @staticmethod
    def synchronize():
        pass
"""


def report_of(
    home: Path | None, *arguments: str, emulator: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("ASCEND", "ACL_", "LD_"))}
    environ = {**inherited, "ACL_EMULATOR": emulator, "SOME_SECRET": "hush", **variables}
    if home is not None:
        environ["ASCEND_HOME_PATH"] = str(home)
    command = [sys.executable, "-m", "kvpull_async.self_test", "--mib", "4", *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.stderr == ""
    assert "Traceback" not in done.stdout
    assert "hush" not in done.stdout
    return done


def failures(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """The lines of checks that failed: name and text."""
    assert done.returncode == 1, done.stdout
    assert done.stdout.splitlines()[-1] == "FAILED: do not rely on device memory here"
    return dict(re.findall(r"^  FAILED   (.+?): (.+)$", done.stdout, re.MULTILINE))


@pytest.mark.smoke
def test_where_all_is_well_every_check_says_so(tmp_path: Path) -> None:
    done = report_of(build(), "--json", str(tmp_path / "report.json"))
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == "OK: device memory can be used here"
    for number, name in SECTIONS.items():
        assert f"\n{number} {name}\n  ok  " in done.stdout
    assert "FAILED" not in done.stdout.replace("0 FAILED", "")
    assert "aclrtMemcpyBatchAsync answers 0" in done.stdout
    rates = re.findall(
        r"^  ok       (pinned|pageable), (to|from) the device, (\d) MiB pieces: ([\d.]+) GB/s",
        done.stdout,
        re.MULTILINE,
    )
    assert {(memory, way, piece) for memory, way, piece, _ in rates} == {
        (memory, way, piece) for memory in ("pinned", "pageable") for way in ("to", "from") for piece in "14"
    }
    for path in ("inproc", "shm", "tcp"):
        assert f"pull_cache and pull_blocks over {path}, " in done.stdout
    assert f"ASCEND_HOME_PATH  {build()}" in done.stdout
    steps = json.loads((tmp_path / "report.json").read_text())["steps"]
    assert {step["section"] for step in steps} == set(SECTIONS)
    if importlib.util.find_spec("torch_npu") is None:
        assert [step["name"] for step in steps if step["state"] == "skipped"] == ["into tensors of torch_npu"]


def test_tensors_of_torch_npu_are_pulled_into_and_its_thread_keeps_its_context(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(TORCH)
    (tmp_path / "torch_npu.py").write_text("")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = report_of(build(), PYTHONPATH=path)
    assert done.returncode == 0, done.stdout
    assert "ok       into tensors of torch_npu: pull_cache to their data_ptr(); " in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("release", ["8.0", "8.2", "8.5"])
def test_an_older_release_is_well_without_what_it_lacks(release: str) -> None:
    done = report_of(build(release=release))
    assert done.returncode == 0, done.stdout
    if release == "8.0":
        assert "without aclrtMemcpyBatchAsync, aclrtPointerGetAttributes, aclrtStreamAbort" in done.stdout
        assert "skipped  aborting a stream: the library has no aclrtStreamAbort" in done.stdout


def test_without_a_library_everything_that_was_tried_is_told() -> None:
    done = report_of(None)
    assert "library" in failures(done)
    for attempt in ("$ASCEND_HOME_PATH is not set", "libascendcl.so: cannot open", "libacl_rt.so: cannot open"):
        assert f"           {attempt}" in done.stdout
    assert done.stdout.count("skipped  all of it: what it needs has failed") == 6


def test_a_function_that_is_needed_and_missing_is_named() -> None:
    done = report_of(build(without=["aclrtMemset"]))
    assert "library" in failures(done)
    assert "lacks aclrtMemset" in done.stdout


def test_the_settings_of_a_service_do_not_matter() -> None:
    """Certificates that are not there, and no peers at all: no node would start, or link."""
    service = {"KVPULL_TLS_CERTIFICATE": "/nowhere", "KVPULL_TLS_KEY": "/nowhere", "KVPULL_ALLOWED_CLUSTERS": "77"}
    done = report_of(build(), **service)
    assert done.returncode == 0, done.stdout


def test_a_report_that_cannot_be_written_is_refused_before_anything_is_tried(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvpull_async.self_test", "--json", str(tmp_path / "nowhere" / "report.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--json: cannot be written: " in done.stderr


def test_no_device_is_told() -> None:
    assert failures(report_of(build(), emulator="devices=0")) == {"devices": "there is no device 0: AscendCL sees 0"}
    assert failures(report_of(build(), "--device", "7")) == {"devices": "there is no device 7: AscendCL sees 2"}


def test_too_little_memory_is_told() -> None:
    found = failures(report_of(build(), emulator="device_bytes=1000000"))
    assert "207001 (MEMORY_ALLOCATION)" in found["memory"]
    assert "207001 (MEMORY_ALLOCATION)" in found["the second process"]


def test_one_wrong_byte_is_found(faulty: Faulty) -> None:
    flip = f"""
    {MEMCPY} {{
        int code = NEXT("aclrtMemcpy")(dst, room, src, count, kind);
        if (kind == 2 && count > 1000000)
            ((uint8_t *)dst)[count - 3] ^= 4;
        return code;
    }}"""
    found = failures(report_of(faulty(flip)))
    assert "pinned host memory to the device and back, asynchronous" not in found
    text = found["pageable host memory to the device and back, synchronous"]
    assert re.search(r"1 of 2097152 bytes are wrong, the first is byte 2097149: 0x..", text)
    assert "tensor 0" in found["inside one process"]  # the entries of its caches are not all aligned


def test_a_copy_beside_its_place_is_found(faulty: Faulty) -> None:
    """Every byte arrives, and one more is written."""
    longer = f"""
    {MEMCPY} {{
        int code = NEXT("aclrtMemcpy")(dst, room, src, count, kind);
        return code || kind != 1 ? code : NEXT("aclrtMemcpy")((char *)dst + count, 1, src, 1, kind);
    }}"""
    found = failures(report_of(faulty(longer)))
    assert "on the device: " in found["unaligned pieces, as the library copies them"]


def test_a_call_that_never_returns_is_told_and_ends_the_test(faulty: Faulty) -> None:
    hang = f"{MEMCPY} {{ for (;;) pause(); }}"
    done = report_of(faulty(hang), "--seconds", "10")
    assert failures(done) == {
        "pageable host memory to the device and back, synchronous": "no answer within 10 s; the process was killed"
    }
    assert "within the device, asynchronous: 2 MiB, every byte is right" in done.stdout
    assert "\n7 pulls\n  skipped  all of it: what it needs has failed" in done.stdout


def test_a_library_that_kills_its_process_is_told_with_its_last_words(faulty: Faulty) -> None:
    done = report_of(faulty('const char *aclrtGetSocName(void) { write(2, "driver trouble\\n", 15); abort(); }'))
    assert failures(done) == {"device 0": "the process ended with exit code -6"}
    assert "           driver trouble\n" in done.stdout


def test_an_error_of_the_device_is_told_with_its_code(faulty: Faulty) -> None:
    broken = "int aclrtMemcpyAsync(void *d, size_t r, const void *s, size_t c, int k, void *x) { return 507899; }"
    found = failures(report_of(faulty(broken)))
    assert "aclrtMemcpyAsync answered 507899 (DRV_INTERNAL_ERROR)" in found["within the device, asynchronous"]
    assert "507899" in found["the second process"]


def test_contexts_that_are_not_those_of_the_documents_are_told(faulty: Faulty) -> None:
    loose = """
    int aclrtGetCurrentContext(void **context) {
        static __thread int mine;
        int code = NEXT("aclrtGetCurrentContext")(context);
        if (code == 0)
            *context = &mine;
        return code;
    }"""
    found = failures(report_of(faulty(loose)))
    assert found["a second thread that binds the device"].startswith("gets another context")


def test_a_stream_that_writes_on_after_its_abort_is_told(faulty: Faulty) -> None:
    """What is said to be aborted starts late and runs to its end; nobody waits for it."""
    deaf = """
    static int deaf;
    int aclrtStreamAbort(void *stream) { deaf = 1; return 0; }
    int aclrtDestroyStream(void *stream) { return deaf ? 0 : NEXT("aclrtDestroyStream")(stream); }
    """
    done = report_of(faulty(deaf), emulator="delay_us=40000 abort_on_violation=0")
    assert re.search(r"\d+ bytes were still written after", failures(done)["aborting a stream"])
