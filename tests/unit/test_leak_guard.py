"""The leak guard of tests/conftest.py: it fails tests that leak, names the leak, and leaves clean tests alone.

Each case runs a small suite under a copy of the guard in a pytest of its own, so that nothing leaks into this one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

GUARD = Path(__file__).parents[1] / "conftest.py"

HEADER = """
import asyncio, atexit, gc, mmap, os, socket, subprocess, sys, threading, time, types
from multiprocessing import shared_memory
import pytest

kept = []
stop = threading.Event()
"""

INI = """
[pytest]
addopts = --strict-markers
asyncio_mode = auto
asyncio_default_fixture_loop_scope = function
filterwarnings = error
markers =
    allow_leak(pattern): as in the project's own configuration
"""


@pytest.fixture
def run(pytester: pytest.Pytester):
    """Runs a suite of the given source under the guard; the grace is short, to keep the leaking cases quick."""

    def run(source: str) -> pytest.RunResult:
        guard = GUARD.read_text(encoding="utf-8").replace("\nGRACE_S = 2.0\n", "\nGRACE_S = 0.3\n")
        assert "GRACE_S = 0.3" in guard
        pytester.makeini(INI)
        pytester.makeconftest(guard)
        pytester.makepyfile(HEADER + source)
        return pytester.runpytest_subprocess("-p", "no:cacheprovider")

    return run


LEAKING = """
async def test_task():
    kept.append(asyncio.create_task(asyncio.sleep(60), name="forgotten"))

def test_thread():
    threading.Thread(target=stop.wait, args=(60,), name="forgotten", daemon=True).start()

def test_file():
    kept.append(os.open("/etc/hostname", os.O_RDONLY))

def test_socket():
    kept.append(socket.create_server(("127.0.0.1", 0)))

async def test_socket_of_a_coroutine():
    kept.extend(socket.socketpair())

def test_memfd():
    kept.append(os.memfd_create("forgotten"))

def test_mapping():
    fd = os.memfd_create("mapped")
    os.ftruncate(fd, 4096)
    kept.append(mmap.mmap(fd, 4096))
    os.close(fd)

def test_shared_memory():
    name = f"/dev/shm/kvpull-forgotten-{os.getpid()}"
    with open(name, "wb"):
        atexit.register(os.unlink, name)

def test_child_process():
    child = subprocess.Popen(["sleep", "60"])
    atexit.register(child.wait)
    atexit.register(child.kill)

class Engine:
    def __repr__(self):
        return "<Engine cluster 7>"

def test_engine():
    engine = Engine()
    module = types.ModuleType("kvpull_async.engine")
    module.live_engines = lambda: [engine]
    sys.modules[module.__name__] = module
"""

# For each of these tests, what the guard's report begins with.
REPORTS = {
    "test_task": "  task 'forgotten' running <coroutine object sleep*",
    "test_thread": "  thread 'forgotten' (daemon)",
    "test_file": "  file descriptor * -> /etc/hostname",
    "test_socket": "  file descriptor * -> socket:*",
    "test_socket_of_a_coroutine": "  file descriptor * -> socket:*",
    "test_memfd": "  file descriptor * -> /memfd:forgotten*",
    # (An mmap object keeps a duplicate of the descriptor.)
    "test_mapping": "  file descriptor * -> /memfd:mapped*\n  mapped shared memory /memfd:mapped*",
    "test_shared_memory": "  shared memory /dev/shm/kvpull-forgotten-*",
    "test_child_process": "  child process *",
    "test_engine": "  engine not finalised: <Engine cluster 7>",
}


@pytest.mark.smoke
def test_each_kind_of_leak_fails_its_test_and_is_named(run) -> None:
    result = run(LEAKING)
    result.assert_outcomes(passed=len(REPORTS), errors=len(REPORTS))
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    for name, report in REPORTS.items():
        lines = [f"*ERROR at teardown of {name} *", "the test left behind:", *report.splitlines()]
        result.stdout.fnmatch_lines(lines, consecutive=True)


@pytest.mark.smoke
def test_tests_that_clean_up_pass(run) -> None:
    result = run("""
@pytest.fixture
async def background():
    task = asyncio.create_task(asyncio.sleep(60))
    yield task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

@pytest.fixture
def opened():
    fd = os.open("/etc/hostname", os.O_RDONLY)
    yield fd
    os.close(fd)

async def test_fixtures_that_clean_up(background, opened):
    assert not background.done()

async def test_the_loops_own_executor_thread():
    await asyncio.to_thread(time.sleep, 0.01)

async def test_a_server_and_a_child_process():
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    server.close()
    await server.wait_closed()
    child = await asyncio.create_subprocess_exec("true")
    await child.wait()

def test_a_thread_that_is_about_to_end():
    threading.Thread(target=time.sleep, args=(0.1,)).start()

def test_garbage_in_a_cycle():
    class Holder:
        def __init__(self):
            self.me = self
            self.fd = os.open("/etc/hostname", os.O_RDONLY)
        def __del__(self):
            os.close(self.fd)
    gc.disable()
    Holder()

def test_shared_memory_and_its_tracker():
    block = shared_memory.SharedMemory(create=True, size=64)
    block.close()
    block.unlink()
""")
    result.assert_outcomes(passed=6)


def test_a_leak_is_charged_to_the_test_that_made_it_only(run) -> None:
    result = run("""
def test_leaks():
    kept.append(os.open("/etc/hostname", os.O_RDONLY))

def test_clean():
    pass

async def test_clean_too():
    pass
""")
    result.assert_outcomes(passed=3, errors=1)
    result.stdout.fnmatch_lines(["ERROR *::test_leaks*"])


def test_a_test_that_failed_by_itself_is_not_blamed_twice(run) -> None:
    result = run("""
def test_fails():
    kept.append(os.open("/etc/hostname", os.O_RDONLY))
    assert not kept
""")
    result.assert_outcomes(failed=1)


def test_an_expected_leak_must_match_its_pattern(run) -> None:
    result = run("""
@pytest.mark.allow_leak(r"thread 'stuck'")
def test_allowed():
    threading.Thread(target=stop.wait, args=(60,), name="stuck", daemon=True).start()

@pytest.mark.allow_leak(r"thread 'stuck'")
def test_another_one():
    threading.Thread(target=stop.wait, args=(60,), name="other", daemon=True).start()
""")
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*ERROR at teardown of test_another_one*", "*thread 'other'*"])
