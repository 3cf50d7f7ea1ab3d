"""LLMClusterInfo: whom to link with, and IPv4 addresses as the original's little-endian integers.

Pure: addresses are parsed here by hand, and nothing is resolved or connected.
"""

from __future__ import annotations

import re

from kvpull_async.values._check import Checked, index, uint16, uint32, uint64
from kvpull_async.values.enums import LLMRole

_PART = re.compile(r"0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]{0,9}")


def ip_to_int(ip: str | int) -> int:
    """An IPv4 address as a little-endian integer; an int is taken as it is (uint32).

    Text follows inet_aton: one to four parts, each decimal, octal (leading 0) or hexadecimal (leading 0x), the last of
    which fills the bytes that are left. Errors: RuntimeError for other text, TypeError, ValueError.
    """
    if not isinstance(ip, str):
        return uint32("ip", ip)
    parts = ip.split(".")
    if len(parts) > 4 or not all(map(_PART.fullmatch, parts)):
        raise RuntimeError(f"{ip!r} is not an IPv4 address")
    *heads, tail = [_part_value(part) for part in parts]
    room = 4 - len(heads)
    if max(heads, default=0) > 255 or tail >= 256**room:
        raise RuntimeError(f"{ip!r} is not an IPv4 address")
    return int.from_bytes(bytes(heads) + tail.to_bytes(room, "big"), "little")


def _part_value(part: str) -> int:
    if part[:2] in ("0x", "0X"):
        return int(part, 16)
    return int(part, 8 if part.startswith("0") else 10)


def int_to_ip(number: int) -> str:
    """The dotted form of a little-endian integer (uint32): the reverse of ``ip_to_int``."""
    return ".".join(str(byte) for byte in uint32("number", number).to_bytes(4, "little"))


def _role(name: str, value: object) -> LLMRole | int:
    return value if isinstance(value, LLMRole) else index(name, value)


class LLMClusterInfo:
    """One remote cluster for ``link_clusters`` and ``unlink_clusters``.

    Set ``remote_cluster_id`` (uint64; None before) and append one remote address; a forced unlink needs the id only.
    ``remote_role_type`` is kept for existing callers and used for nothing. Errors: TypeError, ValueError.
    """

    remote_cluster_id: Checked[int | None] = Checked(uint64)
    remote_role_type: Checked[LLMRole | int | None] = Checked(_role)

    def __init__(self) -> None:
        self._local: list[tuple[int, int]] = []
        self._remote: list[tuple[int, int]] = []

    def append_local_ip_info(self, ip: str | int, port: int) -> None:
        """Add a local address: text or little-endian integer, and a port (uint16; 0 = any).

        Errors: RuntimeError for text that is no address, TypeError, ValueError.
        """
        self._local.append((ip_to_int(ip), uint16("port", port)))

    def append_remote_ip_info(self, ip: str | int, port: int) -> None:
        """Add the remote cluster's address. Arguments and errors as for ``append_local_ip_info``."""
        self._remote.append((ip_to_int(ip), uint16("port", port)))

    @property
    def local_ip_info_list(self) -> list[tuple[int, int]]:
        """The local addresses as (little-endian integer, port)."""
        return list(self._local)

    @property
    def remote_ip_info_list(self) -> list[tuple[int, int]]:
        """The remote addresses as (little-endian integer, port)."""
        return list(self._remote)

    def __repr__(self) -> str:
        remote = ", ".join(f"{int_to_ip(ip)}:{port}" for ip, port in self._remote)
        return f"<LLMClusterInfo {self.remote_cluster_id} at [{remote}]>"
