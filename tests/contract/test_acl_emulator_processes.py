"""The emulated AscendCL in programs of their own: what ends them, what the environment says, forks, two builds."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.emulation import build, needs_gcc
from tests.house import ROOT

LOADED = """
import os
from tests.acl_emulator import build
from tests.acl_emulator.raw import *
raw = Raw(build())
"""
STARTED = """
raw.start()
raw.emulator.configure(delay_us=200_000)
stream, host, device = raw.stream(), raw.pinned(4096), raw.device(4096)
"""


@pytest.fixture(autouse=True)
def _built() -> None:
    """Once for all the programs."""
    build()


def child(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A program with a Raw in `raw` that has called nothing yet."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONFAULTHANDLER": "", **environment}
    command = [sys.executable, "-c", LOADED + code]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=60, check=False)


def started(code: str) -> subprocess.CompletedProcess[str]:
    """A program with a stream, memory, and copies that begin late."""
    return child(STARTED + code)


@needs_gcc
def test_two_processes_may_build_at_once(tmp_path: Path) -> None:
    code = "from tests.acl_emulator import build; print(build())"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    both = [subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True) for _ in "12"]
    homes = {process.communicate(timeout=60)[0].strip() for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert len(homes) == 1
    (home,) = homes
    assert (Path(home) / "lib64" / "libascendcl.so").exists()
    assert [path.name for path in Path(home).parent.iterdir()] == [Path(home).name]


def test_the_environment_configures_a_program() -> None:
    code = "raw('aclInit', None); print(raw.number('aclrtGetDeviceCount'))"
    assert child(code, ACL_EMULATOR="devices=5 delay_us=0").stdout.split() == ["5"]
    wrong = child("print('loaded')", ACL_EMULATOR="devises=5")
    assert (wrong.returncode, wrong.stdout) == (-6, "")
    assert "devises" in wrong.stderr


def test_nothing_goes_before_initialisation() -> None:
    done = child("print(raw('aclrtSetDevice', 0), raw('aclInit', None), raw('aclrtSetDevice', 0))")
    assert done.stdout.split() == ["100001", "0", "0"]


def test_the_host_cannot_touch_device_memory() -> None:
    done = started("print(raw.seen(device, 4096)[0])")
    assert (done.returncode, done.stdout) == (-signal.SIGSEGV, "")
    read = """
libc, zeros = ctypes.CDLL(None, use_errno=True), os.open("/dev/zero", 0)
print(libc.read(zeros, ctypes.c_void_p(device), ctypes.c_size_t(16)), ctypes.get_errno())
"""
    assert started(read).stdout.split() == ["-1", str(errno.EFAULT)]  # nor can the kernel in its name


def test_a_violation_ends_the_program_and_says_why() -> None:
    done = started("raw.send(device, host, 4096, H2D, stream); raw('aclrtFree', device); print('went on')")
    assert (done.returncode, done.stdout) == (-signal.SIGABRT, "")
    assert "acl_emulator: violation: aclrtFree:" in done.stderr
    assert "while a copy that uses it is in flight" in done.stderr


def test_a_forked_child_may_not_use_the_library() -> None:
    fork = """
raw.emulator.configure(abort_on_violation=0)
child = os.fork()
if child == 0:
    code = raw("aclrtFree", device)
    os._exit(code == 507899 and "child of fork" in raw.emulator.violations()[0])
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(code, raw.emulator.violations(), raw.emulator.left()["device_blocks"])
"""
    assert started(fork).stdout.split() == ["1", "[]", "1"]


def test_nobody_may_fork_while_copies_started() -> None:
    done = started("raw.send(device, host, 4096, H2D, stream); os.fork()")
    assert done.returncode == -signal.SIGABRT
    assert "fork() while 1 copies run" in done.stderr
