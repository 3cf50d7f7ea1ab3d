"""A forked child must leave the NPU alone: it is told so, whatever it tries, and its parent goes on."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.integration.running import ROOT

PROGRAM = """
import os
from kvpull_sync import CacheDesc, CacheKey, DataType, LLMDataDist, LLMException, LLMRole
from tests import duo

def made(cluster):
    node = LLMDataDist(LLMRole.PROMPT, cluster)
    node.init(duo.options(listen=True))
    return node

def refused(call):
    try:
        call()
    except (LLMException, RuntimeError) as error:
        return "fork" in str(error)
    return False

node = made(1)
desc = CacheDesc(2, [1, 4096], DataType.DT_UINT8)
cache = node.kv_cache_manager.allocate_cache(desc, [CacheKey(1, 1)])
child = os.fork()
if not child:
    os._exit(refused(lambda: node.kv_cache_manager.allocate_cache(desc)) + 2 * refused(lambda: made(2)))
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
other = node.kv_cache_manager.allocate_cache(desc)
duo.fill(cache)
node.kv_cache_manager.copy_cache(other, cache)
print("parent", duo.holds(other, entry=0, source=0))
node.finalize()
"""


def test_a_forked_child_is_refused_and_its_parent_goes_on() -> None:
    path = os.pathsep.join([str(ROOT), *(entry for entry in sys.path if entry)])
    environ = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ, cwd=ROOT, check=False)
    assert done.stdout.splitlines() == ["child 3", "parent True"], done.stderr
    assert done.returncode == 0
