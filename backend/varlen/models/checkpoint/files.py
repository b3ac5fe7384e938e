"""Files of a checkpoint folder. Nothing else opens them.

A folder may come from anyone. A file counts only if it is regular and in the folder, or in the hub's cache of the same
model; then it is read up to a limit. A pipe, a device or a link out of the folder is an error, not an absent file.
So are files that were not downloaded whole: pointers of Git LFS, and cut safetensors.
"""

import json
import os
import stat
from pathlib import Path

from varlen.errors import CheckpointError

TOKENIZER = "tokenizer.json"

_MEBIBYTE = 1 << 20
# The largest tokenizers that are known have 35 MB, the largest index of weights 15 MB, and other files less than 5 MB.
_MOST_BYTES = {TOKENIZER: 128 * _MEBIBYTE, "model.safetensors.index.json": 64 * _MEBIBYTE}
_MOST_BYTES_OF_OTHERS = 16 * _MEBIBYTE
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def has_file(folder: Path, name: str) -> bool:
    """Return whether a folder has an entry of this name, of any kind."""
    return os.path.lexists(folder / name)


def read_bytes(folder: Path, name: str) -> bytes:
    """Return the content of a file.

    Raises:
        CheckpointError: it is absent, too large, or no file of the folder; see `locate`.
    """
    path, most = locate(folder, name), _most_bytes(name)
    try:
        # what was a file may have become a pipe
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            _check_kind(name, os.fstat(descriptor))
            content = file.read(most + 1)
    except OSError as error:
        raise _unreadable(folder, name, error) from None
    if len(content) > most:
        raise _too_large(name)
    return content


def read_text(folder: Path, name: str) -> str:
    """Return the text in a file; raises as `read_bytes`, and if it is not UTF-8."""
    try:
        return read_bytes(folder, name).decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{name} is not text: {error}") from None


def check_readable(folder: Path, name: str) -> None:
    """Raise CheckpointError if `read_bytes` would not read a file, which a library reads itself."""
    if locate(folder, name).stat().st_size > _most_bytes(name):
        raise _too_large(name)


def locate(folder: Path, name: str) -> Path:
    """Return the real path of a file, for a library that opens it.

    Raises:
        CheckpointError: it is absent, no regular file, or a link that leads out of the folder.
    """
    try:
        path = (folder / name).resolve()
        if not any(path.is_relative_to(root) for root in _roots(folder.resolve())):
            raise CheckpointError(
                f"{name} is a link that leads out of the checkpoint's folder; copy the file there"
                if (folder / name).is_symlink()
                else f"{name} is outside the checkpoint folder"
            )
        _check_kind(name, path.stat())
    except (OSError, ValueError, RuntimeError) as error:
        # a name with a NUL, or a link to itself
        raise _unreadable(folder, name, error) from None
    return path


def _roots(folder: Path) -> list[Path]:
    """Return the folders that may hold the files of a checkpoint.

    In the hub's cache a snapshot, models--org--name/snapshots/hash, is links to models--org--name/blobs.
    """
    snapshots = [each for each in (folder, *folder.parents) if each.parent.name == "snapshots"]
    return [folder, *(each.parents[1] / "blobs" for each in snapshots[:1])]


def _most_bytes(name: str) -> int:
    return _MOST_BYTES.get(Path(name).name, _MOST_BYTES_OF_OTHERS)


def _too_large(name: str) -> CheckpointError:
    most = _most_bytes(name)
    return CheckpointError(f"{name} has more than {most} bytes; allowed: at most {most}")


def _check_kind(name: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "no file")
        raise CheckpointError(f"{name} is {kind}; allowed: a regular file")


def _unreadable(folder: Path, name: str, error: Exception) -> CheckpointError:
    if isinstance(error, FileNotFoundError):
        is_link = (folder / name).is_symlink()
        return CheckpointError(
            f"{name} is a link to a file that is absent" if is_link else f"{folder} has no {name}"
        )
    reason = error.strerror if isinstance(error, OSError) else error
    return CheckpointError(f"{name} cannot be read: {reason}")


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
