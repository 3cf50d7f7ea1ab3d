"""Rank tables and nodes for tests of links by rank table."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from typing import Any

Device = dict[str, str]
_names = itertools.count()


def comm_name(what: str = "comm") -> str:
    """One that no other test has, so that tests which run at the same time do not meet."""
    return f"{what}-{os.getpid()}-{next(_names)}"


def device(rank: int, ip: str | None = "127.0.0.1", **more: str) -> Device:
    entry = {"device_id": str(rank), "rank_id": str(rank), **more}
    return entry if ip is None else {**entry, "device_ip": ip}


def table(*servers: Sequence[Device], version: str = "1.0", names: Sequence[str] = (), **more: Any) -> str:
    """Each server with its devices; the servers are node_0, node_1, ... unless `names` says otherwise."""
    ids = [names[i] if i < len(names) else f"node_{i}" for i in range(len(servers))]
    entries = [{"server_id": name, "device": list(devices)} for name, devices in zip(ids, servers, strict=True)]
    made = {"version": version, "server_count": str(len(servers)), "server_list": entries, "status": "completed"}
    if version == "1.2":
        made["super_pod_list"] = [{"super_pod_id": "0", "server_list": [{"server_id": name} for name in ids]}]
    return json.dumps({**made, **more})


def together(*ranks: int, ip: str = "10.1.1.1", **more: Any) -> str:
    """All on one server, whose devices have addresses that lead nowhere here."""
    return table([device(rank, ip) for rank in ranks or (0, 1)], **more)
