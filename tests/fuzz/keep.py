"""Choose few and small inputs that reach all that many reach: ``python -m tests.fuzz.keep --target session FOLDER...``.

They take the place of those in the corpus, except of what once failed.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from tests.fuzz.targets import CORPUS, TARGETS, Target, inputs

_SOURCES = "/kvpull_async/"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--most", type=int, default=40, help="inputs")
    parser.add_argument("folders", type=Path, nargs="+")
    options = parser.parse_args()
    target = TARGETS[options.target]()
    found = {path.read_bytes() for folder in options.folders for path in folder.iterdir() if path.is_file()}
    kept = inputs(options.target)
    found |= {path.read_bytes() for path in kept}
    chosen = _chosen(target, sorted(found, key=len), options.most)
    for path in kept:
        if not path.name.startswith("crash-"):
            path.unlink()
    folder = CORPUS / options.target
    folder.mkdir(parents=True, exist_ok=True)
    for data in chosen:
        (folder / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    print(f"{options.target}: {len(chosen)} of {len(found)} inputs, {sum(map(len, chosen))} bytes")  # noqa: T201
    return 0


def _chosen(target: Target, found: list[bytes], most: int) -> list[bytes]:
    """Greedily: the input that adds most of what has not been reached, the smallest of several."""
    reached = {data: _arcs(target, data) for data in found}
    chosen: list[bytes] = []
    known: set[Any] = set()
    while len(chosen) < most:
        best = max(reached, key=lambda data: (len(reached[data] - known), -len(data)))
        if not reached[best] - known:
            break
        known |= reached.pop(best)
        chosen.append(best)
    return chosen


def _arcs(target: Target, data: bytes) -> set[tuple[int, int, int]]:
    """Pairs of lines of our own sources that follow each other."""
    arcs: set[tuple[int, int, int]] = set()

    def entered(frame: FrameType, event: str, arg: object) -> Any:
        if _SOURCES not in frame.f_code.co_filename:
            return None
        code, before = hash(frame.f_code), -1

        def line(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal before
            if event == "line":
                arcs.add((code, before, frame.f_lineno))
                before = frame.f_lineno
            return line

        return line

    sys.settrace(entered)
    try:
        target(data)
    finally:
        sys.settrace(None)
    return arcs


if __name__ == "__main__":
    sys.exit(main())
