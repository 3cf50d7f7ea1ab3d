"""Rank tables: JSON to the places of ranks, and from these who meets whom, at which addresses. It does no I/O.

A comm is a group of two to four clusters, each with a rank. In each pair the lower rank listens and the higher one
dials. Both derive the addresses and ports from the table, so that neither has to be told.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvpull_async.config import kinds
from kvpull_async.values._check import instance, require, uint32, uint64

__all__ = ["Gathering", "Member", "Place", "gathering", "places"]

_VERSIONS: Final = ("1.0", "1.2")
_LOOPBACK: Final = "127.0.0.1"
_PORTS: Final = 4096
_SUCCESSORS: Final = 8
"""Ports that a listener tries, so that a few groups may fall on the same one."""
_RANK_MOST: Final = 2**32 - 1


@dataclass(frozen=True)
class Place:
    """Where a rank is, as the table has it; "" for what it does not say."""

    rank: int
    server: int
    server_id: str
    device_id: str
    device_ip: str
    host_ip: str


@dataclass(frozen=True)
class Member:
    """Another member of the comm: where the two may meet, most promising first."""

    cluster_id: int
    hosts: tuple[str, ...]
    ports: tuple[int, ...]

    @property
    def addresses(self) -> tuple[tuple[str, int], ...]:
        return tuple((host, port) for port in self.ports for host in self.hosts)


@dataclass(frozen=True)
class Gathering:
    """What one member does: dial those of lower rank, and listen on `ports` for those of higher rank. `group` tells
    this comm from others that come to the same port.
    """

    name: str
    group: str
    ports: tuple[int, ...]
    dials: tuple[Member, ...]
    awaits: tuple[Member, ...]

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(member.cluster_id for member in (*self.dials, *self.awaits))


def gathering(
    name: object, ranks: object, table: object, *, own: int, port_base: int, renamed: Mapping[str, str]
) -> Gathering:
    """The arguments of ``link``, checked, as seen from cluster *own*. *renamed* says which address to use for what
    stands in the table. TypeError, ValueError, LLMException with LLM_PARAM_INVALID.
    """
    text = instance("comm_name", name, str)
    require(0 < len(text) < 128, f"comm_name must have 1 to 127 characters, got {len(text)}")
    members = _members(ranks)
    found = places(instance("rank_table", table, str))
    require(own in members, f"cluster_rank_info does not hold this node, cluster {own}")
    for cluster_id, rank in members.items():
        require(rank in found, f"rank {rank} of cluster {cluster_id} does not stand in rank_table")
    group = _digest(text, members, found)

    def ports(rank: int) -> tuple[int, ...]:
        first = port_base + int.from_bytes(hashlib.sha256(f"{group} {rank}".encode()).digest()[:4], "big") % _PORTS
        return tuple(range(first, first + _SUCCESSORS))

    mine = members[own]
    dials = [
        Member(cluster_id, _hosts(found[rank], found[mine], renamed), ports(rank))
        for cluster_id, rank in members.items()
        if rank < mine
    ]
    awaits = [
        Member(cluster_id, _hosts(found[mine], found[rank], renamed), ports(mine))
        for cluster_id, rank in members.items()
        if rank > mine
    ]
    return Gathering(text, group, ports(mine), tuple(dials), tuple(awaits))


def _members(ranks: object) -> dict[int, int]:
    given: dict[object, object] = instance("cluster_rank_info", ranks, dict)
    require(2 <= len(given) <= 4, f"cluster_rank_info must hold 2 to 4 clusters, got {len(given)}")
    members = {
        uint64("cluster_rank_info: a cluster id", cluster_id): uint32(f"cluster_rank_info[{cluster_id}]", rank)
        for cluster_id, rank in given.items()
    }
    ordered = list(members.values())
    require(ordered == sorted(set(ordered)), f"cluster_rank_info must list ranks in ascending order, got {ordered}")
    return members


def _digest(name: str, members: Mapping[int, int], found: Mapping[int, Place]) -> str:
    """What members of one comm have in common, and no other comm has: its name, its ranks and their devices."""
    ranks = sorted(members.items(), key=lambda item: item[1])
    devices = [[found[rank].device_id, found[rank].device_ip] for _, rank in ranks]
    return hashlib.sha256(json.dumps([name, ranks, devices]).encode()).hexdigest()[:32]


def _hosts(place: Place, seen_from: Place, renamed: Mapping[str, str]) -> tuple[str, ...]:
    """Where a rank may be found from the place of another one. The addresses of a device come last: without that
    device they lead nowhere, and an address that leads nowhere costs time.
    """
    together = place.server == seen_from.server or place.server_id == seen_from.server_id != ""
    hosts = [_LOOPBACK] if together else []
    for said in (place.host_ip, place.server_id, place.device_ip):
        host = renamed.get(said, said)
        if kinds.is_ipv4(host):
            hosts.append(host)
    return tuple(dict.fromkeys(hosts))


def places(text: str) -> dict[int, Place]:
    """The ranks of a table of version "1.0" or "1.2". LLM_PARAM_INVALID for text that is no such table."""
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        require(False, f"rank_table must be JSON: {error}")
    table = _object("rank_table", table)
    version = table.get("version", _VERSIONS[0])
    require(version in _VERSIONS, f"rank_table: version must be one of {', '.join(_VERSIONS)}, got {version!r}")
    found: dict[int, Place] = {}
    for number, server in enumerate(_list("server_list", table)):
        for device in _list("device", _object("an entry of server_list", server)):
            place = _place(number, server, _object("an entry of device", device))
            require(place.rank not in found, f"rank_table: rank {place.rank} stands in it twice")
            found[place.rank] = place
    return found


def _place(number: int, server: dict[str, Any], device: dict[str, Any]) -> Place:
    rank = _text(device, "rank_id")
    require(kinds.is_decimal(rank) and int(rank) <= _RANK_MOST, f"rank_table: rank_id must be a rank, got {rank!r}")
    host = _text(device, "host_ip") or _text(server, "host_ip")
    return Place(
        int(rank), number, _text(server, "server_id"), _text(device, "device_id"), _text(device, "device_ip"), host
    )


def _text(entry: dict[str, Any], name: str) -> str:
    """Numbers are strings in these tables; written as numbers they are understood, too."""
    value = entry.get(name)
    known = value is None or (isinstance(value, (str, int)) and not isinstance(value, bool))
    require(known, f"rank_table: {name} must be a string, got {value!r}")
    return "" if value is None else str(value)


def _object(what: str, value: object) -> dict[str, Any]:
    require(isinstance(value, dict), f"{what} must be a JSON object, got {value!r:.100}")
    return dict(value)  # type: ignore[call-overload, no-any-return]


def _list(name: str, entry: dict[str, Any]) -> list[Any]:
    value = entry.get(name)
    require(isinstance(value, list), f"rank_table: {name} must be a list, got {value!r:.100}")
    return list(value)  # type: ignore[arg-type]
