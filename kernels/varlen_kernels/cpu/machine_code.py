"""Machine code of the functions of `entries`.

numba compiles it once for a machine, and LLVM alone loads it.

A file holds the code of one function. Its name has a hash of all that the code comes from: the sources of this package,
the versions of the compiler, and the CPU. Its content begins with a hash of the rest, so a damaged file is compiled
again. Nothing of it can run but what was compiled here: the file is as trusted as the package's own, next to which it
lies.
"""

import hashlib
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from threading import Lock
from typing import Any

import llvmlite.binding as llvm

from varlen_kernels.cpu.compile_lock import compile_lock
from varlen_kernels.cpu.target_cpu import target_cpu

_log = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
# The rest of what compiled code is made of: constants of the specifications.
_REFERENCE = _FOLDER.parent / "reference"
# What compiled code may call: functions of the C library, and what LLVM turns into its own instructions.
_EXTERNAL = {
    "aligned_alloc",
    "free",
    "sched_yield",
    "usleep",
    "clock_gettime",
    "exp",
    "log",
    "sqrtf",
    "memset",
    "memcpy",
    "memmove",
}
_HASH_BYTES = 32
# Of a file: a longer one is damaged. The longest function has 90 KB.
_MOST_BYTES = 1 << 22
# Files of a function for other sources or CPUs that stay.
_KEPT = 3

_loading = Lock()


@cache
def address_of(name: str) -> int:
    """Return the address of a function of `entries`, loaded, or compiled and stored.

    Raises:
        ImportError, RuntimeError: its code is not stored, and numba cannot compile it.
        OSError: no folder can hold it.
    """
    with _loading:
        return _load(name, _stored(name) or _compile_once(name))


@cache
def code_folder() -> Path:
    """Return the folder of compiled code.

    It is beside this file or, where that is not writable, in the user's cache. NUMBA_CACHE_DIR names another one.
    """
    named = os.environ.get("NUMBA_CACHE_DIR")
    beside = _FOLDER / "__pycache__"
    if named:
        folder = Path(named)
    elif os.access(beside if beside.exists() else _FOLDER, os.W_OK):
        folder = beside
    else:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = home / "varlen" / "code"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@cache
def code_hash() -> str:
    """Return the hash of all that compiled code comes from, in hexadecimal digits."""
    digest = hashlib.sha256()
    for folder in (_FOLDER, _REFERENCE):
        for path in sorted(folder.glob("*.py")):
            content = path.read_bytes()
            digest.update(f"{path.name} {len(content)}\n".encode())
            digest.update(content)
    versions = [_version(package) for package in ("numba", "llvmlite", "numpy")]
    digest.update(repr((versions, target_cpu())).encode())
    return digest.hexdigest()[:32]


def file_of(name: str) -> Path:
    """Return the file of a function's code."""
    return code_folder() / f"{name}-{code_hash()}.o"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _stored(name: str) -> bytes | None:
    """Return the code of a function; None if it is not stored, or damaged."""
    path = file_of(name)
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES)
    except OSError:
        return None
    digest, code = content[:_HASH_BYTES], content[_HASH_BYTES:]
    if hashlib.sha256(code).digest() == digest:
        return code
    _log.warning("compiled code is damaged and is compiled again: %s", path.name)
    return None


def _compile_once(name: str) -> bytes:
    """Return the code of a function, and store it; one process at a time compiles."""
    with compile_lock(code_folder() / f"{name}.lock"):
        # another process may have stored it meanwhile
        code = _stored(name)
        if code is None:
            code = _compile(name)
            try:
                _store(name, code)
            except OSError as error:
                _log.warning("compiled code cannot be stored, so each start compiles: %r", error)
        return code


def _compile(name: str) -> bytes:
    numba: Any = import_module("numba")
    int64 = numba.types.int64
    function = import_module("varlen_kernels.cpu.entries").MAKERS[name]().py_func
    # sources may have changed since this process began: what it has imported is what it is stored under
    if code_hash.__wrapped__() != code_hash():
        raise RuntimeError("the sources of compiled code have changed: start the process again")
    arguments = [int64] * function.__code__.co_argcount
    # a part of what numba wraps around it, which then has no error to report
    options = {"forceinline": True, "_nrt": False, "error_model": "numpy"}
    compiled = numba.cfunc(int64(*arguments), **options)(function)
    module = llvm.parse_assembly(compiled.inspect_llvm())
    declared = {each.name for each in module.functions if each.is_declaration}
    foreign = {each for each in declared - _EXTERNAL if not each.startswith("llvm.")}
    if foreign:
        raise RuntimeError(f"the code of {name} calls functions of the compiler: {foreign}")
    module.get_function(compiled.native_name).name = _symbol(name)
    return bytes(_new_machine().emit_object(module))


def _store(name: str, code: bytes) -> None:
    """Store the code of a function, for which this process holds the lock."""
    path = file_of(name)
    # of processes that were ended while they wrote
    unfinished = list(path.parent.glob(f".{name}-*"))
    with _new_file(path) as file:
        file.write(hashlib.sha256(code).digest() + code)
    others = [each for each in path.parent.glob(f"{name}-*.o") if each != path]
    with suppress(OSError):
        others.sort(key=lambda each: each.stat().st_mtime)
        for each in [*unfinished, *others[:-_KEPT]]:
            each.unlink()


@contextmanager
def _new_file(path: Path) -> Iterator[Any]:
    """Yield a file that takes the place of a path once it is complete."""
    descriptor, new = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            # as numba and Python do, for other users of the folder
            os.fchmod(descriptor, 0o644)
            yield file
        Path(new).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(new).unlink()
        raise


def _symbol(name: str) -> str:
    return f"varlen_{name}"


def _load(name: str, code: bytes) -> int:
    engine = _engine()
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    address: int = engine.get_function_address(_symbol(name))
    return address


@cache
def _engine() -> Any:
    """Return what holds the loaded code, for as long as the process lives."""
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), _new_machine())


def _new_machine() -> Any:
    """Return LLVM's description of the CPU, as numba sets it."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_triple(llvm.get_process_triple())
    cpu = target_cpu()
    return target.create_target_machine(
        cpu=cpu.name,
        features=cpu.features,
        opt=3,
        reloc="static",
        codemodel="jitdefault",
        jit=True,
    )
