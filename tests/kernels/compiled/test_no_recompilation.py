"""A live server never waits for the compiler: what a warm-up compiled serves every batch that comes after."""

import random
from collections.abc import Iterator

import pytest
import torch

from varlen_tools.dry_run import dry_run
from varlen_tools.kernel_calls.any_batch import ANY_BATCH

LONGEST = 64


def warm_up_lengths() -> Iterator[list[int]]:
    """Yield batches of a few sequences; their lengths are powers of two, or have less to do with 16."""
    power = 1
    while power <= LONGEST:
        for length in {power, power - 1, power - 2, power - 4}:
            if length > 0:
                yield [length]
                yield [length] * 3
        power *= 2


def random_lengths(count: int) -> Iterator[list[int]]:
    """Yield batches as they come, those of one token and of multiples of 16 among them."""
    generator = random.Random(0)
    yield from ([1], [16], [1] * 16, [LONGEST] * 4, [1, LONGEST])
    for _ in range(count):
        sequences = generator.choice([1, 2, 3, 8, 16, 17])
        longest = generator.randint(1, LONGEST)
        yield [generator.randint(1, longest) for _ in range(sequences)]


@pytest.mark.parametrize("op", ANY_BATCH)
def test_after_the_warm_up_nothing_is_compiled(op):
    prepare = ANY_BATCH[op]
    with dry_run(90) as compiled:
        for lengths in warm_up_lengths():
            prepare(lengths, torch.bfloat16)()
        in_warm_up = len(compiled)
        for lengths in random_lengths(100):
            prepare(lengths, torch.bfloat16)()
            assert len(compiled) == in_warm_up, f"compiled again for lengths {lengths}"

    assert in_warm_up > 0
