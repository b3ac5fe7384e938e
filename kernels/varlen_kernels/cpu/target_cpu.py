"""The CPU that code is compiled for.

It is this one, or the one that numba's environment variables name.
"""

import os
from functools import cache
from typing import NamedTuple

import llvmlite.binding as llvm

# Numbers that compiled code works on at once, in one register or several.
LANES = 16


class TargetCpu(NamedTuple):
    """A CPU as LLVM knows it.

    Attributes:
        name: name of its model.
        features: names of its instruction sets, each after "+" or "-", separated by commas.
    """

    name: str
    features: str

    def has(self, feature: str) -> bool:
        """Return whether it has an instruction set."""
        return f"+{feature}" in self.features.split(",")


@cache
def target_cpu() -> TargetCpu:
    """Return the CPU that numba compiles for; loads no numba."""
    name = os.environ.get("NUMBA_CPU_NAME") or llvm.get_host_cpu_name()
    features = os.environ.get("NUMBA_CPU_FEATURES")
    return TargetCpu(name, _features() if features is None else features)


def _features() -> str:
    try:
        return str(llvm.get_host_cpu_features().flatten())
    except RuntimeError:
        # LLVM does not know the features of this CPU
        return ""
