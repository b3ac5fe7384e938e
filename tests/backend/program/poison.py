"""Kernels that show when an op reads memory of the arena that holds nothing live."""

import torch

# every bit set is NaN in each float format
POISON = 0xFF


class PoisonBetweenOps:
    """Kernels; before each op, every byte of the arena that no later op reads is overwritten.

    What is live is searched for in the op list each time: values of earlier ops that this op or a later one reads.
    """

    def __init__(self, program, memory, kernels):
        self._program = program
        self._memory = memory
        self._kernels = kernels
        self._held = {}
        self._next = 0
        self.poisoned_bytes = 0

    def __getattr__(self, kernel):
        def call(*operands, **attributes):
            op, later = self._program.ops[self._next], self._program.ops[self._next :]
            self._poison({value.name for each in later for value in each.reads})
            out = attributes.get("out")
            results = out if isinstance(out, tuple) else (out,)
            self._held.update(zip((value.name for value in op.results), results, strict=False))
            self._next += 1
            return getattr(self._kernels, kernel)(*operands, **attributes)

        return call

    def _poison(self, needed):
        dead = torch.ones(len(self._memory), dtype=torch.bool)
        for name, view in self._held.items():
            begin = view.data_ptr() - self._memory.data_ptr()
            # an output lies outside the arena
            if name in needed and 0 <= begin < len(self._memory):
                dead[begin : begin + view.nbytes] = False
        self._memory[dead] = POISON
        self.poisoned_bytes += int(dead.sum())
