"""The text of a report: what is known of the machine, and how each check went. Plain text, fit for an issue.

It names no environment variable but those of Ascend and the choice of memory. It must not run checks.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from kvpull_async.self_test.lines import State, Step

__all__ = ["SECTIONS", "Report", "facts"]

SECTIONS: Final[Mapping[int, str]] = {
    1: "binding",
    2: "initialisation and devices",
    3: "contexts",
    4: "copies",
    5: "time limits and aborts",
    6: "bandwidth of one stream",
    7: "pulls",
}
_DRIVER: Final = Path("/usr/local/Ascend/driver/version.info")
_PACKAGES: Final = ("kvpull", "numpy", "torch", "torch_npu")
_SECRETS: Final = ("SECRET", "TOKEN", "PASSWORD", "PASSWD", "KEY", "CREDENTIAL")
_LONGEST: Final = 300


def facts(environ: Mapping[str, str], *, driver: Path = _DRIVER) -> dict[str, str]:
    """What matters of this machine, by name."""
    found = {name: _version(name) for name in _PACKAGES}
    found["Python"] = f"{platform.python_implementation()} {platform.python_version()}"
    found["kernel"] = f"{platform.system()} {platform.release()}"
    found["machine"] = f"{platform.machine()}, {os.cpu_count()} CPUs, {_libc()}"
    found["driver"] = _read(driver)
    for name in sorted(environ):
        if _matters(name):
            found[name] = environ[name][:_LONGEST]
    return found


class Report:
    """Writes each line as it is known, by `write`."""

    def __init__(self, write: Callable[[str], object], *, known: Mapping[str, str]) -> None:
        self.steps: list[Step] = []
        self._known = known
        self._write = write
        self._section = 0
        write("kvpull: self-test of NPU memory\n")
        width = max(map(len, known))
        for name, value in known.items():
            write(f"  {name:<{width}}  {value}")

    def add(self, step: Step) -> None:
        """How one check went."""
        self.steps.append(step)
        self._head(step.section or self._section)
        took = f"  [{step.seconds:.2f} s]" if step.seconds >= 0.5 else ""
        self._write(f"  {step.state.value:<7}  {step.name}: {step.text}{took}")
        for line in step.lines:
            self._write(f"           {line}")

    def skip(self, sections: Iterable[int], why: str) -> None:
        """Those of which nothing has been tried."""
        tried = {step.section for step in self.steps}
        for section in sections:
            if section not in tried:
                self.add(Step(section, "all of it", State.SKIPPED, why))

    def summary(self, seconds: float) -> bool:
        """Whether nothing failed. To be called once, at the end."""
        numbers = [f"{self.count(state)} {state.value}" for state in (State.OK, State.FAILED, State.SKIPPED)]
        failed = [f"{SECTIONS.get(step.section, '')}: {step.name}" for step in self.steps if step.state is State.FAILED]
        self._write(f"\n{', '.join(numbers)}; {seconds:.1f} s")
        for name in failed:
            self._write(f"  FAILED  {name}")
        well = not failed and self.count(State.OK) > 0
        self._write("OK: device memory can be used here" if well else "FAILED: do not rely on device memory here")
        return well

    def count(self, state: State) -> int:
        return sum(step.state is state for step in self.steps)

    def data(self) -> dict[str, Any]:
        """The same for programs."""
        return {
            "facts": dict(self._known),
            "steps": [{**asdict(step), "state": step.state.value} for step in self.steps],
        }

    def _head(self, section: int) -> None:
        if section != self._section:
            self._section = section
            self._write(f"\n{section} {SECTIONS[section]}")


def _matters(name: str) -> bool:
    ours = name.startswith("ASCEND_") or name == "KVPULL_DEVICE_BACKEND"
    return ours and not any(part in name for part in _SECRETS)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _libc() -> str:
    return " ".join(part for part in platform.libc_ver() if part) or "unknown libc"


def _read(path: Path) -> str:
    """The lines of a small file, as one."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return f"unknown ({path}: {error.strerror})"
    return "; ".join(_filled(text.splitlines()))[:_LONGEST]


def _filled(lines: Sequence[str]) -> list[str]:
    return [line.strip() for line in lines if line.strip()]
