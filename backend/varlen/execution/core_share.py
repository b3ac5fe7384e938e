"""Whether the one batch that runs may use all cores, in memory that processes share.

The executor says whether a batch runs alone, and the worker that runs it reads that before each op: alone it uses all
cores, beside others one. A batch that starts beside another one therefore waits for no more than an op of it, and no
batch waits at a barrier for a core that another one uses.
"""

import mmap
import os

import numpy as np


class CoreShare:
    """One byte that the executor writes and every worker reads.

    Attributes:
        file: descriptor of the memory, for another process.
        byte: `[1]`, 0 while a batch may use one core.
        is_on: whether `set_alone` has an effect; off while costs are measured, which are costs of one core.
    """

    def __init__(self, file: int | None = None) -> None:
        """Map the memory of a descriptor, which is then its own; without one, new memory."""
        self.file = os.memfd_create("varlen-cores") if file is None else file
        os.ftruncate(self.file, 1)
        self.byte = np.frombuffer(mmap.mmap(self.file, 1), np.uint8)
        self.is_on = False
        self._is_open = True

    @property
    def is_alone(self) -> bool:
        """Whether a batch may use all cores."""
        return bool(self.byte[0])

    def set_alone(self, alone: bool) -> None:
        """Say whether one batch runs alone."""
        self.byte[0] = alone and self.is_on

    def close(self) -> None:
        """Release the memory of this process once no thread reads it; once is enough."""
        if self._is_open:
            self._is_open = False
            # a thread that comes late may still read it
            del self.byte
            os.close(self.file)
