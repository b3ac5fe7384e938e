"""The CPU that code is compiled for: a level of instruction sets, not a model.

So code that one machine has compiled runs on every other one of its level, and a wheel or an image can hold it.
"""

import ctypes
import os
from functools import cache
from typing import NamedTuple

from varlen_kernels import CPU_LEVEL_VARIABLE

# Numbers that compiled code works on at once, in one register or several.
LANES = 16


class TargetCpu(NamedTuple):
    """A level of CPUs.

    Attributes:
        model: the CPU as LLVM knows it.
        features: instruction sets that a CPU of this level has, by LLVM's names.
        tuning: further options of LLVM, such as "-prefer-256-bit".
    """

    level: str
    model: str
    features: frozenset[str]
    tuning: tuple[str, ...] = ()

    def has(self, feature: str) -> bool:
        return feature in self.features

    @property
    def options(self) -> str:
        """Instruction sets and options as LLVM reads them."""
        return ",".join([*(f"+{name}" for name in sorted(self.features)), *self.tuning])


# The level x86-64-v3 of the processor supplement of the ABI, then v4, which most of LLVM's models would use with
# registers of half the width.
_V3 = frozenset(
    "avx avx2 bmi bmi2 cx16 f16c fma lzcnt movbe popcnt sahf sse3 sse4.1 sse4.2 ssse3 xsave".split()
)
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_WIDE = ("-prefer-256-bit",)
_BF16 = _V4 | {"avx512vnni", "avx512bf16"}
_TILES = frozenset({"amx-tile", "amx-int8", "amx-bf16"})
# From the highest level to the lowest: a CPU of a level also runs the code of all lower ones.
LEVELS = (
    TargetCpu("amx", "x86-64-v4", _BF16 | _TILES, _WIDE),
    TargetCpu("avx512_bf16", "x86-64-v4", _BF16, _WIDE),
    TargetCpu("avx512_vnni", "x86-64-v4", _V4 | {"avx512vnni"}, _WIDE),
    TargetCpu("avx512", "x86-64-v4", _V4, _WIDE),
    TargetCpu("avx2", "x86-64-v3", _V3),
)


@cache
def target_cpu() -> TargetCpu:
    """Return the level that code is compiled for here, and loaded of; loads no numba.

    Raises:
        ImportError: LLVM is not installed.
        RuntimeError: this CPU has none of the levels.
        ValueError: see `named_level`.
    """
    return named_level() or best_level(features_here())


def named_level() -> TargetCpu | None:
    """Return the level that the environment variable names; None if it is not set.

    Raises:
        ValueError: there is no such level.
    """
    named = os.environ.get(CPU_LEVEL_VARIABLE)
    if not named:
        return None
    for level in LEVELS:
        if level.level == named:
            return level
    allowed = ", ".join(level.level for level in LEVELS)
    raise ValueError(f'{CPU_LEVEL_VARIABLE} is "{named}"; allowed: {allowed}')


def best_level(features: frozenset[str]) -> TargetCpu:
    """Return the highest level of a CPU with these instruction sets; raises as `target_cpu`."""
    for level in LEVELS:
        if level.features <= features:
            return level
    lacking = ", ".join(sorted(LEVELS[-1].features - features))
    raise RuntimeError(f"this CPU lacks instruction sets of AVX2's level: {lacking}")


@cache
def features_here() -> frozenset[str]:
    """Return the instruction sets of this CPU that the process may use, by LLVM's names."""
    import llvmlite.binding as llvm

    try:
        known = llvm.get_host_cpu_features()
    except RuntimeError:
        # LLVM does not know the features of this CPU
        return frozenset()
    found = frozenset(name for name, is_there in known.items() if is_there)
    return found if _TILES.isdisjoint(found) or _may_use_tiles() else found - _TILES


# The system call `arch_prctl`, its request for a permission, and the number of the tile registers.
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


def _may_use_tiles() -> bool:
    """Ask Linux for the tile registers, which a process has only then; older kernels refuse.

    Source: the kernel's documentation, "Using XSTATE features in user space applications".
    """
    refused: int = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA)
    return not refused
