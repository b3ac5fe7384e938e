"""Make a server's environment from a bundle, without a network or pip: `python3 BUNDLE DIR`.

A bundle of `make bundle` is a zip that Python runs: this file is its program, `manifest.json` says what it holds, and
`payload.tar.xz` has the packages and the server. The program needs Python's own library, and torch comes from the
machine. The python backend embeds Python isolated, which ignores PYTHONPATH. So the folder is a virtual environment,
whose packages come first, and a .pth file adds the machine's.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import posixpath
import shutil
import site
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

MANIFEST, PAYLOAD = "manifest.json", "payload.tar.xz"
# Bounds of any bundle, whatever its manifest says.
_MOST_BYTES, _MOST_FILES, _MOST_MANIFEST_BYTES = 1 << 30, 20_000, 1 << 16
_CHUNK_BYTES = 1 << 20
# Runs in the new environment: links its Python's shared library and writes the commands.
_CONNECT = "from varlen_tools.unbundle import connect; connect()"
# Folder of the server with a libpython for machines that have none.
CARRIED_PYTHON = "carried-python"


class BundleError(Exception):
    """The bundle cannot be unpacked here; the message says how to fix it."""


def unbundle(bundle: Path, folder: Path) -> None:
    """Make the environment in a new or empty folder; on an error nothing stays.

    Raises:
        BundleError: the file is no bundle or damaged, or the machine, its Python or the folder does not fit.
    """
    try:
        with zipfile.ZipFile(bundle) as archive:
            manifest = read_manifest(archive)
            check_machine(manifest)
            _check_folder(folder, manifest["bytes"])
            _check_digest(archive, manifest["sha256"])
            try:
                folder.mkdir(parents=True, exist_ok=True)
                with archive.open(PAYLOAD) as payload:
                    extract(payload, folder, files=manifest["files"], size=manifest["bytes"])
                _make_environment(folder)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
    except (zipfile.BadZipFile, tarfile.TarError, KeyError, EOFError) as error:
        raise BundleError(f"{bundle} is no bundle of this project, or damaged: {error}") from None
    except OSError as error:
        raise BundleError(f"{error.filename or bundle}: {error.strerror or error}") from None


def read_manifest(archive: zipfile.ZipFile) -> dict[str, Any]:
    """Return what a bundle holds and needs.

    Raises:
        BundleError: it is not the manifest of a bundle, or exceeds the bounds.
    """
    if archive.getinfo(MANIFEST).file_size > _MOST_MANIFEST_BYTES:
        raise BundleError(f"{MANIFEST} has more than {_MOST_MANIFEST_BYTES} bytes")
    try:
        manifest = json.loads(archive.read(MANIFEST))
        python, files, size = manifest["python"], int(manifest["files"]), int(manifest["bytes"])
        digest = str(manifest["sha256"])
    except (ValueError, TypeError, KeyError) as error:
        raise BundleError(f"{MANIFEST} is not that of a bundle: {error!r}") from None
    if files > _MOST_FILES or size > _MOST_BYTES:
        raise BundleError(
            f"{MANIFEST} names {files} files of {size} bytes; at most {_MOST_FILES} of {_MOST_BYTES} are unpacked"
        )
    return {**manifest, "python": str(python), "files": files, "bytes": size, "sha256": digest}


def check_machine(manifest: Mapping[str, Any]) -> None:
    """Raise BundleError if this machine or its Python cannot run what the bundle holds."""
    system = f"{platform.system()} {platform.machine()}"
    if system != "Linux x86_64":
        raise BundleError(f"this is {system}; the bundle has programs for Linux x86_64")
    python = ".".join(map(str, sys.version_info[:2]))
    if python != manifest["python"]:
        raise BundleError(
            f"this is Python {python}; the bundle is for {manifest['python']}:"
            f" run it with python{manifest['python']}, or make one for {python}"
        )
    if importlib.util.find_spec("torch") is None:
        raise BundleError(f"{sys.executable} has no torch, which a bundle does not bring along")


def _check_folder(folder: Path, size: int) -> None:
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise BundleError(f"{folder} exists and is not an empty folder; name another one")
    parent = next(each for each in folder.absolute().parents if each.is_dir())
    if (free := shutil.disk_usage(parent).free) < size:
        raise BundleError(f"{parent} has {free >> 20} MiB free; the bundle needs {size >> 20}")


def _check_digest(archive: zipfile.ZipFile, expected: str) -> None:
    """Raise BundleError if the payload is damaged."""
    digest = hashlib.sha256()
    with archive.open(PAYLOAD) as payload:
        while chunk := payload.read(_CHUNK_BYTES):
            digest.update(chunk)
    if digest.hexdigest() != expected:
        raise BundleError(f"{PAYLOAD} has another hash than {MANIFEST} says: copy the file again")


def extract(payload: IO[bytes], folder: Path, *, files: int, size: int) -> None:
    """Unpack a .tar.xz of regular files and of links between them into a folder.

    Args:
        files: limit on files and links.
        size: limit on their bytes together.

    Raises:
        BundleError: an entry is outside of the folder, of another kind, there already, or beyond a limit.
    """
    links: set[str] = set()
    with tarfile.open(fileobj=payload, mode="r|xz") as archive:
        for entry in archive:
            files, size = files - 1, size - entry.size
            if files < 0 or size < 0:
                raise BundleError(f"the payload is larger than {MANIFEST} says, at {entry.name!r}")
            name = _inside(entry.name)
            if any(str(parent) in links for parent in Path(name).parents):
                raise BundleError(f"{entry.name!r} is behind a link")
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if entry.issym():
                _inside(
                    posixpath.join(posixpath.dirname(name), entry.linkname), link=entry.linkname
                )
                target.symlink_to(entry.linkname)
                links.add(name)
            elif entry.isreg() and (content := archive.extractfile(entry)) is not None:
                with target.open("xb") as file:
                    shutil.copyfileobj(content, file, _CHUNK_BYTES)
                target.chmod(0o755 if entry.mode & 0o100 else 0o644)
            else:
                raise BundleError(f"{entry.name!r} is neither a regular file nor a link")


def _inside(name: str, *, link: str = "") -> str:
    """Return a normalized name relative to the folder.

    Raises:
        BundleError: it is absolute, or leads out of the folder.
    """
    normal = posixpath.normpath(name)
    if link.startswith("/") or normal.startswith(("/", "..")) or normal == ".":
        raise BundleError(f"{link or name!r} leads out of the folder of the environment")
    return normal


def _make_environment(folder: Path) -> None:
    """Make a virtual environment around the packages, and connect the server with its Python.

    Raises:
        BundleError: the server cannot run here; the message is the reason.
    """
    try:
        import venv
    except ImportError:
        # some distributions pack it apart
        raise BundleError(f"{sys.executable} has no module venv: install python3-venv") from None
    venv.EnvBuilder(symlinks=True).create(folder)
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    packages = folder / "lib" / version / "site-packages"
    lines = [f"import site; site.addsitedir({each!r})" for each in _package_folders()]
    (packages / "machine.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
    command = [str(folder.absolute() / "bin/python"), "-I", "-c", _CONNECT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BundleError(done.stderr.strip() or "the server cannot be connected with this Python")


def _package_folders() -> list[str]:
    """Return the folders with the packages of this Python, the one with torch first."""
    found = importlib.util.find_spec("torch")
    assert found is not None, "checked"
    of_torch = [str(Path(each).parent) for each in found.submodule_search_locations or ()]
    paths = sysconfig.get_paths()
    user = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    folders = [*of_torch, paths["purelib"], paths["platlib"], *site.getsitepackages(), *user]
    return [each for each in dict.fromkeys(folders) if os.path.isdir(each)]  # noqa: PTH112  # texts, not paths


def connect() -> None:
    """Connect the server of the bundle with this Python, or exit with the reason.

    It has the server's files, and neither its links to this Python nor its commands.
    """
    from varlen_tools import setup_server as server

    kit = server.SERVER_FOLDER
    try:
        server.check_here()
        server.link_libpython(kit, libpython_of(kit))
        server.check_runs(kit)
        (kit / "stamp.json").write_text(server.stamp())
        server.assemble()
    except server.SetupError as error:
        raise SystemExit(str(error)) from None


def libpython_of(kit: Path) -> Path:
    """Return the shared library of this Python, or the one that came with the server.

    Raises:
        SetupError: there is neither.
    """
    from varlen_tools import setup_server as server

    try:
        return server.find_libpython()
    except server.SetupError:
        carried = kit / CARRIED_PYTHON / server.libpython_name()
        if not carried.is_file():
            raise
        return carried


def main() -> None:
    """Unpack a bundle, or say in one line why not: `python3 BUNDLE DIR`."""
    bundle, arguments = Path(sys.argv[0]), sys.argv[1:]
    if not zipfile.is_zipfile(bundle) and arguments:
        # a module of a clone: the bundle is an argument too
        bundle, arguments = Path(arguments[0]), arguments[1:]
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise SystemExit(f"unbundle: usage: python3 {bundle.name} DIR, a folder that is made")
    folder = Path(arguments[0])
    try:
        unbundle(bundle, folder)
    except BundleError as error:
        raise SystemExit(f"unbundle: {error}") from None
    print(f"unbundle: ready: {folder / 'bin/tritonserver'} --model-repository DIR")


if __name__ == "__main__":
    main()
