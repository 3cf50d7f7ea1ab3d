"""TLS 1.3 records made by hand: one KeyUpdate after the other, which no TLS library sends in such numbers."""

from __future__ import annotations

import contextlib
import socket
import struct
from pathlib import Path

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand


class KeyUpdates:
    """For a client that has sent nothing since its handshake, with TLS_AES_256_GCM_SHA384, from the log of its keys."""

    def __init__(self, keylog: Path) -> None:
        (line,) = [line for line in keylog.read_text().splitlines() if line.startswith("CLIENT_TRAFFIC_SECRET_0 ")]
        self._secret = bytes.fromhex(line.split()[2])

    def record(self) -> bytes:
        """The next one; it asks the peer for new keys, too. RFC 8446, 5.2 and 7.2."""
        key, nonce = self._expand("key", 32), self._expand("iv", 12)  # the number of a first record is 0
        message = struct.pack(">B3sB", 24, b"\0\0\x01", 1) + b"\x16"
        head = struct.pack(">BHH", 0x17, 0x0303, len(message) + 16)
        self._secret = self._expand("traffic upd", 48)
        return head + AESGCM(key).encrypt(nonce, message, head)

    def flood(self, sock: socket.socket, count: int) -> None:
        """Until the peer has had enough."""
        sock.settimeout(20.0)
        with contextlib.suppress(ConnectionError):
            for _ in range(count // 100):
                sock.sendall(b"".join(self.record() for _ in range(100)))

    def _expand(self, label: str, length: int) -> bytes:
        name = f"tls13 {label}".encode()
        info = struct.pack(">HB", length, len(name)) + name + b"\0"
        return HKDFExpand(hashes.SHA384(), length, info).derive(self._secret)
