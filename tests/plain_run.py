"""Running a program in plain torch: every op allocates its results."""

from collections.abc import Mapping, Sequence
from types import ModuleType

import torch
from torch import Tensor

from varlen.execution.cpu.runner import tensors_of
from varlen.execution.packing import dims_of, prompt_arrays
from varlen.program.program import PackedBatch, Program, State, Value
from varlen.request.request import Prompt, RequestOptions
from varlen_kernels import reference


def pack(program: Program, prompts: Sequence[Prompt], options: RequestOptions) -> PackedBatch:
    """Return a batch of prompts, all with the same options."""
    dims = dims_of([prompt.num_tokens for prompt in prompts])
    names = [value.name for value in program.inputs]
    arrays = prompt_arrays(names, prompts, [options] * len(prompts))
    return PackedBatch(tensors_of(arrays), dims)


@torch.inference_mode()
def run_without_arena(
    program: Program, bound: Mapping[str, Tensor], kernels: ModuleType = reference
) -> tuple[Tensor, ...]:
    """Return the outputs of a program.

    Args:
        bound: inputs and states by name; ops write into the states.
        kernels: module with a function for each op.
    """
    held = dict(bound)
    for op in program.ops:
        operands = [held[x.name] if isinstance(x, Value | State) else x for x in op.operands]
        made = getattr(kernels, op.kernel)(*operands, **op.attributes)
        results = made if isinstance(made, tuple) else (made,)
        held.update(zip((value.name for value in op.results), results, strict=False))
    return tuple(held[value.name] for value in program.outputs)
