"""What the compiler made of a kernel: registers, spills, widths of loads and stores, tensor cores.

Registers and stack are read from the machine code, the rest from the PTX it was made of, each of whose loads,
stores and multiplications becomes one of the machine's: a tool to print the machine code itself takes
half a second for each kernel. Counts are of instructions in the code, not of executions.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterable
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
    """What a kernel's machine code needs and does.

    Attributes:
        registers: of one thread.
        stack_bytes: of one thread: registers that did not fit and were spilled, if it is not 0.
        shared_bytes: of one program.
        wide_loads: loads of 128 bits from global memory, those straight into shared memory too.
        narrow_loads: loads of fewer bits from global memory.
        wide_stores, narrow_stores: the same for stores.
        mma: multiplications on tensor cores by a warp (HMMA in machine code).
        wgmma: multiplications on tensor cores by four warps (HGMMA).
        barriers: where the warps of a program wait for each other.
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
    """Return what the machine code of a compiled kernel needs and does.

    Raises:
        RuntimeError: it cannot be read.
    """
    ptx = compilation.ptx
    listing = _cuobjdump(compilation.cubin, "--dump-resource-usage")
    resources = _RESOURCES.search(listing)
    if resources is None:
        raise RuntimeError(f"cuobjdump tells no resources of {compilation.kernel}:\n{listing}")
    registers, stack, local = map(int, resources.groups())
    loads = [*_bits(_LOAD, ptx), *(8 * int(count, 0) for count in _COPY.findall(ptx))]
    stores = _bits(_STORE, ptx)
    wide_loads, wide_stores = _wide(loads), _wide(stores)
    return MachineCode(
        kernel=compilation.kernel,
        arch=compilation.arch,
        num_warps=compilation.num_warps,
        registers=registers,
        stack_bytes=stack + local,
        shared_bytes=compilation.shared_bytes,
        wide_loads=wide_loads,
        narrow_loads=len(loads) - wide_loads,
        wide_stores=wide_stores,
        narrow_stores=len(stores) - wide_stores,
        mma=len(re.findall(r"\bmma\.sync\b", ptx)),
        wgmma=len(re.findall(r"\bwgmma\.mma_async\b", ptx)),
        barriers=len(re.findall(r"\bbar(?:rier)?\.(?:cta\.)?sync\b", ptx)),
    )


def disassemble(compilation: Compilation) -> str:
    """Return the instructions of a compiled kernel as NVIDIA writes them, one a line, in half a second.

    Raises:
        RuntimeError: they cannot be read.
    """
    return _cuobjdump(compilation.cubin, "--dump-sass")


def _cuobjdump(cubin: bytes, what: str) -> str:
    """Return what NVIDIA's tool, which comes with Triton, prints of machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, what, file.name]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"cuobjdump failed: {run.stderr.strip()}")
    return run.stdout


def _bits(access: re.Pattern[str], ptx: str) -> list[int]:
    """Return the bits of each load or store."""
    return [int(count or 1) * int(bits) for count, bits in access.findall(ptx)]


def _wide(bits: Iterable[int]) -> int:
    return sum(width >= _WIDE_BITS for width in bits)
