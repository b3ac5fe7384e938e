"""After the warm-up no batch compiles a kernel, so no request waits for the compiler."""

import random
from collections.abc import Iterator

import pytest
import torch

from varlen_bench.dry_run import dry_run
from varlen_bench.ops.call import kernels
from varlen_bench.ops.table import TABLE, op_call

# Longest sequence of a batch. Some need more, because their launch depends on the mean length, or the rows of a group.
_OF_LAUNCHES = {"attention_tiles", "attention_varlen", "linear_groups"}
LONGEST = {op: 300 if op in _OF_LAUNCHES else 64 for op in TABLE}


def warm_up_lengths(longest: int) -> Iterator[list[int]]:
    """Yield batches of equal lengths, divisible by different powers of two."""
    power = 1
    while power <= longest:
        for length in {power, power - 1, power - 2, power - 4}:
            if length > 0:
                yield [length]
                yield [length] * 3
        power *= 2


def random_lengths(count: int, most: int) -> Iterator[list[int]]:
    """Yield fixed edge cases, and `count` random batches of sequences of up to `most` tokens."""
    generator = random.Random(0)
    yield from ([1], [16], [1] * 16, [most] * 4, [1, most])
    for _ in range(count):
        sequences = generator.choice([1, 2, 3, 8, 16, 17])
        longest = generator.randint(1, most)
        yield [generator.randint(1, longest) for _ in range(sequences)]


# Ops of at most 64 rows, with a few kernels by their number.
FEW_ROWS = ["linear_residual", "norm_append_kv", "norm_linear", "norm_next_tokens"]


@pytest.mark.parametrize("op", FEW_ROWS)
def test_three_kernels_serve_all_numbers_of_few_rows(op):
    with dry_run(90) as compiled:
        for rows in (1, 2, 3, 4, 5, 8, 15, 16, 17, 32, 33, 48, 63, 64):
            call = op_call(op, torch.bfloat16, lengths=[1] * rows)
            call.run(kernels("fused"), call.make_empty())

    assert len(compiled) == 3


@pytest.mark.parametrize("op", [op for op in TABLE if op not in FEW_ROWS])
def test_after_the_warm_up_nothing_is_compiled(op):
    fused = kernels("fused")

    def run(lengths: list[int]) -> None:
        call = op_call(op, torch.bfloat16, lengths=lengths)
        call.run(fused, call.make_empty())

    with dry_run(90) as compiled:
        for lengths in warm_up_lengths(LONGEST[op]):
            run(lengths)
        in_warm_up = len(compiled)
        for lengths in random_lengths(100, LONGEST[op]):
            run(lengths)
            assert len(compiled) == in_warm_up, f"compiled again for lengths {lengths}"

    assert in_warm_up > 0
