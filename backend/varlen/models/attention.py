"""Attention of decoders: over packed tokens in one step, or over KV blocks."""

from dataclasses import dataclass
from typing import Protocol

import torch

from varlen.models import inputs
from varlen.program.program import State, Value
from varlen.program.recorder import AttentionHeads, Recorder


class Attention(Protocol):
    """Records the attention of one layer."""

    def record(
        self, ops: Recorder, layer: int, qkv: Value, heads: AttentionHeads, *, window: int = 0
    ) -> Value:
        """Record causal attention and return its context, `[tokens, heads.width]`.

        Args:
            ops: has recorded `qkv`.
            layer: number of the layer, from 0.
            qkv: queries, keys and values of each token, positions applied.
            heads: of the layer.
            window: number of last tokens that a token reads; 0 is all.
        """


@dataclass(frozen=True, slots=True)
class PackedAttention:
    """Attention inside each sequence of a batch that runs once, without a KV cache."""

    def record(
        self,
        ops: Recorder,
        layer: int,  # noqa: ARG002  # part of the protocol
        qkv: Value,
        heads: AttentionHeads,
        *,
        window: int = 0,
    ) -> Value:
        bounds, scale = inputs.cu_seqlens(ops), heads.dim**-0.5
        return ops.attention_varlen(qkv, bounds, heads, scale=scale, causal=True, window=window)


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """Attention over KV blocks; the keys and values of the step's tokens are appended first.

    Attributes:
        num_blocks: number of blocks of each cache.
        block_size: tokens of a block.
        dtype: of the caches.
    """

    num_blocks: int
    block_size: int
    dtype: torch.dtype

    def record(
        self, ops: Recorder, layer: int, qkv: Value, heads: AttentionHeads, *, window: int = 0
    ) -> Value:
        keys, values = (self._cache(ops, f"{part}.{layer}", heads) for part in ("keys", "values"))
        ops.append_kv(qkv, inputs.slots(ops), keys, values, heads)
        tables = inputs.block_tables(ops)
        return ops.attention_paged(
            qkv, keys, values, tables, heads, scale=heads.dim**-0.5, window=window
        )

    def _cache(self, ops: Recorder, name: str, heads: AttentionHeads) -> State:
        shape = (self.num_blocks, heads.keys, self.block_size, heads.dim)
        return ops.state(name, shape, self.dtype)
