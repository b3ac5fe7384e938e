"""Attention of new tokens over the KV blocks of their sequences.

One program owns one tile: some new tokens of one sequence, with the query heads of one key head. It reads the keys up
to its last token through the block table, keys of earlier steps too. The tiles come from the table of `paged_tiles`,
so the grid follows from shapes. Sequences with one new token are computed by the kernels of `attention_decode`: all of
a decode step, and those beside chunks, whose contexts may be long.
"""

from functools import partial

import triton
import triton.language as tl
from torch import Tensor

from varlen_kernels.triton.attention_blocks import LOG2_E
from varlen_kernels.triton.attention_checks import check_bias, check_heads, check_scores
from varlen_kernels.triton.attention_decode import attend_in_splits
from varlen_kernels.triton.attention_tiles import block_d, num_tiles
from varlen_kernels.triton.checks import check_cu_seqlens, check_ids, check_out
from varlen_kernels.triton.dependent_launch import dependent_launch, wait_for_kernels
from varlen_kernels.triton.kv_blocks import attend_to_blocks, check_caches, tile_heads
from varlen_kernels.triton.paged_tiles import (
    check_paged_tiles,
    is_decode_step,
    paged_launch,
    paged_tiles,
    read_paged_tile,
)


@triton.jit(do_not_specialize=["bias_width"])
def _attention_paged_kernel(
    qkv_ptr,  # [tokens, at least NUM_KV_HEADS * GROUP * HEAD_DIM], queries first
    key_cache_ptr,  # [blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM]
    value_cache_ptr,  # [blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM]
    block_ids_ptr,  # [blocks in use]
    tiles_ptr,  # [rows, PAGED_COLUMNS]
    bias_ptr,  # [NUM_KV_HEADS * GROUP, bias_width], read if HAS_BIAS
    out_ptr,  # [tokens, NUM_KV_HEADS * GROUP * HEAD_DIM]
    bias_width,
    scale,
    QKV_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of one key head
    TILE_HEADS: tl.constexpr,  # query heads of one tile
    TILES: tl.constexpr,  # tiles of one key head
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0 for all keys
    SOFT_CAP: tl.constexpr,  # limit of scores, 0 for none
    HAS_BIAS: tl.constexpr,
    SKIPS_SINGLES: tl.constexpr,  # whether sequences with one new token are left out
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,  # power of two >= HEAD_DIM
    DEPENDENT: tl.constexpr,
):
    """Compute the attention of one tile: a row per new token and query head."""
    wait_for_kernels(DEPENDENT)
    TOKENS: tl.constexpr = BLOCK_M // TILE_HEADS
    # heads vary fastest: in a batch sorted by descending length, the last programs are short
    tile_of_token = tl.program_id(0) % (NUM_KV_HEADS * TILES)
    first_row, length, first_query, earlier, first_table_block = read_paged_tile(
        tiles_ptr, tl.program_id(0) // (NUM_KV_HEADS * TILES)
    )
    if (first_query >= length) | ((length == 1) & SKIPS_SINGLES):
        return

    kv_head = tile_of_token // TILES
    row = tl.arange(0, BLOCK_M)
    query = first_query + row // TILE_HEADS
    head_in_group = tile_of_token % TILES * TILE_HEADS + row % TILE_HEADS
    head = kv_head * GROUP + head_in_group
    is_row = (row < TOKENS * TILE_HEADS) & (query < length) & (head_in_group < GROUP)
    # int64: tokens * QKV_STRIDE and the elements of a cache may pass 2**31
    token = (first_row + query).to(tl.int64)
    col = tl.arange(0, BLOCK_D)[None, :]
    inside = is_row[:, None] & (col < HEAD_DIM)
    q_at = (token * QKV_STRIDE + head * HEAD_DIM)[:, None] + col
    q = tl.load(qkv_ptr + q_at, mask=inside, other=0.0)

    # rows past the last head have no bias
    reach = bias_width // 2
    bias_ptr += (tl.where(is_row, head, 0) * bias_width + reach)[:, None]
    table_ptr = block_ids_ptr + first_table_block
    cache_at = kv_head * (BLOCK_SIZE * HEAD_DIM)
    context = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    weight_sum = tl.zeros([BLOCK_M], tl.float32)
    max_score = tl.full([BLOCK_M], float("-inf"), tl.float32)
    # most blocks need no mask: every query may read all keys before `first_masked`
    first_block = 0
    end = earlier + tl.minimum(length, first_query + TOKENS)
    first_masked = (earlier + first_query + 1) // BLOCK_N * BLOCK_N
    if WINDOW > 0:
        # a window is short, so all its blocks are masked
        first_block = tl.maximum(earlier + first_query - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        first_masked = first_block
    for MASKED in tl.static_range(1 if WINDOW > 0 else 0, 2):
        loop_begin = first_masked if MASKED else first_block
        loop_end = end if MASKED else first_masked
        # without a window, too few blocks are masked for a pipeline of loads
        # from 0: Triton 3.9 vectorizes no load in a loop from a start that it computed itself
        for offset in tl.range(
            0,
            loop_end - loop_begin,
            BLOCK_N,
            num_stages=1 if MASKED and WINDOW == 0 else None,
        ):
            context, weight_sum, max_score = attend_to_blocks(
                context,
                weight_sum,
                max_score,
                q,
                earlier + query[:, None],
                key_cache_ptr + cache_at,
                value_cache_ptr + cache_at,
                table_ptr,
                loop_begin + offset,
                end,
                scale,
                bias_ptr,
                reach,
                BLOCK_STRIDE=NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM,
                BLOCK_SIZE=BLOCK_SIZE,
                HEAD_DIM=HEAD_DIM,
                WINDOW=WINDOW,
                SOFT_CAP=SOFT_CAP,
                HAS_BIAS=HAS_BIAS,
                BLOCK_N=BLOCK_N,
                BLOCK_D=BLOCK_D,
                MASKED=MASKED,
                # one address takes more registers here, and half as many programs of heads of 128 fit
                ALIGNED=False,
            )

    out_at = (token * OUT_STRIDE + head * HEAD_DIM)[:, None] + col
    tl.store(out_ptr + out_at, context / weight_sum[:, None], mask=inside)


def attention_paged(
    qkv: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    block_ids: Tensor,
    cu_blocks: Tensor,
    bias: Tensor | None = None,
    tiles: Tensor | None = None,
    *,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """Return the causal attention of new tokens over their blocks, see `reference.attention_paged`.

    Rows of `out` past the last sequence are not written.

    Raises:
        ValueError: shapes or dtypes disagree, a tensor is not contiguous, head_dim is over MAX_HEAD_DIM, block_size is
            not a multiple of 16, `num_kv_heads` does not divide `num_heads`, `scale` is not above 0, `window` or
            `soft_cap` is below 0, or `tiles` is not of `paged_tiles`.
    """
    tokens, sequences = len(qkv), len(cu_seqlens) - 1
    head_dim = check_heads(qkv, num_heads, num_kv_heads, cached_dim=key_cache.shape[-1])
    check_scores(scale, window, soft_cap)
    check_caches(key_cache, value_cache, num_kv_heads, head_dim)
    check_cu_seqlens(cu_seqlens)
    check_ids(sequences, context_lens=context_lens)
    check_ids(sequences + 1, cu_blocks=cu_blocks)
    check_ids(block_ids.numel(), block_ids=block_ids)
    check_bias(bias, num_heads)
    if out is None:
        out = qkv.new_empty(tokens, num_heads * head_dim)
    check_out(out, (tokens, num_heads * head_dim), qkv.dtype)
    if tokens == 0 or sequences == 0:
        return out
    if tiles is None:
        tiles = paged_tiles(
            qkv,
            key_cache,
            cu_seqlens,
            context_lens,
            cu_blocks,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            window=window,
        )
    check_paged_tiles(tiles, qkv, cu_seqlens)
    operands = (qkv, key_cache, value_cache, block_ids, tiles)
    attend = partial(
        attend_in_splits,
        *operands,
        bias,
        num_heads=num_heads,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        out=out,
    )
    if is_decode_step(tokens, sequences):
        attend(rows=range(tokens))
        return out
    heads, tiles_of_head = tile_heads(num_heads, num_kv_heads)
    launch = paged_launch(
        head_dim, key_cache.dtype, window=window, rows=tokens * heads, sequences=sequences
    )
    count = num_tiles(tokens, sequences, launch["BLOCK_M"] // heads)
    # the only sequence has several tokens
    has_singles = sequences > 1
    _attention_paged_kernel[(count * num_kv_heads * tiles_of_head,)](
        *operands,
        qkv if bias is None else bias,
        out,
        0 if bias is None else bias.shape[1],
        scale * LOG2_E.value,
        QKV_STRIDE=qkv.stride(0),
        OUT_STRIDE=out.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        TILE_HEADS=heads,
        TILES=tiles_of_head,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=key_cache.shape[2],
        WINDOW=window,
        SOFT_CAP=soft_cap,
        HAS_BIAS=bias is not None,
        SKIPS_SINGLES=has_singles,
        BLOCK_D=block_d(head_dim),
        **launch,
        **dependent_launch(),
    )
    if has_singles:
        attend(rows=range(count, count + sequences), only_singles=True)
    return out
