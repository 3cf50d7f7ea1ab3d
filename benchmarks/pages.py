"""Which pages memory really has: what the kernel says of the mappings it lies in. It must not change them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from workloads import Arena

__all__ = ["pages"]

HUGE: Final = ("AnonHugePages:", "ShmemPmdMapped:", "FilePmdMapped:")


@dataclass
class _Mapping:
    start: int
    end: int
    huge: int = 0
    present: int = 0


def pages(arenas: Iterable[Arena]) -> str:
    """The size of pages, of each kind of memory once: 4 KiB, 2 MiB, or the share that lies in those of 2 MiB.

    The kernel counts by mapping, so an arena is told as the mappings that it touches. Without memory it is "".
    """
    mappings = list(_mappings())
    return " and ".join(dict.fromkeys(filter(None, (_told(arena, mappings) for arena in arenas))))


def _told(arena: Arena, mappings: Sequence[_Mapping]) -> str:
    touched = [mapping for mapping in mappings if any(_overlap(mapping, *span) for span in arena.spans)]
    present = sum(mapping.present for mapping in touched)
    share = sum(mapping.huge for mapping in touched) / present if present else 0.0
    if share > 0.99:
        return "2 MiB"
    return f"{share:.0%} in 2 MiB" if share > 0.005 else "4 KiB"


def _overlap(mapping: _Mapping, start: int, nbytes: int) -> bool:
    return start < mapping.end and mapping.start < start + nbytes


def _mappings() -> Iterator[_Mapping]:
    mapping = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head, *rest = line.split()
        if not head.endswith(":"):
            if mapping is not None:
                yield mapping
            start, _, end = head.partition("-")
            mapping = _Mapping(int(start, 16), int(end, 16))
        elif mapping is not None and head in HUGE:
            mapping.huge += int(rest[0])
        elif mapping is not None and head == "Rss:":
            mapping.present += int(rest[0])
    if mapping is not None:
        yield mapping
