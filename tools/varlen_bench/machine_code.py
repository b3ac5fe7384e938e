"""Figures of a kernel's machine code: registers, spills, widths of loads and stores, tensor cores.

Registers and stack come from the machine code. The rest comes from its PTX, each of whose loads, stores and
multiplications becomes one of the machine's: to print the machine code takes half a second for each kernel.
Counts are of instructions in the code, not of executions.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass

from triton import knobs

from varlen_bench.dry_run import Compilation

_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")
# such as ld.global.L1::evict_last.v4.b32: four times 32 bits
_LOAD = re.compile(r"\bld\.global[\w.:]*?(?:\.v(\d))?\.[busf](\d+)\b")
_STORE = re.compile(r"\bst\.global[\w.:]*?(?:\.v(\d))?\.[busf](\d+)\b")
# from global to shared memory; the number of bytes follows both addresses
_COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\.global[\w.:]* *\[[^]]*\], *\[[^]]*\], *(\w+)")
_WIDE_BITS = 128


@dataclass(frozen=True, slots=True)
class MachineCode:
    """Figures of a kernel's machine code.

    Attributes:
        registers, stack_bytes: of one thread; a stack holds spilled registers.
        shared_bytes: of one program.
        wide_loads: loads of 128 bits from global memory, also those straight into shared memory.
        narrow_loads: loads of fewer bits from global memory.
        mma, wgmma: multiplications on tensor cores by one warp (HMMA) and by four (HGMMA).
    """

    kernel: str
    arch: int
    num_warps: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    wide_loads: int
    narrow_loads: int
    wide_stores: int
    narrow_stores: int
    mma: int
    wgmma: int
    barriers: int


def read_machine_code(compilation: Compilation) -> MachineCode:
    """Return the figures of a compiled kernel.

    Raises:
        RuntimeError: the machine code cannot be read.
    """
    ptx = compilation.ptx
    listing = cuobjdump(compilation, "--dump-resource-usage")
    resources = _RESOURCES.search(listing)
    if resources is None:
        raise RuntimeError(f"cuobjdump tells no resources of {compilation.kernel}:\n{listing}")
    registers, stack, local = map(int, resources.groups())
    loads = [*_bits(_LOAD, ptx), *(8 * int(count, 0) for count in _COPY.findall(ptx))]
    stores = _bits(_STORE, ptx)
    return MachineCode(
        kernel=compilation.kernel,
        arch=compilation.arch,
        num_warps=compilation.num_warps,
        registers=registers,
        stack_bytes=stack + local,
        shared_bytes=compilation.shared_bytes,
        wide_loads=sum(bits >= _WIDE_BITS for bits in loads),
        narrow_loads=sum(bits < _WIDE_BITS for bits in loads),
        wide_stores=sum(bits >= _WIDE_BITS for bits in stores),
        narrow_stores=sum(bits < _WIDE_BITS for bits in stores),
        mma=len(re.findall(r"\bmma\.sync\b", ptx)),
        wgmma=len(re.findall(r"\bwgmma\.mma_async\b", ptx)),
        barriers=len(re.findall(r"\bbar(?:rier)?\.(?:cta\.)?sync\b", ptx)),
    )


def cuobjdump(compilation: Compilation, what: str) -> str:
    """Return the output of NVIDIA's tool, which comes with Triton: "--dump-sass" prints the instructions.

    Raises:
        RuntimeError: the machine code cannot be read.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compilation.cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, what, file.name]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"cuobjdump failed: {run.stderr.strip()}")
    return run.stdout


def _bits(access: re.Pattern[str], ptx: str) -> list[int]:
    """Return the bits of each load or store."""
    return [int(count or 1) * int(bits) for count, bits in access.findall(ptx)]
