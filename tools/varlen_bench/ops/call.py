"""One call of a launcher, and what the machine code it leads to must be like."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Call:
    """A launcher called on CPU tensors, inside `dry_run`: kernels are compiled and nothing executes.

    Attributes:
        name: unique; the op, and after a dash what is special, such as "add_layer_norm-768".
        run: makes the tensors in the dtype it is given and calls the launcher on them.
        dtypes: those worth a compilation.
        narrow_loads: most loads from global memory of less than 128 bits that a kernel may have; None
            where the width of the rows allows no better.
        tensor_cores: whether the kernels for 16-bit dtypes multiply on tensor cores: HMMA on
            sm_80, HGMMA on sm_90.
    """

    name: str
    run: Callable[[torch.dtype], object]
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)
    narrow_loads: int | None = None
    tensor_cores: bool = False

    @property
    def op(self) -> str:
        """The launcher's name."""
        return self.name.partition("-")[0]
