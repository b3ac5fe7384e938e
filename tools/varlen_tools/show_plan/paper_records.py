"""The memory of TurboTransformers' paper: usage records of BERT-base as its code lists them, and streams of lengths.

What is published about the paper's allocator rests on these, so ours is held against them. The
records are one encoder layer of 12 heads in fp32, which all layers share.

Source: Fang et al. 2021, arXiv:2010.05680, and the code that came with it.
"""

import random

from varlen.memory.usage import Size, Usage


def usages(batch: int, length: int) -> list[Usage]:
    """Return the records of `batch` sequences of `length` tokens, padded as all there is.

    Two sizes are as the code has them, not as its ops need: `batch_gemm4` is recorded as large as the
    scores, and `seqpool` without the batch.
    """
    ids = 8 * batch * length
    hidden = 4 * batch * length * 768
    scores = 4 * batch * 12 * length * length
    pooled = 4 * batch * 768
    records = [
        ("position ids", 0, 1, ids),
        ("segment ids", 0, 1, ids),
        ("attmask", 0, 0, ids),
        ("extended mask", 0, 11, ids // 2),
        ("embedding", 1, 11, hidden),
        ("qkv_out1", 2, 3, 3 * hidden),
        ("q", 3, 4, hidden),
        ("k", 3, 4, hidden),
        ("v", 3, 5, hidden),
        ("batch_gemm3", 4, 5, scores),
        ("context", 5, 6, hidden),
        ("batch_gemm4", 6, 7, scores),
        ("gemm5", 7, 10, hidden),
        ("intermediate", 9, 10, 4 * hidden),
        ("pooler", 11, 12, pooled),
        ("seqpool", 12, 13, 4 * 768),
    ]
    return [Usage(name, first, last, Size(fixed=size)) for name, first, last, size in records]


def lengths(count: int, longest: int) -> list[int]:
    """Return the lengths of a stream of requests, in tokens: uniform from 5, as the paper's figures draw them."""
    numbers = random.Random(0)
    return [numbers.randint(5, longest) for _ in range(count)]
