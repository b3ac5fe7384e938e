"""Describes what decides the run time of a batch: checkpoint, device and libraries.

The hash of a checkpoint covers its config.json, and header and size of each safetensors file, which list the tensors
with shape and dtype. A model that is trained further keeps its measured costs, and hashing does not read the weights.
"""

import hashlib
import os
import platform
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

import varlen.execution
import varlen.memory
import varlen.models
import varlen.program
import varlen_kernels
from varlen.models.checkpoint.extraction import config_name
from varlen.models.checkpoint.files import has_file, read_bytes
from varlen.models.checkpoint.weights import locate_weights, shards
from varlen.models.checkpoint_folder import Checkpoint
from varlen.program.rank import ALONE, Rank
from varlen_kernels.cpu.calls.calls import has_compiled_ops
from varlen_kernels.cpu.native.target_cpu import target_cpu

# Our own packages that run a batch, and the files of theirs that count.
_PACKAGES = (varlen.models, varlen.program, varlen.execution, varlen.memory, varlen_kernels)
_CODE = (".py", ".json")
# A safetensors file begins with the length of its header, a little-endian number of this many bytes.
_LENGTH_BYTES = 8


def cost_fields(
    checkpoint: Checkpoint, device: torch.device, rank: Rank = ALONE
) -> Mapping[str, str]:
    """Return what decides the run time of a batch beside settings, by name.

    Raises:
        CheckpointError, OSError: see `checkpoint_hash`.
    """
    return {
        "checkpoint": checkpoint_hash(checkpoint.weights_folder),
        "device": device_name(device),
        **({} if rank == ALONE else {"ranks": str(rank.size)}),
        **library_versions(device),
    }


def checkpoint_hash(folder: Path) -> str:
    """Return a hash of a checkpoint's architecture, in hexadecimal digits.

    Raises:
        CheckpointError: there are no safetensors files.
        OSError: one cannot be read.
    """
    digest = hashlib.sha256()
    # static embeddings may have none
    if has_file(folder, name := config_name(folder)):
        digest.update(read_bytes(folder, name))
    for shard in shards(folder):
        path = locate_weights(folder, shard.name)
        with path.open("rb") as file:
            length = file.read(_LENGTH_BYTES)
            digest.update(length)
            digest.update(file.read(int.from_bytes(length, "little")))
        digest.update(path.stat().st_size.to_bytes(_LENGTH_BYTES, "little"))
    return digest.hexdigest()


def device_name(device: torch.device) -> str:
    """Return model and size of a device, such as "Intel Xeon 2.50GHz, AVX512, 2 cores"."""
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        return f"{gpu.name}, {gpu.multi_processor_count} multiprocessors"
    cores = len(os.sched_getaffinity(0))
    return f"{_cpu_name()}, {torch.backends.cpu.get_cpu_capability()}, {cores} cores"


def library_versions(device: torch.device) -> Mapping[str, str]:
    """Return the versions of the libraries that run a batch, by name.

    Our own version is a hash of the code: a backend that was copied into a server's folder has no package version, and
    one in development changes without a new version.
    """
    versions = {"varlen": _own_code_hash(), "torch": str(torch.__version__)}
    if device.type == "cuda":
        versions["triton"] = _version("triton")
    elif has_compiled_ops():
        versions["level"] = target_cpu().level
    return versions


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        # some builds of torch bring it under another name
        return "unknown"


@cache
def _own_code_hash() -> str:
    """Return the hash of our own code.

    It is read once, since this process runs what it has imported.
    """
    return code_hash([Path(folder) for package in _PACKAGES for folder in package.__path__])


def code_hash(folders: Sequence[Path]) -> str:
    """Return a hash of the code and the tables in some folders, 12 hexadecimal digits."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.suffix in _CODE:
                digest.update(path.name.encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    # an Arm kernel names no model
    return names[0] if names else platform.machine()
