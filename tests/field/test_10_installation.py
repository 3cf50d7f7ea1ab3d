"""Reports of installations: libraries that are not there, clash, or fail to load in silence; versions that differ."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from typing import Any

import msgspec
import pytest
from packaging.requirements import Requirement

from kvpull_async import CacheDesc, DataType, LLMConfig, LLMDataDist, LLMException, LLMRole, LLMStatusCode
from kvpull_async.protocol import frames
from tests import house
from tests.conformance.api import Api
from tests.hostile import Raw, honest_client, messages, serving
from tests.integration.rig import each_face
from tests.loop_nodes import event_log
from tests.wire import plain_hello

REQUIRED = {"anyio", "async-timeout", "msgspec", "numpy", "structlog"}
ENGINES = ("nixl", "mooncake", "libuc", "cuda", "nccl", "ibverbs", "hccl", "ascend", "rocm")

PULL = """
import asyncio, sys
from pathlib import Path

class Absent:
    'As on a machine that has none of these.'
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.split(".")[0] in ("torch", "torch_npu", "nixl", "mooncake", "cupy", "acl", "uvloop", "xxhash"):
            raise ImportError(f"no module named {name}")

sys.meta_path.insert(0, Absent)
from kvpull_async import CacheKey
from kvpull_async.memory.copying import ACCELERATED
from tests import duo

async def main():
    for transport in ("tcp", "inproc", "shm"):
        async with duo.duo(transport=transport) as pair:
            for desc, first in ((duo.SMALL, 0), (duo.BIG, 10)):
                await pair.publish(desc, first=first)
                cache = await pair.destination(desc)
                await pair.decoder.kv_cache_manager.pull_cache(CacheKey(duo.PROMPT, first + 1), cache, 0)
                assert duo.holds(cache, entry=0, source=1)

asyncio.run(main())
print(ACCELERATED)
print(*sorted({line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line}))
"""


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A program of its own, in which a warning is an error."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{program}"],
        capture_output=True, text=True, timeout=100, check=False, cwd=house.ROOT, env={**os.environ, **environment},
    )  # fmt: skip


@pytest.mark.parametrize("extension", ["", "1"], ids=["extension", "pure Python"])
def test_10_1_without_any_library_of_a_device_pulls_work_over_every_path(extension: str) -> None:
    """Neither the optional packages nor the own extension are needed."""
    done = run(PULL, KVPULL_NO_EXTENSION=extension)
    assert done.returncode == 0, done.stderr
    accelerated = done.stdout.splitlines()[0]
    assert accelerated == "False" or not extension


def test_10_1_the_package_requires_nothing_but_plain_libraries() -> None:
    requirements = [Requirement(text) for text in metadata.requires("kvpull") or []]
    assert {one.name for one in requirements if "extra" not in str(one.marker)} == REQUIRED


def test_10_3_a_program_that_pulls_has_loaded_no_library_of_an_engine() -> None:
    """So none can clash with the copy that the program, or its machine, brings along."""
    done = run(PULL)
    assert done.returncode == 0, done.stderr
    names = [os.path.basename(path).lower() for path in done.stdout.splitlines()[1].split()]  # noqa: PTH119
    assert any(name.startswith("libc.") for name in names), names
    assert [name for name in names if any(engine in name for engine in ENGINES)] == []


@pytest.mark.parametrize("engine", ["nixl", "mooncake"])
@each_face
async def test_10_4_an_engine_that_is_not_available_says_so_by_name_when_it_is_chosen(engine: str, api: Api) -> None:
    config = LLMConfig()
    config.transfer_backend = engine
    node = api.package.LLMDataDist(LLMRole.DECODER, 1)
    with pytest.raises(LLMException, match=f"{engine} is not in this version") as caught:
        await api.do(node.init, config.generate_options())
    assert caught.value.status_code is LLMStatusCode.LLM_FEATURE_NOT_ENABLED


BROKEN = """
import importlib.machinery, sys

class Broken:
    'An extension that was built, but does not load here.'
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "kvpull_async.memory._speedups":
            return importlib.machinery.ModuleSpec(name, Broken)
    @staticmethod
    def create_module(spec):
        raise ImportError("libmissing.so.9: cannot open shared object file")
    exec_module = None

sys.meta_path.insert(0, Broken)
import kvpull_async.memory.copying
"""


def test_10_4_an_extension_that_does_not_load_fails_with_its_own_reason_and_can_be_left_out() -> None:
    """It is not taken for one that was never built."""
    broken = run(BROKEN)
    assert broken.returncode != 0
    assert "ImportError: libmissing.so.9: cannot open shared object file" in broken.stderr
    assert run(BROKEN, KVPULL_NO_EXTENSION="1").returncode == 0


async def test_10_4_memory_of_a_library_that_is_missing_is_not_looked_for() -> None:
    """What is no tensor is told by its type; no import is tried, and none is swallowed."""
    async with LLMDataDist(LLMRole.MIX, 1) as node:
        await node.init({})
        with pytest.raises(TypeError, match=r"tensors\[0\] must be a torch tensor or a numpy array"):
            await node.cache_manager.register_cache(CacheDesc(1, [1, 8], DataType.DT_UINT8), tensors=[b"12345678"])


def refusal(said: bytes) -> str:
    """Of what a peer answers to a greeting: the reason for which it refuses."""
    return next(message.reason for message in messages(said) if isinstance(message, frames.Reject))


@pytest.mark.parametrize("version", [1, 2, 77], ids=["oldest", "older", "of the future"])
async def test_10_5_a_peer_of_another_version_is_told_both_versions(version: int) -> None:
    """A mixed installation is found out while the link is made, on both sides."""
    other: dict[str, Any] = {"version": version}
    if "oldest" in frames.Hello.__struct_fields__ and version == 77:
        other["oldest"] = 76
    with event_log() as log:
        async with serving() as source:
            raw = await Raw.connect(source.listen_address)
            await raw.send(frames.encode(msgspec.structs.replace(plain_hello(asked=1), **other)))
            reason = refusal(await raw.rest())
            told = (await log.first("link.rejected", text="speaks protocol"))["reason"]
            for text in (reason, told):
                assert str(version) in text, text
                assert str(frames.VERSION) in text, text
            await honest_client(source)


def test_10_5_the_lowest_version_of_everything_required_is_one_that_is_tested() -> None:
    pins = (house.ROOT / "tests" / "lowest-requirements.txt").read_text(encoding="utf-8").splitlines()
    tested = {line.split("==")[0]: line.split("==")[1] for line in pins if not line.startswith("#")}
    assert set(tested) == REQUIRED
    for text in metadata.requires("kvpull") or []:
        one = Requirement(text)
        if one.name in tested and "extra" not in str(one.marker):
            assert one.specifier.contains(tested[one.name])
