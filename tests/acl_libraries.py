"""Small libraries that look like AscendCL's, compiled to test the binding: their functions answer 0 and do nothing.

The one that behaves like a device is `tests/acl_emulator`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from kvpull_async.memory._acl import REQUIRED

# The structures as C knows them, for code of a test's own.
TYPES = """
#include <stddef.h>
#include <stdint.h>
typedef struct { uint32_t id; int type; } Location;
typedef struct { Location dst; Location src; uint8_t reserved[16]; } BatchAttr;
typedef struct { Location location; uint32_t page_size; uint32_t reserved[4]; } PtrAttributes;
"""


class Library(Protocol):
    """Makes `<home>/lib64/<name>` with these functions and this code; gives the home."""

    def __call__(
        self,
        home: str,
        *,
        name: str = "libascendcl.so",
        functions: Iterable[str] = REQUIRED,
        code: str = "",
        soname: str | None = None,
    ) -> Path: ...


def compiler(gcc: str, root: Path) -> Library:
    """What makes libraries below *root*."""

    def library(
        home: str,
        *,
        name: str = "libascendcl.so",
        functions: Iterable[str] = REQUIRED,
        code: str = "",
        soname: str | None = None,
    ) -> Path:
        folder = root / home / "lib64"
        folder.mkdir(parents=True, exist_ok=True)
        source = TYPES + code + "".join(f"int {function}(void) {{ return 0; }}\n" for function in functions)
        command = [gcc, "-shared", "-fPIC", "-x", "c", "-", "-o", str(folder / name)]
        command += [f"-Wl,-soname,{soname}"] if soname else []
        subprocess.run(command, input=source, text=True, check=True, timeout=60)
        return folder.parent

    return library


def at(home: Path) -> dict[str, str]:
    """The environment that names *home*."""
    return {"ASCEND_HOME_PATH": str(home)}


def ran(program: str, **environ: str) -> str:
    """What a Python of its own prints, with no Ascend in its environment but what is given."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("ASCEND", "LD_"))}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{textwrap.dedent(program)}"],
        env=inherited | environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
