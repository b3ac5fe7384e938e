"""Files that were not downloaded whole: pointers of Git LFS, and cut safetensors."""

import json
from pathlib import Path

from varlen.errors import CheckpointError
from varlen.models.checkpoint.files import read_bytes

_POINTER = b"version https://git-lfs.github.com/spec/"
# A pointer has about 130.
_MOST_POINTER_BYTES = 1024
# The first bytes of a safetensors file are the size of its header.
_LENGTH_BYTES = 8
# Endings of files that serving reads, or that it can be made to read.
_READ = (".safetensors", ".json", ".txt", ".model", ".spm", ".bin", ".pt", ".jinja")


def check_no_pointers(folder: Path) -> None:
    """Raise CheckpointError if a file that serving needs is a pointer of Git LFS."""
    paths = [path for path in sorted(folder.glob("*")) if path.suffix in _READ]
    has_safetensors = any(path.suffix == ".safetensors" for path in paths)
    for path in paths:
        is_needed = path.suffix not in (".bin", ".pt") or not has_safetensors
        if is_needed and _is_pointer(path):
            raise CheckpointError(
                f"{path.name} is a pointer of Git LFS, not the file itself; get the files:"
                f" git -C {folder} lfs pull"
            )


def describe_damage(path: Path, error: Exception) -> str:
    """Return what is wrong with a safetensors file that cannot be opened, and the remedy."""
    expected, size = _expected_bytes(path), path.stat().st_size
    if expected is None or size >= expected:
        return f"{path.name} cannot be read: {error}"
    return f"{path.name} has {size} bytes and needs {expected}: it was not downloaded whole; download it again"


def _is_pointer(path: Path) -> bool:
    try:
        if not path.is_file() or path.stat().st_size > _MOST_POINTER_BYTES:
            return False
        return read_bytes(path.parent, path.name).startswith(_POINTER)
    except (OSError, CheckpointError):
        # whoever needs it says so
        return False


def _expected_bytes(path: Path) -> int | None:
    """Return the size that a safetensors file needs; None if its header is damaged."""
    with path.open("rb") as file:
        length = file.read(_LENGTH_BYTES)
        begin = _LENGTH_BYTES + int.from_bytes(length, "little")
        if len(length) < _LENGTH_BYTES or path.stat().st_size < begin:
            return max(begin, _LENGTH_BYTES + 1)
        header = file.read(begin - _LENGTH_BYTES)
    try:
        ends = [
            tensor["data_offsets"][1]
            for name, tensor in json.loads(header).items()
            if name != "__metadata__"
        ]
        return begin + max(ends, default=0)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        return None
