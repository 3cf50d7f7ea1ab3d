"""Sections 7.1 to 7.4: the arguments of pull_cache, its bytes and keys, layer ranges, offsets."""

from __future__ import annotations

from typing import Any

from kvpull_async import BlocksCacheKey, CacheKeyByIdAndIndex, DataType
from tests.conformance.row import (
    KNE,
    NYL,
    PI,
    Move,
    Row,
    delivers,
    for_manager,
    gone,
    kept,
    key,
    plain,
    raises,
    refused,
    several,
    succeeds,
)
from tests.conformance.scene import BOTH, DESTINATION, INVALID_ID, NEW, OLD, SOURCE, Layout, Scene

SMALLER = {"d": Layout(shape=(4, 128))}
LARGER = {"d": Layout(shape=(4, 512))}
BYTES = {"d": Layout(shape=(4, 512), data_type=DataType.DT_INT8)}
ODD = {"s": Layout(tensors=3), "d": Layout(tensors=3)}
UNLINKED = {"linked": False}
REMOTE = {"remote_access": True}


def by_id(f: Scene, index: int = 0, *, cluster_id: int = SOURCE, cache_id: int | None = None) -> CacheKeyByIdAndIndex:
    return CacheKeyByIdAndIndex(cluster_id, f.s.cache_id if cache_id is None else cache_id, index)


ARGUMENTS = [
    Row(1, BOTH, lambda f: f.pull("x", f.d), refused(TypeError)),
    Row(2, BOTH, lambda f: f.pull(BlocksCacheKey(1), f.d), refused(TypeError)),
    Row(3, NEW, lambda f: f.pull(key(0), f.d), refused(TypeError), setup=REMOTE),
    Row(5, BOTH, lambda f: f.pull(f.r[0], None), refused(TypeError), differs="none-is-a-type-error"),
    Row(6, BOTH, lambda f: f.pull(None, f.d), refused(TypeError), differs="none-is-a-type-error"),
    Row(7, BOTH, several(batch_index=[None, 1.0, "0"]), refused(TypeError)),
    Row(8, BOTH, several(batch_index=[-1, 2**32]), refused(ValueError)),
    Row(9, BOTH, plain(batch_index=True), refused(TypeError), differs="bool-is-no-integer"),
    Row(10, BOTH, plain(batch_index=4), refused(PI)),
    Row(12, BOTH, plain(size=2**63), refused(ValueError)),
    Row(14, BOTH, plain(size=True), refused(TypeError), differs="bool-is-no-integer"),
    Row(18, BOTH, plain(tensor_num_per_layer=-1), refused(ValueError)),
    Row(19, BOTH, lambda f: f.pull(key(INVALID_ID), f.d), refused(PI)),
    Row(20, BOTH, lambda f: f.pull(key(1, prefix_id=2), f.d), refused(PI)),
    Row(21, BOTH, plain(src_layer_range=[0, 1]), refused(TypeError)),
    Row(22, BOTH, plain(src_layer_range=range(0, 2, 2)), refused(PI)),
    Row(24, BOTH, plain(src_layer_range=range(-1, 1)), refused(PI)),
    Row(25, BOTH, plain(src_layer_range=range(2**32, 2**32 + 1)), refused(ValueError)),
    Row(26, BOTH, plain(src_layer_range=range(0), dst_layer_range=range(5, 5)), delivers(Move(), then=[gone(0)])),
    Row(27, BOTH, plain(foo=1), refused(TypeError), differs="unknown-keywords-are-refused"),
    Row(29, NEW, plain(batch_index=-1, size=0), refused(ValueError)),
    Row(30, OLD, plain(batch_index=-1, size="x"), refused(TypeError)),
    Row(30, OLD, plain(batch_index="x", size=2**63), refused(ValueError)),
    Row(31, OLD, lambda f: f.api.do(f.source.kv_cache_manager.pull_cache, "x", 3), refused(PI)),
    *for_manager(
        Row(33, BOTH, several(src_cache_offset=["0", 0.0]), refused(TypeError)),
        new_differs="offsets-work-in-both-managers",
    ),
]


async def again(f: Scene) -> Any:
    await f.pull(f.r[0], f.d)
    return await f.pull(f.r[0], f.d)


async def too_large_then_sized(f: Scene) -> Any:
    await refused(PI, usable=False)(f, [plain()])
    return await f.pull(f.r[0], f.d, size=512)


async def by_id_then_by_key(f: Scene) -> Any:
    await f.pull(by_id(f, 2), f.d)
    return await f.pull(f.r[2], f.d)


async def by_id_twice_then_unbound(f: Scene) -> Any:
    """The first consumes the key; the later ones read an entry that has none, and leave it there."""
    await f.pull(by_id(f, 2), f.d)
    await f.pull(by_id(f, 2), f.d)
    return await f.pull(by_id(f, 2), f.d)


async def into_a_released_cache(f: Scene) -> Any:
    await f.api.do(f.of(f.destination).deallocate_cache, f.d)
    return await f.pull(f.r[0], f.d)


async def removed_key(f: Scene) -> Any:
    await f.api.do(f.of(f.source).remove_cache_key, f.r[0])
    return await f.pull(f.r.pop(0), f.d)


async def prefix_twice(f: Scene) -> Any:
    await f.pull(f.r[0], f.d)
    return await f.pull(f.r[0], f.d)


async def registered_twice(f: Scene) -> Any:
    cache = await f.register([key(70)])
    await f.pull(key(70), f.d)
    await f.pull(key(70), f.d)
    assert (f.content(f.d)[:, 0] == f.image(cache)[:, 0]).all()


async def other_model(f: Scene) -> Any:
    await f.publish([key(5, model_id=5)])
    return await f.pull(key(5, model_id=0), f.d)


PREFIX = {"keys": (key(INVALID_ID, prefix_id=7),)}

DATA_AND_KEYS = [
    Row(38, BOTH, again, raises(KNE)),
    Row(40, BOTH, plain(size=512), delivers(Move(), then=[gone(0)])),
    Row(40, BOTH, plain(size=513), refused(PI)),
    Row(41, BOTH, plain(), delivers(Move(size=256), then=[gone(0)]), setup=SMALLER),
    Row(42, BOTH, plain(), refused(PI), setup=LARGER),
    Row(43, BOTH, too_large_then_sized, delivers(Move(), then=[gone(0)]), setup=LARGER),
    Row(45, BOTH, plain(), delivers(Move(), then=[gone(0)]), setup=BYTES),
    Row(47, BOTH, lambda f: f.pull(by_id(f, 2), f.d), delivers(Move(src_entry=2), then=[gone(2), kept(0, 1, 3)])),
    Row(48, BOTH, by_id_then_by_key, raises(KNE)),
    Row(49, BOTH, by_id_twice_then_unbound, delivers(Move(src_entry=2), then=[kept(0, 1, 3)])),
    Row(51, BOTH, lambda f: f.pull(by_id(f, cache_id=999), f.d), refused(KNE)),
    Row(52, NEW, lambda f: f.pull(by_id(f, cluster_id=DESTINATION), f.d), refused(PI)),
    Row(53, BOTH, lambda f: f.pull(type(f.r[0])(3, 0), f.d), refused(NYL)),
    Row(54, BOTH, plain(batch_index=9), refused(PI, usable=False), setup=UNLINKED),
    Row(56, BOTH, into_a_released_cache, refused(KNE)),
    Row(59, BOTH, removed_key, raises(KNE)),
    Row(60, BOTH, prefix_twice, delivers(Move(), then=[kept(0)]), setup=PREFIX),
    Row(
        61,
        BOTH,
        lambda f: f.pull(by_id(f), f.d),
        delivers(Move(), then=[kept(0)]),
        differs="prefix-keys-by-id",
        setup=PREFIX,
    ),
    Row(62, NEW, registered_twice, succeeds()),
    Row(63, BOTH, other_model, refused(KNE)),
]


def first_layer(dst: int) -> Any:
    return plain(src_layer_range=range(1), dst_layer_range=range(dst, dst + 1))


async def first_layer_twice(f: Scene) -> Any:
    await first_layer(1)(f)
    return await first_layer(0)(f)


async def both_layers(f: Scene) -> Any:
    await first_layer_twice(f)
    return await f.pull(f.r[0], f.d, src_layer_range=range(1, 2), dst_layer_range=range(1, 2))


TO_THE_SECOND_LAYER = ((0, 2), (1, 3))
TO_THE_FIRST_LAYER = ((0, 0), (1, 1))

LAYERS = [
    Row(66, BOTH, first_layer(1), delivers(Move(TO_THE_SECOND_LAYER), then=[kept(0)])),
    Row(
        67, BOTH, first_layer_twice,
        delivers(Move(TO_THE_SECOND_LAYER), Move(TO_THE_FIRST_LAYER), then=[kept(0)]),
    ),
    Row(68, BOTH, both_layers, delivers(Move(), then=[gone(0), kept(1, 2, 3)])),
    Row(71, BOTH, plain(dst_layer_range=range(1)), refused(PI)),
    Row(73, BOTH, plain(src_layer_range=range(2), dst_layer_range=range(1)), refused(PI)),
    Row(74, BOTH, plain(src_layer_range=range(2, 3), dst_layer_range=range(1)), refused(PI)),
    Row(75, BOTH, plain(src_layer_range=range(1), dst_layer_range=range(2, 3)), refused(PI)),
    Row(77, BOTH, plain(tensor_num_per_layer=2), delivers(Move(), then=[gone(0)]), setup=ODD),
    Row(78, BOTH, plain(tensor_num_per_layer=99), delivers(Move(), then=[gone(0)])),
    Row(
        79, BOTH, plain(tensor_num_per_layer=4, src_layer_range=range(1), dst_layer_range=range(1)),
        delivers(Move(), then=[gone(0)]),
    ),
    Row(
        80, BOTH, plain(tensor_num_per_layer=1, src_layer_range=range(3, 4), dst_layer_range=range(1)),
        delivers(Move(((3, 0),)), then=[kept(0)]),
    ),
    Row(
        81, BOTH, plain(src_layer_range=range(1), dst_layer_range=range(1), size=64, batch_index=3),
        delivers(Move(TO_THE_FIRST_LAYER, dst_entry=3, size=64), then=[kept(0)]),
    ),
]  # fmt: skip

PART = {"src_cache_offset": 128, "dst_cache_offset": 0, "size": 64, "batch_index": 2}

# The original's newer manager ignores offsets; here the rows of the older one hold for both.
OFFSETS = [
    row
    for number, call, expect in [
        (83, plain(src_cache_offset=0, dst_cache_offset=0), delivers(Move(), then=[kept(0)])),
        (84, plain(src_cache_offset=128, size=128), delivers(Move(src_at=128, size=128), then=[kept(0)])),
        (85, plain(dst_cache_offset=128), delivers(Move(dst_at=128, size=384), then=[kept(0)])),
        (86, plain(dst_cache_offset=128, size=385), refused(PI)),
        (
            88,
            plain(src_cache_offset=128, dst_cache_offset=128),
            delivers(Move(src_at=128, dst_at=128, size=384), then=[kept(0)]),
        ),
        (
            91,
            plain(src_layer_range=range(1), dst_layer_range=range(1, 2), **PART),
            delivers(Move(TO_THE_SECOND_LAYER, dst_entry=2, src_at=128, size=64), then=[kept(0)]),
        ),
        (92, plain(dst_cache_offset=513, size=1), refused(PI)),
    ]
    for row in for_manager(Row(number, BOTH, call, expect), new_differs="offsets-work-in-both-managers")
] + [Row(90, BOTH, plain(dst_cache_offset=512), refused(PI), differs="offsets-stay-inside-the-entry")]

ROWS = [*ARGUMENTS, *DATA_AND_KEYS, *LAYERS, *OFFSETS]
