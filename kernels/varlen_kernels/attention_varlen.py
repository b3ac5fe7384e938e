"""Attention over packed tokens: each query reads the keys of its own sequence, and nothing is padded.

One program owns BLOCK_M queries of one sequence and one head. It reads the keys in blocks and keeps a running maximum
and sum of each query's weights, so no score leaves its registers.
Source: Dao 2023, arXiv:2307.08691; Milakov, Gimelshein 2018, arXiv:1805.02867.

Which sequence a program works on it finds by itself: sequence i owns the tiles of queries from
cu_seqlens[i] // BLOCK_M + i on. Those are enough for its length, with at most one to spare, and how many there are in a
batch follows from its shapes alone: the host need not know a length, and one CUDA graph fits every batch of a shape.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from varlen_kernels.checks import check_cu_seqlens, check_dtype, check_out, check_row_layout
from varlen_kernels.tuning import Launch, pick

MAX_HEAD_DIM = 256

LOG2_E = tl.constexpr(math.log2(math.e))

# Sequences that a program looks at in one go to find its own.
_CHUNK = 256
# The mean length of a batch counts as the last of these that it reaches.
_MEAN_LENGTHS = (256, 64, 16, 1)
# Most queries of a tile, by mean length: longer tiles read keys less often, and leave more places empty.
_MOST_QUERIES = {256: 128, 64: 64, 16: 32, 1: 16}
_MOST_CANDIDATES = 4
# A thread has no more.
_MOST_REGISTERS = 255

# (BLOCK_M, BLOCK_N, num_warps, num_stages) by BLOCK_D, bytes of an element and whether there is a bias, those
# with few queries first. None needs more registers than there are, on sm_80 and sm_90. The tiles of fp32 are small: a
# product is three on tensor cores, of operands twice the size. So are those with a bias, which is one load a score.
_TILES: dict[tuple[int, int, bool], list[tuple[int, int, int, int]]] = {
    (64, 2, False): [
        (16, 32, 2, 3),
        (32, 32, 2, 3),
        (64, 32, 4, 3),
        (64, 64, 4, 2),
        (64, 64, 4, 3),
        (128, 64, 8, 2),
        (128, 64, 8, 3),
    ],
    (64, 2, True): [(16, 32, 2, 2), (32, 32, 4, 2), (64, 32, 4, 2), (128, 32, 8, 2)],
    (128, 2, False): [
        (16, 32, 2, 3),
        (32, 32, 2, 3),
        (32, 64, 4, 3),
        (64, 32, 4, 3),
        (64, 64, 4, 2),
        (64, 64, 4, 3),
        (128, 32, 8, 3),
    ],
    (128, 2, True): [(16, 32, 2, 2), (32, 32, 4, 2), (64, 32, 8, 2)],
    (256, 2, False): [(16, 32, 4, 2), (32, 32, 4, 2), (64, 32, 8, 2), (64, 64, 8, 2)],
    (256, 2, True): [(16, 32, 4, 2), (32, 32, 8, 2), (32, 32, 4, 2), (64, 32, 8, 1)],
    (64, 4, False): [(16, 32, 4, 2), (32, 32, 4, 2)],
    (64, 4, True): [(16, 32, 4, 2), (32, 16, 4, 2)],
    (128, 4, False): [(16, 32, 4, 2), (32, 32, 8, 2)],
    (128, 4, True): [(16, 32, 4, 2), (32, 32, 8, 2)],
    (256, 4, False): [(16, 32, 8, 2)],
}


@triton.jit
def find_tile(
    cu_seqlens_ptr,  # [batch + 1]
    batch,
    tile,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Return the first token and the length of the sequence that owns a tile, and the tile's first query in it.

    The owner is the last sequence to start at or before the tile. All that is looked for grows from sequence to
    sequence, so a maximum finds it, where a binary search would wait for one load after the other.
    """
    first_tiles = tl.zeros([CHUNK], tl.int32)
    begins = tl.zeros([CHUNK], tl.int32)
    ends = tl.zeros([CHUNK], tl.int32)
    # sequence i starts no earlier than tile i
    for chunk in range(0, tl.minimum(batch, tile + 1), CHUNK):
        sequence = chunk + tl.arange(0, CHUNK)
        begin = tl.load(cu_seqlens_ptr + sequence, mask=sequence < batch, other=0)
        end = tl.load(cu_seqlens_ptr + sequence + 1, mask=sequence < batch, other=0)
        first_tile = begin // BLOCK_M + sequence
        started = (first_tile <= tile) & (sequence < batch)
        first_tiles = tl.where(started, first_tile, first_tiles)
        begins = tl.where(started, begin, begins)
        ends = tl.where(started, end, ends)
    begin = tl.max(begins, axis=0)
    return begin, tl.max(ends, axis=0) - begin, (tile - tl.max(first_tiles, axis=0)) * BLOCK_M


@triton.jit
def load_tile(
    tile_ptr,  # [ROWS, HEAD_DIM]
    rows,
    STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return [ROWS, BLOCK_D]: 0 past HEAD_DIM and, if MASKED, from row `rows` on."""
    row = tl.arange(0, ROWS)[:, None]
    lane = tl.arange(0, BLOCK_D)[None, :]
    at = row * STRIDE + lane
    if MASKED:
        return tl.load(tile_ptr + at, mask=(row < rows) & (lane < HEAD_DIM), other=0.0)
    if HEAD_DIM < BLOCK_D:
        return tl.load(tile_ptr + at, mask=lane < HEAD_DIM, other=0.0)
    return tl.load(tile_ptr + at)


@triton.jit
def read_keys(
    context,  # [BLOCK_M, BLOCK_D], weighted sum of the values read before
    total,  # [BLOCK_M], sum of their weights
    top,  # [BLOCK_M], the largest score among them, which has weight 1
    q,  # [BLOCK_M, BLOCK_D]
    keys_ptr,  # [length, HEAD_DIM], of the sequence
    values_ptr,  # [length, HEAD_DIM]
    bias_ptr,  # entry of distance 0, read if HAS_BIAS
    first_query,
    first_key,
    length,
    scale,
    STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return context, total and top with BLOCK_N more keys read; if MASKED, only those that are there and may be read.

    Scores are in units of log 2, since exp2 is what the hardware has.
    """
    rows = length - first_key
    at = tl.cast(first_key, tl.int64) * STRIDE
    # a block past the end is 0, not what stands there: a weight of 0 times NaN is NaN
    k = load_tile(keys_ptr + at, rows, STRIDE, HEAD_DIM, BLOCK_N, BLOCK_D, MASKED)
    v = load_tile(values_ptr + at, rows, STRIDE, HEAD_DIM, BLOCK_N, BLOCK_D, MASKED)
    row = tl.arange(0, BLOCK_M)[:, None]
    col = tl.arange(0, BLOCK_N)[None, :]

    scores = tl.dot(q, tl.trans(k), input_precision="tf32x3")
    if HAS_BIAS:
        # queries past the end have no distance in the table
        known = (row < length - first_query) & (col < rows)
        bias = tl.load(bias_ptr + (first_key - first_query) + (col - row), mask=known, other=0.0)
        bias = bias.to(tl.float32)
        scores = scores * scale + bias * LOG2_E
    if MASKED:
        readable = col < rows
        if CAUSAL:
            readable = readable & (first_key + col <= first_query + row)
        scores = tl.where(readable, scores, float("-inf"))

    if HAS_BIAS:
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        # a bias of -inf may hide all keys so far
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - shift[:, None])
    else:
        # scaled after the maximum: one fused multiply-add a score
        new_top = tl.maximum(top, tl.max(scores, axis=1) * scale)
        shift = new_top
        weights = tl.exp2(scores * scale - shift[:, None])
    fade = tl.exp2(top - shift)
    total = total * fade + tl.sum(weights, axis=1)
    context = tl.dot(weights.to(v.dtype), v, context * fade[:, None], input_precision="tf32x3")
    return context, total, new_top


@triton.jit(do_not_specialize=["batch", "bias_width"])
def _attention_varlen_kernel(
    qkv_ptr,  # [tokens, 3 * NUM_HEADS * HEAD_DIM]
    cu_seqlens_ptr,  # [batch + 1]
    distance_bias_ptr,  # [NUM_HEADS, bias_width], read if HAS_BIAS
    out_ptr,  # [tokens, NUM_HEADS * HEAD_DIM]
    batch,
    bias_width,
    scale,
    QKV_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,  # power of two >= HEAD_DIM
):
    """Attend from the queries of tile `program_id(0) // NUM_HEADS` in head `program_id(0) % NUM_HEADS`."""
    # heads side by side: in a batch sorted by length, the programs that end last are short ones
    head = tl.program_id(0) % NUM_HEADS
    tile = tl.program_id(0) // NUM_HEADS
    begin, length, first_query = find_tile(cu_seqlens_ptr, batch, tile, BLOCK_M, CHUNK)
    if first_query >= length:
        return

    # int64: tokens * QKV_STRIDE may pass 2**31
    sequence_ptr = qkv_ptr + begin.to(tl.int64) * QKV_STRIDE + head * HEAD_DIM
    keys_ptr = sequence_ptr + NUM_HEADS * HEAD_DIM
    values_ptr = keys_ptr + NUM_HEADS * HEAD_DIM
    bias_ptr = distance_bias_ptr + head.to(tl.int64) * bias_width + bias_width // 2
    query = first_query + tl.arange(0, BLOCK_M)
    rows = length - first_query
    q_ptr = sequence_ptr + first_query.to(tl.int64) * QKV_STRIDE
    q = load_tile(q_ptr, rows, QKV_STRIDE, HEAD_DIM, BLOCK_M, BLOCK_D, True)

    context = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    # keys before `whole` stand in blocks that every query may read from end to end: most need no mask
    end = length
    whole = length // BLOCK_N * BLOCK_N
    if CAUSAL:
        end = tl.minimum(length, first_query + BLOCK_M)
        whole = first_query // BLOCK_N * BLOCK_N
    for MASKED in tl.static_range(2):
        first = whole if MASKED else 0
        last = end if MASKED else whole
        # the masked blocks are too few to load one while another is computed
        for first_key in tl.range(first, last, BLOCK_N, num_stages=1 if MASKED else None):
            context, total, top = read_keys(
                context,
                total,
                top,
                q,
                keys_ptr,
                values_ptr,
                bias_ptr,
                first_query,
                first_key,
                length,
                scale,
                STRIDE=QKV_STRIDE,
                HEAD_DIM=HEAD_DIM,
                BLOCK_M=BLOCK_M,
                BLOCK_N=BLOCK_N,
                BLOCK_D=BLOCK_D,
                CAUSAL=CAUSAL,
                HAS_BIAS=HAS_BIAS,
                MASKED=MASKED,
            )

    if HAS_BIAS:
        # a query that may read no key gets zeros
        total = tl.where(total == 0.0, 1.0, total)
    out_row = (begin.to(tl.int64) + query)[:, None] * OUT_STRIDE + head * HEAD_DIM
    lane = tl.arange(0, BLOCK_D)[None, :]
    inside = (query < length)[:, None] & (lane < HEAD_DIM)
    tl.store(out_ptr + out_row + lane, context / total[:, None], mask=inside)


def attention_varlen(
    qkv: Tensor,
    cu_seqlens: Tensor,
    *,
    num_heads: int,
    scale: float,
    causal: bool = False,
    distance_bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return softmax(q kᵀ · scale + bias) v inside each sequence, as `reference.attention_varlen` does.

    Rows of tokens past the last sequence are left as they are.

    Raises:
        ValueError: shapes or dtypes disagree, rows are not contiguous, head_dim is over
            MAX_HEAD_DIM, or `scale` is not above 0.
    """
    tokens, width = qkv.shape
    head_dim = width // (3 * num_heads)
    if out is None:
        out = qkv.new_empty(tokens, num_heads * head_dim)
    _check(qkv, cu_seqlens, num_heads, scale, distance_bias, out)
    batch = len(cu_seqlens) - 1
    if tokens == 0 or batch == 0:
        return out
    key = (head_dim, qkv.dtype, causal, distance_bias is not None, mean_length(tokens, batch))
    launch = pick("attention_varlen", key, candidates)
    tiles = tokens // launch["BLOCK_M"] + batch
    _attention_varlen_kernel[(tiles * num_heads,)](
        qkv,
        cu_seqlens,
        qkv if distance_bias is None else distance_bias,
        out,
        batch,
        0 if distance_bias is None else distance_bias.shape[1],
        scale * LOG2_E.value,
        QKV_STRIDE=qkv.stride(0),
        OUT_STRIDE=out.stride(0),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        CAUSAL=causal,
        HAS_BIAS=distance_bias is not None,
        CHUNK=_CHUNK,
        BLOCK_D=block_d(head_dim),
        **launch,
    )
    return out


def mean_length(tokens: int, batch: int) -> int:
    """Return the mean length of the sequences as launches know it."""
    return next(length for length in _MEAN_LENGTHS if tokens >= length * batch or length == 1)


def block_d(head_dim: int) -> int:
    """Return how wide the tiles of a head are; tensor cores take 16 features or a larger power of two."""
    return max(16, 1 << (head_dim - 1).bit_length())


def candidates(
    head_dim: int,
    dtype: torch.dtype,
    causal: bool,  # noqa: ARG001  # of the key: hiding later tokens may change what is fastest
    biased: bool,
    mean: int,
) -> list[Launch]:
    """Return launches for heads of this size, the first for a GPU on which none was measured.

    Args:
        mean: as `mean_length` has it.
    """
    tiles = _TILES[max(64, block_d(head_dim)), dtype.itemsize, biased]
    # of the most queries that sequences of the mean length fill, then its neighbours
    fitting = [tile for tile in tiles if tile[0] <= _MOST_QUERIES[mean]]
    best = len(fitting) - 1
    near = sorted(range(len(tiles)), key=lambda i: (abs(i - best), i > best))[:_MOST_CANDIDATES]
    names = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
    launches: list[Launch] = [dict(zip(names, tiles[i], strict=True)) for i in near]
    if biased or dtype.itemsize == 4:
        # else the assembler spills a few registers, to fit one more program on a multiprocessor
        return [{**launch, "maxnreg": _MOST_REGISTERS} for launch in launches]
    return launches


def _check(
    qkv: Tensor,
    cu_seqlens: Tensor,
    num_heads: int,
    scale: float,
    distance_bias: Tensor | None,
    out: Tensor,
) -> None:
    check_dtype(qkv=qkv)
    check_row_layout(qkv=qkv)
    check_cu_seqlens(cu_seqlens)
    tokens, width = qkv.shape
    head_dim = width // (3 * num_heads)
    if width != 3 * num_heads * head_dim:
        raise ValueError(f"qkv has rows of {width}; allowed: multiples of 3 · {num_heads} heads")
    if not 0 < head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim is {head_dim}; allowed: 1 to {MAX_HEAD_DIM}")
    if not scale > 0:
        raise ValueError(f"scale is {scale}; allowed: above 0")
    check_out(out, (tokens, num_heads * head_dim), qkv.dtype)
    if distance_bias is None:
        return
    if head_dim > 128 and qkv.dtype == torch.float32:
        raise ValueError(
            f"head_dim is {head_dim}; allowed with distance_bias in torch.float32: 1 to 128"
        )
    check_dtype(distance_bias=distance_bias)
    shape = distance_bias.shape
    if len(shape) != 2 or shape[0] != num_heads or shape[1] % 2 == 0:
        raise ValueError(f"distance_bias is {list(shape)}; it must be [{num_heads}, an odd number]")
    if not distance_bias.is_contiguous():
        raise ValueError(
            f"distance_bias has strides {distance_bias.stride()}; it must be contiguous"
        )
