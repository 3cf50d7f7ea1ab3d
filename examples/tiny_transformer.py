"""A small decoder-only transformer in numpy, whose KV cache lives in memory that somebody else owns.

Its job: real keys and values for the other examples. Byte-level vocabulary, RMSNorm, rotary positions, grouped-query
attention, SwiGLU; the weights are random but fixed by a seed, so two processes that build the model have the same one.
It must not know that its cache travels between processes: it writes and reads rows of the arrays it was given.

Run it by itself to check it by itself: ``python examples/tiny_transformer.py``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]

MASKED = np.float32(-1e30)
NORM_EPSILON = np.float32(1e-5)


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model. ``kv_width`` float32 numbers are cached per token, layer and side (keys or values)."""

    layers: int = 8
    d_model: int = 256
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    hidden: int = 640
    vocab: int = 256
    max_seq: int = 1024
    rope_base: float = 10_000.0
    seed: int = 20

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def kv_tensors(self) -> int:
        return 2 * self.layers

    @property
    def kv_row_bytes(self) -> int:
        return self.kv_width * 4


class KVMemory(Protocol):
    """What the model asks of a cache: write rows of one layer, read them all back."""

    def write(self, layer: int, start: int, *, keys: F32, values: F32) -> None:
        """Store rows ``[n, kv_width]`` for the positions ``start .. start + n - 1``."""

    def read(self, layer: int, length: int) -> tuple[F32, F32]:
        """Keys and values ``[length, kv_width]`` of the positions ``0 .. length - 1``."""


class ContiguousKV:
    """One batch entry of tensors ``[batch, max_seq, kv_width]`` in the order K0, V0, K1, V1, ..."""

    def __init__(self, tensors: Sequence[F32], batch_index: int) -> None:
        self._rows = [tensor[batch_index] for tensor in tensors]

    def write(self, layer: int, start: int, *, keys: F32, values: F32) -> None:
        stop = start + len(keys)
        self._rows[2 * layer][start:stop] = keys
        self._rows[2 * layer + 1][start:stop] = values

    def read(self, layer: int, length: int) -> tuple[F32, F32]:
        return self._rows[2 * layer][:length], self._rows[2 * layer + 1][:length]


class PagedKV:
    """One sequence in tensors ``[num_blocks, block_size, kv_width]``: position p in block ``table[p // size]``."""

    def __init__(self, tensors: Sequence[F32], table: Sequence[int]) -> None:
        self._tensors = tensors
        self._table = np.asarray(table, dtype=np.int64)
        self._block_size = tensors[0].shape[1]

    def write(self, layer: int, start: int, *, keys: F32, values: F32) -> None:
        position = np.arange(start, start + len(keys))
        block, slot = self._table[position // self._block_size], position % self._block_size
        self._tensors[2 * layer][block, slot] = keys
        self._tensors[2 * layer + 1][block, slot] = values

    def read(self, layer: int, length: int) -> tuple[F32, F32]:
        return self._gather(2 * layer, length), self._gather(2 * layer + 1, length)

    def _gather(self, tensor: int, length: int) -> F32:
        blocks = self._table[: math.ceil(length / self._block_size)]
        rows: F32 = self._tensors[tensor][blocks].reshape(-1, self._tensors[tensor].shape[2])
        return rows[:length]


def contiguous_arrays(config: ModelConfig, batch: int) -> list[F32]:
    """Zeroed tensors for a contiguous cache that lives in this process alone."""
    shape = (batch, config.max_seq, config.kv_width)
    return [np.zeros(shape, dtype=np.float32) for _ in range(config.kv_tensors)]


def paged_arrays(config: ModelConfig, num_blocks: int, *, block_size: int) -> list[F32]:
    """Zeroed tensors for a paged cache, one per layer and side."""
    shape = (num_blocks, block_size, config.kv_width)
    return [np.zeros(shape, dtype=np.float32) for _ in range(config.kv_tensors)]


@dataclass(frozen=True)
class LayerWeights:
    """The matrices of one layer; inputs multiply from the left."""

    attention_norm: F32
    query: F32
    key: F32
    value: F32
    output: F32
    mlp_norm: F32
    gate: F32
    up: F32
    down: F32


class TinyTransformer:
    """The model. The same ``config`` gives the same weights in every process."""

    def __init__(self, config: ModelConfig | None = None) -> None:
        self.config = config or ModelConfig()
        rng = np.random.default_rng(self.config.seed)
        c = self.config
        self._embedding = rng.standard_normal((c.vocab, c.d_model), dtype=np.float32)
        self._layers = [_random_layer(c, rng) for _ in range(c.layers)]
        self._final_norm = np.ones(c.d_model, dtype=np.float32)
        self._head = _random_matrix(rng, c.d_model, c.vocab)
        self._cos, self._sin = _rotary_tables(c)

    def prefill(self, tokens: Sequence[int], kv: KVMemory) -> F32:
        """Read the whole prompt, leave its keys and values in ``kv``; returns logits ``[vocab]`` of what follows."""
        return self._forward(np.asarray(tokens, dtype=np.int64), 0, kv=kv)

    def decode_step(self, token: int, position: int, *, kv: KVMemory) -> F32:
        """Read one token at ``position`` on top of what ``kv`` holds for the positions before it; returns logits."""
        return self._forward(np.asarray([token], dtype=np.int64), position, kv=kv)

    def _forward(self, tokens: NDArray[np.int64], start: int, *, kv: KVMemory) -> F32:
        if not 0 < len(tokens) <= self.config.max_seq - start:
            raise ValueError(f"{len(tokens)} tokens at position {start} exceed the {self.config.max_seq} positions")
        x = self._embedding[tokens]
        for index, weights in enumerate(self._layers):
            x = x + self._attention(_rms_norm(x, weights.attention_norm), index, start=start, kv=kv)
            x = x + _swiglu(_rms_norm(x, weights.mlp_norm), weights)
        logits: F32 = _rms_norm(x[-1], self._final_norm) @ self._head
        return logits

    def _attention(self, x: F32, index: int, *, start: int, kv: KVMemory) -> F32:
        c, weights, n = self.config, self._layers[index], len(x)
        query = self._rotate((x @ weights.query).reshape(n, c.heads, c.head_dim), start)
        key = self._rotate((x @ weights.key).reshape(n, c.kv_heads, c.head_dim), start)
        kv.write(index, start, keys=key.reshape(n, c.kv_width), values=x @ weights.value)
        keys, values = kv.read(index, start + n)
        mixed = _grouped_attention(
            query,
            keys.reshape(-1, c.kv_heads, c.head_dim),
            values=values.reshape(-1, c.kv_heads, c.head_dim),
            start=start,
        )
        out: F32 = mixed.reshape(n, c.heads * c.head_dim) @ weights.output
        return out

    def _rotate(self, x: F32, start: int) -> F32:
        """Rotary positions: turns the two halves of every head by an angle that grows with the position."""
        cos, sin = (table[start : start + len(x), None, :] for table in (self._cos, self._sin))
        half = self.config.head_dim // 2
        low, high = x[..., :half], x[..., half:]
        return np.concatenate((low * cos - high * sin, high * cos + low * sin), axis=-1)


def greedy(logits: F32) -> int:
    """The most likely next token."""
    return int(np.argmax(logits))


def continue_greedily(model: TinyTransformer, first_token: int, *, length: int, count: int, kv: KVMemory) -> list[int]:
    """``count`` tokens beginning with ``first_token``, on top of a cache that holds a prompt of ``length`` tokens."""
    tokens = [first_token]
    while len(tokens) < count:
        tokens.append(greedy(model.decode_step(tokens[-1], length + len(tokens) - 1, kv=kv)))
    return tokens


def encode(text: str) -> list[int]:
    """A text as tokens: its bytes in UTF-8."""
    return list(text.encode("utf-8"))


def _random_matrix(rng: np.random.Generator, rows: int, columns: int) -> F32:
    matrix = rng.standard_normal((rows, columns), dtype=np.float32)
    matrix *= np.float32(1 / math.sqrt(rows))
    return matrix


def _random_layer(c: ModelConfig, rng: np.random.Generator) -> LayerWeights:
    width = c.heads * c.head_dim
    return LayerWeights(
        attention_norm=np.ones(c.d_model, dtype=np.float32),
        # Sharp attention: with the usual scale random heads only average, and the answer would hardly need the cache.
        query=_random_matrix(rng, c.d_model, width) * np.float32(2),
        key=_random_matrix(rng, c.d_model, c.kv_width) * np.float32(2),
        value=_random_matrix(rng, c.d_model, c.kv_width),
        output=_random_matrix(rng, width, c.d_model),
        mlp_norm=np.ones(c.d_model, dtype=np.float32),
        gate=_random_matrix(rng, c.d_model, c.hidden),
        up=_random_matrix(rng, c.d_model, c.hidden),
        down=_random_matrix(rng, c.hidden, c.d_model),
    )


def _rotary_tables(c: ModelConfig) -> tuple[F32, F32]:
    half = c.head_dim // 2
    frequencies = c.rope_base ** (-np.arange(half) / half)
    angles = np.arange(c.max_seq)[:, None] * frequencies[None, :]
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _rms_norm(x: F32, gain: F32) -> F32:
    scale = np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + NORM_EPSILON)
    normed: F32 = x / scale * gain
    return normed


def _swiglu(x: F32, weights: LayerWeights) -> F32:
    gate = x @ weights.gate
    out: F32 = (gate / (np.float32(1) + np.exp(-gate)) * (x @ weights.up)) @ weights.down
    return out


def _grouped_attention(query: F32, keys: F32, *, values: F32, start: int) -> F32:
    """``query [n, heads, dim]`` against ``keys, values [m, kv_heads, dim]``; the heads of a group share one of them."""
    n, heads, dim = query.shape
    m, kv_heads, _ = keys.shape
    grouped = query.reshape(n, kv_heads, heads // kv_heads, dim).transpose(1, 2, 0, 3)
    scores = grouped @ keys.transpose(1, 2, 0)[:, None] * np.float32(1 / math.sqrt(dim))
    visible = np.arange(m)[None, :] <= np.arange(start, start + n)[:, None]
    weights = _softmax(np.where(visible, scores, MASKED))
    mixed: F32 = (weights @ values.transpose(1, 0, 2)[:, None]).transpose(2, 0, 1, 3)
    return mixed


def _softmax(scores: F32) -> F32:
    exponent = np.exp(scores - scores.max(axis=-1, keepdims=True))
    probabilities: F32 = exponent / exponent.sum(axis=-1, keepdims=True)
    return probabilities


def _generate(model: TinyTransformer, prompt: list[int], *, count: int, kv: KVMemory) -> list[int]:
    first = greedy(model.prefill(prompt, kv))
    return continue_greedily(model, first, length=len(prompt), count=count, kv=kv)


def check_recomputation(model: TinyTransformer, prompt: list[int], *, count: int) -> tuple[float, float]:
    """Decodes with the cache and, token by token, from scratch.

    Returns the largest difference of the logits, and the smallest lead of a best token over the second best.
    """
    tokens, difference, lead = list(prompt), 0.0, math.inf
    kv = ContiguousKV(contiguous_arrays(model.config, 1), 0)
    cached = model.prefill(prompt, kv)
    for _ in range(count):
        fresh = model.prefill(tokens, ContiguousKV(contiguous_arrays(model.config, 1), 0))
        difference = max(difference, float(np.abs(fresh - cached).max()))
        second, first = np.sort(fresh)[-2:]
        lead = min(lead, float(first - second))
        if greedy(fresh) != greedy(cached):
            raise AssertionError(f"token {len(tokens)}: the cache gives {greedy(cached)}, from scratch {greedy(fresh)}")
        tokens.append(greedy(cached))
        cached = model.decode_step(tokens[-1], len(tokens) - 1, kv=kv)
    return difference, lead


def check_paged(model: TinyTransformer, prompt: list[int], *, count: int) -> None:
    """A paged cache with a scattered block table gives the same tokens as a contiguous one."""
    table = np.random.default_rng(1).permutation(model.config.max_seq // 16).tolist()
    paged = PagedKV(paged_arrays(model.config, len(table), block_size=16), table)
    plain = ContiguousKV(contiguous_arrays(model.config, 3), 2)
    if _generate(model, prompt, count=count, kv=paged) != _generate(model, prompt, count=count, kv=plain):
        raise AssertionError("the paged cache and the contiguous cache disagree")


def check_sensitivity(model: TinyTransformer, prompt: list[int], *, count: int) -> None:
    """An empty cache, or one wrong layer or position, must change the answer: else comparing answers proves nothing."""
    tensors = contiguous_arrays(model.config, 1)
    kv = ContiguousKV(tensors, 0)
    first = greedy(model.prefill(prompt, kv))
    saved = [tensor.copy() for tensor in tensors]
    right = continue_greedily(model, first, length=len(prompt), count=count, kv=kv)
    for name in ("all", "values of the last layer", "keys of layer 0", "the newest position"):
        for index, tensor in enumerate(tensors):
            tensor[...] = saved[index]
            _spoil(name, tensor, index=index, from_end=len(tensors) - index, length=len(prompt))
        if continue_greedily(model, first, length=len(prompt), count=count, kv=kv) == right:
            raise AssertionError(f"the answer does not depend on the cache: {name} zeroed changed nothing")


def _spoil(name: str, tensor: F32, *, index: int, from_end: int, length: int) -> None:
    if name == "all" or (name.startswith("values") and from_end == 1) or (name.startswith("keys") and index == 0):
        tensor[...] = 0
    elif name.startswith("the newest"):
        tensor[:, length - 1] = 0


def main() -> int:
    """Check the model by itself; 0 when everything holds."""
    model = TinyTransformer()
    for text in ("Hi", "The cache is the memory of the model.", "A longer prompt, over and over. " * 9):
        prompt = encode(text)
        difference, lead = check_recomputation(model, prompt, count=24)
        check_paged(model, prompt, count=24)
        check_sensitivity(model, prompt, count=24)
        print(
            f"{len(prompt):4d} tokens: cached decoding equals recomputation (logits within {difference:.1e}, the "
            f"best token leads by {lead:.1e} or more); paged equals contiguous; a spoiled cache is noticed"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
