"""Random pulls for property tests: right ones, and right ones with an argument or two spoilt.

Drawing every argument on its own would make nearly every pull a refused one. So a pull that fits is drawn first, its
source and destination shaped around it, and then sometimes spoilt with values at and beyond the limits. What is right
and what is refused is for `tests.oracle` to say; nothing here does.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tests.oracle import ELEMENT_NBYTES, CacheModel, Descriptor, PullArguments

EXAMPLES = int(os.environ.get("KVPULL_PROPERTY_EXAMPLES", "200"))

# No deadline: the oracle is slow, and a busy machine is not a failure.
thorough = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@dataclass(frozen=True)
class PullCase:
    """Two caches and a pull from one into the other."""

    source: CacheModel
    destination: CacheModel
    arguments: PullArguments


@dataclass(frozen=True)
class _Layers:
    """A layer selection that fits: what to ask for, and how many tensors each side then needs."""

    src_tensors: int
    dst_tensors: int
    arguments: dict[str, Any]


data_types = st.sampled_from(sorted(ELEMENT_NBYTES))


@st.composite
def descriptors(draw: st.DrawFn, *, num_tensors: int, entry_nbytes: int, blocks: bool, least: int = 1) -> Descriptor:
    """A descriptor of `least` entries or a few more, of exactly `entry_nbytes` bytes each, in any shape and type."""
    fitting = [name for name in sorted(ELEMENT_NBYTES) if entry_nbytes % ELEMENT_NBYTES[name] == 0]
    data_type = draw(st.sampled_from(fitting))
    elements = entry_nbytes // ELEMENT_NBYTES[data_type]
    inner = draw(st.sampled_from([number for number in range(1, elements + 1) if elements % number == 0]))
    entries = draw(st.integers(least, least + 4))
    inner_shapes = [(elements,), (elements // inner, inner), (1, inner, elements // inner)]
    shape = (entries, *draw(st.sampled_from(inner_shapes)))
    return Descriptor(num_tensors=num_tensors, shape=shape, data_type=data_type, blocks=blocks)


@st.composite
def filled(draw: st.DrawFn, descriptor: Descriptor) -> CacheModel:
    """A cache of random bytes."""
    noise = random.Random(draw(st.integers(0, 2**16)))
    nbytes = descriptor.tensor_nbytes
    return CacheModel(descriptor, [bytearray(noise.randbytes(nbytes)) for _ in range(descriptor.num_tensors)])


@st.composite
def layers(draw: st.DrawFn) -> _Layers:
    """No range, a range on one side, or ranges on both, over matching numbers of tensors."""
    per_layer = draw(st.integers(1, 3))
    count = draw(st.integers(1, 3))
    src_first, dst_first = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    src_more, dst_more = draw(st.integers(0, 4)), draw(st.integers(0, 1))
    given = draw(st.sampled_from(["none", "src", "dst", "both"]))
    if given == "none":
        nothing = st.sampled_from([None, range(0), range(5, 5), range(3, 1)])
        arguments: dict[str, Any] = {"src_layer_range": draw(nothing), "dst_layer_range": draw(nothing)}
        arguments["tensor_num_per_layer"] = draw(st.sampled_from([per_layer, 99, 2**32 - 1]))
        return _Layers(per_layer * count, per_layer * count, arguments)
    arguments = {"tensor_num_per_layer": per_layer}
    src_tensors = dst_tensors = per_layer * count
    if given in ("src", "both"):
        arguments["src_layer_range"] = range(src_first, src_first + count)
        src_tensors = (src_first + count) * per_layer + src_more
    if given in ("dst", "both"):
        arguments["dst_layer_range"] = range(dst_first, dst_first + count)
        dst_tensors = (dst_first + count + dst_more) * per_layer
    return _Layers(src_tensors, dst_tensors, arguments)


@st.composite
def entry_pulls(draw: st.DrawFn) -> PullCase:
    """A pull_cache that fits."""
    chosen = draw(layers())
    dst_nbytes = draw(st.integers(1, 48))
    src_nbytes = draw(st.just(dst_nbytes) | st.integers(1, 48))
    src = draw(descriptors(num_tensors=chosen.src_tensors, entry_nbytes=src_nbytes, blocks=False))
    dst = draw(descriptors(num_tensors=chosen.dst_tensors, entry_nbytes=dst_nbytes, blocks=False))
    src_offset, dst_offset = draw(_offsets(src_nbytes)), draw(_offsets(dst_nbytes))
    src_room, dst_room = src_nbytes - (src_offset or 0), dst_nbytes - (dst_offset or 0)
    whole = dst_room <= src_room and draw(st.booleans())
    arguments = PullArguments(
        src_entry=draw(st.integers(0, src.entries - 1)),
        batch_index=draw(_plain_or_numpy(draw(st.integers(0, dst.entries - 1)))),
        size=-1 if whole else draw(_plain_or_numpy(draw(st.integers(1, min(src_room, dst_room))))),
        src_cache_offset=src_offset,
        dst_cache_offset=dst_offset,
        **chosen.arguments,
    )
    return PullCase(draw(filled(src)), draw(filled(dst)), arguments)


@st.composite
def paged_pulls(draw: st.DrawFn) -> PullCase:
    """A pull_blocks from blocks that fits; runs of consecutive blocks are common, repeated pairs happen."""
    chosen = draw(layers())
    block_nbytes = draw(st.integers(1, 24))
    src = draw(descriptors(num_tensors=chosen.src_tensors, entry_nbytes=block_nbytes, blocks=True, least=4))
    dst = draw(descriptors(num_tensors=chosen.dst_tensors, entry_nbytes=block_nbytes, blocks=True, least=4))
    dst_blocks = draw(block_numbers(dst.entries))
    src_blocks = draw(st.lists(st.integers(0, src.entries - 1), min_size=len(dst_blocks), max_size=len(dst_blocks)))
    if draw(st.booleans()):  # consecutive on both sides wherever possible
        src_blocks = [block % src.entries for block in dst_blocks]
    if draw(st.booleans()):
        src_blocks, dst_blocks = [*src_blocks, src_blocks[0]], [*dst_blocks, dst_blocks[0]]
    kind = draw(st.sampled_from([list, tuple]))
    arguments = PullArguments(src_blocks=kind(src_blocks), dst_blocks=kind(dst_blocks), **chosen.arguments)
    return PullCase(draw(filled(src)), draw(filled(dst)), arguments)


@st.composite
def sliced_pulls(draw: st.DrawFn) -> PullCase:
    """A pull_blocks from a contiguous cache that fits: all of an entry, or its beginning."""
    chosen = draw(layers())
    block_nbytes = draw(st.integers(1, 16))
    dst = draw(descriptors(num_tensors=chosen.dst_tensors, entry_nbytes=block_nbytes, blocks=True, least=3))
    dst_blocks = draw(block_numbers(dst.entries))
    src_nbytes = max(block_nbytes, (len(dst_blocks) - 1) * block_nbytes + 1) + draw(st.integers(0, block_nbytes + 3))
    src = draw(descriptors(num_tensors=chosen.src_tensors, entry_nbytes=src_nbytes, blocks=False))
    src_entry = draw(st.integers(0, src.entries - 1))
    arguments = PullArguments(src_entry=src_entry, dst_blocks=dst_blocks, **chosen.arguments)
    return PullCase(draw(filled(src)), draw(filled(dst)), arguments)


@st.composite
def block_numbers(draw: st.DrawFn, entries: int) -> list[int]:
    """Distinct block numbers below `entries`, at least one: in order from some block on, or shuffled."""
    count = draw(st.integers(1, entries))
    if draw(st.booleans()):
        first = draw(st.integers(0, entries - count))
        return list(range(first, first + count))
    return draw(st.permutations(range(entries)))[:count]


def fitting_pulls() -> st.SearchStrategy[PullCase]:
    """Pulls that must succeed."""
    return st.one_of(entry_pulls(), paged_pulls(), sliced_pulls())


@st.composite
def misfit_pulls(draw: st.DrawFn) -> PullCase:
    """Well-formed pulls of which one or two arguments were changed to something at or beyond what the caches have."""
    case = draw(fitting_pulls())
    for _ in range(draw(st.integers(1, 2))):
        if case.arguments.is_blocks and draw(st.booleans()):
            case = draw(_change_blocks(case, _misfit_blocks))
        else:
            case = draw(_change(case, _misfits(case)))
    return case


@st.composite
def malformed_pulls(draw: st.DrawFn) -> PullCase:
    """Pulls with an argument of the wrong type or outside its own range, or between the wrong kinds of cache."""
    case = draw(fitting_pulls() | misfit_pulls())
    if draw(st.integers(0, 9)) == 0:
        descriptor = case.destination.descriptor
        other_kind = replace(descriptor, blocks=not descriptor.blocks)
        return replace(case, destination=replace(case.destination, descriptor=other_kind))
    if case.arguments.is_blocks and draw(st.booleans()):
        return draw(_change_blocks(case, _malformed_blocks))
    return draw(_change(case, _malformed()))


def pulls() -> st.SearchStrategy[PullCase]:
    """Any pull, about half of them fitting."""
    return st.one_of(entry_pulls(), paged_pulls(), sliced_pulls(), misfit_pulls(), misfit_pulls(), malformed_pulls())


def _offsets(nbytes: int) -> st.SearchStrategy[int | None]:
    return st.none() | st.just(0) | st.integers(0, nbytes - 1)


def _plain_or_numpy(value: int) -> st.SearchStrategy[Any]:
    return st.sampled_from([value, value, np.int64(value)])


_LAYER_ARGUMENTS = ("src_layer_range", "dst_layer_range", "tensor_num_per_layer")


def _misfits(case: PullCase) -> dict[str, list[Any]]:
    """For each argument the values at and just beyond the edges of the two caches."""
    source, destination = case.source.descriptor, case.destination.descriptor
    entry_nbytes = (source.entry_nbytes, destination.entry_nbytes)
    ranges = [None, range(0, 0, 2), range(0, 4, 2), range(1, 0, -1), range(-1, 1), range(1), range(1, 2), range(9)]
    ranges += [range(2**32, 2**32 + 1), range(2**32 - 1, 2**32)]
    offsets = [None, 2**63 - 1, *entry_nbytes, *(nbytes - 1 for nbytes in entry_nbytes)]
    return {
        "src_entry": [source.entries - 1, source.entries, 2**32 - 1],
        "batch_index": [destination.entries - 1, destination.entries, 2**32 - 1],
        "size": [-1, 2**63 - 1, *entry_nbytes, *(nbytes + 1 for nbytes in entry_nbytes)],
        "src_cache_offset": offsets,
        "dst_cache_offset": offsets,
        "src_layer_range": ranges,
        "dst_layer_range": ranges,
        "tensor_num_per_layer": [1, 2, 3, destination.num_tensors, destination.num_tensors + 1, 2**32 - 1],
    }


def _malformed() -> dict[str, list[Any]]:
    """For each argument values that are wrong whatever the caches are."""
    not_integers = [True, False, 1.0, "1"]
    return {
        "batch_index": [None, *not_integers, -1, 2**32],
        "size": [None, *not_integers, 0, -2, 2**63],
        "src_cache_offset": [*not_integers, -1, 2**63],
        "dst_cache_offset": [*not_integers, -1, 2**63],
        "src_layer_range": [[0, 1], (0, 1), 1, "0"],
        "dst_layer_range": [[0, 1], (0, 1), 1, "0"],
        "tensor_num_per_layer": [None, *not_integers, 0, -1, 2**32],
    }


@st.composite
def _change(draw: st.DrawFn, case: PullCase, values: dict[str, list[Any]]) -> PullCase:
    names = [name for name in values if not case.arguments.is_blocks or name in _LAYER_ARGUMENTS]
    name = draw(st.sampled_from(names))
    changed: dict[str, Any] = {name: draw(st.sampled_from(values[name]))}
    return replace(case, arguments=replace(case.arguments, **changed))


def _misfit_blocks(blocks: list[int], entries: int) -> list[Any]:
    wrong = [entries, entries - 1, 0, 2**31]
    appended = [[*blocks, number] for number in [*wrong, *blocks[:1]]]
    replaced = [[number, *blocks[1:]] for number in wrong]
    return [[], blocks[:-1], *appended, *replaced]


def _malformed_blocks(blocks: list[int], entries: int) -> list[Any]:
    return [[*blocks, wrong] for wrong in (-1, None, True, 0.0, "0")] + [range(2), "01", {0: 1}]


@st.composite
def _change_blocks(draw: st.DrawFn, case: PullCase, choices: Callable[[list[int], int], list[Any]]) -> PullCase:
    side = draw(st.sampled_from(["src", "dst"]))
    blocks = list(case.arguments.src_blocks if side == "src" else case.arguments.dst_blocks)
    entries = (case.source if side == "src" else case.destination).descriptor.entries
    changed: dict[str, Any] = {f"{side}_blocks": draw(st.sampled_from(choices(blocks, entries)))}
    return replace(case, arguments=replace(case.arguments, **changed))
