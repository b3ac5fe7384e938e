"""Write the server of this environment into one file for machines without a network: `make bundle`.

`varlen_tools/unbundle.py` is the program of the file and says what its parts are. It holds the server of `make server`,
the packages that serving needs beside torch, our own, and the compiled ops. Debug symbols and tests stay out.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import lzma
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from varlen_tools.setup_server import SERVER_FOLDER, SetupError, find_libpython, libpython_name
from varlen_tools.unbundle import CARRIED_PYTHON, MANIFEST, PAYLOAD

# Packages that serving needs and torch does not bring, and the client. Where llvmlite is missing, plain torch runs the
# ops; where grpcio is, our client does not.
_PACKAGES = (
    *("numpy", "tritonclient", "python-rapidjson"),
    *("llguidance", "tokenizers", "safetensors", "sortedcontainers"),
)
_OURS = ("varlen", "varlen_kernels", "varlen_tools", "varlen_client")
_OUR_DISTRIBUTIONS = ("varlen", "varlen-client")
# Patterns of files that no server reads.
_LEFT_OUT = (
    *(
        "../*",
        "*.pyi",
        "*.pyc",
        "*/__pycache__/*",
        "*/tests/*",
        "*/RECORD",
        "*/direct_url.json",
        "*.pth",
    ),
    *(
        "numpy/f2py/*",
        "numpy/distutils/*",
        "numpy/core/include/*",
        "numpy/core/lib/*",
        "numpy/random/lib/*",
    ),
    *("numpy/random/_examples/*", "numpy/doc/*", "numpy/core/_simd.*", "*.h", "*.pxd", "*.a"),
    *("varlen_kernels/cpu/code/*", "varlen_tools/train_demo/*", "varlen_tools/demo.py"),
    "varlen_tools/bundle.py",
)
# Files of the server's folder that stay here: what other folders have, and the wheel's own libpython of Python 3.13.
_SERVER_LEFT_OUT = ("wheels/*", "stamp.json", "backends/varlen", "lib/libpython3*", "*.pyc")
# Libraries of perf_analyzer by their usual names, which a machine may lack; the server's have a hash in theirs.
_OF_PERF_ANALYZER = {"libssl.so.3": "libssl-*.so.3", "libcrypto.so.3": "libcrypto-*.so.3"}
# The first filter makes calls of x86 code repeat. More effort than preset 1 takes four times as long and saves 3 %.
_FILTERS = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 1, "dict_size": 1 << 26}]


def write_bundle(
    folder: Path,
    *,
    libpython: Path | None = None,
    added: Sequence[str] = (),
) -> Path:
    """Write the bundle of this environment into a folder, and return its path.

    Args:
        libpython: shared library for machines that have none for this Python version; by default this Python's own.
        added: further packages, without the packages that they need.

    Raises:
        SetupError: there is no server here, or this Python has no shared library.
        PackageNotFoundError: a package is not installed here.
    """
    if not (SERVER_FOLDER / "stamp.json").is_file():
        raise SetupError(f"{SERVER_FOLDER} has no server: make server")
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    bundle = folder / bundle_name()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".bundle-", dir=folder) as scratch:
        tree, payload = Path(scratch, "tree"), Path(scratch, PAYLOAD)
        _copy_server(tree / "share/varlen/server", libpython or find_libpython())
        packages = (*_PACKAGES, *added)
        _copy_packages(packages, tree / f"lib/python{version}/site-packages")
        _strip(tree)
        entries = [path for path in _walk(tree) if path.is_symlink() or path.is_file()]
        _pack(tree, entries, payload)
        size = sum(path.stat().st_size for path in entries if not path.is_symlink())
        manifest = {
            "python": version,
            "files": len(entries),
            "bytes": size,
            "sha256": hashlib.sha256(payload.read_bytes()).hexdigest(),
            "sources": sources_hash(),
            "packages": {name: metadata.version(name) for name in (*packages, "varlen")},
        }
        partial = Path(scratch, bundle.name)
        _write_zip(partial, manifest, payload)
        partial.replace(bundle)
    return bundle


def bundle_name() -> str:
    """Return the name of the file for this version of Python."""
    return f"varlen-server-cp{sys.version_info[0]}{sys.version_info[1]}.pyz"


def sources_hash() -> str:
    """Return the hash of our packages' Python files."""
    digest = hashlib.sha256()
    for name in _OURS:
        for path, inside in _package_files(name):
            if path.suffix == ".py":
                digest.update(f"{inside} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _copy_server(target: Path, libpython: Path) -> None:
    for path in _walk(SERVER_FOLDER):
        inside = path.relative_to(SERVER_FOLDER).as_posix()
        if not _matches(inside, _SERVER_LEFT_OUT) and (path.is_symlink() or path.is_file()):
            _copy(path, target / inside)
    for soname, hashed in _OF_PERF_ANALYZER.items():
        (found,) = (SERVER_FOLDER / "lib").glob(hashed)
        (target / "lib-perf_analyzer" / soname).symlink_to(Path("..", "lib", found.name))
    _copy(libpython.resolve(), target / CARRIED_PYTHON / libpython_name())


def _copy_packages(packages: Sequence[str], target: Path) -> None:
    for name in (*packages, *_OUR_DISTRIBUTIONS):
        distribution = metadata.distribution(name)
        for file in distribution.files or ():
            inside = file.as_posix()
            if not _matches(inside, _LEFT_OUT):
                _copy(Path(str(distribution.locate_file(file))), target / inside)
    # an editable installation has our files elsewhere
    for name in _OURS:
        for path, inside in _package_files(name):
            _copy(path, target / inside)
    # it imports llvmlite, which the other functions do without
    from varlen_kernels.cpu.calls.machine_code import BESIDE, code_hash

    for path in BESIDE.glob(f"*-{code_hash()}.o"):
        _copy(path, target / "varlen_kernels/cpu/code" / path.name)


def _package_files(name: str) -> Iterator[tuple[Path, str]]:
    """Yield the files of a package of ours with their names in site-packages, in order."""
    found = importlib.util.find_spec(name)
    assert found is not None, name
    assert found.origin is not None, name
    package = Path(found.origin).parent
    for path in _walk(package):
        inside = f"{name}/{path.relative_to(package).as_posix()}"
        if path.is_file() and not _matches(inside, _LEFT_OUT):
            yield path, inside


def _walk(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _copy(path: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(path, target, follow_symlinks=False)


def _strip(tree: Path) -> None:
    """Remove the debug symbols of all machine code; without binutils it stays as it is."""
    code = [
        path
        for path in _walk(tree)
        if path.is_file() and not path.is_symlink() and path.suffix != ".o" and _is_elf(path)
    ]
    if shutil.which("strip") is None:
        print("bundle: no strip here (binutils), so the file is larger", file=sys.stderr)
        return
    subprocess.run(["strip", "--strip-unneeded", *code], check=True)


def _is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def _pack(tree: Path, entries: Iterable[Path], payload: Path) -> None:
    """Write the entries of a tree; equal trees give equal bytes."""
    with (
        lzma.open(payload, "wb", filters=_FILTERS) as data,
        tarfile.open(fileobj=data, mode="w|", format=tarfile.PAX_FORMAT) as archive,
    ):
        for path in entries:
            entry = archive.gettarinfo(path, path.relative_to(tree).as_posix())
            entry.uid = entry.gid = entry.mtime = 0
            entry.uname = entry.gname = ""
            if entry.issym():
                archive.addfile(entry)
                continue
            with path.open("rb") as file:
                archive.addfile(entry, file)


def _write_zip(bundle: Path, manifest: Mapping[str, object], payload: Path) -> None:
    bundle.write_bytes(b"#!/usr/bin/env python3\n")
    program = Path(__file__).with_name("unbundle.py").read_text(encoding="utf-8")
    with zipfile.ZipFile(bundle, "a") as archive:
        archive.writestr("__main__.py", program, zipfile.ZIP_DEFLATED)
        archive.writestr(MANIFEST, json.dumps(manifest, indent=2), zipfile.ZIP_DEFLATED)
        # compressed already
        archive.write(payload, PAYLOAD, zipfile.ZIP_STORED)
    bundle.chmod(0o755)


def main(
    output: Annotated[Path, typer.Option(help="Folder of the bundle.")] = Path("dist"),
    libpython: Annotated[
        Path | None, typer.Option(help="A libpython3.NN.so.1.0 for machines that have none.")
    ] = None,
    add: Annotated[
        list[str] | None, typer.Option(help="A further package, such as grpcio; several times.")
    ] = None,
) -> None:
    """Write a bundle, or say in one line why not."""
    try:
        bundle = write_bundle(output, libpython=libpython, added=add or ())
    except (SetupError, metadata.PackageNotFoundError) as error:
        raise SystemExit(f"bundle: {error}") from None
    megabytes = bundle.stat().st_size / 1e6
    print(f"bundle: {bundle} has {megabytes:.1f} MB; on the machine: python3 {bundle.name} DIR")


if __name__ == "__main__":
    typer.run(main)
