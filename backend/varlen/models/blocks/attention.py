"""Attention of decoders: over packed tokens in one step, or over KV blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from varlen.models.blocks import inputs
from varlen.program.rank import AttentionHeads

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from varlen.models.blocks.rotary import RotaryPositions
    from varlen.program.program import State, Value
    from varlen.program.recorder import Recorder


class Attention(Protocol):
    """Records the attention of one layer."""

    def record(
        self,
        ops: Recorder,
        layer: int,
        qkv: Value,
        heads: AttentionHeads,
        *,
        positions: RotaryPositions | None = None,
        scale: float | None = None,
        window: int = 0,
        soft_cap: float = 0.0,
        bias: Tensor | None = None,
    ) -> Value:
        """Record the attention of the layer and return its context, `[tokens, heads.width]`.

        Args:
            layer: number of the layer, from 0.
            qkv: queries, keys and values of each token.
            positions: rotary positions of queries and keys; None leaves both as they are.
            scale: multiplies the scores; None is heads.dim ** -0.5.
            window: number of last tokens that a token reads; 0 is all.
            soft_cap: limit of scores; 0 is none, see `attention_varlen`.
            bias: `[heads.queries, 2 * reach + 1]` fp32, added to scores by distance; see `attention_varlen`.
        """


@dataclass(frozen=True, slots=True)
class PackedAttention:
    """Attention inside each sequence of a batch that runs once, without a KV cache.

    Attributes:
        is_causal: whether tokens read only earlier ones, and with a window those on one side.
    """

    is_causal: bool = True

    def record(
        self,
        ops: Recorder,
        layer: int,  # noqa: ARG002  # part of the protocol
        qkv: Value,
        heads: AttentionHeads,
        *,
        positions: RotaryPositions | None = None,
        scale: float | None = None,
        window: int = 0,
        soft_cap: float = 0.0,
        bias: Tensor | None = None,
    ) -> Value:
        if positions is not None:
            norms, eps = positions.norms, positions.norm_eps
            if norms is not None and not positions.are_norms_last:
                qkv = ops.norm_heads(qkv, *norms, heads, eps=eps)
            qkv = ops.rotary(qkv, inputs.position_ids(ops), positions.cos_sin, heads)
            if norms is not None and positions.are_norms_last:
                qkv = ops.norm_heads(qkv, *norms, heads, eps=eps)
        return ops.attention_varlen(
            qkv,
            inputs.cu_seqlens(ops),
            heads,
            scale=_scale(scale, heads),
            causal=self.is_causal,
            window=window,
            soft_cap=soft_cap,
            bias=bias,
        )


@dataclass(frozen=True, slots=True)
class _KvCaches:
    num_blocks: int
    block_size: int
    dtype: torch.dtype

    def _of(self, ops: Recorder, layer: int, heads: AttentionHeads) -> tuple[State, State]:
        shape = (self.num_blocks, heads.keys, self.block_size, heads.dim)
        keys = ops.state(f"keys.{layer}", shape, self.dtype)
        return keys, ops.state(f"values.{layer}", shape, self.dtype)


@dataclass(frozen=True, slots=True)
class PagedAttention(_KvCaches):
    """Attention over KV blocks; the keys and values of the step's tokens are appended first."""

    def record(
        self,
        ops: Recorder,
        layer: int,
        qkv: Value,
        heads: AttentionHeads,
        *,
        positions: RotaryPositions | None = None,
        scale: float | None = None,
        window: int = 0,
        soft_cap: float = 0.0,
        bias: Tensor | None = None,
    ) -> Value:
        keys, values = self._of(ops, layer, heads)
        slots = inputs.slots(ops)
        if positions is not None and positions.norms is not None and positions.are_norms_last:
            # the op that appends norms before it rotates
            qkv = ops.rotary(qkv, inputs.position_ids(ops), positions.cos_sin, heads)
            qkv = ops.norm_heads(qkv, *positions.norms, heads, eps=positions.norm_eps)
            positions = None
        if positions is None:
            ops.append_kv(qkv, slots, keys, values, heads)
        else:
            qkv = ops.append_kv(
                qkv,
                slots,
                keys,
                values,
                heads,
                inputs.position_ids(ops),
                positions.cos_sin,
                positions.norms,
                eps=positions.norm_eps,
            )
        return ops.attention_paged(
            qkv,
            keys,
            values,
            inputs.block_tables(ops),
            heads,
            scale=_scale(scale, heads),
            window=window,
            soft_cap=soft_cap,
            bias=bias,
        )


@dataclass(frozen=True, slots=True)
class CrossAttention(_KvCaches):
    """Attention of a decoder's tokens over their sources, in blocks of the same caches.

    The encoder's program stores the keys and values of a source once; the decoder's program reads them in each step.
    """

    def store(self, ops: Recorder, layer: int, kv: Value, heads: AttentionHeads) -> None:
        """Record writing the keys and values of sources into their slots.

        Args:
            ops: recorder of the encoder's program; has recorded `kv`.
            kv: `[tokens, 2 * heads.keys * heads.dim]`: keys, then values of each token of the sources.
        """
        keys, values = self._of(ops, layer, heads)
        no_queries = AttentionHeads(0, heads.keys, heads.dim)
        ops.append_kv(kv, inputs.slots(ops), keys, values, no_queries)

    def attend(
        self,
        ops: Recorder,
        layer: int,
        queries: Value,
        heads: AttentionHeads,
        *,
        scale: float,
        soft_cap: float = 0.0,
    ) -> Value:
        """Record each token's attention over its source and return its context, `[tokens, heads.width]`.

        Args:
            ops: recorder of the decoder's program; has recorded `queries`.
            queries: `[tokens, heads.width]`.
            scale: multiplies the scores.
            soft_cap: limit of scores; 0 is none, see `attention_varlen`.
        """
        keys, values = self._of(ops, layer, heads)
        tables = inputs.source_tables(ops)
        return ops.attention_paged(
            queries, keys, values, tables, heads, scale=scale, soft_cap=soft_cap
        )


def _scale(scale: float | None, heads: AttentionHeads) -> float:
    return heads.dim**-0.5 if scale is None else scale
