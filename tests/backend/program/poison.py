"""Kernels that detect an op that reads dead arena memory."""

import torch

# every bit set is NaN in each float format
POISON = 0xFF


class PoisonBetweenOps:
    """Overwrites all dead arena memory with NaN before each op.

    A value is live if an earlier op made it and this op or a later one reads it; the op list is searched each time.
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
