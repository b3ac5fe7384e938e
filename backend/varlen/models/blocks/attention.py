"""Attention of decoders, and positions of tokens.

Attention is over packed tokens in one step, or over KV blocks. Positions are a table of rotary ones, and biases by
distance.
Source: Su et al. 2021, arXiv:2104.09864; Peng et al. 2023, arXiv:2309.00071 (YaRN). Frequencies are computed in
fp32 in the order of transformers, so that far positions get the same angles.

Distances of T5 share learned biases: near ones have one each, farther ones fall into buckets that grow with the
logarithm. Source: Raffel et al. 2019, arXiv:1910.10683, section 2.1; buckets as in Mesh TensorFlow. The bias of ALiBi
is a slope of each head times the distance. Source: Press et al. 2021, arXiv:2108.12409.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypedDict

from varlen.models.blocks import inputs
from varlen.models.checkpoint.rotary_config import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RotaryConfig,
    YarnScaling,
)
from varlen.program.rank import AttentionHeads

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from typing_extensions import Unpack

    from varlen.models.checkpoint.layers import LayerReader, TokenTable
    from varlen.program.program import State, Value
    from varlen.program.recorder import Recorder


@dataclass(frozen=True, slots=True)
class RotaryPositions:
    """Rotary positions of queries and keys, and their norms.

    Attributes:
        cos_sin: `[positions, head_dim]` fp32, result of `rotary_table`.
        norms: `[head_dim]`, weights of the RMS norms of queries and of keys; None for no norms.
        norm_eps: added to the mean square.
        are_norms_last: whether the norms follow the rotation; else they come before it.
    """

    cos_sin: Tensor
    norms: tuple[Tensor, Tensor] | None
    norm_eps: float
    are_norms_last: bool = False


def rotary_table(rotary: RotaryConfig, dim: int, device: torch.device) -> Tensor:
    """Return cosines, then sines, of all positions: `[positions, dim]` fp32.

    Features that do not rotate are the last ones of either half: their cosine is 1, see `half_order`.
    """
    import torch
    from torch.nn.functional import pad

    rotated = rotary.rotated(dim)
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
    frequencies, scale = _scaled(rotary, rotary.theta**exponents, rotated)
    positions = torch.arange(rotary.positions, dtype=torch.float32)
    angles = positions[:, None] * frequencies
    others = (0, (dim - rotated) // 2)
    cos, sin = pad(angles.cos() * scale, others, value=1.0), pad(angles.sin() * scale, others)
    return torch.cat((cos, sin), dim=1).to(device)


def read_rotary_tables(
    read: LayerReader, rotary: Sequence[RotaryConfig], dim: int, table: TokenTable
) -> tuple[Tensor, ...]:
    """Return the rotary table of each layer; layers with equal positions share one.

    Args:
        table: the tables are on its device.
    """

    def computed(of_layer: RotaryConfig) -> Tensor:
        return read.computed(lambda: rotary_table(of_layer, dim, table.device))

    tables = {each: computed(each) for each in dict.fromkeys(rotary)}
    return tuple(tables[each] for each in rotary)


def half_order(dim: int, rotated: int) -> list[int]:
    """Return an order of a head's features in which each half begins with rotating ones.

    A checkpoint has the features that rotate before all others. Queries and keys in one order have the same products.
    """
    half, middle = rotated // 2, rotated + (dim - rotated) // 2
    return [*range(half), *range(rotated, middle), *range(half, rotated), *range(middle, dim)]


def _scaled(rotary: RotaryConfig, periods: Tensor, dim: int) -> tuple[Tensor, float]:
    """Return the frequencies, given their inverses, and the factor of cosines and sines."""
    match rotary.scaling:
        case LinearScaling(factor=factor):
            return 1.0 / periods / factor, 1.0
        case Llama3Scaling() as llama3:
            return _llama3(llama3, 1.0 / periods), 1.0
        case LongRopeScaling(factors=factors, attention_factor=scale):
            return 1.0 / (periods.new_tensor(factors) * periods), scale
        case YarnScaling() as yarn:
            return _yarn(yarn, periods, rotary.theta, dim), _yarn_attention_factor(yarn)


def _llama3(scaling: Llama3Scaling, frequencies: Tensor) -> Tensor:
    rotations = scaling.positions / (2 * math.pi / frequencies)
    # 0 for low frequencies, 1 for high ones
    ramp = ((rotations - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
    return (1 - ramp) * frequencies / scaling.factor + ramp * frequencies


def _yarn(scaling: YarnScaling, periods: Tensor, theta: float, dim: int) -> Tensor:
    import torch

    def feature_at(rotations: float) -> float:
        """Return the feature that rotates `rotations` times over the original length."""
        return dim * math.log(scaling.positions / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    first, last = feature_at(scaling.beta_fast), feature_at(scaling.beta_slow)
    if scaling.is_truncated:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first if last != first else 0.001
    # 1 for high frequencies, 0 for low ones
    kept = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    return 1.0 / (scaling.factor * periods) * (1 - kept) + 1.0 / periods * kept


def _yarn_attention_factor(scaling: YarnScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return _mscale(scaling.factor, scaling.mscale) / _mscale(
            scaling.factor, scaling.mscale_all_dim
        )
    return _mscale(scaling.factor, 1.0)


def _mscale(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def bias_by_distance(table: Tensor, *, max_distance: int, is_causal: bool) -> Tensor:
    """Return the bias of each head and distance, `[num_heads, 2 * max_distance + 1]` fp32.

    Entry max_distance + d belongs to a key d tokens after its query.

    Args:
        table: `[buckets, num_heads]`, the bias of each bucket.
        max_distance: first distance of the last bucket.
        is_causal: whether queries read no later keys, so that earlier ones have all buckets.
    """
    import torch

    buckets = len(table)
    later = torch.arange(-max_distance, max_distance + 1)
    if is_causal:
        bucket = _bucket((-later).clamp_min(0), buckets, max_distance)
    else:
        half = buckets // 2
        bucket = _bucket(later.abs(), half, max_distance) + half * (later > 0)
    return table.float()[bucket.to(table.device)].t().contiguous()


def alibi_by_distance(num_heads: int, furthest: int) -> Tensor:
    """Return the bias of each head and distance in both directions, `[num_heads, 2 * furthest + 1]` fp32.

    Entry furthest + d belongs to a key d tokens before or after its query.
    """
    import torch

    # powers of two of heads have a geometric series; others take every second slope of the next one
    whole = 2 ** (num_heads.bit_length() - 1)
    slopes = [*_slopes(whole), *_slopes(2 * whole)[::2]][:num_heads]
    distance = torch.arange(-furthest, furthest + 1).abs()
    return -torch.tensor(slopes)[:, None] * distance


def _slopes(heads: int) -> list[float]:
    return [2 ** (-8 * (head + 1) / heads) for head in range(heads)]


def _bucket(distance: Tensor, buckets: int, max_distance: int) -> Tensor:
    import torch

    exact = buckets // 2
    # log(0) is never chosen
    part = torch.log(distance.float() / exact) / math.log(max_distance / exact)
    far = exact + (part.clamp_min(0) * (buckets - exact)).long()
    return torch.where(distance < exact, distance, far.clamp_max(buckets - 1))


class ScoreTerms(TypedDict, total=False):
    """What changes the scores of a layer's attention.

    Attributes:
        scale: multiplies them; None is heads.dim ** -0.5.
        window: number of last tokens that a token reads; 0 is all.
        soft_cap: limit of scores; 0 is none, see `attention_varlen`.
        bias: `[heads.queries, 2 * reach + 1]` fp32, added by distance; see `attention_varlen`.
    """

    scale: float | None
    window: int
    soft_cap: float
    bias: Tensor | None


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
        **terms: Unpack[ScoreTerms],
    ) -> Value:
        """Record the attention of the layer and return its context, `[tokens, heads.width]`.

        Args:
            qkv: queries, keys and values of each token.
            positions: rotary positions of queries and keys; None leaves both as they are.
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
        **terms: Unpack[ScoreTerms],
    ) -> Value:
        if positions is not None:
            norms, eps = positions.norms, positions.norm_eps
            if norms is not None and not positions.are_norms_last:
                qkv = ops.norm_heads(qkv, *norms, heads, eps=eps)
            qkv = ops.rotary(qkv, inputs.position_ids(ops), positions.cos_sin, heads)
            if norms is not None and positions.are_norms_last:
                qkv = ops.norm_heads(qkv, *norms, heads, eps=eps)
        bounds = inputs.cu_seqlens(ops)
        return ops.attention_varlen(qkv, bounds, heads, causal=self.is_causal, **terms)


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
        **terms: Unpack[ScoreTerms],
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
        return ops.attention_paged(qkv, keys, values, inputs.block_tables(ops), heads, **terms)


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
        **terms: Unpack[ScoreTerms],
    ) -> Value:
        """Record each token's attention over its source and return its context, `[tokens, heads.width]`.

        Args:
            ops: recorder of the decoder's program; has recorded `queries`.
            queries: `[tokens, heads.width]`.
        """
        caches = self._of(ops, layer, heads)
        return ops.attention_paged(queries, *caches, inputs.source_tables(ops), heads, **terms)
