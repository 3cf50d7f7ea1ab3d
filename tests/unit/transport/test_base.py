"""What the contracts themselves promise to a transport's author; their behaviour is tested by the contract suite."""

from __future__ import annotations

import pytest

from kvpull_async._deadline import Deadline
from kvpull_async._workers import Workers
from kvpull_async.memory.base import Batches
from kvpull_async.transport import base
from kvpull_async.transport.base import (
    Address,
    ControlChannel,
    DataPath,
    Listener,
    OnChannel,
    PathSeed,
    Transfer,
    Transport,
)
from kvpull_async.transport.inproc import InprocTransport
from kvpull_async.transport.tcp import TcpTransport


class SmallestPath(DataPath):
    name = "smallest"

    async def ready(self, deadline: Deadline) -> None: ...

    def fetch(self, grant_id: bytes, landing: Batches, nbytes: int) -> Transfer:
        raise NotImplementedError

    def serve(self, grant_id: bytes, lending: Batches, nbytes: int) -> Transfer:
        raise NotImplementedError

    def abort(self) -> None: ...

    async def aclose(self, deadline: Deadline) -> None: ...


class SmallestTransport(Transport):
    name = "smallest"

    async def listen(self, address: Address, on_channel: OnChannel) -> Listener:
        raise NotImplementedError

    async def dial(self, address: Address) -> ControlChannel:
        raise NotImplementedError

    def path(self, seed: PathSeed) -> DataPath:
        return SmallestPath()


@pytest.mark.parametrize("contract", [ControlChannel, DataPath, Listener, Transport])
def test_a_contract_cannot_be_used_without_its_methods(contract: type[object]) -> None:
    with pytest.raises(TypeError, match="abstract"):
        contract()


def test_a_path_streams_and_has_nothing_to_release_unless_it_says_so() -> None:
    path = SmallestPath()
    assert path.one_sided is False
    path.release(b"g" * 16)


def test_a_transport_reaches_every_address_unless_it_says_otherwise() -> None:
    assert SmallestTransport().reaches(("10.0.0.1", 7))


def test_a_seed_does_not_show_its_token() -> None:
    seed = PathSeed(b"a secret token!!", 0, dialer=True, address=("127.0.0.1", 7), workers=Workers(1))
    assert "secret" not in repr(seed)


def test_the_transports_have_names_of_their_own() -> None:
    assert {TcpTransport.name, InprocTransport.name} == {"tcp", "inproc"}
    assert set(base.__all__) >= {"ControlChannel", "DataPath", "Listener", "Transfer", "Transport"}
