"""What decides how long a batch takes, in words: the checkpoint, the device, the libraries.

A checkpoint is hashed by its config.json, and by the header and size of each safetensors file: they say which tensors
of which shape and dtype there are. What the weights are changes no cost, so a model that was trained further keeps
the costs that were measured; and 500 MB are not read for it, which takes a second or more.
"""

import hashlib
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import torch

import varlen.execution
import varlen.memory
import varlen.models
import varlen.program
import varlen_kernels
from varlen.models.weights import shards

# What of our own code runs a batch, and by what kinds of file.
_PACKAGES = (varlen.models, varlen.program, varlen.execution, varlen.memory, varlen_kernels)
_CODE = (".py", ".json")
# Bytes that say how long a safetensors header is: a little-endian number.
_LENGTH_BYTES = 8


def checkpoint_hash(folder: Path) -> str:
    """Return a hash of a checkpoint's architecture, in hexadecimal digits.

    Raises:
        CheckpointError: there are no safetensors files.
        OSError: one cannot be read.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in shards(folder):
        with path.open("rb") as file:
            length = file.read(_LENGTH_BYTES)
            digest.update(length)
            digest.update(file.read(int.from_bytes(length, "little")))
        digest.update(path.stat().st_size.to_bytes(_LENGTH_BYTES, "little"))
    return digest.hexdigest()


def device_name(device: torch.device) -> str:
    """Return the kind of a device and how large it is: "Intel Xeon 2.50GHz, AVX512, 2 cores"."""
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        return f"{gpu.name}, {gpu.multi_processor_count} multiprocessors"
    cores = len(os.sched_getaffinity(0))
    return f"{_cpu_name()}, {torch.backends.cpu.get_cpu_capability()}, {cores} cores"


def library_versions(device: torch.device) -> Mapping[str, str]:
    """Return the versions of what runs a batch on a device, by name; ours is a hash of its code.

    A backend that was copied into a server's folder has no version to ask for, and one in development has many
    that are called the same.
    """
    versions = {"varlen": _code_hash(), "torch": str(torch.__version__)}
    if device.type == "cuda":
        versions["triton"] = _version("triton")
    return versions


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        # some builds of torch bring it under another name
        return "unknown"


def _code_hash() -> str:
    digest = hashlib.sha256()
    for package in _PACKAGES:
        (folder,) = package.__path__
        for path in sorted(Path(folder).rglob("*")):
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
