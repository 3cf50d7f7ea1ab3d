"""Several hosts on one machine: network namespaces whose cables lead to a switch. For what loopback cannot show: a
cable that is pulled (nobody gets a reset), packets that are lost, a line that carries one direction only.

Needs root and iproute2. Namespaces are named after this process; those of processes that are gone are removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

_PREFIX = "kvpull-"
_NOBODY = "02:00:00:00:00:ff"
_CABLE = "eth0"


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout


def why_not() -> str:
    """Why there can be no such hosts here; "" if there can."""
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "there is no iproute2 here"
    name = f"{_PREFIX}{os.getpid()}-try"
    try:
        _ip("netns", "add", name)
        try:
            _ip("-n", name, "link", "add", "name", "switch", "type", "bridge")
            _ip("-n", name, "link", "add", "name", "p1", "type", "veth", "peer", "name", "p2")
        finally:
            _ip("netns", "del", name)
    except (subprocess.SubprocessError, OSError) as error:
        return f"no network namespaces can be made here: {getattr(error, 'stderr', '') or error}"
    return ""


@dataclass(frozen=True)
class Host:
    """One of them. `before` is what a command begins with that is to run there."""

    name: str
    address: str
    mac: str
    port: str
    switch: str

    @property
    def before(self) -> tuple[str, ...]:
        return "ip", "netns", "exec", self.name

    def unplug(self) -> None:
        """Pull the cable out of the switch: nothing comes or goes, and no connection hears of it."""
        _ip("-n", self.switch, "link", "set", self.port, "down")

    def plug(self) -> None:
        _ip("-n", self.switch, "link", "set", self.port, "up")

    def lose_what_goes_to(self, other: Host) -> None:
        """Only this direction: the other's packets still come."""
        self._address_to(other, _NOBODY)

    def find(self, other: Host) -> None:
        """No longer."""
        self._address_to(other, other.mac)

    def _address_to(self, other: Host, mac: str) -> None:
        _ip("-n", self.name, "neigh", "replace", other.address, "lladdr", mac, "dev", _CABLE, "nud", "permanent")

    def shape(self, *qdisc: str) -> None:
        """What goes out of here passes this queue of `tc`."""
        _run("tc", "-n", self.name, "qdisc", "replace", "dev", _CABLE, "root", *qdisc)

    def dropped(self) -> int:
        """How many packets that queue has dropped."""
        told = _run("tc", "-n", self.name, "-s", "qdisc", "show", "dev", _CABLE)
        return sum(int(number) for number in re.findall(r"dropped (\d+)", told))


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """So many, each with an address of its own. Skips the test, with the reason, where they cannot be."""
    if reason := why_not():
        pytest.skip(reason)
    _remove_those_of_the_dead()
    prefix = f"{_PREFIX}{os.getpid()}-"
    switch = f"{prefix}switch"
    made: list[str] = []
    try:
        _ip("netns", "add", switch)
        made.append(switch)
        _ip("-n", switch, "link", "add", "name", "switch", "type", "bridge", "forward_delay", "0")
        _ip("-n", switch, "link", "set", "switch", "up")
        found = []
        for number in range(1, count + 1):
            host = Host(f"{prefix}{number}", f"10.77.0.{number}", f"02:00:00:00:00:{number:02x}", f"p{number}", switch)
            _ip("netns", "add", host.name)
            made.append(host.name)
            _connect(host)
            found.append(host)
        yield found
    finally:
        for name in made:
            with contextlib.suppress(subprocess.SubprocessError, OSError):
                _ip("netns", "del", name)


def _connect(host: Host) -> None:
    end = ("name", _CABLE, "address", host.mac, "netns", host.name)
    _ip("-n", host.switch, "link", "add", "name", host.port, "type", "veth", "peer", *end)
    _ip("-n", host.switch, "link", "set", host.port, "master", "switch")
    _ip("-n", host.switch, "link", "set", host.port, "up")
    _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", _CABLE)
    for device in ("lo", _CABLE):
        _ip("-n", host.name, "link", "set", device, "up")


def _remove_those_of_the_dead() -> None:
    for name in re.findall(rf"^({_PREFIX}\d+-\w+)", _ip("netns", "list"), re.MULTILINE):
        if not Path(f"/proc/{name.split('-')[1]}").exists():
            with contextlib.suppress(subprocess.SubprocessError):
                _ip("netns", "del", name)
