"""`python -m tests.acl_emulator [RELEASE]` builds the library and prints the folder for ASCEND_HOME_PATH to name."""

from __future__ import annotations

import shutil
import sys

from tests.acl_emulator import RELEASES, build


def main() -> int:
    """The exit code; what is wrong goes to standard error, the folder alone to standard output."""
    release = sys.argv[1] if len(sys.argv) > 1 else "9.0"
    if shutil.which("gcc") is None:
        return _refuse("the emulator of an NPU is compiled with gcc, which is not installed")
    if release not in RELEASES:
        return _refuse(f"there is no release {release}; known are {', '.join(RELEASES)}")
    sys.stdout.write(f"{build(release=release)}\n")
    return 0


def _refuse(why: str) -> int:
    sys.stderr.write(f"{why}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
