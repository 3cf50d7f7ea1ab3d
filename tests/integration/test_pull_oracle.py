"""Random pulls, for real, over one long-lived pair of linked nodes, against the byte-by-byte oracle.

Every pull either delivers exactly the bytes that the oracle says, or fails as the oracle says and changes nothing.
Either way its key is there afterwards, unless the pull was one that uses it up, and the link serves the next example.
KVPULL_PROPERTY_EXAMPLES sets the number of examples, 200 by default.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvpull_async import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LLMClusterInfo,
    LLMConfig,
    LLMException,
    LLMRole,
    LLMStatusCode,
)
from tests import npu
from tests.conformance.api import AWAITED, BLOCKING, Api
from tests.oracle import CacheModel, Descriptor, PullArguments, Refused, expected
from tests.strategies import PullCase, pulls, thorough

SOURCE, DESTINATION = 1, 2
PADDING, MODEL = 2**64 - 1, 5
RANGES = ("src_layer_range", "dst_layer_range", "tensor_num_per_layer")
OFFSETS = ("src_cache_offset", "dst_cache_offset")


@dataclass(frozen=True)
class Naming:
    """How a source entry is named, who owns its memory, and which manager pulls."""

    kind: str
    registered: bool
    older: bool


namings = st.builds(
    Naming, kind=st.sampled_from(["request", "prefix", "id"]), registered=st.booleans(), older=st.booleans()
)


class Pair:
    """A source and a destination node, linked for as long as the test runs. Calls are made through one face."""

    def __init__(self, api: Api, options: dict[str, str]) -> None:
        self._api = api
        self.source = api.package.LLMDataDist(LLMRole.PROMPT, SOURCE)
        self.destination = api.package.LLMDataDist(LLMRole.DECODER, DESTINATION)
        self._options = options

    def call(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        return self._api.run(self._api.do(method, *args, **kwargs))

    def begin(self) -> None:
        self.call(self.source.init, {**self._options, "llm.listenIpInfo": "127.0.0.1:0"})
        self.call(self.destination.init, self._options)
        info = LLMClusterInfo()
        info.remote_cluster_id = SOURCE
        info.append_remote_ip_info(*self.source.listen_address)
        status, codes = self.call(self.destination.link_clusters, [info], timeout=20_000)
        assert status == LLMStatusCode.LLM_SUCCESS, codes

    def end(self) -> None:
        self.call(self.destination.finalize)
        self.call(self.source.finalize)


@contextmanager
def linked(api: Api, transport: str, inline_limit: int) -> Iterator[Pair]:
    config = LLMConfig()
    config.enable_cache_manager = True
    config.transfer_backend = transport
    config.inline_limit = inline_limit
    config.sync_kv_timeout = 20_000
    pair = Pair(api, config.generate_options())
    try:
        pair.begin()
        yield pair
    finally:
        pair.end()


class Example:
    """The two caches of one example, made for real."""

    def __init__(self, pair: Pair, case: PullCase, naming: Naming) -> None:
        self._pair = pair
        self._naming = naming
        self._case = case
        self._memory: list[NDArray[np.uint8]] = []
        self._manager = pair.source.cache_manager
        self.source = self._make_source(case.source, case.arguments.src_entry)
        self.destination = self._make_destination(case.destination)

    def _make_source(self, model: CacheModel, entry: int) -> Any:
        desc, keys = described(model.descriptor), self._keys(model.descriptor, entry)
        call = self._pair.call
        if self._naming.registered:
            self._memory = [npu.room(len(tensor)) for tensor in model.tensors]
            for room, tensor in zip(self._memory, model.tensors, strict=True):
                room[:] = np.frombuffer(tensor, np.uint8)
            addresses = npu.addresses(self._memory)
            if model.descriptor.blocks:
                return call(self._manager.register_blocks_cache, desc, addresses, BlocksCacheKey(SOURCE, MODEL))
            return call(self._manager.register_cache, desc, addresses, keys)
        if model.descriptor.blocks:
            cache = call(self._manager.allocate_blocks_cache, desc, BlocksCacheKey(SOURCE, MODEL))
        else:
            cache = call(self._manager.allocate_cache, desc, keys)
        fill(cache, model)
        return cache

    def _keys(self, descriptor: Descriptor, entry: int) -> list[CacheKey]:
        """A key for the entry that is to be pulled, behind as much padding as it takes."""
        if self._naming.kind == "id" or entry >= descriptor.entries:
            return []
        return [CacheKey(SOURCE, PADDING)] * entry + [self.key]

    @property
    def key(self) -> Any:
        arguments = self._case.arguments
        if self._case.source.descriptor.blocks:
            return BlocksCacheKey(SOURCE, MODEL)
        if self._naming.kind == "id" or arguments.src_entry >= self._case.source.descriptor.entries:
            return CacheKeyByIdAndIndex(SOURCE, self.source.cache_id, arguments.src_entry)
        if self._naming.kind == "prefix":
            return CacheKey(SOURCE, PADDING, MODEL, prefix_id=9)
        return CacheKey(SOURCE, 9, MODEL)

    def _make_destination(self, model: CacheModel) -> Any:
        destination = self._pair.destination
        # Pulls into blocks from a contiguous entry are the newer manager's; so all pulls of blocks are made with it.
        older = self._naming.older and not self._case.arguments.is_blocks
        self._puller = destination.kv_cache_manager if older else destination.cache_manager
        make = self._puller.allocate_blocks_cache if model.descriptor.blocks else self._puller.allocate_cache
        cache = self._pair.call(make, described(model.descriptor))
        fill(cache, model)
        return cache

    def pull(self, arguments: PullArguments) -> None:
        given = {name: getattr(arguments, name) for name in RANGES}
        if arguments.is_blocks:
            call, chosen = self._puller.pull_blocks, [arguments.src_blocks, arguments.dst_blocks]
        else:
            call, chosen = self._puller.pull_cache, [arguments.batch_index, arguments.size]
            given.update({name: getattr(arguments, name) for name in OFFSETS})
        assert self._pair.call(call, self.key, self.destination, *chosen, **given) is None

    def outcome(self) -> list[bytes] | str:
        """The destination's bytes after the pull, or what it raised."""
        try:
            self.pull(self._case.arguments)
        except LLMException as error:
            return LLMStatusCode(error.status_code).name
        except (TypeError, ValueError) as error:
            return type(error).__name__
        return self.content()

    def content(self) -> list[bytes]:
        return content(self.destination)

    def source_content(self) -> list[bytes]:
        return content(self.source)

    def consumes(self) -> bool:
        """Whether a successful pull uses the key up; as in the documentation, told from the arguments alone."""
        arguments = self._case.arguments
        whole = not arguments.src_layer_range or len(arguments.src_layer_range) * int(
            arguments.tensor_num_per_layer
        ) == (self._case.source.descriptor.num_tensors)
        offset = arguments.src_cache_offset is not None or arguments.dst_cache_offset is not None
        offset = offset and not arguments.is_blocks
        plain = isinstance(self.key, CacheKey) and self._naming.kind == "request"
        return plain and not self._naming.registered and not offset and whole

    def key_is_there(self) -> bool:
        """Whether the source still has the key: asked for one byte too many, it says so instead of sending them."""
        spare = self._pair.destination.cache_manager
        nbytes = self._case.source.descriptor.entry_nbytes + 1
        probe = self._pair.call(spare.allocate_cache, CacheDesc(1, [1, nbytes], DataType.DT_INT8))
        try:
            self._pair.call(spare.pull_cache, self.key, probe, src_layer_range=range(1), tensor_num_per_layer=1)
        except LLMException as error:
            return bool(error.status_code != LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)
        finally:
            self._pair.call(spare.deallocate_cache, probe)
        raise AssertionError("more bytes came than an entry has")

    def end(self) -> None:
        call, source = self._pair.call, self._case.source.descriptor
        if self._naming.registered:
            call(self._manager.unregister_cache, self.source.cache_id)
        elif source.blocks:
            call(self._manager.deallocate_blocks_cache, self.source)
        else:
            if isinstance(self.key, CacheKey):
                call(self._manager.remove_cache_key, self.key)
            call(self._manager.deallocate_cache, self.source)
        blocks = self._case.destination.descriptor.blocks
        # The older manager has one call for both kinds.
        own = getattr(self._puller, "deallocate_blocks_cache", self._puller.deallocate_cache)
        call(own if blocks else self._puller.deallocate_cache, self.destination)


def described(descriptor: Descriptor) -> CacheDesc:
    return CacheDesc(descriptor.num_tensors, list(descriptor.shape), DataType[descriptor.data_type])


def fill(cache: Any, model: CacheModel) -> None:
    views = npu.tensors(cache)
    for number, tensor in enumerate(model.tensors):
        views[number][:] = np.frombuffer(tensor, np.uint8)


def content(cache: Any) -> list[bytes]:
    return [tensor.tobytes() for tensor in npu.tensors(cache)]


def check(pair: Pair, case: PullCase, naming: Naming) -> None:
    right = expected(case.source, case.destination, case.arguments)
    example = Example(pair, case, naming)
    try:
        outcome = example.outcome()
        if isinstance(right, Refused):
            event("refused")
            assert outcome in right.kinds, f"{outcome}, but {set(right.kinds)} expected"
            assert example.content() == [bytes(tensor) for tensor in case.destination.tensors], "it was changed"
        else:
            event("delivered")
            assert outcome == [bytes(tensor) for tensor in right]
        assert example.source_content() == [bytes(tensor) for tensor in case.source.tensors], "the source was changed"
        if not case.source.descriptor.blocks and case.arguments.src_entry < case.source.descriptor.entries:
            used_up = not isinstance(right, Refused) and example.consumes()
            assert example.key_is_there() is not used_up
    finally:
        example.end()


SETTINGS = [
    pytest.param(AWAITED, "inproc", 65536, id="awaited-inproc-inline"),
    pytest.param(BLOCKING, "inproc", 0, id="blocking-inproc-streamed"),
    pytest.param(AWAITED, "shm", 0, id="awaited-shm-copied"),
    pytest.param(BLOCKING, "tcp", 65536, id="blocking-tcp-inline"),
    pytest.param(AWAITED, "tcp", 0, id="awaited-tcp-streamed"),
]


@pytest.mark.parametrize(("api", "transport", "inline_limit"), SETTINGS)
def test_p2_any_pull_is_whole_or_changes_nothing(api: Api, transport: str, inline_limit: int) -> None:
    with linked(api, transport, inline_limit) as pair:

        @thorough
        @given(case=pulls(), naming=namings)
        def examples(case: PullCase, naming: Naming) -> None:
            check(pair, case, naming)

        examples()
        assert "links_lost" not in pair.destination.counters, "one link serves them all, refused ones included"
