"""Every transport keeps the contracts of control channels and data paths, the deliberately bad ones too."""

from __future__ import annotations

import pytest

from kvpull_async.memory.base import MemoryBackend
from kvpull_async.memory.host import HostMemory
from kvpull_async.observe import Log
from kvpull_async.testing.contracts import ControlContract, DataPathContract
from kvpull_async.testing.faults import Faults, FaultyTransport
from kvpull_async.testing.stubborn import StubbornTransport
from kvpull_async.transport.base import Transport
from kvpull_async.transport.inproc import InprocTransport
from kvpull_async.transport.tcp import TcpTransport
from kvpull_async.transport.tls import Tls
from tests.certificates import Authority, cluster

pytestmark = pytest.mark.smoke


class TestTcp(ControlContract, DataPathContract):
    def make_transport(self) -> Transport:
        return TcpTransport(Log(), greeting_timeout=5)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    options = Authority(tmp_path_factory.mktemp("certificates")).issue("both", *cluster("*"))
    return Tls.load(certificate=options["tls_certificate"], key="", authority=options["tls_authority"])


class TestTcpWithTls(ControlContract, DataPathContract):
    @pytest.fixture(autouse=True)
    def _certificates(self, own: Tls) -> None:
        self.tls = own

    def make_transport(self) -> Transport:
        return TcpTransport(Log(), greeting_timeout=5, certificates=self.tls)


class TestInproc(ControlContract, DataPathContract):
    def make_transport(self) -> Transport:
        return InprocTransport(Log())


class TestFaultyWithoutFaults(ControlContract):
    def make_transport(self) -> Transport:
        return FaultyTransport(TcpTransport(Log(), greeting_timeout=5), Faults())


class TestStubborn(DataPathContract):
    """The path that refuses to abort."""

    stoppable = False

    def make_transport(self) -> Transport:
        return StubbornTransport(InprocTransport(Log()))

    def make_memory(self) -> MemoryBackend:
        return HostMemory()
