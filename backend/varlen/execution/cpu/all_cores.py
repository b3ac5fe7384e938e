"""Runs the ops of a batch on all cores while no other batch runs.

An op that treats each token by itself runs on parts of the tokens, each with the kernels of one core. Any other op
shares its work as with more than one thread of torch. A thread that gets no core leaves its part to the others
(`run_parts`); after one that loses its core in the middle of a part, ops stay on one core.
docs/decisions/0051-lone-batches.md has the reasons.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from varlen.execution.thread_executor import LoneCores
from varlen.program.program import Op, Program, Value, call_kernel
from varlen_kernels.cpu.native.threads import run_parts, usable_cores, using_cores

# Products are compiled for each number of tokens that batches are padded to: how many of these there are from one power
# of two to the next, and the smallest difference.
_STEPS, _LEAST_STEP = 8, 8
# With fewer tokens a part, a product mostly reads its weights, which each core would read again.
_LEAST_TOKENS = 16
# Multiplications of an op from which another thread gains more than its 0.2 ms of start and end: 0.8 ms of an fp32
# product on one core with AVX2.
_LEAST_WORK = 1 << 25
# Attention of fewer tokens takes less than that.
_LEAST_TOGETHER = 128
# Multiplications that take as long as one number of an activation or a norm.
_WORK_OF_NUMBER = 32


def padded(tokens: int) -> int:
    """Return the least of `batch_sizes` that has room for this number of tokens."""
    step = max(_LEAST_STEP, (1 << (tokens.bit_length() - 1)) // _STEPS)
    return -(-tokens // step) * step


def batch_sizes(most: int) -> list[int]:
    """Return the numbers of tokens that batches are padded to, ascending, up to `most`."""
    return sorted({padded(tokens) for tokens in range(1, most + 1)})


class AllCores:
    """Runs one op after another; for `Program.run`."""

    def __init__(self, program: Program, cores: LoneCores) -> None:
        """Use the cores that are allowed."""
        self._cores = cores
        # of ops that may be split: the least number of tokens
        self._least_tokens = {
            id(op): max(2 * _LEAST_TOKENS, -(-_LEAST_WORK // _work_of_token(op)))
            for op in program.ops
            if op.is_by_token
        }

    def __call__(
        self,
        op: Op,
        kernel: Callable[..., object],
        operands: list[Any],
        out: tuple[Tensor, ...],
    ) -> None:
        """Run an op; the number of cores may change from one to the next."""
        least = self._least_tokens.get(id(op))
        is_small = len(operands[0]) < (least or _LEAST_TOGETHER)
        count = 1 if is_small else self._cores.count
        if count == 1:
            call_kernel(op, kernel, operands, out)
            return
        with using_cores(count) as cores:
            if least is None:
                call_kernel(op, kernel, operands, out)
            else:
                self._run_rows(op, kernel, operands, out)
        self._cores.add_gain(cores.gained)

    def _run_rows(
        self,
        op: Op,
        kernel: Callable[..., object],
        operands: list[Any],
        out: tuple[Tensor, ...],
    ) -> None:
        has_rows = [isinstance(operand, Value) for operand in op.operands]

        def run(first: int, last: int) -> None:
            pairs = zip(operands, has_rows, strict=True)
            rows = [operand[first:last] if has else operand for operand, has in pairs]
            results = tuple([result[first:last] for result in out])
            # the part is what this core gets
            with using_cores(1):
                call_kernel(op, kernel, rows, results)

        run_parts(run, token_bounds(len(out[0]), usable_cores()))


def token_bounds(tokens: int, cores: int) -> list[int]:
    """Return the bounds of parts, at most one for each core.

    Their numbers of tokens are some that batches are padded to.
    """
    part = padded(max(_LEAST_TOKENS, -(-tokens // cores)))
    return [*range(0, tokens, part), tokens]


def _work_of_token(op: Op) -> int:
    """Return the multiplications of an op for each token, or what takes as long."""
    if not op.kernel.startswith("linear"):
        columns = [axis for result in op.results for axis in result.shape[1:]]
        return _WORK_OF_NUMBER * max(1, sum(axis for axis in columns if isinstance(axis, int)))
    weight = op.operands[1]
    if isinstance(weight, Tensor):
        return weight.numel()
    assert isinstance(weight, tuple)
    # the codes of an int8 weight; their product takes about half the time of one in fp32
    return max(each.numel() for each in weight if isinstance(each, Tensor)) // 2
