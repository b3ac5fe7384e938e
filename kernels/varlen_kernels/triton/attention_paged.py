"""Attention of new tokens over the KV blocks of their sequences.

One program owns one tile: some new tokens of one sequence, with the query heads of one key head. It reads the keys up
to its last token through the block table, keys of earlier steps too. The tiles come from the table of `paged_tiles`,
so the grid follows from shapes.

Sequences with one new token have a kernel of their own: all of a decode step, and those beside chunks, whose contexts
may be long. The work is to read the keys and values, so the context of each token is divided into splits, and many
programs read at the same time. One program owns one token, one key head and one split; it writes the maximum score, the
sum of the weights and the weighted sum of the values. The program that finishes last of a token and key head merges the
splits in their order, so the result does not depend on which one it is. The number of splits follows from the shapes of
the batch and the device (`splits`): one CUDA graph serves every batch whose contexts fit into its block tables.

Programs count their arrivals in memory that holds 0 between launches. A program stores its results, passes a barrier,
and adds 1 with release and acquire semantics for the whole GPU: its stores come before its arrival, and the last one
reads after all arrivals. It waits for no other program, so the order in which programs run does not matter.
Source: Dao et al. 2023, "Flash-Decoding for long-context inference".
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from varlen_kernels.triton.attention_blocks import (
    LOG2_E,
    attend_to_blocks,
    check_caches,
    tile_heads,
)
from varlen_kernels.triton.attention_tiles import (
    block_d,
    check_paged_tiles,
    is_decode_step,
    num_tiles,
    paged_launch,
    paged_tiles,
    read_paged_tile,
)
from varlen_kernels.triton.checks import (
    check_bias,
    check_cu_seqlens,
    check_heads,
    check_ids,
    check_out,
    check_scores,
)
from varlen_kernels.triton.dependent_launch import dependent_launch, wait_for_kernels
from varlen_kernels.triton.splits import Splits, arrivals_of, choose_splits, wave_of
from varlen_kernels.tuning import Launch, pick

# Query heads of one program: the fewest rows of a matrix product on tensor cores.
_ROWS = tl.constexpr(16)

# (BLOCK_N, num_warps, num_stages), by (BLOCK_D, bytes per element); the first is the default. Two stages keep one more
# block of keys in flight, because the block table is read a stage before the keys.
# For each tile the programs that a multiprocessor holds, by registers and shared memory: the fewest on sm_80 and sm_90
# under each Triton. A wave that is too small leaves some programs idle; one that is too large makes a second wave.
_TILES: dict[tuple[int, int], dict[tuple[int, int, int], int]] = {
    (64, 2): {(64, 4, 3): 7, (64, 4, 5): 4, (32, 2, 5): 8, (128, 4, 3): 4},
    (128, 2): {(64, 4, 3): 4, (64, 4, 5): 2, (32, 4, 5): 4, (64, 8, 3): 3},
    (256, 2): {(32, 4, 3): 3, (64, 8, 3): 2, (32, 8, 3): 2},
    # fp8, which is widened in registers
    (64, 1): {(64, 4, 3): 5},
    (128, 1): {(64, 4, 3): 3},
    (256, 1): {(32, 4, 3): 3},
    (64, 4): {(32, 4, 3): 4, (32, 4, 5): 3, (32, 2, 3): 4},
    (128, 4): {(32, 4, 3): 3, (32, 8, 3): 1, (16, 4, 3): 3},
    (256, 4): {(32, 8, 3): 1, (16, 8, 3): 1},
}
_TILE_NAMES = ("BLOCK_N", "num_warps", "num_stages")
# Elements of results that a merge reads at once.
_MERGED_ELEMENTS = 1024


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


@triton.jit(do_not_specialize=["first_row", "splits", "min_keys", "bias_width"])
def _read_split_kernel(
    qkv_ptr,  # [tokens, at least NUM_KV_HEADS * GROUP * HEAD_DIM], queries first
    key_cache_ptr,  # [blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM]
    value_cache_ptr,  # [blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM]
    block_ids_ptr,  # [blocks in use]
    tiles_ptr,  # [all rows, PAGED_COLUMNS]
    bias_ptr,  # [NUM_KV_HEADS * GROUP, bias_width], read if HAS_BIAS
    context_ptr,  # [rows, NUM_KV_HEADS * GROUP, splits, HEAD_DIM], not divided by the sum; used if SPLIT
    sums_ptr,  # [rows, NUM_KV_HEADS * GROUP, 2, splits]: maximum score, sum of the weights; used if SPLIT
    arrivals_ptr,  # [rows, NUM_KV_HEADS * TILES] int32 of 0; used if SPLIT
    out_ptr,  # [tokens, NUM_KV_HEADS * GROUP * HEAD_DIM]
    first_row,
    splits,
    min_keys,  # fewest keys of a split
    bias_width,
    scale,
    QKV_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of one key head
    TILE_HEADS: tl.constexpr,  # query heads of one program
    TILES: tl.constexpr,  # programs of one key head
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0 for all keys
    SOFT_CAP: tl.constexpr,  # limit of scores, 0 for none
    HAS_BIAS: tl.constexpr,
    SPLIT: tl.constexpr,  # whether there are several splits
    MERGED_HEADS: tl.constexpr,  # power of two >= TILE_HEADS
    MERGED_SPLITS: tl.constexpr,  # splits that a merge reads at once
    ONLY_SINGLES: tl.constexpr,  # whether sequences with several new tokens are left out
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,  # power of two >= HEAD_DIM
    DEPENDENT: tl.constexpr,
):
    wait_for_kernels(DEPENDENT)
    tile = tl.program_id(0) % (NUM_KV_HEADS * TILES)
    row = tl.program_id(0) // (NUM_KV_HEADS * TILES)
    split = tl.program_id(1)
    begin, new, query, earlier, first_block = read_paged_tile(tiles_ptr, first_row + row)
    if (query >= new) | ((new > 1) & ONLY_SINGLES):
        return
    token = begin + query
    length = earlier + query + 1

    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    keys = tl.maximum(tl.cdiv(length - first, splits), min_keys)
    keys = tl.cdiv(keys, BLOCK_N) * BLOCK_N
    used = tl.cdiv(length - first, keys)
    if split >= used:
        # a short context has fewer splits
        return
    first += split * keys
    end = tl.minimum(length, first + keys)

    kv_head = tile // TILES
    place = tl.arange(0, _ROWS)
    head_in_group = tile % TILES * TILE_HEADS + place
    head = kv_head * GROUP + head_in_group
    is_head = (place < TILE_HEADS) & (head_in_group < GROUP)
    # int64: tokens * QKV_STRIDE and the elements of a cache may pass 2**31
    q_ptr = qkv_ptr + token.to(tl.int64) * QKV_STRIDE
    col = tl.arange(0, BLOCK_D)[None, :]
    inside = is_head[:, None] & (col < HEAD_DIM)
    q = tl.load(q_ptr + head[:, None] * HEAD_DIM + col, mask=inside, other=0.0)
    # rows past the last head have no bias
    reach = bias_width // 2
    bias_ptr += (tl.where(is_head, head, 0) * bias_width + reach)[:, None]
    cache_at = kv_head * (BLOCK_SIZE * HEAD_DIM)

    context = tl.zeros([_ROWS, BLOCK_D], tl.float32)
    weight_sum = tl.zeros([_ROWS], tl.float32)
    max_score = tl.full([_ROWS], float("-inf"), tl.float32)
    # the split is inside the window
    for first_key in tl.range(first, end, BLOCK_N):
        context, weight_sum, max_score = attend_to_blocks(
            context,
            weight_sum,
            max_score,
            q,
            length - 1,
            key_cache_ptr + cache_at,
            value_cache_ptr + cache_at,
            block_ids_ptr + first_block,
            first_key,
            end,
            scale,
            bias_ptr,
            reach,
            BLOCK_STRIDE=NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM,
            BLOCK_SIZE=BLOCK_SIZE,
            HEAD_DIM=HEAD_DIM,
            WINDOW=0,
            SOFT_CAP=SOFT_CAP,
            HAS_BIAS=HAS_BIAS,
            BLOCK_N=BLOCK_N,
            BLOCK_D=BLOCK_D,
            MASKED=True,
            # a window begins at any key
            ALIGNED=WINDOW == 0,
        )

    out_ptr += token.to(tl.int64) * OUT_STRIDE
    if SPLIT and used > 1:
        pair = row.to(tl.int64) * (NUM_KV_HEADS * GROUP) + head
        tl.store(sums_ptr + pair * 2 * splits + split, max_score, mask=is_head)
        tl.store(sums_ptr + (pair * 2 + 1) * splits + split, weight_sum, mask=is_head)
        at = (pair * splits + split)[:, None] * HEAD_DIM + col
        tl.store(context_ptr + at, context, mask=inside)
        arrivals_ptr += tl.program_id(0)
        # the stores of all threads come before the arrival
        tl.debug_barrier()
        if tl.atomic_add(arrivals_ptr, 1, sem="acq_rel", scope="gpu") == used - 1:
            tl.store(arrivals_ptr, 0)
            _merge_splits(
                context_ptr,
                sums_ptr,
                out_ptr,
                row,
                kv_head * GROUP + tile % TILES * TILE_HEADS,
                tl.minimum(TILE_HEADS, GROUP - tile % TILES * TILE_HEADS),
                splits,
                used,
                NUM_HEADS=NUM_KV_HEADS * GROUP,
                HEAD_DIM=HEAD_DIM,
                HEADS=MERGED_HEADS,
                SPLITS=MERGED_SPLITS,
                BLOCK_D=BLOCK_D,
            )
    else:
        out_at = head[:, None] * HEAD_DIM + col
        tl.store(out_ptr + out_at, context / weight_sum[:, None], mask=inside)


@triton.jit
def _merge_splits(
    context_ptr,  # [rows, NUM_HEADS, splits, HEAD_DIM]
    sums_ptr,  # [rows, NUM_HEADS, 2, splits]: maximum score, sum of the weights
    out_ptr,  # [NUM_HEADS * HEAD_DIM] of the token
    row,
    first_head,
    num_heads,
    splits,
    used,  # splits with keys
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    SPLITS: tl.constexpr,  # splits that are read at once
    BLOCK_D: tl.constexpr,
):
    """Merge the splits of some query heads of a token."""
    head = first_head + tl.arange(0, HEADS)
    is_head = tl.arange(0, HEADS) < num_heads
    pair = row.to(tl.int64) * NUM_HEADS + head
    col = tl.arange(0, BLOCK_D)
    context = tl.zeros([HEADS, BLOCK_D], tl.float32)
    weight_sum = tl.zeros([HEADS], tl.float32)
    max_score = tl.full([HEADS], float("-inf"), tl.float32)
    for first in range(0, used, SPLITS):
        split = first + tl.arange(0, SPLITS)
        inside = is_head[:, None] & (split < used)
        # from the L2 cache, where the other programs have written
        sums_at = sums_ptr + (pair * 2 * splits)[:, None] + split
        max_scores = tl.load(sums_at, mask=inside, other=float("-inf"), cache_modifier=".cg")
        weight_sums = tl.load(sums_at + splits, mask=inside, other=0.0, cache_modifier=".cg")
        at = ((pair * splits)[:, None] + split)[:, :, None] * HEAD_DIM + col
        contexts = tl.load(
            context_ptr + at,
            mask=inside[:, :, None] & (col < HEAD_DIM),
            other=0.0,
            cache_modifier=".cg",
        )
        new_max = tl.maximum(max_score, tl.max(max_scores, axis=1))
        rescale = tl.exp2(max_score - new_max)
        rescales = tl.exp2(max_scores - new_max[:, None])
        weight_sum = weight_sum * rescale + tl.sum(weight_sums * rescales, axis=1)
        context = context * rescale[:, None] + tl.sum(contexts * rescales[:, :, None], axis=1)
        max_score = new_max
    at = head[:, None] * HEAD_DIM + col
    tl.store(out_ptr + at, context / weight_sum[:, None], mask=is_head[:, None] & (col < HEAD_DIM))


def attend_in_splits(
    qkv: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_ids: Tensor,
    tiles: Tensor,
    bias: Tensor | None,
    *,
    rows: range,
    num_heads: int,
    scale: float,
    window: int,
    soft_cap: float,
    only_singles: bool = False,
    out: Tensor,
) -> None:
    """Write paged attention into `out`, one token and key head at a time, see `reference.attention_paged`.

    Arguments are not checked.

    Args:
        qkv, key_cache, value_cache, block_ids, bias, num_heads, scale, window, soft_cap: see
            `reference.attention_paged`.
        tiles: result of `paged_tiles`.
        rows: rows of the table, each of one token.
        only_singles: whether to leave out sequences with several new tokens.
        out: `[tokens, num_heads · head_dim]`.
    """
    _, kv_heads, block_size, head_dim = key_cache.shape
    heads, tiles_of_head = tile_heads(num_heads, kv_heads)
    programs = len(rows) * kv_heads * tiles_of_head
    key = (head_dim, num_heads // kv_heads, key_cache.dtype)
    launch = pick("attention_decode", key, candidate_launches)
    # tables of a graph have room for its longest context; elsewhere they have the mean one
    chosen = decode_splits(
        qkv.device,
        rows=len(rows),
        longest=triton.cdiv(block_ids.numel(), len(rows)) * block_size,
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=key_cache.dtype,
        window=window,
    )
    merged_heads = triton.next_power_of_2(heads)
    splits = chosen.count
    context, sums, arrivals = out, out, out
    if splits > 1:
        arrivals = arrivals_of(qkv.device, programs)
        pairs = len(rows) * num_heads * splits
        context = torch.empty(pairs * head_dim, dtype=torch.float32, device=qkv.device)
        sums = torch.empty(pairs * 2, dtype=torch.float32, device=qkv.device)
    _read_split_kernel[(programs, splits)](
        qkv,
        key_cache,
        value_cache,
        block_ids,
        tiles,
        qkv if bias is None else bias,
        context,
        sums,
        arrivals,
        out,
        rows.start,
        splits,
        chosen.min_keys,
        0 if bias is None else bias.shape[1],
        scale * LOG2_E.value,
        QKV_STRIDE=qkv.stride(0),
        OUT_STRIDE=out.stride(0),
        NUM_KV_HEADS=kv_heads,
        GROUP=num_heads // kv_heads,
        TILE_HEADS=heads,
        TILES=tiles_of_head,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        WINDOW=window,
        SOFT_CAP=soft_cap,
        HAS_BIAS=bias is not None,
        SPLIT=splits > 1,
        MERGED_HEADS=merged_heads,
        MERGED_SPLITS=max(1, _MERGED_ELEMENTS // (merged_heads * block_d(head_dim))),
        ONLY_SINGLES=only_singles,
        BLOCK_D=block_d(head_dim),
        **launch,
        **dependent_launch(),
    )


def decode_splits(
    device: torch.device,
    *,
    rows: int,
    longest: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    window: int = 0,
) -> Splits:
    """Return how the context of each token is divided.

    Args:
        rows: tokens.
        longest: keys of the longest context.
        window: see `reference.attention_paged`.
    """
    key = (head_dim, num_heads // num_kv_heads, dtype)
    launch = pick("attention_decode", key, candidate_launches)
    _, tiles = tile_heads(num_heads, num_kv_heads)
    wave = wave_of(device, resident_programs(head_dim, dtype, launch))
    readable = min(longest, window) if window else longest
    return choose_splits(rows * num_kv_heads * tiles, wave, readable)


def candidate_launches(head_dim: int, group: int, dtype: torch.dtype) -> list[Launch]:
    """Return the candidate launches for heads of this size; the first is the default.

    Args:
        group: query heads of one key head; part of the key only.
    """
    del group
    return [dict(zip(_TILE_NAMES, tile, strict=True)) for tile in _tiles_of(head_dim, dtype)]


def resident_programs(head_dim: int, dtype: torch.dtype, launch: Launch) -> int:
    """Return the number of programs that a multiprocessor holds at least."""
    block_n, num_warps, num_stages = (launch[name] for name in _TILE_NAMES)
    return _tiles_of(head_dim, dtype)[block_n, num_warps, num_stages]


def _tiles_of(head_dim: int, dtype: torch.dtype) -> dict[tuple[int, int, int], int]:
    return _TILES[max(64, block_d(head_dim)), dtype.itemsize]
