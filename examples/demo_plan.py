"""What the demo's processes agree on beforehand: prompts, sizes of the caches, and the five ways to move a prompt's KV.

Its job: constants and names. It must not import the library, nor talk to anybody.
"""

from __future__ import annotations

import enum
import math
import zlib

import numpy as np

from tiny_transformer import KVMemory, ModelConfig

PREFILL_CLUSTER = 1
DECODE_CLUSTER = 2
MODEL_ID = 0
NEW_TOKENS = 32
BLOCK_SIZE = 16
PREFILL_BLOCKS = 128
DECODE_BLOCKS = 256
LINK_TIMEOUT_MS = 30_000
PULL_TIMEOUT_MS = 60_000
CONFIG = ModelConfig()


class Way(str, enum.Enum):
    """How the KV of one prompt travels."""

    WHOLE = "whole"
    LAYERS = "layers"
    HALVES = "halves"
    KEY_TO_BLOCKS = "key_to_blocks"
    BLOCKS_TO_BLOCKS = "blocks_to_blocks"


IN_WORDS = {
    Way.WHOLE: "whole entry, one pull",
    Way.LAYERS: "by layers, two pulls (upper layers first)",
    Way.HALVES: "by offsets, two halves of the bytes in use",
    Way.KEY_TO_BLOCKS: "contiguous entry into paged blocks",
    Way.BLOCKS_TO_BLOCKS: "paged blocks into other paged blocks",
}

_STORY = (
    "A cache remembers what the model has read. Without it every new word would mean reading the whole text again. "
    "Prefill reads the prompt once and fills the cache; decode adds one token after another. The two have different "
    "needs, so big installations run them on different machines, and the cache has to travel. "
)

PROMPTS: tuple[tuple[str, Way], ...] = (
    ("Hi", Way.WHOLE),
    ("The quick brown fox jumps over the lazy dog, again and again and again.", Way.WHOLE),
    ("What is a KV cache?", Way.LAYERS),
    (_STORY + "Summarise this in one sentence.", Way.LAYERS),
    ("Grüße aus der Küche: bytes are tokens here, so umlauts count twice.", Way.HALVES),
    (_STORY * 2 + "And now?", Way.HALVES),
    ("Count: one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve,", Way.KEY_TO_BLOCKS),
    (_STORY[:160], Way.KEY_TO_BLOCKS),
    ("Blocks need not be neighbours.", Way.BLOCKS_TO_BLOCKS),
    (_STORY + _STORY[:300], Way.BLOCKS_TO_BLOCKS),
)


def request_id(number: int) -> int:
    """The id under which prompt ``number`` is published."""
    return 1000 + number


def blocks_for(tokens: int) -> int:
    """How many blocks of a paged cache hold that many tokens."""
    return math.ceil(tokens / BLOCK_SIZE)


def scattered_tables(lengths: list[int], *, num_blocks: int, seed: int) -> list[list[int]]:
    """A block table per sequence, from blocks in no particular order, as an allocator leaves them after some hours."""
    free = np.random.default_rng(seed).permutation(num_blocks).tolist()
    return [[free.pop() for _ in range(blocks_for(length))] for length in lengths]


def checksum(kv: KVMemory, length: int) -> int:
    """CRC-32 of the keys and values of ``length`` positions, whatever the layout of the cache."""
    crc = 0
    for layer in range(CONFIG.layers):
        for rows in kv.read(layer, length):
            crc = zlib.crc32(rows.tobytes(), crc)
    return crc
