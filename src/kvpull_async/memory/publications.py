"""What this node's caches are to processes that read them by themselves: where the bytes are, and until when.

A *publication* is one cache's layout and an epoch, a 64-bit word in a page that such readers map. The word is the
cache's for as long as it lives and 0 afterwards, and no epoch is ever used twice: who finds the right epoch after
reading has read the cache, not what came after it. It must not know peers or how they read.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvpull_async.memory import shared
from kvpull_async.memory.base import Region
from kvpull_async.memory.copying import store_word
from kvpull_async.memory.shared import SharedFile

__all__ = ["EPOCHS", "Publication", "Publications"]

EPOCHS: Final = 8192
"""Caches that can be published at one time; further ones are streamed."""
_WORD: Final = 8
_TENSORS: Final = 8192
"""Most tensors of a cache whose layout a side channel takes at once; others are streamed."""
_FILES: Final = 1024  # a cache in more of them counts as one in no file: who maps it needs a descriptor for each


@dataclass(eq=False)
class Publication:
    """One cache as readers see it.

    `files` hold all tensors, or are none: then the tensors are elsewhere in this process. `places` has, for each
    tensor, the index of its file and its offset there, or -1 and its address.
    """

    number: int
    slot: int
    epoch: int
    tensor_nbytes: int
    files: tuple[SharedFile, ...]
    places: NDArray[np.int64]
    regions: tuple[Region, ...] = field(repr=False)
    holders: dict[object, Callable[[int], None]] = field(default_factory=dict)
    """Who reads it, and how to tell them that it is over."""
    over: Callable[[], None] | None = None
    """Called once it has been withdrawn and no holder is left."""

    def release(self, holder: object) -> None:
        """That holder reads it no more."""
        self.holders.pop(holder, None)
        self._settle()

    def _settle(self) -> None:
        if not self.holders and self.over is not None:
            over, self.over = self.over, None
            over()


class Publications:
    """Those of one engine. Used by the core's loop only."""

    def __init__(self) -> None:
        self._page: SharedFile | None = None
        self._numbers = itertools.count(1)
        self._free = list(range(EPOCHS - 1, -1, -1))
        self._by_regions: dict[int, Publication] = {}

    @property
    def page(self) -> SharedFile:
        """The words of all epochs. OSError when there is no memory or no descriptor."""
        if self._page is None:
            made = SharedFile(EPOCHS * _WORD, name="kvpull-epochs", needed=True)
            if made.descriptor < 0:
                raise OSError(errno.EMFILE, "no descriptor for the page of epochs is left, or the kernel cannot seal")
            self._page = made
        return self._page

    def publish(self, regions: tuple[Region, ...]) -> Publication | None:
        """The publication of a cache, made when first asked for; None when there are too many of them, or too many
        tensors in it, or when it is in the memory of a device.
        """
        known = self._by_regions.get(id(regions))
        if known is not None:
            return known
        if not self._free or len(regions) > _TENSORS or regions[0].device is not None:
            return None
        page, slot, number = self.page, self._free.pop(), next(self._numbers)
        files, places = _places(regions)
        made = Publication(number, slot, number, regions[0].nbytes, files, places, regions)
        store_word(page.address + slot * _WORD, made.epoch)
        self._by_regions[id(regions)] = made  # which holds the regions, so that their id stays theirs
        return made

    def withdraw(self, regions: Sequence[Region], over: Callable[[], None]) -> None:
        """The cache is gone: no read that ends from now on counts. `over` is called once nobody has it mapped."""
        made = self._by_regions.pop(id(regions), None)
        if made is None:
            over()
            return
        store_word(self.page.address + made.slot * _WORD, 0)
        self._free.append(made.slot)
        made.over = over
        for tell in tuple(made.holders.values()):
            tell(made.number)
        made._settle()

    def close(self) -> None:
        """Withdraw everything, and give back the page, whoever still holds a cache."""
        for made in tuple(self._by_regions.values()):
            self.withdraw(made.regions, _nothing)
        self._page = None

    def __repr__(self) -> str:
        return f"<Publications {len(self._by_regions)} of {EPOCHS}>"


def _places(regions: Sequence[Region]) -> tuple[tuple[SharedFile, ...], NDArray[np.int64]]:
    found = [shared.find(region.address, region.nbytes) for region in regions]
    places = np.empty((len(regions), 2), np.int64)
    files: dict[SharedFile, int] = {}
    for place in found:
        if place is not None and place[0].descriptor >= 0:
            files.setdefault(place[0], len(files))
            if len(files) <= _FILES:
                continue
        places[:, 0] = -1
        places[:, 1] = np.array([region.address for region in regions], np.uint64).view(np.int64)
        return (), places
    places[:, 0] = [files[place[0]] for place in found if place is not None]
    places[:, 1] = [place[1] for place in found if place is not None]
    return tuple(files), places


def _nothing() -> None:
    """Nobody waits for the memory."""
