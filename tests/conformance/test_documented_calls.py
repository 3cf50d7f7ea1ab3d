"""The documentation's three example calls of pull_cache, as written: plain, with layer ranges, with offsets.

They run in a process of their own, from the star import, once of `kvpull_sync` and once of `llm_datadist` after
`kvpull_sync.install_as_llm_datadist()`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
prompt, decoder = LLMDataDist(LLMRole.PROMPT, 1), LLMDataDist(LLMRole.DECODER, 2)
config = LLMConfig()
config.device_id = 0
config.sync_kv_timeout = 20000
config.listen_ip_info = "127.0.0.1:0"
prompt.init(config.generate_options())
decoder.init(config.generate_options())
cluster = LLMClusterInfo()
cluster.remote_cluster_id = 1
cluster.append_remote_ip_info(*prompt.listen_address)
status, codes = decoder.link_clusters([cluster], 20000)
assert status == LLMStatusCode.LLM_SUCCESS, codes

# Four layers, so eight tensors; the byte of tensor t, entry b is 16 * t + b + 1.
kv_desc = CacheDesc(8, [4, 32], DataType.DT_UINT8)
cache_keys = [CacheKey(1, req_id=1), CacheKey(1, req_id=2)]
source = prompt.kv_cache_manager.allocate_cache(kv_desc, cache_keys)
for t in range(8):
    tensor = prompt.kv_cache_manager.get_cache_tensors(source, t)[0].numpy()
    for b in range(4):
        tensor[b] = 16 * t + b + 1

kv_cache_manager = decoder.kv_cache_manager
cache = kv_cache_manager.allocate_cache(kv_desc)

def held(entry):
    tensors = [kv_cache_manager.get_cache_tensors(cache, t)[0].numpy()[entry] for t in range(8)]
    assert all((tensor == tensor[0]).all() for tensor in tensors)
    return [int(tensor[0]) for tensor in tensors]

kv_cache_manager.pull_cache(cache_keys[0], cache, 0)
assert held(0) == [16 * t + 1 for t in range(8)]
kv_cache_manager.pull_cache(cache_keys[1], cache, 1, src_layer_range=range(0,2), dst_layer_range=range(2,4))
assert held(1) == [0, 0, 0, 0, 2, 18, 34, 50]
kv_cache_manager.pull_cache(cache_keys[1], cache, src_cache_offset=0, dst_cache_offset=0)
assert held(0) == [16 * t + 2 for t in range(8)]
assert held(2) == held(3) == [0] * 8

try:
    kv_cache_manager.pull_cache(cache_keys[0], cache, 0)
except LLMException as error:
    assert error.status_code == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
else:
    raise AssertionError("the first key should have been used up")
kv_cache_manager.deallocate_cache(cache)
prompt.kv_cache_manager.remove_cache_key(cache_keys[1])
prompt.kv_cache_manager.deallocate_cache(source)
decoder.finalize()
prompt.finalize()
print("as documented")
"""

IMPORTS = {
    "kvpull_sync": "from kvpull_sync import *\n",
    "llm_datadist": "import kvpull_sync\nkvpull_sync.install_as_llm_datadist()\nfrom llm_datadist import *\n",
}


def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = folder / "program.py"
    path.write_text(program)
    return subprocess.run(
        [sys.executable, "-W", "error", str(path)], capture_output=True, text=True, timeout=100, check=False
    )


@pytest.mark.smoke
@pytest.mark.parametrize("package", IMPORTS)
def test_the_documented_calls_run_as_written(package: str, tmp_path: Path) -> None:
    ended = run(IMPORTS[package] + PROGRAM, tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "as documented\n", "")


def test_installing_changes_what_an_import_gives_and_nothing_else(tmp_path: Path) -> None:
    program = """
import kvpull_sync, sys
before = set(sys.modules)
kvpull_sync.install_as_llm_datadist()
kvpull_sync.install_as_llm_datadist()
import llm_datadist
from llm_datadist import LLMDataDist
assert llm_datadist is kvpull_sync and LLMDataDist is kvpull_sync.LLMDataDist
assert {name.partition(".")[0] for name in set(sys.modules) - before} == {"llm_datadist"}
"""
    ended = run(program, tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_an_original_that_is_imported_already_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "llm_datadist.py").write_text("original = True\n")
    program = """
import llm_datadist, kvpull_sync
try:
    kvpull_sync.install_as_llm_datadist()
except RuntimeError as error:
    assert "llm_datadist" in str(error)
else:
    raise AssertionError("it was replaced")
import llm_datadist
assert llm_datadist.original
"""
    ended = run(program, tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_importing_starts_no_thread(tmp_path: Path) -> None:
    ended = run("import threading, kvpull_sync\nassert threading.active_count() == 1\n", tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
