"""The fuzz targets by name. Each takes the fuzzer's bytes, and raises where something does not hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.fuzz import pullers, sessions, sources, texts

Target = Callable[[bytes], object]

CORPUS: Final = Path(__file__).parent / "corpus"
"""A folder for each target; the names of what once failed begin with `crash-`."""

TARGETS: Final[dict[str, Callable[[], Target]]] = {
    "decoder": lambda: sessions.decoder,
    "session": lambda: sessions.session,
    "find": lambda: sources.find,
    "serving": sources.serving,
    "puller": pullers.puller,
    "payload": lambda: pullers.payload,
    "text": lambda: texts.text,
}
"""What makes each of them."""


def inputs(target: str) -> list[Path]:
    return sorted((CORPUS / target).glob("*"))
