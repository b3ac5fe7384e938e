"""Copy varlen into the backends folder of a server, such as NVIDIA's image.

`varlen install-backend /opt/tritonserver/backends` makes

    <backends>/varlen/model.py          the file that the server looks for
    <backends>/varlen/varlen/           the package that it imports
    <backends>/varlen/varlen_kernels/   the kernels

The server appends `<backends>/varlen` to the import path of every model of this backend. Nothing else
changes a path. The packages come from this Python's import path, installed or not. The image's own Python may run this
module from a clone, `python3 -m varlen_tools.install_backend`, so it imports the standard library only.
"""

import argparse
import importlib.util
import shutil
import sys
import tempfile
from pathlib import Path

PACKAGES = ("varlen", "varlen_kernels")
# Packages that the backend imports, by their names on PyPI; the ranges are in pyproject.toml.
NEEDED = (
    "torch",
    "numpy",
    "tokenizers",
    "safetensors",
    "sortedcontainers",
    "jinja2",
    "llguidance",
    "llvmlite",
    "numba",
)


class InstallError(Exception):
    """The backend cannot be installed; the message says why."""


def install(backends: Path) -> Path:
    """Copy the backend and the kernels into `backends`, and return the new folder.

    An older copy is replaced as a whole; a running server keeps the loaded one.

    Raises:
        InstallError: `backends` is not a backends folder, or has another backend of this name; or a package is missing.
    """
    packages = [_package(name) for name in PACKAGES]
    target = backends / "varlen"
    _check(backends, target)
    # Beside the target, so that the last step is a rename on one file system.
    with tempfile.TemporaryDirectory(prefix=".varlen-", dir=backends) as scratch:
        made = Path(scratch, "varlen")
        unwanted = shutil.ignore_patterns("__pycache__", "*.pyc", "*.lock")
        for package in packages:
            # copyfile sets modes by the umask: the files of a checkout may be private to their owner.
            shutil.copytree(
                package,
                made / package.name,
                ignore=unwanted,
                copy_function=shutil.copyfile,
            )
        shutil.copyfile(packages[0] / "model.py", made / "model.py")
        # The server may run as another user.
        for folder in (made, *filter(Path.is_dir, made.rglob("*"))):
            folder.chmod(0o755)
        if target.is_symlink():
            target.unlink()
        elif target.exists():
            target.rename(Path(scratch, "replaced"))
        made.rename(target)
    return target


def _package(name: str) -> Path:
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise InstallError(
            f"{sys.executable} finds no package {name}; install the wheel, or set PYTHONPATH to"
            " kernels:backend:tools of a clone"
        )
    return Path(found.origin).parent


def _check(backends: Path, target: Path) -> None:
    if not backends.is_dir():
        raise InstallError(f"there is no folder {backends}; give the server's backends folder")
    if not (backends / "python").is_dir():
        raise InstallError(
            f"{backends} has no python backend, which varlen runs in;"
            " give the server's backends folder, such as /opt/tritonserver/backends"
        )
    if target.exists() and not target.is_symlink() and not (target / "varlen").exists():
        raise InstallError(f"{target} was not made by this command; move it away first")


def missing_packages() -> list[str]:
    """Return the packages that the backend imports and this Python lacks."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def install_backend(backends: Path) -> None:
    """Copy varlen into the backends folder of a server.

    The server looks for backends in this folder: /opt/tritonserver/backends in NVIDIA's image.
    """
    try:
        target = install(backends)
    except (InstallError, OSError) as error:
        print(f"install-backend: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print(f"install-backend: {target} is ready")
    if missing := missing_packages():
        print(
            f"install-backend: {sys.executable} has no {', '.join(missing)}; if the server uses this"
            f" Python: {sys.executable} -m pip install {' '.join(missing)}"
        )


def main(arguments: list[str] | None = None) -> None:
    """Read the arguments without typer, and install the backend."""
    parser = argparse.ArgumentParser(prog="install_backend", description=__doc__.splitlines()[0])
    parser.add_argument("backends", type=Path, help="backends folder of the server")
    install_backend(parser.parse_args(arguments).backends)


if __name__ == "__main__":
    main()
