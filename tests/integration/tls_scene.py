"""A node with certificates, and clients made by hand that have others."""

from __future__ import annotations

import contextlib
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpull_async import LLMDataDist
from tests.certificates import Authority, cluster
from tests.hostile import honest_client, links_of, serving
from tests.integration.wire_client import AGREED, Peer, Wire
from tests.loop_nodes import eventually

NODE = 0x5EC2E7_C105_7E2D
"""A cluster id that does not come up by chance."""
ME = Peer(cluster_id=11, asked=NODE)


@dataclass
class Office:
    """Where certificates come from."""

    right: Authority
    wrong: Authority
    folder: Path

    @classmethod
    def at(cls, folder: Path) -> Office:
        """Both authorities have one name."""
        (folder / "wrong").mkdir()
        return cls(Authority(folder), Authority(folder / "wrong"), folder)

    def context(
        self, name: str, *uris: str, newest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3, wrong: bool = False, **more: Any
    ) -> ssl.SSLContext:
        """Of a client with such a certificate; any name of a file will do."""
        return presents(
            (self.wrong if wrong else self.right).issue(name, *uris, **more)["tls_certificate"], newest=newest
        )


def presents(path: str | None, *, newest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # whom it talks to is all the same to it
    context.maximum_version = newest
    if path is not None:
        context.load_cert_chain(path)
    return context


@contextlib.asynccontextmanager
async def guarded(office: Office, **more: Any) -> AsyncIterator[LLMDataDist]:
    async with serving(NODE, **office.right.issue("node", *cluster(NODE)), **more) as source:
        yield source
        await unharmed(office, source)


async def unharmed(office: Office, source: LLMDataDist) -> None:
    """An honest client links, pulls and leaves, and nothing else is linked."""
    began = time.monotonic()
    await honest_client(source, **office.right.issue("honest", *cluster(99)))
    assert time.monotonic() - began < 10
    await eventually(lambda: links_of(source) == [])


def admitted(source: LLMDataDist, context: ssl.SSLContext) -> Wire:
    """A control connection whose certificate has been found good."""
    wire = Wire.over_tls(source.listen_address, context)
    assert wire.take(1) == AGREED
    return wire
