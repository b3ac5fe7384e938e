"""Machine code of the functions of the table of ops.

numba compiles it once for a level of CPUs, and LLVM alone loads it.

A file holds the code of one function for one level. Its name has a hash of the sources that the code comes from. Its
content begins with a hash of its name and of the rest, so a damaged file is compiled again. Beside the package it is as
trusted as the package, since wheels and images bring the code of all levels along (`compile_all`). Elsewhere it is used
only if no other user can write it (`cache_files`). Without a folder for it, each start compiles.
"""

import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import llvmlite.binding as llvm

from varlen_kernels import CPU_LEVEL_VARIABLE
from varlen_kernels.cache_files import CacheFolder, cache_home
from varlen_kernels.cpu.native.target_cpu import features_here, target_cpu

_log = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent.parent
# Code that came with the package, and the folder of new code if it can be written.
BESIDE = _FOLDER / "code"
# What compiled code is made of: with the bodies, constants of the specifications and the table of ops.
_SOURCES = (
    "cpu/**/*.py",
    "reference/*.py",
    "functions.py",
    "op.py",
    "op_table.py",
    "vector_ops.py",
)
# The command that compiles ahead: it decides when and where, and no code comes from it.
_NO_SOURCES = {"compile_all.py"}
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
# Size of a file: a longer one is damaged. The longest function has 90 KB.
_MOST_BYTES = 1 << 22
# Files of a function for other sources that stay.
_KEPT = 3
# Longest wait for another process that compiles a function; then this one compiles it too.
_LOCK_SECONDS = 60.0

_loading = Lock()


@cache
def address_of(name: str) -> int:
    """Return the address of a function, loaded, or compiled and stored.

    Raises:
        ImportError, RuntimeError: its code is not stored, and numba cannot compile it; or this CPU cannot run it.
    """
    cpu = target_cpu()
    if not cpu.features <= features_here():
        raise RuntimeError(
            f"this CPU cannot run code of the level {cpu.level}; unset {CPU_LEVEL_VARIABLE}"
        )
    with _loading:
        return _load(name, code_of(name))


def code_of(name: str) -> bytes:
    """Return the code of a function; raises as `address_of`."""
    return _stored(name) or _compile_once(name)


@cache
def code_folder() -> Path:
    """Return the folder of new code.

    It is beside this file or, where that is not writable, in the user's cache.

    Raises:
        CacheError: the user has no folder for caches.
    """
    if os.access(BESIDE if BESIDE.exists() else BESIDE.parent, os.W_OK):
        return BESIDE
    return cache_home() / "varlen" / "code"


@cache
def code_hash() -> str:
    """Return the hash of all sources of compiled code, in hexadecimal digits."""
    digest = hashlib.sha256()
    for pattern in _SOURCES:
        for path in sorted(_FOLDER.parent.glob(pattern)):
            if path.name in _NO_SOURCES:
                continue
            content = path.read_bytes()
            digest.update(f"{path.name} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()[:32]


def file_name(name: str, level: str) -> str:
    """Return the name of the file of a function's code for a level."""
    return f"{_series(name, level)}{code_hash()}.o"


def _series(name: str, level: str) -> str:
    """Return what the files of a function begin with, whatever its sources."""
    return f"{name}-{level}-"


def _stored(name: str) -> bytes | None:
    file = file_name(name, target_cpu().level)
    # a user without a home has the code of the package all the same
    code = _read(_package_folder(), file)
    if code is None and (folder := _new_code_folder()) not in (None, _package_folder()):
        code = _read(folder, file)
    return code


def _read(folder: CacheFolder, file: str) -> bytes | None:
    try:
        content = folder.read(file, _MOST_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn(f"stored code is not used: {error}")
        return None
    digest, code = content[:_HASH_BYTES], content[_HASH_BYTES:]
    if _digest(file, code) == digest:
        return code
    _log.warning("compiled code is damaged and is compiled again: %s", file)
    return None


def _digest(file: str, code: bytes) -> bytes:
    # a file may not take the place of another
    return hashlib.sha256(file.encode() + b"\0" + code).digest()


def _package_folder() -> CacheFolder:
    return CacheFolder(BESIDE, of_package=True)


def _new_code_folder() -> CacheFolder | None:
    """Return the folder of new code, None without one."""
    try:
        folder = code_folder()
    except OSError as error:
        _warn(f"compiled code is not stored, so each start compiles: {error}")
        return None
    return CacheFolder(folder, of_package=folder == BESIDE)


@cache
def _warn(line: str) -> None:
    """Log a warning once."""
    _log.warning("%s", line)


def _compile_once(name: str) -> bytes:
    """Return the code of a function, and store it; one process at a time compiles."""
    folder = _new_code_folder()
    if folder is None:
        return _compile(name)
    with _compile_lock(folder, name):
        # another process may have stored it meanwhile
        code = _stored(name)
        if code is None:
            _log.info("compiling the op %s; later starts read it", name)
            code = _compile(name)
            try:
                _store(folder, name, code)
            except OSError as error:
                _warn(f"compiled code is not stored, so each start compiles: {error}")
        return code


@contextmanager
def _compile_lock(folder: CacheFolder, name: str) -> Iterator[None]:
    """Let the other processes that compile a function wait for what this one stores."""
    with ExitStack() as stack:
        try:
            stack.enter_context(folder.lock(f"{name}.lock", _LOCK_SECONDS, _warn))
        except OSError as error:
            # to compile twice costs time only
            _warn(f"compiled code has no lock: {error}")
        yield


def _compile(name: str) -> bytes:
    # where all code is stored, numba need not be
    import numba
    from numba.core.registry import cpu_target

    from varlen_kernels.cpu.calls.entries import entry_of

    int64, function = numba.types.int64, entry_of(name).py_func
    codegen = cpu_target.target_context.codegen()
    if codegen.magic_tuple()[2] != target_cpu().options:
        raise RuntimeError(
            "other code of this process has used numba before: run python -m varlen_kernels.cpu.compile_all once"
        )
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


def _store(folder: CacheFolder, name: str, code: bytes) -> None:
    """Store the code of a function, and remove older code of it."""
    file, series = file_name(name, target_cpu().level), _series(name, target_cpu().level)
    # of processes that were ended while they wrote
    unfinished = [each for each in folder.names() if each.startswith(f".{name}-")]
    folder.write(file, _digest(file, code) + code)
    others = [each for each in folder.names() if each.startswith(series) and each != file]
    with suppress(OSError):
        others.sort(key=lambda each: (folder.path / each).lstat().st_mtime)
        for each in [*unfinished, *others[:-_KEPT]]:
            folder.remove(each)


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
    """Return LLVM's description of the level, as numba sets it."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_triple(llvm.get_process_triple())
    cpu = target_cpu()
    return target.create_target_machine(
        cpu=cpu.model,
        features=cpu.options,
        opt=3,
        reloc="static",
        codemodel="jitdefault",
        jit=True,
    )
