"""Linear layers of at most 64 rows, each with its neighbours in one kernel.

They are the products of a decode step with its norms, positions, append, activations, sums and choice. A step reads
each weight once, so a kernel takes as long as its weights. One program owns some features of all rows and reads their
weights, `[features, hidden]` in memory, as one stream. One row runs on CUDA cores, more on tensor cores.

A norm is applied behind the product, which needs the weighted inputs only: the sums of a row and of its squares come
from the same pass. What an epilogue combines, such as the halves that a rotation turns or a gate and its factor, are
features of one program, side by side.

Weights may be codes of 8 bits with a scale for each feature. They become numbers in registers, and the scale is applied
behind the product, on tensor cores for one row too. They have no other kernel: of more rows, programs own parts.

Weights depend on no kernel before. So they are requested before the wait of a dependent launch, into registers or the
L2 cache, and everything else after it.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from varlen_kernels import Activation, reference
from varlen_kernels.reference.few_rows import FoldedNorm
from varlen_kernels.reference.linear_layers import CODES, CodedWeight, LinearWeight
from varlen_kernels.triton import activation
from varlen_kernels.triton.activation import activated
from varlen_kernels.triton.attention_blocks import check_caches, for_cache
from varlen_kernels.triton.beam_keys import NO_INDEX, key_of, without_nan
from varlen_kernels.triton.checks import (
    check_dtype,
    check_heads,
    check_ids,
    check_out,
    check_rows,
    check_vector,
)
from varlen_kernels.triton.dependent_launch import dependent_launch, wait_for_kernels
from varlen_kernels.triton.splits import arrivals_of

MOST_ROWS = 64
# Rows of a program: the first number that is not less than the rows of the step; more rows are several programs.
# One row of numbers runs on CUDA cores, all else on tensor cores.
_ROWS = (1, 16, 64, 128)
_FEW = tl.constexpr(MOST_ROWS)
# Bytes of a tile of weights on CUDA cores, by rows of a program; on tensor cores weights of 16 bits of each feature.
_TILES = {1: 16384, 16: 256, 64: 128, 128: 64}
# Most bytes of the weights of a feature in a tile.
_WIDEST = 2048
# Programs that fill a large GPU. Programs own fewer features where that leaves some idle.
_PROGRAMS = 256
# Features of a program of more than 64 rows: the first number that leaves enough programs, else the last one.
_MANY_ROWS_FEATURES = (128, 32)
# Tiles that are in flight on tensor cores.
_STAGES = 3
# Bytes of a line of the L2 cache, and tiles whose lines are requested before the wait.
_LINE, _REQUESTED = tl.constexpr(128), tl.constexpr(4)
# What a norm subtracts and divides by.
_NONE, _RMS, _LAYER = (tl.constexpr(each) for each in range(3))
# The bias of exponents of fp32 by the bias of fp8.
_BIAS = tl.constexpr(2.0**120)
# Compute capability from which GPUs convert fp8.
_FP8_ARCH = 89
# Above the keys of all logits, so that the order of a token is not negative.
_LIFT = tl.constexpr(2**31)


@triton.jit
def _widened(weight):
    """Return fp8 (e4m3) or its bytes as numbers in fp32; other weights as they are."""
    if weight.dtype == tl.uint8:
        # the sign to the top, exponent and mantissa below the upper bits of an exponent
        bits = (weight.to(tl.int8, bitcast=True).to(tl.int32) << 20) & -0x78100000
        weight = bits.to(tl.float32, bitcast=True) * _BIAS
    elif weight.dtype == tl.float8e4nv:
        # a conversion to bf16 at once is a slower instruction
        weight = weight.to(tl.float32)
    return weight


@triton.jit
def _request(
    weight_ptr,  # [features, HIDDEN]
    feature,  # [FEATURES]
    is_feature,  # [FEATURES]
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Request the first weights, then wait for the kernel before.

    Returns pointers to the first weight of each feature, and on CUDA cores the first tile, [FEATURES, BLOCK].
    """
    # int64: features * HIDDEN may pass 2**31
    weight_ptr += tl.where(is_feature, feature, 0).to(tl.int64) * HIDDEN
    tile = is_feature
    if ROWS == 1:
        col = tl.arange(0, BLOCK)[None, :]
        inside = is_feature[:, None] & (col < HIDDEN)
        tile = tl.load(weight_ptr[:, None] + col, mask=inside, other=0.0)
    elif DEPENDENT:
        ITEM: tl.constexpr = weight_ptr.dtype.element_ty.primitive_bitwidth // 8
        LINES: tl.constexpr = max(_REQUESTED * BLOCK * ITEM // _LINE, 1)
        line = tl.arange(0, LINES) * (_LINE // ITEM)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [weight_ptr[:, None] + tl.minimum(line, HIDDEN - 1)[None, :]],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    wait_for_kernels(DEPENDENT)
    return weight_ptr, tile


@triton.jit
def _product(
    requested,  # result of `_request`
    row_ptr,  # [ROWS] pointers to rows of [HIDDEN]
    is_row,  # [ROWS]
    scale_ptr,  # [features] fp32, read if IS_CODED
    gain_ptr,  # [HIDDEN], read if NORM
    sums_ptr,  # [features] fp32, read if NORM is _LAYER
    shift_ptr,  # [features], read if HAS_SHIFT
    feature,  # [FEATURES]
    is_feature,  # [FEATURES]
    eps,
    HIDDEN: tl.constexpr,
    IS_CODED: tl.constexpr,
    NORM: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return norm(x) @ weightᵀ + shift, [FEATURES, ROWS] fp32."""
    weight_ptr, tile = requested
    # weights, then x: [FEATURES, BLOCK] and [BLOCK, ROWS]
    col = tl.arange(0, BLOCK)
    weight_ptr = weight_ptr[:, None] + col[None, :]
    product = tl.zeros([FEATURES, ROWS], tl.float32)
    # of x and of its squares
    total = tl.zeros([ROWS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    if ROWS == 1:
        for first in range(0, HIDDEN, BLOCK):
            inside = first + col < HIDDEN
            at = row_ptr[:, None] + (first + col)[None, :]
            x = tl.load(at, mask=is_row[:, None] & inside[None, :], other=0.0).to(tl.float32)
            weight = tile.to(tl.float32)
            # the next weights are on their way while these are used
            ahead = is_feature[:, None] & (first + BLOCK + col < HIDDEN)[None, :]
            tile = tl.load(weight_ptr + first + BLOCK, mask=ahead, other=0.0)
            if NORM != _NONE:
                gain = tl.load(gain_ptr + first + col, mask=inside, other=0.0).to(tl.float32)
                total += tl.sum(x, axis=1)
                squares += tl.sum(x * x, axis=1)
                x *= gain[None, :]
            product += tl.sum(weight[:, None, :] * x[None, :, :], axis=2)
    else:
        for first in tl.range(0, HIDDEN, BLOCK):
            inside = first + col < HIDDEN
            there = is_feature[:, None] & inside[None, :]
            weight = tl.load(weight_ptr + first, mask=there, other=0.0)
            at = row_ptr[None, :] + (first + col)[:, None]
            x = tl.load(at, mask=inside[:, None] & is_row[None, :], other=0.0)
            if NORM != _NONE:
                gain = tl.load(gain_ptr + first + col, mask=inside, other=0.0).to(tl.float32)
                exact = x.to(tl.float32)
                total += tl.sum(exact, axis=0)
                squares += tl.sum(exact * exact, axis=0)
                x = (exact * gain[:, None]).to(x.dtype)
            weight = _widened(weight).to(x.dtype)
            product = tl.dot(weight, x, product, input_precision="ieee")
    if IS_CODED:
        product *= tl.load(scale_ptr + feature, mask=is_feature, other=0.0)[:, None]
    if NORM == _RMS:
        product *= tl.rsqrt(squares / HIDDEN + eps)[None, :]
    if NORM == _LAYER:
        mean = total / HIDDEN
        # rounding may leave less than 0
        variance = tl.maximum(squares / HIDDEN - mean * mean, 0.0)
        sums = tl.load(sums_ptr + feature, mask=is_feature, other=0.0)
        product = (product - sums[:, None] * mean[None, :]) * tl.rsqrt(variance + eps)[None, :]
    if HAS_SHIFT:
        shift = tl.load(shift_ptr + feature, mask=is_feature, other=0.0).to(tl.float32)
        product += shift[:, None]
    return product


@triton.jit
def _pairs(product, FEATURES: tl.constexpr, ROWS: tl.constexpr):
    """Return every other feature of a product, and those between: [FEATURES / 2, ROWS] each."""
    return tl.split(product.reshape(FEATURES // 2, 2, ROWS).permute(0, 2, 1))


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x_ptr,  # [rows, HIDDEN]
    weight_ptr,  # [OUT, HIDDEN], [2 * OUT, HIDDEN] if IS_GATED
    scale_ptr,  # features of the weight, fp32, read if IS_CODED
    gain_ptr,  # [HIDDEN], read if NORM
    sums_ptr,  # features of the weight, fp32, read if NORM is _LAYER
    shift_ptr,  # features of the weight, read if HAS_SHIFT
    residual_ptr,  # [rows, OUT], read if HAS_RESIDUAL; may be `out`
    out_ptr,  # [rows, OUT]
    rows,
    eps,
    OUT: tl.constexpr,
    X_STRIDE: tl.constexpr,
    RESIDUAL_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    KIND: tl.constexpr,  # "" for no activation
    IS_GATED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HIDDEN: tl.constexpr,
    IS_CODED: tl.constexpr,
    NORM: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    SIDES: tl.constexpr = 2 if IS_GATED else 1
    part = tl.program_id(0)
    if ROWS > _FEW:
        # neighbours read the same weights, for other rows; int64: rows * X_STRIDE may pass 2**31
        part = tl.program_id(1)
        before = tl.program_id(0).to(tl.int64) * ROWS
        x_ptr += before * X_STRIDE
        residual_ptr += before * RESIDUAL_STRIDE
        out_ptr += before * OUT_STRIDE
        rows -= tl.program_id(0) * ROWS
    place = part * FEATURES + tl.arange(0, FEATURES)
    row = tl.arange(0, ROWS)
    feature = place // SIDES + place % SIDES * OUT
    is_feature = place // SIDES < OUT
    requested = _request(weight_ptr, feature, is_feature, HIDDEN, ROWS, BLOCK, DEPENDENT)
    product = _product(
        requested,
        x_ptr + row * X_STRIDE,
        row < rows,
        scale_ptr,
        gain_ptr,
        sums_ptr,
        shift_ptr,
        feature,
        is_feature,
        eps,
        HIDDEN,
        IS_CODED,
        NORM,
        HAS_SHIFT,
        ROWS,
        FEATURES,
        BLOCK,
    )
    if IS_GATED:
        gate, up = _pairs(product, FEATURES, ROWS)
        product = activated(gate, KIND) * up
    elif KIND != "":
        product = activated(product, KIND)
    first = part * (FEATURES // SIDES)
    feature = (first + tl.arange(0, FEATURES // SIDES))[:, None]
    inside = (feature < OUT) & (row < rows)[None, :]
    if HAS_RESIDUAL:
        at = residual_ptr + row[None, :] * RESIDUAL_STRIDE + feature
        product += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row[None, :] * OUT_STRIDE + feature, product, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _append_kernel(
    x_ptr,  # [rows, HIDDEN]
    weight_ptr,  # [heads * HEAD_DIM, HIDDEN]
    scale_ptr,  # features of the weight, fp32, read if IS_CODED
    gain_ptr,  # [HIDDEN]
    sums_ptr,  # [heads * HEAD_DIM] fp32, read if NORM is _LAYER
    shift_ptr,  # [heads * HEAD_DIM], read if HAS_SHIFT
    slots_ptr,  # [rows] int64
    key_cache_ptr,  # [blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM]
    value_cache_ptr,  # [blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM]
    position_ids_ptr,  # [rows], read if ROTATES, as the next one
    cos_sin_ptr,  # [positions, HEAD_DIM]
    out_ptr,  # [rows, heads * HEAD_DIM], gets the queries
    rows,
    eps,
    X_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    TABLE_STRIDE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROTATES: tl.constexpr,
    HIDDEN: tl.constexpr,
    IS_CODED: tl.constexpr,
    NORM: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute pairs of features, one of each half of a head."""
    HALF: tl.constexpr = HEAD_DIM // 2
    PAIRS: tl.constexpr = (NUM_HEADS + 2 * NUM_KV_HEADS) * HALF
    place = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    row = tl.arange(0, ROWS)
    is_row = row < rows
    feature = place // 2 // HALF * HEAD_DIM + place % 2 * HALF + place // 2 % HALF
    is_feature = place // 2 < PAIRS
    requested = _request(weight_ptr, feature, is_feature, HIDDEN, ROWS, BLOCK, DEPENDENT)
    product = _product(
        requested,
        x_ptr + row * X_STRIDE,
        is_row,
        scale_ptr,
        gain_ptr,
        sums_ptr,
        shift_ptr,
        feature,
        is_feature,
        eps,
        HIDDEN,
        IS_CODED,
        NORM,
        HAS_SHIFT,
        ROWS,
        FEATURES,
        BLOCK,
    )
    first, second = _pairs(product, FEATURES, ROWS)
    pair = tl.program_id(0) * (FEATURES // 2) + tl.arange(0, FEATURES // 2)[:, None]
    head, col = pair // HALF, pair % HALF
    if ROTATES:
        position = tl.load(position_ids_ptr + row, mask=is_row, other=0).to(tl.int64)
        angle_ptr = cos_sin_ptr + position[None, :] * TABLE_STRIDE + col
        turns = is_row[None, :] & (head < NUM_HEADS + NUM_KV_HEADS)
        cos = tl.load(angle_ptr, mask=turns, other=1.0)
        sin = tl.load(angle_ptr + HALF, mask=turns, other=0.0)
        first, second = first * cos - second * sin, second * cos + first * sin
    query_ptr = out_ptr + row[None, :] * OUT_STRIDE + head * HEAD_DIM + col
    is_query = is_row[None, :] & (head < NUM_HEADS)
    tl.store(query_ptr, first, mask=is_query)
    tl.store(query_ptr + HALF, second, mask=is_query)

    slot = tl.load(slots_ptr + row, mask=is_row, other=-1)[None, :]
    kv_head = (head - NUM_HEADS) % NUM_KV_HEADS
    # int64, as slots: the elements of a cache may pass 2**31
    cache_row = (slot // BLOCK_SIZE * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
    at = cache_row * HEAD_DIM + col
    is_key = (slot >= 0) & (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    first, second = for_cache(first, key_cache_ptr), for_cache(second, key_cache_ptr)
    tl.store(key_cache_ptr + at, first, mask=is_key)
    tl.store(key_cache_ptr + at + HALF, second, mask=is_key)
    is_value = (slot >= 0) & (head >= NUM_HEADS + NUM_KV_HEADS) & (pair < PAIRS)
    tl.store(value_cache_ptr + at, first, mask=is_value)
    tl.store(value_cache_ptr + at + HALF, second, mask=is_value)


@triton.jit(do_not_specialize=["rows"])
def _next_tokens_kernel(
    x_ptr,  # [tokens, HIDDEN]
    rows_ptr,  # [rows]
    weight_ptr,  # [VOCABULARY, HIDDEN]
    scale_ptr,  # features of the weight, fp32, read if IS_CODED
    gain_ptr,  # [HIDDEN]
    sums_ptr,  # [VOCABULARY] fp32, read if NORM is _LAYER
    shift_ptr,  # [VOCABULARY], read if HAS_SHIFT
    logits_ptr,  # [rows, VOCABULARY] fp32
    tokens_ptr,  # [rows] int32
    best_ptr,  # [ROWS] int64 of 0: the order of the best token
    arrivals_ptr,  # int32 of 0
    rows,
    eps,
    X_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    VOCABULARY: tl.constexpr,
    HIDDEN: tl.constexpr,
    IS_CODED: tl.constexpr,
    NORM: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute FEATURES logits of each row; the last program writes the tokens."""
    token = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    is_token = token < VOCABULARY
    requested = _request(weight_ptr, token, is_token, HIDDEN, ROWS, BLOCK, DEPENDENT)
    row = tl.arange(0, ROWS)
    is_row = row < rows
    product = _product(
        requested,
        x_ptr + tl.load(rows_ptr + row, mask=is_row, other=0).to(tl.int64) * X_STRIDE,
        is_row,
        scale_ptr,
        gain_ptr,
        sums_ptr,
        shift_ptr,
        token,
        is_token,
        eps,
        HIDDEN,
        IS_CODED,
        NORM,
        HAS_SHIFT,
        ROWS,
        FEATURES,
        BLOCK,
    )
    # int64: rows * OUT_STRIDE may pass 2**31
    at = row.to(tl.int64)[None, :] * OUT_STRIDE + token[:, None]
    tl.store(logits_ptr + at, product, mask=is_token[:, None] & is_row[None, :])

    # a better token has a higher logit, or the same logit and a lower id
    lifted = key_of(without_nan(product)).to(tl.int64) + _LIFT
    order = tl.where(is_token[:, None], (lifted << 31) + (token ^ NO_INDEX)[:, None], 0)
    tl.atomic_max(best_ptr + row, tl.max(order, axis=0), mask=is_row, sem="relaxed")
    # the maxima of all threads come before the arrival
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals_ptr, 1, sem="acq_rel", scope="gpu")
    if arrived == tl.num_programs(0) - 1:
        best = tl.load(best_ptr + row, mask=is_row, other=0, cache_modifier=".cg")
        tl.store(tokens_ptr + row, ((best ^ NO_INDEX) & NO_INDEX).to(tl.int32), is_row)
        # as the next kernel finds them
        tl.store(best_ptr + row, tl.zeros([ROWS], tl.int64), mask=is_row)
        tl.store(arrivals_ptr, 0)


def norm_append_kv(
    x: Tensor,
    weight: LinearWeight,
    bias: Tensor | None,
    norm: FoldedNorm,
    slots: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    position_ids: Tensor | None = None,
    cos_sin: Tensor | None = None,
    *,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
    out: Tensor | None = None,
) -> Tensor:
    """Return queries and write keys and values, see `reference.norm_append_kv`.

    Every position must be inside the table.

    Raises:
        ValueError: there are more than 64 rows, the weight is not the transpose of a contiguous one, heads have an odd
            number of features, only one of two arguments is given that belong together, or a shape, dtype or layout
            disagrees.
    """
    rows, heads = len(x), num_heads + 2 * num_kv_heads
    features = weight.shape[1]
    out = x.new_empty(rows, features) if out is None else out
    head_dim = check_heads(out, num_heads, num_kv_heads)
    check_out(out, (rows, features), x.dtype)
    check_caches(key_cache, value_cache, num_kv_heads, head_dim)
    check_vector(rows, slots=slots)
    table = slots if cos_sin is None else cos_sin
    if slots.dtype != torch.int64 or head_dim % 2 or (position_ids is None) != (cos_sin is None):
        raise ValueError(
            f"slots is {slots.dtype}, heads have {head_dim} features; they must be torch.int64 and an even number, and"
            " position_ids and cos_sin are given together"
        )
    if position_ids is not None and cos_sin is not None:
        check_ids(rows, position_ids=position_ids)
        check_out(cos_sin, (len(cos_sin), head_dim), torch.float32)
    _check_few(rows)
    settings = _settings(x, weight, bias, norm, rows)
    if rows:
        _append_kernel[(triton.cdiv(heads * head_dim, settings["FEATURES"]),)](
            x,
            *_operands(x, weight, bias, norm),
            slots,
            key_cache,
            value_cache,
            slots if position_ids is None else position_ids,
            table,
            out,
            rows,
            eps,
            OUT_STRIDE=out.stride(0),
            TABLE_STRIDE=table.stride(0),
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=key_cache.shape[2],
            ROTATES=cos_sin is not None,
            **settings,
        )
    return out


def linear_residual(
    x: Tensor,
    weight: LinearWeight,
    bias: Tensor | None,
    residual: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return x @ weight + bias + residual, see `reference.linear_residual`.

    Raises:
        ValueError: see `norm_append_kv`.
    """
    out = torch.empty_like(residual) if out is None else out
    check_rows(residual, out=out)
    _check_few(len(x))
    return _linear(x, weight, bias, None, residual, out)


def linear(
    x: Tensor, weight: LinearWeight, bias: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Return x @ weight + bias, see `reference.linear`.

    Codes have a kernel, for any number of rows.
    """
    if isinstance(weight, Tensor):
        return reference.linear(x, weight, bias, out=out)
    return _linear(x, weight, bias, None, None, out)


def linear_activate(
    x: Tensor,
    weight: LinearWeight,
    bias: Tensor | None = None,
    *,
    kind: Activation,
    out: Tensor | None = None,
) -> Tensor:
    """Return the activation of x @ weight + bias, see `reference.linear_activate`."""
    if isinstance(weight, Tensor):
        return activation.linear_activate(x, weight, bias, kind=kind, out=out)
    return _linear(x, weight, bias, None, None, out, kind=kind)


def norm_linear(
    x: Tensor,
    weight: LinearWeight,
    bias: Tensor | None,
    norm: FoldedNorm,
    *,
    eps: float,
    kind: Activation | None = None,
    is_gated: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Return norm(x) @ weight + bias, perhaps activated, see `reference.norm_linear`.

    Raises:
        ValueError: see `norm_append_kv`.
    """
    _check_few(len(x))
    if out is None:
        out = x.new_empty(len(x), weight.shape[1] // (1 + is_gated))
    return _linear(x, weight, bias, norm, None, out, eps=eps, kind=kind or "")


def _linear(
    x: Tensor,
    weight: LinearWeight,
    bias: Tensor | None,
    norm: FoldedNorm | None,
    residual: Tensor | None,
    out: Tensor | None,
    *,
    eps: float = 0.0,
    kind: str = "",
) -> Tensor:
    features = weight.shape[1]
    out = x.new_empty(len(x), features) if out is None else out
    is_gated = out.shape[1] != features
    check_out(out, (len(x), features // (1 + is_gated)), x.dtype)
    settings = _settings(x, weight, bias, norm, len(x))
    if len(x):
        parts = (triton.cdiv(features, settings["FEATURES"]),)
        of_rows = triton.cdiv(len(x), settings["ROWS"])
        _linear_kernel[parts if len(x) <= MOST_ROWS else (of_rows, *parts)](
            x,
            *_operands(x, weight, bias, norm),
            x if residual is None else residual,
            out,
            len(x),
            eps,
            OUT=out.shape[1],
            RESIDUAL_STRIDE=0 if residual is None else residual.stride(0),
            OUT_STRIDE=out.stride(0),
            KIND=kind,
            IS_GATED=is_gated,
            HAS_RESIDUAL=residual is not None,
            **settings,
        )
    return out


def norm_next_tokens(
    x: Tensor,
    rows: Tensor,
    weight: LinearWeight,
    bias: Tensor | None,
    norm: FoldedNorm,
    *,
    eps: float,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the logits of some rows and the tokens of the largest, see `reference.norm_next_tokens`.

    NaN counts as -inf.

    Raises:
        ValueError: see `norm_append_kv`.
    """
    count, vocabulary = len(rows), weight.shape[1]
    _check_few(count)
    if out is None:
        out = x.new_empty(count, vocabulary, dtype=torch.float32), rows.new_empty(count).int()
    logits, tokens = out
    check_out(logits, (count, vocabulary), torch.float32)
    check_ids(count, rows=rows, tokens=tokens)
    settings = _settings(x, weight, bias, norm, count)
    if count:
        # the first counter, and after another one numbers of twice the size
        counters = arrivals_of(x.device, 2 + 2 * MOST_ROWS)
        _next_tokens_kernel[(triton.cdiv(vocabulary, settings["FEATURES"]),)](
            x,
            rows,
            *_operands(x, weight, bias, norm),
            logits,
            tokens,
            counters[2 : 2 + 2 * MOST_ROWS].view(torch.int64),
            counters,
            count,
            eps,
            OUT_STRIDE=logits.stride(0),
            VOCABULARY=vocabulary,
            **settings,
        )
    return out


def _check_few(rows: int) -> None:
    if rows > MOST_ROWS:
        raise ValueError(f"{rows} rows; allowed: {MOST_ROWS}")


def _operands(
    x: Tensor, weight: LinearWeight, bias: Tensor | None, norm: FoldedNorm | None
) -> tuple[Tensor, ...]:
    """Return the operands that all kernels have, with `x` for what one does not read."""
    codes, scale = (weight, x) if isinstance(weight, Tensor) else weight
    if codes.dtype == torch.float8_e4m3fn and not _converts_fp8():
        codes = codes.view(torch.uint8)
    gain, _, sums, shift = norm or FoldedNorm(x, None, None, bias)
    return codes, scale, gain, x if sums is None else sums, x if shift is None else shift


def _converts_fp8() -> bool:
    if knobs.runtime.interpret:
        return True
    target = triton.runtime.driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch >= _FP8_ARCH)


def _settings(
    x: Tensor, weight: LinearWeight, bias: Tensor | None, norm: FoldedNorm | None, rows: int
) -> dict[str, Any]:
    matrix, scale = weight if isinstance(weight, CodedWeight) else (weight, None)
    is_coded = scale is not None
    hidden, features = matrix.shape
    check_dtype(x=x)
    check_out(x, (len(x), hidden), x.dtype)
    allowed = CODES if is_coded else (x.dtype,)
    if matrix.dtype not in allowed or not matrix.t().is_contiguous():
        raise ValueError(
            f"the weight is {matrix.dtype} with strides {matrix.stride()}; allowed:"
            f" {' or '.join(map(str, allowed))}, the transpose of a contiguous weight"
        )
    vectors = {"bias": bias, "scale": scale}
    kind = _NONE
    if norm is not None:
        check_vector(hidden, gain=norm.weight)
        vectors |= {"sums": norm.sums, "shift": norm.shift}
        kind = _RMS if norm.sums is None else _LAYER
    check_vector(features, **vectors)
    return {
        "X_STRIDE": x.stride(0),
        "HIDDEN": hidden,
        "IS_CODED": is_coded,
        "NORM": kind.value,
        "HAS_SHIFT": (bias if norm is None else norm.shift) is not None,
        **_tile(rows, features, hidden, x.dtype.itemsize, is_coded=is_coded),
        **dependent_launch(),
    }


def _tile(rows: int, features: int, hidden: int, item: int, *, is_coded: bool) -> dict[str, Any]:
    most = next((each for each in _ROWS[is_coded:] if each >= rows), _ROWS[-1])
    on_cores = most == 1
    # a start of a program takes longer than 4 features of a small model
    fewest, widest = (4 if features > _PROGRAMS else 16, 16) if on_cores else (16, 64)
    filling = 1 << (max(features // _PROGRAMS, 1).bit_length() - 1)
    count = min(max(fewest, filling), widest)
    if most > MOST_ROWS:
        tiles = triton.cdiv(rows, most)
        wide = (each for each in _MANY_ROWS_FEATURES if 2 * features * tiles >= each * _PROGRAMS)
        count = next(wide, _MANY_ROWS_FEATURES[-1])
    # 64 features would else take more shared memory than some GPUs have, and fp32 more registers than there are
    smaller = (max(1, min(count, widest) // 32) if most <= MOST_ROWS else 1) * (
        1 if item == 2 else 8
    )
    block = _TILES[most] // (count * item if on_cores else smaller)
    # wider rows of weights would spill registers
    block = max(16, min(block, _WIDEST // item, triton.next_power_of_2(hidden)))
    return {
        "ROWS": most,
        "FEATURES": count,
        "BLOCK": block,
        # warps of fewer features than this would all widen the same codes
        "num_warps": count // 16 if is_coded else 4,
        "num_stages": 1 if on_cores else _STAGES,
        "enable_fp_fusion": True,
    }
