"""Put varlen into the backends folder of a server that was not set up here, such as NVIDIA's image.

`make install-backend BACKENDS=/opt/tritonserver/backends` makes

    <backends>/varlen/model.py          what the server looks for
    <backends>/varlen/varlen/           the package it imports
    <backends>/varlen/varlen_kernels/   and the kernels below that

The server adds `<backends>/varlen` to the end of the path of every model of this backend, so both
packages are found there, and nothing else is put on anyone's path. Only the standard library is used:
the image's own Python runs this.
"""

import argparse
import importlib.util
import shutil
import sys
import tempfile
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
PACKAGES = (Path("backend", "varlen"), Path("kernels", "varlen_kernels"))
# What the backend imports, and what pip calls it; the ranges are in pyproject.toml.
NEEDED = ("torch", "numpy", "tokenizers", "safetensors", "sortedcontainers")


class InstallError(Exception):
    """The backend cannot be put there; the message says why."""


def install(backends: Path, *, link: bool = False, project: Path = PROJECT) -> Path:
    """Copy the backend and the kernels into `backends`, and return the folder made.

    An older copy is replaced as a whole. A running server keeps what it has loaded.

    Args:
        link: make symbolic links into `project` instead, for development in a container.

    Raises:
        InstallError: `backends` is no backends folder, or holds another backend of this name.
    """
    target = backends / "varlen"
    _check(backends, target)
    # Beside the target, so that the last step is a rename on one file system.
    with tempfile.TemporaryDirectory(prefix=".varlen-", dir=backends) as scratch:
        made = Path(scratch, "varlen")
        made.mkdir()
        # TemporaryDirectory is for its owner alone; the server may run as another user.
        made.chmod(0o755)
        _place(project / PACKAGES[0] / "model.py", made / "model.py", link=link)
        for package in PACKAGES:
            _place(project / package, made / package.name, link=link)
        if target.is_symlink():
            target.unlink()
        elif target.exists():
            target.rename(Path(scratch, "replaced"))
        made.rename(target)
    return target


def _check(backends: Path, target: Path) -> None:
    if not backends.is_dir():
        raise InstallError(f"there is no folder {backends}; give the server's backends folder")
    if not (backends / "python").is_dir():
        raise InstallError(
            f"{backends} holds no python backend, which varlen runs in;"
            " give the server's backends folder, such as /opt/tritonserver/backends"
        )
    if target.exists() and not target.is_symlink() and not (target / "varlen").exists():
        raise InstallError(f"{target} was not made by this command; move it away first")


def _place(source: Path, target: Path, *, link: bool) -> None:
    if link:
        target.symlink_to(source)
    elif source.is_dir():
        # copyfile leaves the modes to the umask: the checkout's may be for its owner alone.
        unwanted = shutil.ignore_patterns("__pycache__", "*.pyc")
        shutil.copytree(source, target, ignore=unwanted, copy_function=shutil.copyfile)
        for folder in (target, *filter(Path.is_dir, target.rglob("*"))):
            folder.chmod(0o755)
    else:
        shutil.copyfile(source, target)


def missing_packages() -> list[str]:
    """Return which of the packages that the backend imports this Python does not have."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def main(arguments: list[str] | None = None) -> None:
    """Install the backend, or say in one line why that cannot be done."""
    parser = argparse.ArgumentParser(prog="install_backend", description=__doc__.splitlines()[0])
    parser.add_argument("backends", type=Path, help="the server's backends folder")
    parser.add_argument("--link", action="store_true", help="link to this checkout, do not copy")
    options = parser.parse_args(arguments)
    try:
        target = install(options.backends, link=options.link)
    except (InstallError, OSError) as error:
        print(f"install-backend: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print(f"install-backend: {target} is ready")
    if missing := missing_packages():
        print(
            f"install-backend: {sys.executable} has no {', '.join(missing)}; if the server uses this"
            f" Python: {sys.executable} -m pip install {' '.join(missing)}"
        )


if __name__ == "__main__":
    main()
