"""Figures of a kernel's machine code: registers, spills, instructions, loads, stores, tensor cores.

Registers, stack and the number of instructions are read from the machine code. The rest is counted in its PTX, because
disassembly takes half a second per kernel; each load, store and multiplication there becomes one machine instruction.
Counts are instructions in the code, not executions.
"""

import re
import struct
import subprocess
import tempfile
from dataclasses import dataclass

from triton import knobs

from varlen_bench.dry_run import Compilation

_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")
# such as ld.global.L1::evict_last.v4.b32, which loads four times 32 bits
_LOAD = re.compile(r"\bld\.global[\w.:]*?(?:\.v(\d))?\.[busf](\d+)\b")
_STORE = re.compile(r"\bst\.global[\w.:]*?(?:\.v(\d))?\.[busf](\d+)\b")
# global to shared memory; the number of bytes follows the two addresses
_COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\.global[\w.:]* *\[[^]]*\], *\[[^]]*\], *(\w+)")
_WIDE_BITS = 128
# Bytes of a machine instruction from sm_70 on.
_INSTRUCTION_BYTES = 16


@dataclass(frozen=True, slots=True)
class MachineCode:
    """Figures of a kernel's machine code.

    Attributes:
        registers, stack_bytes: per thread; the stack holds spilled registers.
        shared_bytes: shared memory of one program.
        instructions: instructions of the whole kernel, with the padding to a multiple of 128 bytes.
        wide_loads, narrow_loads: loads from global memory of at least 128 bits, and of fewer.
        mma, wgmma: tensor-core multiplications by one warp (HMMA) and by four (HGMMA).
    """

    kernel: str
    arch: int
    num_warps: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    instructions: int
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
    usage = cuobjdump(compilation, "--dump-resource-usage")
    resources = _RESOURCES.search(usage)
    if resources is None:
        raise RuntimeError(f"cuobjdump prints no resources of {compilation.kernel}:\n{usage}")
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
        instructions=_code_bytes(compilation.cubin) // _INSTRUCTION_BYTES,
        wide_loads=sum(bits >= _WIDE_BITS for bits in loads),
        narrow_loads=sum(bits < _WIDE_BITS for bits in loads),
        wide_stores=sum(bits >= _WIDE_BITS for bits in stores),
        narrow_stores=sum(bits < _WIDE_BITS for bits in stores),
        mma=len(re.findall(r"\bmma\.sync\b", ptx)),
        wgmma=len(re.findall(r"\bwgmma\.mma_async\b", ptx)),
        barriers=len(re.findall(r"\bbar(?:rier)?\.(?:cta\.)?sync\b", ptx)),
    )


def cuobjdump(compilation: Compilation, option: str) -> str:
    """Return the output of NVIDIA's cuobjdump, which comes with Triton.

    Raises:
        RuntimeError: the machine code cannot be read.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compilation.cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, option, file.name]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"cuobjdump failed: {run.stderr.strip()}")
    return run.stdout


def _code_bytes(cubin: bytes) -> int:
    """Return the size of the code in a cubin, in bytes.

    A cubin is an ELF file of 64 bits. Its sections `.text.*` hold the code.
    """
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, of_names = struct.unpack_from("<3H", cubin, 0x3A)
    # name, offset and size of each section
    sections = [
        struct.unpack_from("<I20xQQ", cubin, table + index * size) for index in range(count)
    ]
    names = sections[of_names][1]
    return sum(length for name, _, length in sections if cubin.startswith(b".text.", names + name))


def _bits(access: re.Pattern[str], ptx: str) -> list[int]:
    """Return the number of bits of each load or store."""
    return [int(count or 1) * int(bits) for count, bits in access.findall(ptx)]
